"""A generator made ready to read texts and pairs whole (Radford et al. 2018, section 3.3).

It doesn't know what is learned of them.  The one idea: [START], [DELIM] and [EXTRACT] are the tokenizer's own to put
round texts, so whoever reads the folder that is written, here or elsewhere, reads what was learned from.  The state at
[EXTRACT], the last, is the one that has seen all others.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from torch import nn

from polyhead.models.checkpoint import load
from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..export.export import FORMS, write_network
from ..loop.errors import RecipeError
from .named_networks import SPREAD

TOKENS = ("[START]", "[DELIM]", "[EXTRACT]")
SINGLE, PAIR = "[START] $A [EXTRACT]", "[START] $A [DELIM] $B [EXTRACT]"
VOCABULARY, SAID = "tokenizer.json", "tokenizer_config.json"
ARCHITECTURE = "GPT2LMHeadModel"


def delimited(folder: Path, out: Path, seed: int) -> Path:
    """The generator in `folder`, written to `out` with three more tokens, whose rows are drawn from the seed.

    RecipeError if it is none of those that can be written here.
    """
    trunk = load(str(folder))
    config = read_json(folder / "config.json")
    if config["architectures"] != [ARCHITECTURE]:
        raise RecipeError(f"trunk.delimited: {folder} is no {ARCHITECTURE}; leave it out, or name a trunk that is")
    write_vocabulary(folder, out)
    words = Tokenizer.from_folder(out)
    torch.manual_seed(seed)
    grow(trunk.network, words)
    said = {**config, "vocab_size": trunk.network.config.vocab_size, "pad_token_id": words.pad_id}
    write_network(FORMS[trunk.family], ARCHITECTURE, [trunk.network, trunk.head], out, said)
    return out


def write_vocabulary(folder: Path, out: Path) -> None:
    """RecipeError if there is no tokenizer.json, or one that puts tokens round texts already."""
    if not (folder / VOCABULARY).is_file():
        raise RecipeError(f"trunk.delimited: {folder} has no {VOCABULARY} to add tokens to")
    backend = Backend.from_file(str(folder / VOCABULARY))
    if backend.encode("").ids:
        raise RecipeError(f"trunk.delimited: {folder} puts tokens round texts already; leave it out")
    backend.add_special_tokens(list(TOKENS))
    ids = [(token, backend.token_to_id(token)) for token in TOKENS]
    backend.post_processor = processors.TemplateProcessing(single=SINGLE, pair=PAIR, special_tokens=ids)
    out.mkdir(parents=True, exist_ok=True)
    backend.save(str(out / VOCABULARY))
    said = read_json(folder / SAID, {})
    # Who pads a batch finds the last token by what is no padding: anything but [EXTRACT] will do.
    (out / SAID).write_text(json.dumps({"pad_token": said.get("eos_token") or TOKENS[0], **said}, indent=2) + "\n")


@torch.no_grad()
def grow(network: Transformer, words: Tokenizer) -> None:
    """Rows for the new tokens, as small as first ones are."""
    known = network.tokens.weight
    size = max(len(known), words.vocab_size)
    grown = nn.Embedding(size, known.size(1))
    grown.weight[: len(known)] = known
    for token in TOKENS:
        grown.weight[words.find(token)].normal_(std=SPREAD)
    network.tokens = grown
    network.config = replace(network.config, vocab_size=size)
