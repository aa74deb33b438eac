"""LoRA adapters in GGUF files equal the PEFT folders they were converted from, merged and beside their base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from polyhead.models.checkpoint import describe_source, load
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.checkpoint.unmerged_adapter import BaseModel
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.models.checkpoint.test_merged_adapter import adapted
from tests.models.network.test_lora import load_adapter_parts, rows, torch_executor
from tests.support import checkpoints, gguf_files

IDS = (5, 6, 7, 8, 9, 10)
VOCABULARY = len(checkpoints.byte_level_bpe())
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=64,
)  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SHAPE)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
}
TARGETS = {"gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}}


def write_adapter(path: Path, architecture: str, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    writer = GGUFWriter(path, architecture)
    fields = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0, **changes}
    for key, value in fields.items():
        if value is not None:
            gguf_files.add(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted_adapter(folder: Path, architecture: str, config: Any) -> dict[str, Tensor]:
    """A PEFT folder's tensors as the converter writes them: GGUF's names, rows of Llama's B reordered."""
    names = gguf.get_tensor_name_map(gguf_files.ARCHITECTURES[architecture], config.num_hidden_layers)
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        theirs = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert theirs, name
        if architecture == "llama" and side == "lora_B" and ("q_proj" in module or "k_proj" in module):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            tensor = gguf_files.permuted(tensor, heads)
        found[f"{theirs}.{side.lower()}"] = tensor
    return found


class Case:
    """A base as a folder and as a GGUF file, an adapter as both, and the logits that peft computes."""

    def __init__(self, architecture: str, root: Path) -> None:
        model = gguf_files.torch_seeded(MODELS[architecture]())
        self.folder = checkpoints.save(model, checkpoints.byte_level_bpe(), root / "base")
        fields = (
            gguf_files.decoder_metadata(model.config)
            if architecture != "gpt2"
            else {
                "block_count": 2,
                "context_length": 64,
                "embedding_length": 32,
                "feed_forward_length": 128,
                "attention.head_count": 4,
                "attention.layer_norm_epsilon": 1e-5,
                **gguf_files.byte_level_metadata(checkpoints.byte_level_bpe()),
            }
        )
        tensors = gguf_files.converted(architecture, model)
        self.file = gguf_files.write(root / "base.gguf", architecture, fields, tensors)
        self.peft = root / "adapter"
        settings = TARGETS.get(architecture, {"target_modules": "all-linear"})
        merged = adapted(model, self.peft, task_type="CAUSAL_LM", **settings)
        self.tensors = converted_adapter(self.peft, architecture, model.config)
        self.adapter = write_adapter(root / "adapter.gguf", architecture, self.tensors)
        with torch.inference_mode():
            self.expected: Tensor = merged(torch.tensor([IDS])).logits[0]


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("refused"))


@torch.inference_mode()
def merged_logits(source: str) -> Tensor:
    loaded = load(source)
    out: Tensor = loaded.head(loaded.network(RaggedBatch.of([list(IDS)])))
    return out


def test_a_merged_adapter_equals_peft(case: Case) -> None:
    """Over the folder, as the PEFT folder to the bit; over the file too."""
    reference = merged_logits(f"{case.folder}+{case.peft}")
    assert float((reference - case.expected).abs().max()) < 1e-5 * float(case.expected.abs().max())
    assert torch.equal(merged_logits(f"{case.folder}+{case.adapter}"), reference)
    over_file = merged_logits(f"{case.file}+{case.adapter}")
    assert float((over_file - case.expected).abs().max()) < 1e-5 * float(case.expected.abs().max())
    assert float((merged_logits(str(case.folder)) - reference).abs().max()) > 1e-2


@pytest.mark.parametrize("base", ["folder", "file"])
def test_an_adapter_beside_its_base_equals_peft(case: Case, base: str) -> None:
    source: Path = getattr(case, base)
    _, lora, head = load_adapter_parts(source, case.adapter)
    assert head is None
    with torch.inference_mode():
        executor = torch_executor(load(str(source)), blocks=4)
        got = executor.step(rows(IDS, adapters=[executor.attach(lora)])).clone()
    assert float((got - case.expected).abs().max()) < 1e-5 * float(case.expected.abs().max())


def test_the_matrices_equal_those_of_the_folder(case: Case) -> None:
    _, ours, _ = load_adapter_parts(case.folder, case.adapter)
    _, theirs, _ = load_adapter_parts(case.folder, case.peft)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name].a, theirs[name].a)
        assert torch.equal(ours[name].b, theirs[name].b)


def test_without_alpha_the_scale_is_one(llama: Case, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", "llama", llama.tensors, **{"adapter.lora.alpha": 0.0})
    _, lora, _ = load_adapter_parts(llama.folder, path)
    _, scaled, _ = load_adapter_parts(llama.folder, llama.adapter)
    for name in lora:
        torch.testing.assert_close(lora[name].b * 6 / 4, scaled[name].b)


def test_an_encoder_takes_an_adapter_too(tmp_path: Path, tiny_embedder: Path) -> None:
    model = tf.AutoModel.from_pretrained(tiny_embedder)
    config = model.config
    adapted(model, tmp_path / "peft", task_type="FEATURE_EXTRACTION", target_modules=["query", "value", "dense"])
    tensors = {
        name: tensor
        for name, tensor in converted_adapter_of_bert(tmp_path / "peft", config).items()
        if "pooler" not in name
    }
    path = write_adapter(tmp_path / "a.gguf", "bert", tensors)
    _, ours, _ = load_adapter_parts(tiny_embedder, path)
    _, theirs, _ = load_adapter_parts(tiny_embedder, tmp_path / "peft")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name].b @ ours[name].a, theirs[name].b @ theirs[name].a)


def converted_adapter_of_bert(folder: Path, config: Any) -> dict[str, Tensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        theirs = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if theirs:
            found[f"{theirs}.{side.lower()}"] = tensor
    return found


def test_a_merge_into_blocks_is_computed_in_float32(llama: Case, tmp_path: Path) -> None:
    """The sum is no whole multiple of the stored scales any more."""
    base = describe_source(str(llama.file))
    model = gguf_files.torch_seeded(MODELS["llama"]())
    kinds = lambda name, tensor: "Q8_0" if tensor.dim() > 1 else "F32"  # noqa: E731
    weights = gguf_files.converted("llama", model)
    path = gguf_files.write(tmp_path / "q.gguf", "llama", gguf_files.decoder_metadata(model.config), weights, kinds)
    assert describe_source(str(path)).default_precision.precision == "int8"
    merged = describe_source(f"{path}+{llama.adapter}")
    assert merged.default_precision.precision == "float32"
    assert estimate_load(merged).computed > estimate_load(base).computed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.type": "model"}, r"general\.type is 'model'; a LoRA adapter has 'adapter'"),
    ({"adapter.type": "other"}, r"adapter\.type is 'other'; a LoRA adapter has 'lora'"),
    ({"adapter.type": None}, r"adapter\.type is None"),
    ({"adapter.lora.alpha": "six"}, r"adapter\.lora\.alpha is 'six', which should be a number"),
    ({"adapter.lora.alpha": float("nan")}, r"adapter\.lora\.alpha is nan"),
    ({"adapter.alora.invocation_tokens": [1, 2]}, r"invocation_tokens starts the adapter in the middle"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_wrong_fields_are_named(llama: Case, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_adapter(tmp_path / "odd.gguf", "llama", llama.tensors, **change)
    with pytest.raises(CheckpointError, match=rf"odd\.gguf.*{message}"):
        load(f"{llama.folder}+{path}")


def test_adapters_of_other_models_are_refused(llama: Case, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "qwen.gguf", "qwen2", llama.tensors)
    with pytest.raises(CheckpointError, match=r"qwen\.gguf: it is an adapter of the qwen2 family.*is of llama"):
        load(f"{llama.folder}+{other}")
    unknown = write_adapter(tmp_path / "mamba.gguf", "mamba", llama.tensors)
    with pytest.raises(UnsupportedError, match=r"mamba\.gguf.*'mamba' is not known; known are llama"):
        load(f"{llama.folder}+{unknown}")


def pair(tensor: str, rows_of_b: int = 64, inputs: int = 64) -> dict[str, Tensor]:
    return {f"{tensor}.lora_a": torch.ones(4, inputs), f"{tensor}.lora_b": torch.ones(rows_of_b, 4)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            pair("blk.7.attn_q.weight"),
            r"blk\.7\.attn_q\.weight\.lora_a.*has no tensor that is 'blk\.7",
        ),
        (pair("token_embd.weight"), r"token_embd\.weight\.lora_a.*only pairs"),
        ({"blk.0.attn_norm.weight": torch.ones(64)}, r"blk\.0\.attn_norm\.weight.*only pairs \.lora_a and \.lora_b"),
        ({"blk.0.attn_q.weight.lora_a": torch.ones(4, 64)}, "its other half is missing"),
        (
            pair("blk.0.attn_q.weight", rows_of_b=32),
            r"a matrix of shape \[32, 64\], but the base's is \[64, 64\]",
        ),
        (pair("blk.0.attn_q.weight", rows_of_b=30), r"attn_q\.weight.*shape \[30, 4\] is not that of such a tensor"),
        (pair("blk.0.ffn_up.weight", 96, 32), r"updates a matrix of shape \[96, 32\], but the base's is \[96, 64\]"),
    ],
)
def test_wrong_tensors_are_named(llama: Case, tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    path = write_adapter(tmp_path / "odd.gguf", "llama", tensors)
    with pytest.raises(CheckpointError, match=message):
        load(f"{llama.folder}+{path}")


def test_a_second_adapter_of_one_tensor_is_refused(llama: Case) -> None:
    base = describe_source(f"{llama.file}+{llama.adapter}")
    with pytest.raises(UnsupportedError, match="has an adapter in this tensor already"):
        BaseModel(base).plan_adapter(llama.adapter)


def test_an_adapter_alone_and_a_folder_over_a_file_are_refused(llama: Case) -> None:
    with pytest.raises(UnsupportedError, match=r"adapter\.gguf: it is an adapter, which is loaded with its base"):
        load(str(llama.adapter))
    with pytest.raises(UnsupportedError, match="merged only into a safetensors folder"):
        load(f"{llama.file}+{llama.peft}")
    with pytest.raises(UnsupportedError, match="an adapter folder needs a base in a safetensors folder"):
        BaseModel(describe_source(str(llama.file))).plan_adapter(llama.peft)
