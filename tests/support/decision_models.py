"""Tiny models that answer questions about a text, in the folders that laya and gliner2 save.

Weights are drawn by numpy, whose numbers stay the same, because `decision_answers.json` has the answers of those
packages (laya 0.4.15: the logits of `Agent` divided by its temperatures; gliner2 2.1.0: those of
`ClassificationScorer` for all questions together, for the architecture boundary divided by its temperature) for the
folders of VARIANTS.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Model,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
)

from polyhead.models.core.decision_prompt import SCHEMA_TOKENS
from polyhead.service.text.decision_prompts import QuestionedText, QuestionText
from tests.support.checkpoints import write_json
from tests.support.label_models import Shapes, deberta_config, linear, save, tokenizer, two_layers
from tests.support.places import ROOT

ANSWERS = ROOT / "tests" / "contracts" / "decision_answers.json"
WIDTH = 128  # two heads of the layers above the network
TEXTS = (
    "The fox runs over Marie Curie, born in New-York. Write to marie.curie@river.example or www.paris.example!",
    "a dog",
    "bad film (naïve cafe\u0301) \u2014 the dog jumps over @fox_1 [MASK] 100% " * 3,
)
QUESTIONS = (
    QuestionText("questions[0]", "choice", "what is it", (("animal", ""), ("person", "a person was born"), ("x", ""))),
    QuestionText("questions[1]", "noul", "the film is good"),
    QuestionText("questions[2]", "score", "how good", tuple((str(n), f"good {n}") for n in range(6))),
    QuestionText("questions[3]", "noul", "the fox runs", (("no", "it jumps"), ("yes", ""))),
    QuestionText("questions[4]", "choice", "which place", tuple((f"place {n}", "") for n in "abcdefghijkl")),
    QuestionText("questions[5]", "choice", "only [MASK] one", (("a", "the river"),)),
    QuestionText("questions[6]", "score", "how bad", (("bad", ""), ("good", "the good film"))),
)


def encoder(kind: str, vocabulary: int) -> tuple[dict[str, Any], Shapes]:
    """The configuration of an encoder, and its tensors."""
    sizes = {"vocab_size": vocabulary, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 1024}
    if kind == "bert":
        config: Any = BertConfig(**sizes)
        network: Any = BertModel(config)
    elif kind == "modernbert":
        ids = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
        config = ModernBertConfig(**sizes, **ids, local_attention=16, global_attn_every_n_layers=2)
        network = ModernBertModel(config)
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 24}
        config = deberta_config(sizes)
        network = DebertaV2Model(config)
    return config.to_dict(), {f"encoder.{name}": tuple(each.shape) for name, each in network.state_dict().items()}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def laya(folder: Path, *, kind: str = "modernbert", **settings: Any) -> Path:
    """A folder of laya."""
    made = tokenizer()
    config, tensors = encoder(kind, len(made))
    known: dict[str, Any] = {
        "encoder": "tiny",
        "head_layers": 2,
        "act_costs": {"escalate": 0.3},
        "max_len": 320,
        "head_max_len": 160,
        "temperature": [1.5, 0.75, 2],
        "temperature_by_options": {"choice:11+": 0.1, "score:6-10": 1.25, "choice:2": 3, "choice:99": "unknown"},
        **settings,
    }
    for layer in range(known["head_layers"]):
        place = f"head.layers.{layer}"
        tensors |= {f"{place}.self_attn.in_proj_weight": (3 * WIDTH, WIDTH)}
        tensors |= {f"{place}.self_attn.in_proj_bias": (3 * WIDTH,)}
        tensors |= linear(f"{place}.self_attn.out_proj", WIDTH, WIDTH)
        tensors |= norm(f"{place}.norm1", WIDTH) | norm(f"{place}.norm2", WIDTH)
        tensors |= two_layers(place, WIDTH, 4 * WIDTH, WIDTH, (".linear1", ".linear2"))
    tensors |= {"type_emb.weight": (3, WIDTH), "temperature": (3,)}
    tensors |= norm("scorer.0", WIDTH) | two_layers("scorer", WIDTH, WIDTH, 1, (".1", ".3"))
    tensors |= two_layers("act_head", WIDTH + 4, 256, 1 + len(known["act_costs"]), (".0", ".2"))
    save(folder, "rl_agent_config.json", known, tensors, made)
    move_tokenizer(folder, made)
    return with_encoder(folder / "encoder", config)


def move_tokenizer(folder: Path, made: PreTrainedTokenizerFast) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    made.save_pretrained(folder / "tokenizer")


def with_encoder(place: Path, config: Mapping[str, Any]) -> Path:
    place.mkdir(exist_ok=True)
    write_json(place / "config.json", config)
    return place.parent


def gliner2(folder: Path, *, kind: str = "deberta-v2", **settings: Any) -> Path:
    """A folder of gliner2, with one of the tensors that find spans."""
    made = tokenizer(*SCHEMA_TOKENS)
    config, tensors = encoder(kind, len(made))
    width = config["hidden_size"]
    known: dict[str, Any] = {"model_type": "extractor", "model_name": "tiny", "token_pooling": "first", **settings}
    is_boundary = known.get("architecture") == "boundary"
    numbers = (".0", ".3" if is_boundary else ".2")  # a layer of dropout stands between
    tensors |= two_layers("classifier", width, 2 * width, 1, numbers)
    if not is_boundary:
        tensors |= two_layers("count_pred", width, 2 * width, 20, (".0", ".2"))
    save(folder, "config.json", known, tensors, made)
    return with_encoder(folder / "encoder_config", config)


LAYA_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "marks": {},
    "marks-bert": {"kind": "bert", "head_layers": 0, "temperature_by_options": {}},
}
GLINER2_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "schema": {},
    "schema-boundary": {
        "kind": "modernbert",
        "architecture": "boundary",
        "boundary_head": {"classification_temperature": 2.0, "enable_records": False, "enable_relations": False},
    },
}
VARIANTS = (*LAYA_VARIANTS, *GLINER2_VARIANTS)


def make_variant(name: str, folder: Path) -> Path:
    if name in LAYA_VARIANTS:
        return laya(folder, **LAYA_VARIANTS[name])
    return gliner2(folder, **GLINER2_VARIANTS[name])


def ask(text: str) -> QuestionedText:
    return QuestionedText("state", text, QUESTIONS)


def read_answers() -> dict[str, list[list[list[float]]]]:
    """By variant: of each of TEXTS, the logits of the options of each of QUESTIONS."""
    found: dict[str, list[list[list[float]]]] = json.loads(ANSWERS.read_text())
    return found
