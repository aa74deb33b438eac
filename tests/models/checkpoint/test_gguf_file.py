"""GGUF files: every family equals its reference, every encoding its definition, and every defect has a clear error."""

import random
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from polyhead.models.checkpoint import Checkpoint, describe_source, gguf_adapter, gguf_file, gguf_header, load
from polyhead.models.checkpoint import tensor_files as tensors
from polyhead.models.checkpoint.gguf_header import BLOCK_FORMATS, read_header
from polyhead.models.core.errors import CheckpointError, ModelError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.tokenizer import Tokenizer, gguf_vocabulary
from tests.support import checkpoints, gguf_files

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34]]
SMOLLM2 = Path("~/.cache/polyhead/models").expanduser()
VOCABULARY = len(checkpoints.byte_level_bpe())
LLAMA: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=64,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip


def llama(**changes: Any) -> tf.PreTrainedModel:
    return gguf_files.torch_seeded(tf.LlamaForCausalLM(tf.LlamaConfig(**{**LLAMA, **changes})))


def write_llama(path: Path, model: tf.PreTrainedModel, **metadata: Any) -> Path:
    fields = {**gguf_files.decoder_metadata(model.config), **metadata}
    return gguf_files.write(path, "llama", fields, gguf_files.converted("llama", model))


@torch.inference_mode()
def logits(checkpoint: Checkpoint) -> torch.Tensor:
    out: torch.Tensor = checkpoint.head(checkpoint.network(RaggedBatch.of(SEQUENCES)))
    return out


@torch.inference_mode()
def reference(model: tf.PreTrainedModel) -> torch.Tensor:
    return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])


def difference(checkpoint: Checkpoint, model: tf.PreTrainedModel) -> float:
    return float((logits(checkpoint) - reference(model)).abs().max())


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf", llama(), **{"rope.freq_base": 5e3})


def test_llama_equals_transformers(tmp_path: Path) -> None:
    model = llama(rope_parameters=dict(rope_type="default", rope_theta=5e3), tie_word_embeddings=True)
    loaded = load(str(write_llama(tmp_path / "llama.gguf", model, **{"rope.freq_base": 5e3})))
    assert difference(loaded, model) < 1e-5
    assert loaded.task == "generate"
    assert loaded.head.output.weight is loaded.network.tokens.weight
    assert loaded.max_tokens == 64
    assert loaded.stop_tokens == {checkpoints.byte_level_bpe().eos_token_id}
    assert loaded.chat is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("A good film").ids) == "A good film"


def test_llama_with_biases_of_queries_and_keys(tmp_path: Path) -> None:
    model = llama(attention_bias=True)
    assert difference(load(str(write_llama(tmp_path / "biased.gguf", model))), model) < 1e-5


def test_rope_scaling_from_metadata_and_from_factors(tmp_path: Path) -> None:
    linear = llama(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert difference(load(str(write_llama(tmp_path / "linear.gguf", linear, **fields))), linear) < 1e-5

    model = llama(rope_parameters=LLAMA3, head_dim=64)
    tensors_of = gguf_files.converted("llama", model)
    plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
    tensors_of["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    fields = {**gguf_files.decoder_metadata(model.config), "rope.freq_base": 5e5}
    path = gguf_files.write(tmp_path / "llama3.gguf", "llama", fields, tensors_of)
    assert difference(load(str(path)), model) < 1e-5

    tensors_of["rope_freqs.weight"] = torch.linspace(1, 3, 32)
    path = gguf_files.write(tmp_path / "longrope.gguf", "llama", fields, tensors_of)
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight.*Llama 3"):
        load(str(path))


def test_rope_factors_of_a_very_wide_head_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head width in the file does not limit their size: a sparse file may declare any width without disk space."""
    width = gguf_file.MAX_HEAD_WIDTH + 2
    weights = gguf_files.converted("llama", llama()) | {"rope_freqs.weight": torch.ones(width // 2)}
    fields = {**gguf_files.decoder_metadata(llama().config), "attention.key_length": width}
    fields |= {"attention.value_length": width, "rope.dimension_count": width}
    path = gguf_files.write(tmp_path / "wide.gguf", "llama", fields, weights)
    monkeypatch.setattr(tensors.TensorEntry, "read", None)
    with pytest.raises(UnsupportedError, match=rf"rope_freqs\.weight.*head width is {width}.*16384 features at most"):
        describe_source(str(path))


def test_a_vocabulary_is_tried_with_the_fields_that_are_read(tmp_path: Path) -> None:
    """They are copied for the process that tries it; others may be of any length."""
    asked = list[set[str]]()
    path = write_llama(
        tmp_path / "a.gguf", llama(), **{".tokenizer.ggml.other": "x" * 1000, ".tokenizer.ggml.pre": "gpt-2"}
    )

    def note_fields(_: Path, fields: Mapping[str, object]) -> int:
        asked.append(set(fields))
        return 0

    describe_source(str(path), folder_check=note_fields)
    [names] = asked
    assert {"tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.pre"} <= names
    assert "tokenizer.ggml.other" not in names


@pytest.mark.parametrize("length", [30, 1000])
def test_a_vocabulary_is_bounded_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    path, asked = write_llama(tmp_path / "a.gguf", llama(), **{".tokenizer.ggml.pre": "x" * length}), list[Path]()
    fields = Tokenizer.select_gguf_fields(read_header(path)[0])
    characters = sum(
        len("".join(value)) for value in fields.values() if isinstance(value, str | list) and isinstance(value[0], str)
    )
    monkeypatch.setattr(gguf_vocabulary, "MAX_FIELD_CHARACTERS", characters - 1)
    said = f"has .* of {characters} characters under tokenizer.ggml; {characters - 1} are the most"
    with pytest.raises(CheckpointError, match=said):
        describe_source(str(path), folder_check=lambda source, _: asked.append(source))
    assert not asked


def test_qwen_equals_transformers(tmp_path: Path) -> None:
    two = gguf_files.torch_seeded(tf.Qwen2ForCausalLM(tf.Qwen2Config(**LLAMA)))
    three = gguf_files.torch_seeded(tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**LLAMA, "head_dim": 32})))
    for name, model in (("qwen2", two), ("qwen3", three)):
        fields = gguf_files.decoder_metadata(model.config)
        path = gguf_files.write(tmp_path / name, name, fields, gguf_files.converted(name, model))
        loaded = load(str(path.rename(path.with_suffix(".gguf"))))
        assert loaded.family == name
        assert difference(loaded, model) < 1e-5


def test_gemma3_equals_transformers(tmp_path: Path) -> None:
    config = tf.Gemma3TextConfig(
        **{**LLAMA, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    model = gguf_files.torch_seeded(tf.Gemma3ForCausalLM(config))
    fields = gguf_files.decoder_metadata(config) | {
        "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.sliding_window": 4,
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "gemma.gguf", "gemma3", fields, gguf_files.converted("gemma3", model))
    assert difference(load(str(path)), model) < 2e-5


def test_gpt2_equals_transformers(tmp_path: Path) -> None:
    config = tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = gguf_files.torch_seeded(tf.GPT2LMHeadModel(config))
    fields = {
        "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5,
        **gguf_files.byte_level_metadata(checkpoints.byte_level_bpe()),
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "gpt2.gguf", "gpt2", fields, gguf_files.converted("gpt2", model))
    assert difference(load(str(path)), model) < 1e-5


def bert_fields(pooling: int, tokenizer: tf.PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False,
        "pooling_type": pooling, **gguf_files.word_piece_metadata(tokenizer),
    }  # fmt: skip


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_bert_is_an_embedder_with_the_pooling_of_the_file(tmp_path: Path, number: int, pooling: str) -> None:
    tokenizer = checkpoints.word_piece()
    config = checkpoints.bert_config(tokenizer)
    config.max_position_embeddings = 64
    model = gguf_files.torch_seeded(tf.BertModel(config))
    fields = bert_fields(number, tokenizer)
    path = gguf_files.write(tmp_path / "bert.gguf", "bert", fields, gguf_files.converted("bert", model))
    loaded = load(str(path))
    assert (loaded.task, loaded.max_tokens, loaded.head.pooling) == ("embed", 64, pooling)
    encoding = loaded.tokenizer.encode("A good film")
    assert encoding.ids == tokenizer("A good film")["input_ids"]
    with torch.inference_mode():
        got = loaded.network(RaggedBatch.of([encoding.ids]))
        vector = loaded.head.postprocess(loaded.head(got, [0, len(encoding.ids)]))
        assert float((got - model(torch.tensor([encoding.ids])).last_hidden_state[0]).abs().max()) < 1e-5
    assert float(vector.norm()) == pytest.approx(1.0, abs=1e-6)


def reranker(
    tmp_path: Path, scores: torch.Tensor, **changes: Any
) -> tuple[Path, tf.BertModel, tf.PreTrainedTokenizerFast, dict[str, torch.Tensor]]:
    """A BERT with the head of a reranker: the file, the network, its tokenizer, and the tensors of the head."""
    tokenizer = checkpoints.word_piece()
    config = checkpoints.bert_config(tokenizer)
    config.max_position_embeddings = 64
    model = gguf_files.torch_seeded(tf.BertModel(config))
    head = {"cls.weight": torch.randn(32, 32), "cls.bias": torch.randn(32), "cls.output.weight": scores}
    head["cls.output.bias"] = torch.randn(len(scores))
    fields = bert_fields(gguf_file.RANK_POOLING, tokenizer) | changes
    path = gguf_files.write(
        tmp_path / "rank.gguf", "bert", fields, gguf_files.converted("bert", model) | head, lambda *_: "F32"
    )
    return path, model, tokenizer, head


@pytest.mark.parametrize(("labels", "task"), [(["relevance"], "rank"), (["no", "yes", "maybe"], "classify")])
def test_a_reranker_scores_pairs_as_its_head_does(tmp_path: Path, labels: list[str], task: str) -> None:
    scores = torch.randn(len(labels), 32)
    path, model, tokenizer, head = reranker(tmp_path, scores, **{"classifier.output_labels": labels})
    loaded = load(str(path))
    assert (loaded.task, list(loaded.labels)) == (task, labels)
    [pair] = loaded.tokenizer.encode_batch([("A good film", "It is bad")])
    reference = tokenizer("A good film", "It is bad", return_tensors="pt")
    assert pair.ids == reference["input_ids"][0].tolist()
    with torch.inference_mode():
        first = model(**reference).last_hidden_state[0, 0]
        inner = torch.tanh(head["cls.weight"] @ first + head["cls.bias"])
        wanted = scores @ inner + head["cls.output.bias"]
        states = loaded.network(RaggedBatch.of([pair.ids], [pair.segments]))
        got = loaded.head(states, [0, len(pair.ids)])[0]
        assert float((got - wanted).abs().max()) < 1e-5 * float(wanted.abs().max() + 1)
        closed = wanted.sigmoid() if task == "rank" else wanted.softmax(-1)
        torch.testing.assert_close(loaded.head.postprocess(got[None])[0], closed)


def test_other_rerankers_are_refused(tmp_path: Path) -> None:
    path, *_ = reranker(tmp_path, torch.randn(2, 32), **{"classifier.output_labels": ["one"]})
    with pytest.raises(CheckpointError, match=r"classifier\.output_labels is \['one'\].*names of the 2 rows"):
        load(str(path))
    path, *_ = reranker(tmp_path, torch.randn(1, 32), **{"classifier.output_labels": ["x" * 2000]})
    with pytest.raises(CheckpointError, match=r"classifier\.output_labels has a string of 2000 characters"):
        load(str(path))


def test_an_encoder_whose_tokens_see_those_before_them_only_is_refused(tmp_path: Path) -> None:
    path, *_ = reranker(tmp_path, torch.randn(1, 32), **{"attention.causal": True})
    with pytest.raises(
        UnsupportedError, match=r"attention\.causal is True, and tokens of this .* see those after them"
    ):
        load(str(path))


def test_named_chat_templates_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = gguf_files.decoder_metadata(llama().config)[".tokenizer.chat_template"]
    tools = {".tokenizer.chat_templates": ["tool_use"], ".tokenizer.chat_template.tool_use": own + "{# tools #}"}
    both = load(str(write_llama(tmp_path / "both.gguf", llama(), **tools)))
    assert both.chat is not None
    assert not caplog.messages
    fields = gguf_files.decoder_metadata(llama().config) | tools
    del fields[".tokenizer.chat_template"]
    path = gguf_files.write(tmp_path / "tools.gguf", "llama", fields, gguf_files.converted("llama", llama()))
    assert load(str(path)).chat is None
    assert "none of its chat templates is the default one: ['tool_use']" in caplog.text


def one_bit_numbers(blocks: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Q1_0 as ggml-quants.c defines it, number by number: [N, bytes] to [N, K]."""
    rows = []
    for row in blocks:
        numbers = []
        for block in row.reshape(-1, 18):
            scale = float(block[:2].view(numpy.float16)[0])
            numbers += [scale if block[2 + index // 8] >> index % 8 & 1 else -scale for index in range(128)]
        rows.append(numbers)
    return numpy.array(rows, dtype=numpy.float32)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_quantised_blocks_are_decoded_as_the_format_defines(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = gguf_files.random_blocks(kind, rows=6, columns=512)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("a", blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("b", blocks[::-1].copy(), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, entries = read_header(tmp_path / "one.gguf")
    wanted = one_bit_numbers(blocks) if kind == "Q1_0" else dequantize(blocks, GGMLQuantizationType[kind])
    assert numpy.isfinite(wanted).all()
    assert wanted.std() > 0
    monkeypatch.setattr(gguf_header, "DECODED_NUMBERS", 512)  # a few blocks at a time
    monkeypatch.setattr(tensors, "PIECE_BYTES", 1000)  # several pieces, none of which is a multiple of a row
    for name, expected in (("a", wanted), ("b", wanted[::-1].copy())):
        assert torch.equal(entries[name].read(torch.float32, torch.device("cpu")), torch.from_numpy(expected))


@pytest.mark.parametrize(("kind", "dtype"), [("F64", "f8"), ("I8", "i1"), ("I16", "i2"), ("I32", "i4"), ("I64", "i8")])
def test_plain_numbers_are_read_as_they_are(tmp_path: Path, kind: str, dtype: str) -> None:
    numbers = numpy.arange(-64, 64).reshape(4, 32).astype(dtype)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("a", numbers, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = read_header(tmp_path / "one.gguf")[1]["a"]
    assert entry.kind == kind
    assert entry.read(torch.float32, torch.device("cpu")).tolist() == numbers.tolist()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_a_quantised_network_equals_the_dequantised_reference(tmp_path: Path, kind: str) -> None:
    model = llama()
    kinds = lambda name, tensor: kind if tensor.dim() > 1 else "F32"  # noqa: E731
    fields = gguf_files.decoder_metadata(model.config)
    weights = gguf_files.converted("llama", model)
    path = gguf_files.write(tmp_path / "quantised.gguf", "llama", fields, weights, kinds)
    rounded = {}
    for name, entry in read_header(path)[1].items():
        rounded[name] = entry.read(torch.float32, torch.device("cpu"))
    plain = gguf_files.write(tmp_path / "plain.gguf", "llama", fields, rounded)
    quantised = load(str(path))
    assert torch.equal(logits(quantised), logits(load(str(plain))))
    assert difference(quantised, model) > 0


def test_truncated_files_are_reported(tiny: Path, tmp_path: Path) -> None:
    content = tiny.read_bytes()
    first = min(entry.start for entry in read_header(tiny)[1].values())
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 7, 20, 100, first // 2, first - 100, first + 1000, len(content) * 3 // 4, len(content) - 32):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf.*(truncated|no GGUF)"):
            load(str(cut))
    cut.write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(CheckpointError, match="truncated") as raised:
        load(str(cut))
    assert raised.value.tensor in read_header(tiny)[1]


def patched(path: Path, old: bytes, new: bytes, target: Path) -> str:
    content = path.read_bytes()
    assert content.count(old) >= 1
    target.write_bytes(content.replace(old, new, 1))
    return str(target)


def test_damaged_and_unknown_fields_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "damaged.gguf"
    with pytest.raises(CheckpointError, match="no GGUF file"):
        load(patched(tiny, b"GGUF", b"GGML", target))
    with pytest.raises(UnsupportedError, match="version 9"):
        load(patched(tiny, b"GGUF\x03\x00\x00\x00", b"GGUF\x09\x00\x00\x00", target))
    with pytest.raises(CheckpointError, match="unknown kind 99"):
        load(
            patched(
                tiny, b"llama.block_count" + struct.pack("<I", 4), b"llama.block_count" + struct.pack("<I", 99), target
            )
        )
    with pytest.raises(CheckpointError, match=r"damaged\.gguf.*block_count is missing"):
        load(patched(tiny, b"llama.block_count", b"llama.block_c0unt", target))
    name = b"output_norm.weight" + struct.pack("<IQ", 1, 64)
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight.*unknown type 77"):
        load(patched(tiny, name + struct.pack("<I", 0), name + struct.pack("<I", 77), target))
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight.*Q8_K.*Q4_K"):
        load(patched(tiny, name + struct.pack("<I", 0), name + struct.pack("<I", 15), target))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight.*blocks of 256"):
        load(patched(tiny, name + struct.pack("<I", 0), name + struct.pack("<I", 12), target))


def test_wrong_and_missing_tensors_are_named(tmp_path: Path) -> None:
    model = llama()
    fields, weights = gguf_files.decoder_metadata(model.config), gguf_files.converted("llama", model)
    without_query = {name: tensor for name, tensor in weights.items() if name != "blk.1.attn_q.weight"}
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: blk\.1\.attn_q\.weight"):
        load(str(gguf_files.write(tmp_path / "lacking.gguf", "llama", fields, without_query)))
    wrong = {**weights, "blk.0.ffn_up.weight": torch.zeros(95, 64)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight.*\[95, 64\].*\[96, 64\]"):
        load(str(gguf_files.write(tmp_path / "wrong.gguf", "llama", fields, wrong)))
    with_layer = {**weights, "blk.2.attn_q.weight": torch.zeros(64, 64)}
    with pytest.raises(CheckpointError, match=r"blk\.2\.attn_q\.weight"):
        load(str(gguf_files.write(tmp_path / "more.gguf", "llama", fields, with_layer)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.causal": False}, r"attention\.causal is False, and tokens of this .* see those before them only"),
        ({"expert_count": 8}, "expert_count 8"),
        ({"rope.scaling.type": "ntk", "rope.scaling.factor": 4.0}, "rope.scaling.type 'ntk'"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({".split.count": 3}, "one of 3 parts.*NAME-00001-of-00003"),
        ({".general.type": "adapter"}, "it is an adapter"),
        ({"block_count": 10**9}, "1000000000 layers"),
        ({"embedding_length": 2**31}, "width"),
        ({"attention.head_count": 0}, "wrong kind"),
        ({"pooling_type": 4}, "reranker"),
        ({".tokenizer.ggml.model": "unheard"}, "unheard"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        load(str(write_llama(tmp_path / "odd.gguf", llama(), **metadata)))
    assert "odd.gguf" in str(raised.value)


def test_the_error_for_an_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "mamba.gguf", "mamba", {"block_count": 1}, {"a": torch.zeros(32)})
    with pytest.raises(UnsupportedError, match=r"'mamba'.*llama, qwen2"):
        load(str(path))


@pytest.mark.parametrize("name", [["llama"], {"llama": 1}, 7, None])
def test_an_architecture_that_is_no_text_is_refused(name: Any) -> None:
    path, metadata = Path("odd.gguf"), {"general.architecture": name}
    with pytest.raises(UnsupportedError, match=r"general\.architecture .* is not known"):
        gguf_file.check_architecture(path, metadata)
    adapter = {**metadata, "general.type": "adapter", "adapter.type": "lora"}
    with pytest.raises(UnsupportedError, match=r"general\.architecture .* is not known"):
        gguf_adapter.check_kind(path, adapter)


def test_a_vocabulary_is_checked_before_it_is_built(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[Path, dict[str, Any]]]()

    def check(path: Path, fields: dict[str, Any]) -> None:
        seen.append((path, fields))
        raise CheckpointError("refused by the check")

    monkeypatch.setattr(Tokenizer, "from_gguf", None)
    with pytest.raises(CheckpointError, match="refused by the check") as raised:
        describe_source(str(tiny), folder_check=check)
    [(path, fields)] = seen
    assert (path, raised.value.file) == (tiny, str(tiny))
    assert fields["tokenizer.ggml.model"]
    assert all(name.startswith("tokenizer.ggml.") for name in fields)


def test_other_suffixes_and_adapters_over_gguf_are_refused(tiny: Path, tmp_path: Path, tiny_generator: Path) -> None:
    other = tmp_path / "tiny.bin"
    shutil.copy(tiny, other)
    with pytest.raises(UnsupportedError, match=r"\.gguf"):
        load(str(other))
    with pytest.raises(UnsupportedError, match="safetensors folder"):
        load(f"{tiny}+{tiny_generator}")


@pytest.mark.skipif(not list(SMOLLM2.rglob("SmolLM2*.gguf")), reason="the quick-start generator is not downloaded")
def test_smollm2_equals_transformers(full: bool) -> None:
    if not full:
        pytest.skip("transformers takes half a minute to read its vocabulary: --full")
    path = next(SMOLLM2.rglob("SmolLM2*.gguf"))
    model = tf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert difference(load(str(path)), model.eval()) < 1e-3


def test_a_flipped_byte_in_a_header_loads_or_is_refused_with_a_message(tiny: Path, tmp_path: Path) -> None:
    whole, choice, target = tiny.read_bytes(), random.Random(0), tmp_path / "flipped.gguf"
    messages = []
    for _ in range(150):
        content = bytearray(whole)
        place = choice.randrange(1500)
        content[place] = choice.choice([0, 255, content[place] ^ 1, content[place] ^ 128])
        target.write_bytes(content)
        try:
            load(str(target))
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(str(target) in message for message in messages)
