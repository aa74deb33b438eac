"""Adds the tokens [START], [DELIM] and [EXTRACT] to a generator, for reading texts and pairs (Radford et al. 2018,
section 3.3).

The tokenizer itself puts them around texts, so every program that loads the written folder reads what was trained.  The
state at [EXTRACT], the last token, has attended to all others.
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
from polyhead.models.core.json_files import LARGE_JSON
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..export.network_folder import FAMILY_FORMATS, write_network
from ..loop.errors import RecipeError
from .named_networks import INIT_STD

DELIMITERS = ("[START]", "[DELIM]", "[EXTRACT]")
SINGLE_TEMPLATE, PAIR_TEMPLATE = "[START] $A [EXTRACT]", "[START] $A [DELIM] $B [EXTRACT]"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
ARCHITECTURE = "GPT2LMHeadModel"


def add_delimiters(folder: Path, out: Path, seed: int) -> Path:
    """Write the generator in `folder` to `out`, with three more tokens whose embeddings are random from the seed.

    Raises RecipeError if its architecture cannot be written here.
    """
    base = load(str(folder))
    config = read_json(folder / "config.json")
    if config["architectures"] != [ARCHITECTURE]:
        raise RecipeError(
            f"trunk.delimited: {folder} is not a {ARCHITECTURE}; leave it out, or name a trunk that is one"
        )
    write_tokenizer(folder, out)
    tokenizer = Tokenizer.from_folder(out)
    torch.manual_seed(seed)
    grow_embeddings(base.network, tokenizer)
    config_fields = {**config, "vocab_size": base.network.config.vocab_size, "pad_token_id": tokenizer.pad_id}
    write_network(FAMILY_FORMATS[base.family], ARCHITECTURE, [base.network, base.head], out, config_fields)
    return out


def write_tokenizer(folder: Path, out: Path) -> None:
    """Write the tokenizer with the new tokens.  Raises RecipeError without a tokenizer.json, or if it already adds
    tokens to texts.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        raise RecipeError(f"trunk.delimited: {folder} has no {TOKENIZER_FILE} to add tokens to")
    backend = Backend.from_file(str(folder / TOKENIZER_FILE))
    if backend.encode("").ids:
        raise RecipeError(f"trunk.delimited: {folder} already puts tokens around texts; leave it out")
    backend.add_special_tokens(list(DELIMITERS))
    ids = [(token, backend.token_to_id(token)) for token in DELIMITERS]
    backend.post_processor = processors.TemplateProcessing(
        single=SINGLE_TEMPLATE, pair=PAIR_TEMPLATE, special_tokens=ids
    )
    out.mkdir(parents=True, exist_ok=True)
    backend.save(str(out / TOKENIZER_FILE))
    config = read_json(folder / TOKENIZER_CONFIG_FILE, {}, limit=LARGE_JSON)
    # A classifier finds the last token as the last one that is not padding, so any token but [EXTRACT] serves as
    # padding.
    (out / TOKENIZER_CONFIG_FILE).write_text(
        json.dumps({"pad_token": config.get("eos_token") or DELIMITERS[0], **config}, indent=2) + "\n"
    )


@torch.no_grad()
def grow_embeddings(network: Transformer, tokenizer: Tokenizer) -> None:
    """Add embeddings for the new tokens, as small as initial weights."""
    known = network.tokens.weight
    size = max(len(known), tokenizer.vocab_size)
    grown = nn.Embedding(size, known.size(1))
    grown.weight[: len(known)] = known
    for token in DELIMITERS:
        grown.weight[tokenizer.token_id(token)].normal_(std=INIT_STD)
    network.tokens = grown
    network.config = replace(network.config, vocab_size=size)
