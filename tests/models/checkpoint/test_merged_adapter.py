"""PEFT adapters: merged networks equal those of peft, and no unknown part of an adapter is ignored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from polyhead.models.checkpoint import describe_source, hub, load, merged_adapter
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.checkpoint.tensor_files import read_safetensors
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints

TEXT = "A good film"
IDS = [5, 6, 7, 8, 9]


def adapted(model: Any, folder: Path, base: str = "", **settings: Any) -> Any:
    """peft's own network over `model`, with random low-rank matrices, saved into `folder`."""
    torch.manual_seed(4)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings})
    adapter: Any = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    adapter.peft_config["default"].base_model_name_or_path = base or None
    adapter.save_pretrained(folder)
    return adapter.merge_and_unload().eval()


def classifier(base: Path, labels: int = 3) -> Any:
    return tf.AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)


def generator(base: Path) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(base)


@torch.inference_mode()
def scores(loaded: Any) -> torch.Tensor:
    ids = loaded.tokenizer.encode(TEXT).ids
    raw: torch.Tensor = loaded.head(loaded.network(RaggedBatch.of([ids])), [0, len(ids)])
    return raw


@torch.inference_mode()
def wanted_scores(model: Any, base: Path) -> torch.Tensor:
    out: torch.Tensor = model(**tf.AutoTokenizer.from_pretrained(base)(TEXT, return_tensors="pt")).logits
    return out


@torch.inference_mode()
def language_difference(loaded: Any, model: Any) -> float:
    return float(
        (loaded.head(loaded.network(RaggedBatch.of([IDS]))) - model(torch.tensor([IDS])).logits[0]).abs().max()
    )


def overlay(folder: Path, *labels: str) -> None:
    names = {str(index): label for index, label in enumerate(labels)}
    checkpoints.write_json(folder / "config.json", {"id2label": names, "vocab_size": 5})


@pytest.mark.parametrize("rslora", [False, True])
def test_a_classifier_over_an_embedder(tiny_embedder: Path, tmp_path: Path, rslora: bool) -> None:
    """The base has no classifier and other prefixes; the adapter brings the head and its labels."""
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query", "value", "dense"], "use_rslora": rslora}
    merged = adapted(classifier(tiny_embedder), tmp_path, modules_to_save=["classifier"], **settings)
    overlay(tmp_path, "bad", "fair", "good")
    loaded = load(f"{tiny_embedder}+{tmp_path}")
    assert (loaded.task, loaded.labels) == ("classify", ("bad", "fair", "good"))
    assert float((scores(loaded) - wanted_scores(merged, tiny_embedder)).abs().max()) < 1e-5
    assert loaded.config.vocab_size != 5


def test_labels_are_numbered_where_they_have_no_names(tiny_embedder: Path, tmp_path: Path) -> None:
    adapted(classifier(tiny_embedder, labels=4), tmp_path, task_type="SEQ_CLS", target_modules=["query"])
    assert load(f"{tiny_embedder}+{tmp_path}").labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")


@pytest.mark.parametrize("named", [False, True])
def test_a_head_without_labels_is_refused(tiny_classifier: Path, tmp_path: Path, named: bool) -> None:
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query"], "modules_to_save": ["classifier"]}
    adapted(classifier(tiny_classifier), tmp_path, **settings)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    heads = {name: tensor[:0] for name, tensor in tensors.items() if ".classifier." in name}
    assert heads
    save_file(tensors | heads, tmp_path / "adapter_model.safetensors")
    if named:
        overlay(tmp_path)
    wrong = "id2label should name the labels" if named else r"classifier.weight.*shape is \[0, 32\].*one label at least"
    with pytest.raises(CheckpointError, match=wrong):
        load(f"{tiny_classifier}+{tmp_path}")


def test_a_classifier_over_a_classifier(tiny_classifier: Path, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"layer.1.attention.self.query": 2}, "alpha_pattern": {"value": 3}}
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], **patterns}
    merged = adapted(classifier(tiny_classifier), tmp_path, **settings)
    loaded = load(f"{tiny_classifier}+{tmp_path}")
    assert loaded.labels == checkpoints.LABELS
    assert float((scores(loaded) - wanted_scores(merged, tiny_classifier)).abs().max()) < 1e-5


def test_a_generator(tiny_generator: Path, tmp_path: Path) -> None:
    settings = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    merged = adapted(generator(tiny_generator), tmp_path, **settings)
    loaded = load(f"{tiny_generator}+{tmp_path}")
    assert loaded.task == "generate"
    assert language_difference(loaded, merged) < 1e-5
    assert language_difference(load(str(tiny_generator)), merged) > 1e-2


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_modules_of_a_tied_base_are_replaced_as_by_peft(tiny_generator: Path, tmp_path: Path, saved: list[str]) -> None:
    """A saved token embedding is not that of the output, which keeps the base's table unless it is saved, too."""
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "modules_to_save": saved}
    adapted(generator(tiny_generator), tmp_path, **settings)
    wanted = peft.PeftModel.from_pretrained(generator(tiny_generator), str(tmp_path)).eval()
    assert language_difference(load(f"{tiny_generator}+{tmp_path}"), wanted) < 1e-4


def test_an_embedding_without_a_module_replaces_both_tables_of_a_tied_base(
    tiny_generator: Path, tmp_path: Path
) -> None:
    """As peft writes that of a base which got new tokens: beside the modules, under the base's own name."""
    adapted(generator(tiny_generator), tmp_path, task_type="CAUSAL_LM", target_modules=["q_proj"])
    table = torch.randn(generator(tiny_generator).get_input_embeddings().weight.shape)
    retensor(tmp_path, lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": table}))
    wanted = peft.PeftModel.from_pretrained(generator(tiny_generator), str(tmp_path)).eval()
    assert language_difference(load(f"{tiny_generator}+{tmp_path}"), wanted) < 1e-3


def test_the_embedding_of_two_tied_sides_is_not_replaced(tmp_path: Path) -> None:
    """peft replaces a module that neither side of T5 reads."""
    config = tf.T5Config(
        vocab_size=400, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    base = checkpoints.save(tf.T5ForConditionalGeneration(config), checkpoints.byte_level_bpe(), tmp_path / "base")
    model = tf.T5ForConditionalGeneration.from_pretrained(base)
    adapted(model, tmp_path / "adapter", target_modules=["q"], modules_to_save=["shared"])
    with pytest.raises(UnsupportedError, match=r"shared\.weight.*which other layers of this base share; merge it"):
        describe_source(f"{base}+{tmp_path / 'adapter'}")


def test_matrices_that_the_base_stores_transposed(tmp_path: Path) -> None:
    """As in GPT-2, where one matrix is square, so its shape does not show that it is transposed."""
    config = tf.GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    base = checkpoints.save(tf.GPT2LMHeadModel(config), checkpoints.byte_level_bpe(), tmp_path / "base")
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    merged = adapted(generator(base), tmp_path / "adapter", **settings)
    assert language_difference(load(f"{base}+{tmp_path / 'adapter'}"), merged) < 1e-5


def test_an_adapter_without_a_task_keeps_that_of_its_base(tiny_embedder: Path, tmp_path: Path) -> None:
    merged = adapted(tf.AutoModel.from_pretrained(tiny_embedder), tmp_path, target_modules=["key"])
    loaded = load(f"{tiny_embedder}+{tmp_path}")
    assert loaded.task == "embed"
    with torch.inference_mode():
        got = loaded.network(RaggedBatch.of([IDS]))
        assert float((got - merged(torch.tensor([IDS])).last_hidden_state[0]).abs().max()) < 1e-5


def test_an_adapter_names_its_base(tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_classifier, tmp_path / "base")
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query"]}
    merged = adapted(classifier(tiny_classifier), tmp_path / "adapter", base="../base", **settings)
    wanted = wanted_scores(merged, tiny_classifier)
    assert float((scores(load(str(tmp_path / "adapter"))) - wanted).abs().max()) < 1e-5
    edit(tmp_path / "adapter", base_model_name_or_path="org/base", revision="v2")
    asked: list[str] = []

    def download(source: str, _: hub.DownloadOptions) -> Path:
        asked.append(source)
        return tmp_path / "base"

    monkeypatch.setattr(hub, "download", download)
    assert float((scores(load(str(tmp_path / "adapter"))) - wanted).abs().max()) < 1e-5
    assert asked == ["org/base@v2"]
    edit(tmp_path / "adapter", base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="does not name the base"):
        load(str(tmp_path / "adapter"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    checkpoints.write_json(path, json.loads(path.read_text()) | changes)


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture
def plain(tiny_classifier: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter that fits it."""
    adapted(classifier(tiny_classifier), tmp_path / "plain", task_type="SEQ_CLS", target_modules=["query"])
    return tiny_classifier, tmp_path / "plain"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"something_of_tomorrow": 1}, "something_of_tomorrow"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "SEQ_2_SEQ_LM.*BertForSequenceClassification"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    plain: tuple[Path, Path], changes: dict[str, Any], message: str
) -> None:
    edit(plain[1], **changes)
    with pytest.raises(UnsupportedError, match=rf"adapter_config\.json.*{message}"):
        load(f"{plain[0]}+{plain[1]}")


def test_an_adapter_for_generation_needs_a_causal_base(plain: tuple[Path, Path]) -> None:
    """The family has a causal form, and this base is not of it."""
    edit(plain[1], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedError, match=r"its tokens see those after them .*, so it cannot generate"):
        load(f"{plain[0]}+{plain[1]}")


@pytest.mark.parametrize("changes", [{"r": 5}, {"r": None}, {"lora_alpha": None}, {"lora_alpha": "x"}])
def test_settings_that_contradict_the_matrices_are_refused(plain: tuple[Path, Path], changes: dict[str, Any]) -> None:
    edit(plain[1], **changes)
    with pytest.raises(CheckpointError, match="matrices have rank 4"):
        load(f"{plain[0]}+{plain[1]}")


def test_unused_tensors_are_refused_by_name(plain: tuple[Path, Path]) -> None:
    base, adapter = plain
    query = "base_model.model.bert.encoder.layer.0.attention.self.query"

    def unknown_tensor(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.bert.encoder.layer.0.adapter.weight"] = torch.zeros(2)

    def unknown_module(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["base_model.model.bert.encoder.layer.0.adapter.weight"]
        for side in "AB":
            tensors[f"base_model.model.bert.gate.lora_{side}.weight"] = torch.zeros(4, 4)

    def single_matrix(tensors: dict[str, torch.Tensor]) -> None:
        for side in "AB":
            del tensors[f"base_model.model.bert.gate.lora_{side}.weight"]
        del tensors[f"{query}.lora_B.weight"]

    def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{query}.lora_B.weight"] = torch.zeros(33, 4)

    def magnitude(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{query}.lora_B.weight"] = torch.zeros(32, 4)
        tensors[f"{query}.lora_magnitude_vector"] = torch.zeros(32)

    for change, message in [
        (unknown_tensor, r"adapter\.weight"),
        (unknown_module, r"no tensor bert\.gate\.weight"),
        (single_matrix, r"self\.query\.lora_A\.weight.*other half"),
        (wrong_shape, r"self\.query\.lora_A\.weight.*\[33, 32\].*\[32, 32\]"),
        (magnitude, "lora_magnitude_vector"),
    ]:
        retensor(adapter, change)
        with pytest.raises(CheckpointError, match=message) as raised:
            load(f"{base}+{adapter}")
        assert "adapter_model.safetensors" in str(raised.value)


def test_an_adapter_without_its_weights(plain: tuple[Path, Path]) -> None:
    (plain[1] / "adapter_model.safetensors").rename(plain[1] / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="as safetensors"):
        load(f"{plain[0]}+{plain[1]}")


def test_a_truncated_adapter(plain: tuple[Path, Path]) -> None:
    file = plain[1] / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors.*truncated"):
        load(f"{plain[0]}+{plain[1]}")


@pytest.mark.parametrize("rank", [0, merged_adapter.MAX_RANK + 1])
def test_a_rank_out_of_range_is_refused(plain: tuple[Path, Path], rank: int) -> None:
    base, adapter = plain
    query = "base_model.model.bert.encoder.layer.0.attention.self.query"

    def resize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{query}.lora_A.weight"] = torch.zeros(rank, 32)
        tensors[f"{query}.lora_B.weight"] = torch.zeros(32, rank)

    retensor(adapter, resize)
    edit(adapter, rank_pattern={"layer.0.attention.self.query": rank})
    with pytest.raises(UnsupportedError, match=rf"lora_A.*its rank is {rank}; ranks from 1 to 8192 are read"):
        describe_source(f"{base}+{adapter}")


def test_the_memory_of_both_low_rank_matrices_is_counted(tiny_classifier: Path, tmp_path: Path) -> None:
    """With a large rank the two low-rank matrices are larger than the matrix that they update."""
    sizes = {}
    for rank in (4, 5000):
        settings = {"task_type": "SEQ_CLS", "target_modules": ["query"], "r": rank}
        adapted(classifier(tiny_classifier), tmp_path / str(rank), **settings)
        size = estimate_load(describe_source(f"{tiny_classifier}+{tmp_path / str(rank)}"))
        sizes[rank] = size.temporary_bytes(torch.float32)
    assert sizes[5000] - sizes[4] == (5000 - 4) * (32 + 32) * 4


@pytest.mark.parametrize("transposed", [False, True])
def test_progress_while_a_matrix_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    """Other models compute between two progress calls, so each piece of work must be short."""
    sides, base = {"a": torch.randn(6, 8), "b": torch.randn(10, 6)}, torch.randn(10, 8)
    base = base.t().contiguous() if transposed else base
    save_file({"base": base, **sides}, tmp_path / "some.safetensors")
    entries = read_safetensors(tmp_path / "some.safetensors")
    matrix, pair = entries["base"], (entries["a"], entries["b"])
    location = (matrix.source, "base", "F32", matrix.shape, matrix.start, matrix.encoding)
    entry = merged_adapter.MergedEntry(*location, matrix, pair, 0.5, transposed)
    monkeypatch.setattr(merged_adapter, "PRODUCTS", 3 * (60 if transposed else 48))
    pieces: list[int] = []
    merged = entry.read(torch.float32, torch.device("cpu"), pieces.append)
    update = 0.5 * sides["b"] @ sides["a"]
    assert float((merged - base - (update.t() if transposed else update)).abs().max()) < 1e-5
    rows = 8 if transposed else 10
    assert pieces == [6 * 8 * 4, 10 * 6 * 4, 10 * 8 * 4, *[0] * -(-rows // 3)]
    assert sum(pieces) == entry.read_size


def test_progress_of_a_merged_checkpoint_increases_to_the_total(plain: tuple[Path, Path]) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    for source in (str(plain[0]), f"{plain[0]}+{plain[1]}"):
        calls = seen.setdefault(source, [])
        load(source, progress=lambda done, total, calls=calls: calls.append((done, total)))
        assert calls == sorted(calls)
        assert calls[-1][0] == calls[-1][1]
    base, merged = (calls[-1][1] for calls in seen.values())
    sides = [each for name, each in load_file(plain[1] / "adapter_model.safetensors").items() if "lora_" in name]
    assert merged == base + sum(side.nbytes for side in sides)


QUERY = "bert.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    "shapes",
    [
        {f"{QUERY}.lora_A.default.weight": (4, 32)},
        {f"{QUERY}.lora_A": (4, 32)},
        {
            f"{QUERY.removeprefix('bert.')}.lora_A.weight": (4, 32),
            f"{QUERY.removeprefix('bert.')}.lora_B.weight": (32, 4),
        },
        {f"{QUERY}.weight": (32, 32)},
        {f"{QUERY.removeprefix('bert.')}.weight": (32, 32)},
        {"classifier.modules_to_save.weight": (3, 32)},
        {"bert.classifier.weight": (3, 32)},
    ],
)
def test_a_tensor_that_is_changed_twice_is_refused(
    plain: tuple[Path, Path], shapes: dict[str, tuple[int, int]]
) -> None:
    base, adapter = plain

    def twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.classifier.weight"] = torch.zeros(3, 32)
        tensors |= {f"base_model.model.{name}": torch.zeros(shape) for name, shape in shapes.items()}

    retensor(adapter, twice)
    with pytest.raises(CheckpointError, match=r"it has the place of .*; an adapter changes a tensor once"):
        describe_source(f"{base}+{adapter}")


def test_the_steps_of_all_patterns_on_all_modules_are_bounded(
    plain: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = plain
    edit(adapter, alpha_pattern={f".*aa.*{number}": 3 for number in range(merged_adapter.MAX_PATTERNS)})
    describe_source(f"{base}+{adapter}")
    monkeypatch.setattr(merged_adapter, "MAX_PATTERN_STEPS", 2 * merged_adapter.MAX_PATTERNS)
    with pytest.raises(UnsupportedError, match=r"adapter_config\.json.*patterns .*take too long.*all modules"):
        describe_source(f"{base}+{adapter}")
