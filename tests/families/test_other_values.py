"""A field of a configuration with another legal value changes answers as in transformers, or is refused.

Each family has a tiny random checkpoint. One field at a time is changed: every one that its configuration has, and
those that others have, which transformers may read of any network. Both then compute the same two texts.
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.initialization import no_init_weights

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.checkpoint import folder as folder_module
from polyhead.models.core.errors import ModelError
from polyhead.models.network.ragged import RaggedBatch
from tests.families import conformance, test_decoders, test_encoder_decoders, test_encoders, test_experts
from tests.families.test_field_values import Way, changed, list_fields

Row = tuple[Any, Any]  # what saves a folder, and the class of the reference
END = [3]  # of a text
TEXTS = [[*(5 + (7 * i * i + 3 * i) % 280 for i in range(26)), *END], [20, 21, *END]]
ROUNDING = 2e-4  # of the largest number
UNREAD = frozenset((
    "architectures", "model_type", "dtype", "transformers_version", "id2label", "label2id", "_name_or_path",
))  # fmt: skip
ACTIVATIONS = ("relu", "gelu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def by_layer(**more: Any) -> dict[str, Any]:
    """A rotation for each type of layers."""
    plain = {"rope_type": "default", **more}
    return {"full_attention": {**plain, "rope_theta": 50.0}, "sliding_attention": {**plain, "rope_theta": 7.0}}


# Values of fields that are not in all configurations, the ones that have been read wrongly first.
ADDED: dict[str, list[Any]] = {
    "is_causal": [True, False],
    "partial_rotary_factor": [0.5],
    "rope_scaling": [
        YARN,
        LLAMA3,
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "rope_theta": 100.0},
        by_layer(),
        by_layer(rope_type="linear", factor=4.0),
        by_layer(partial_rotary_factor=0.5),
    ],
}
MORE: dict[str, list[Any]] = {
    "rope_theta": [77.0], "rotary_pct": [0.5], "rotary_emb_base": [33.0], "global_rope_theta": [33.0],
    "local_rope_theta": [33.0], "rope_local_base_freq": [33.0], "rope_interleave": [False, True],
    "original_max_position_embeddings": [8], "is_decoder": [True, False], "add_cross_attention": [True],
    "chunk_size_feed_forward": [2], "use_bidirectional_attention": [True], "sliding_window": [4, None],
    "use_sliding_window": [True, False], "max_window_layers": [1], "sliding_window_pattern": [2],
    "position_embedding_type": ["relative_key", "absolute"], "attn_logit_softcapping": [2.0],
    "final_logit_softcapping": [2.0], "tie_word_embeddings": [True, False], "head_dim": [4], "alibi": [True],
    "logit_scale": [0.5], "query_pre_attn_scalar": [3], "problem_type": ["regression", "multi_label_classification"],
    "layer_norm_eps": [0.1], "rms_norm_eps": [0.1], "hidden_act": ["relu"], "hidden_activation": ["relu"],
    "mlp_bias": [True], "attention_bias": [True], "attn_scale": [0.3], "floor_scale": [4],
}  # fmt: skip
CHOICES: dict[str, list[Any]] = {
    "pos_att_type": [["c2p"], ["p2c"], []],
    "classifier_pooling": ["cls", "mean", "bos", "late"],
    "position_embedding_type": ["relative_key", "absolute", "alibi", "rotary"],
    "feed_forward_proj": ["relu", "gated-silu", "gated-gelu"],
    "attention_type": ["original_full", "block_sparse"],
    "norm_rel_ebd": ["none", "layer_norm"],
    "summary_type": ["first", "last", "mean"],
    "scoring_func": ["sigmoid", "softmax"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "dense_act_fn": ["relu", "silu"],
}


def all_rows() -> Iterator[tuple[str, Row]]:
    """One row for each `model_type` of decoders, of encoders and of encoder-decoders."""
    known = set()
    decoders = {name: (row.make_config(), row.kind) for name, row in test_decoders.ROWS.items()}
    for name, (config, kind) in {**decoders, **test_experts.ROWS}.items():
        if config.model_type not in known:
            known.add(config.model_type)
            yield name, (partial(_save_decoder, kind, name), kind)
    generating, known = known, set()
    for name, row in test_encoders.ROWS.items():
        model_type = row.config.model_type  # type: ignore[attr-defined]
        is_wanted = row.kind.__name__.endswith(("ForSequenceClassification", "EncoderModel", "ForPreTraining"))
        if is_wanted and model_type not in known and (model_type not in generating or "bert" in model_type):
            known.add(model_type)
            yield name, (partial(conformance.save_checkpoint, row), row.kind)
    for name, sides in test_encoder_decoders.ROWS.items():
        yield f"sides-{name}", (partial(test_encoder_decoders.save_reference, sides), sides.kind)


def _save_decoder(kind: Any, name: str, path: Path) -> None:
    config = test_decoders.ROWS[name].make_config() if name in test_decoders.ROWS else test_experts.ROWS[name][0]
    test_decoders.save_reference(kind, config, path)


ROWS = dict(all_rows())
SAMPLE = (
    *("llama", "gemma3", "gpt_neox", "mellum", "glm4_moe", "minimax_m2"),
    *("BertForSequenceClassification", "ModernBertForSequenceClassification", "XmodForSequenceClassification"),
)
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")


class Compared:
    """A checkpoint folder whose fields are changed, and both answers for it. The reference's tensors are read once."""

    def __init__(self, name: str, path: Path) -> None:
        save, self.kind = ROWS[name]
        save(path)
        self.path, self.file = path, path / "config.json"
        self.config: dict[str, Any] = json.loads(self.file.read_text())
        self.tensors: dict[str, Tensor] = self.kind.from_pretrained(path, dtype=torch.float32).state_dict()
        self.task = load(str(path)).task

    @torch.no_grad()
    def ours(self, config: dict[str, Any]) -> Tensor | None:
        """None if it is refused, or reads shorter texts only."""
        self.file.write_text(json.dumps(config))
        try:
            loaded = load(str(self.path))
        except ModelError:
            return None
        return answer(loaded) if loaded.max_tokens >= max(map(len, TEXTS)) else None

    @torch.no_grad()
    def theirs(self) -> Tensor | None:
        """Of the folder as it is now. None if the reference fails, or has other tensors than the folder."""
        try:
            config = self.kind.config_class.from_pretrained(self.path)
            with no_init_weights():
                network = self.kind(config)
            names = network.load_state_dict(self.tensors, strict=False, assign=True)
            if names.missing_keys or names.unexpected_keys:
                return None
            found = torch.cat([self._reference(network.eval(), torch.tensor([text])) for text in TEXTS])
        except Exception:  # noqa: BLE001  the reference raises errors of many kinds
            return None
        return found if found.isfinite().all() else None

    def _reference(self, network: Any, ids: Tensor) -> Tensor:
        if self.task == "translate":
            return test_encoder_decoders.reference_logits(network, ids[0].tolist(), ids[0, :13].tolist())
        out = network(ids, attention_mask=torch.ones_like(ids))
        logits: Tensor = out.logits[0] if self.task == "generate" else conformance.read_reference(self.task, out)
        return logits


def answer(loaded: Checkpoint) -> Tensor:
    head: Any = loaded.head
    if loaded.task == "translate":
        found: Tensor = head(RaggedBatch.of(TEXTS), RaggedBatch.of([text[:13] for text in TEXTS]))
        return found
    states = loaded.network(RaggedBatch.of(TEXTS))
    if loaded.task == "generate":
        found = head(states)
        return found
    rows, starts = head.needed_rows([0, len(TEXTS[0]), sum(map(len, TEXTS))])
    found = head(states[list(rows)], starts)
    return found


def is_close(found: Tensor, expected: Tensor) -> bool:
    if found.numel() != expected.numel():
        return False
    apart = float((found.reshape(expected.shape) - expected).abs().max())
    return apart < ROUNDING * max(1.0, float(expected.abs().max()))


def other_values(key: str, value: Any) -> list[Any]:
    """Other legal values of a field."""
    listed: list[Any] = {**ADDED, **MORE, **CHOICES}.get(key, [])
    if listed:
        return [each for each in listed if each != value]
    match value:
        case bool():
            return [not value]
        case int():
            return [value * 2 or 1]
        case float():
            return [value * 3 + 0.01]
        case str() if "act" in key:
            return [next(each for each in ACTIVATIONS if each != value)]
        case [first, *_]:
            return [value[::-1]] if value != value[::-1] else [[first] * len(value)]
    return []


def own_changes(config: dict[str, Any]) -> Iterator[tuple[Way, Any]]:
    """Other values of the fields that a configuration has."""
    for way, value in list_fields(config):
        if way[-1] not in UNREAD:
            yield from ((way, each) for each in other_values(way[-1], value))


def added_changes(config: dict[str, Any], fields: dict[str, list[Any]]) -> Iterator[tuple[Way, Any]]:
    """Values of fields that it may not have, in each of its stacks."""
    inner = [(name,) for name in ("text_config", "encoder", "decoder") if isinstance(config.get(name), dict)]
    for way in [(), *inner]:
        holder = config[way[0]] if way else config
        for key, values in fields.items():
            yield from (((*way, key), each) for each in values if holder.get(key, "missing") != each)


@pytest.fixture(autouse=True)
def _one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's tokenizer is read once: its fields are not those that are changed."""
    monkeypatch.setattr(folder_module, "load_tokenizer", cache(folder_module.load_tokenizer))
    tf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def find_differences(compared: Compared, changes: Iterator[tuple[Way, Any]]) -> list[tuple[str, Any]]:
    """The changes after which our answers are not those of the reference."""
    found = []
    for way, value in changes:
        ours = compared.ours(changed(compared.config, way, value))
        if ours is not None and (theirs := compared.theirs()) is not None and not is_close(ours, theirs):
            found.append((".".join(way), value))
    return found


@pytest.mark.parametrize("name", SAMPLE)
def test_fields_that_were_read_wrongly_are_followed_or_refused(name: str, tmp_path: Path) -> None:
    compared = Compared(name, tmp_path / name)
    assert is_close(compared.ours(compared.config), compared.theirs())  # type: ignore[arg-type]
    assert find_differences(compared, added_changes(compared.config, ADDED)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROWS)
def test_each_field_is_followed_or_refused(name: str, tmp_path: Path) -> None:
    compared = Compared(name, tmp_path / name)
    assert is_close(compared.ours(compared.config), compared.theirs())  # type: ignore[arg-type]
    found = find_differences(compared, added_changes(compared.config, {**ADDED, **MORE}))
    assert found + find_differences(compared, own_changes(compared.config)) == []
