"""Tiny models that read labels beside a text, in the folders that gliner and gliclass save.

Weights are drawn by numpy, whose numbers stay the same, because `label_answers.json` has the answers of those packages
(gliner 0.2.29: `GLiNER.from_pretrained(folder).predict_entities`; gliclass 0.1.21: `ZeroShotClassificationPipeline`
with every score) for the folders of VARIANTS.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, DebertaV2Config, DebertaV2Model, PreTrainedTokenizerFast

from tests.support.checkpoints import write_json
from tests.support.places import ROOT

ANSWERS = ROOT / "tests" / "contracts" / "label_answers.json"
WIDTH, HIDDEN, WIDEST, MAX_WORDS = 16, 12, 3, 400
WORDS = (
    "the a fox dog runs over jumps person animal place film good bad new york paris marie curie born in was by river"
)
TEXTS = ("The fox runs over Marie Curie, born in New-York.", "a dog", "the river. " * 150)
Shapes = dict[str, tuple[int, ...]]


def tokenizer(*added: str) -> PreTrainedTokenizerFast:
    """Words, and letters for all others, with the tokens `added` at the end."""
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"\u2581{word}" for word in WORDS.split()), "\u2581"]
    pieces += list("abcdefghijklmnopqrstuvwxyz.,-()")
    scores = [(piece, 0.0 if piece.startswith("[") else -float(2 + rank % 7)) for rank, piece in enumerate(pieces)]
    backend = Tokenizer(models.Unigram(scores, 3))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    roles = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    made.add_tokens(list(added), special_tokens=True)
    return made


def encoder(kind: str, vocabulary: int) -> tuple[dict[str, Any], Shapes]:
    """The configuration of an encoder, and its tensors."""
    sizes = {"vocab_size": vocabulary, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 512}
    if kind == "bert":
        config: Any = BertConfig(**sizes)
        network: Any = BertModel(config, add_pooling_layer=True)
    else:
        config = deberta_config(sizes)
        network = DebertaV2Model(config)
    return config.to_dict(), {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def deberta_config(sizes: Mapping[str, Any]) -> DebertaV2Config:
    """The configuration of DeBERTa v3 with these sizes."""
    return DebertaV2Config(
        **sizes,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        type_vocab_size=0,
    )


def two_layers(name: str, inputs: int, hidden: int, outputs: int, numbers: tuple[str, str] = (".0", ".3")) -> Shapes:
    first, second = (f"{name}{number}" for number in numbers)
    return {
        f"{first}.weight": (hidden, inputs),
        f"{first}.bias": (hidden,),
        f"{second}.weight": (outputs, hidden),
        f"{second}.bias": (outputs,),
    }


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def lstm(name: str, width: int, depth: int) -> Shapes:
    half, found = width // 2, Shapes()
    for layer in range(depth):
        for end in (f"l{layer}", f"l{layer}_reverse"):
            found |= {f"{name}.weight_ih_{end}": (4 * half, width), f"{name}.weight_hh_{end}": (4 * half, half)}
            found |= {f"{name}.bias_ih_{end}": (4 * half,), f"{name}.bias_hh_{end}": (4 * half,)}
    return found


def draw(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Random tensors, by name: matrices of unit gain and more, norms near one."""
    found = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        numbers = np.random.RandomState(seed).standard_normal(shape or (1,)).reshape(shape)
        if name.endswith("position_ids"):
            continue
        if "norm" in name.lower() and name.endswith("weight"):
            numbers = 1 + 0.1 * numbers
        else:
            numbers = numbers * (1.5 / shape[1] ** 0.5 if len(shape) > 1 else 0.3)
        found[name] = torch.tensor(numbers, dtype=torch.float32)
    return found


def gliner(folder: Path, *, kind: str = "deberta-v2", **settings: Any) -> Path:
    """A folder of gliner."""
    made = tokenizer("<<ENT>>", "<<SEP>>")
    config, shapes = encoder(kind, len(made))
    known: dict[str, Any] = {
        "model_name": "tiny",
        "encoder_config": config,
        "hidden_size": HIDDEN,
        "max_width": WIDEST,
        "max_len": MAX_WORDS,
        "span_mode": "markerV0",
        "num_rnn_layers": 1,
        "vocab_size": len(made),
        "class_token_index": len(made) - 2,
        **settings,
    }
    width = known["hidden_size"]
    tensors = {f"token_rep_layer.bert_layer.model.{name}": shape for name, shape in shapes.items()}
    if width != WIDTH:
        tensors |= linear("token_rep_layer.projection", WIDTH, width)
    tensors |= lstm("rnn.lstm", width, known["num_rnn_layers"])
    if known["span_mode"] == "markerV0":
        layer = "span_rep_layer.span_rep_layer"
        tensors |= two_layers(f"{layer}.project_start", width, 4 * width, width)
        tensors |= two_layers(f"{layer}.project_end", width, 4 * width, width)
        tensors |= two_layers(f"{layer}.out_project", 2 * width, 4 * width, width)
        tensors |= two_layers("prompt_rep_layer", width, 4 * width, width)
    else:
        tensors |= linear("scorer.proj_token", width, 2 * width) | linear("scorer.proj_label", width, 2 * width)
        tensors |= two_layers("scorer.out_mlp", 3 * width, 4 * width, 3)
    return save(folder, "gliner_config.json", known, tensors, made)


def gliclass(folder: Path, *, kind: str = "deberta-v2", **settings: Any) -> Path:
    """A folder of gliclass."""
    made = tokenizer("<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>")
    config, shapes = encoder(kind, len(made))
    first = len(made) - 3
    known: dict[str, Any] = {
        "architectures": ["GLiClassModel"],
        "model_type": "GLiClass",
        "architecture_type": "uni-encoder",
        "encoder_config": config,
        "encoder_model_name": "tiny",
        "hidden_size": WIDTH,
        "vocab_size": len(made),
        "class_token_index": first,
        "text_token_index": first + 1,
        "example_token_index": first + 2,
        "prompt_first": True,
        "scorer_type": "simple",
        **settings,
    }
    tensors: Shapes = {f"model.encoder_model.{name}": shape for name, shape in shapes.items()}
    for name in ("text_projector", "classes_projector"):
        tensors |= two_layers(f"model.{name}", WIDTH, known["hidden_size"], WIDTH, (".linear_1", ".linear_2"))
    tensors["model.logit_scale"] = ()
    if known.get("use_lstm"):
        tensors |= lstm("model.lstm.lstm", WIDTH, 1)
    if known["scorer_type"] == "mlp":
        tensors |= two_layers("model.scorer.mlp", 2 * WIDTH, 256, 128, (".0", ".2")) | linear(
            "model.scorer.mlp.4", 128, 1
        )
    if known["scorer_type"] == "weighted-dot":
        for name in ("proj_text", "proj_label"):
            tensors |= linear(f"model.scorer.{name}", WIDTH, 2 * WIDTH)
        tensors |= two_layers("model.scorer.out_mlp", 3 * WIDTH, 4 * WIDTH, 1)
    return save(folder, "config.json", known, tensors, made)


def save(folder: Path, name: str, config: Mapping[str, Any], shapes: Shapes, made: PreTrainedTokenizerFast) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    write_json(folder / name, config)
    save_file(draw(shapes), folder / "model.safetensors", {"format": "pt"})
    return folder


SPAN_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "spans": {},
    "spans-bert": {"kind": "bert", "hidden_size": WIDTH, "num_rnn_layers": 0, "embed_ent_token": False},
    "words": {"span_mode": "token_level", "num_rnn_layers": 2, "subtoken_pooling": "last"},
}
TEXT_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "texts": {},
    "texts-mlp": {
        "kind": "bert",
        "scorer_type": "mlp",
        "pooling_strategy": "avg",
        "class_token_pooling": "average",
        "extract_text_features": True,
    },
    "texts-lstm": {
        "scorer_type": "weighted-dot",
        "use_lstm": True,
        "pooling_strategy": "max",
        "prompt_first": False,
        "normalize_features": True,
        "embed_class_token": False,
    },
}


def make_variant(name: str, folder: Path) -> Path:
    if name in SPAN_VARIANTS:
        return gliner(folder, **SPAN_VARIANTS[name])
    return gliclass(folder, **TEXT_VARIANTS[name])


def read_answers() -> dict[str, list[dict[str, Any]]]:
    """By variant: requests, each with the package's answer."""
    found: dict[str, list[dict[str, Any]]] = json.loads(ANSWERS.read_text())
    return found
