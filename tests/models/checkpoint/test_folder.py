"""Checkpoint folders: loaded networks equal transformers; what cannot be loaded is refused with a clear message."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from polyhead.models.checkpoint import Checkpoint, describe_source, head_config, load
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.heads import SparsePooling
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints, gguf_files
from tests.support.edits import edited, with_tensors
from tests.support.places import ROOT

TEXTS = ["A good film", "What is the capital of France?", "dull"]


@torch.inference_mode()
def answers(loaded: Checkpoint, texts: list[Any] = TEXTS) -> torch.Tensor:
    """The scores or vectors of the head for texts, computed in one batch."""
    encodings = loaded.tokenizer.encode_batch(texts)
    batch = RaggedBatch.of([e.ids for e in encodings], [e.segments for e in encodings])
    head: Any = loaded.head
    out: torch.Tensor = head.postprocess(head(loaded.network(batch), list(batch.starts)))
    return out


@torch.inference_mode()
def logits(loaded: Checkpoint, ids: list[int]) -> torch.Tensor:
    out: torch.Tensor = loaded.head(loaded.network(RaggedBatch.of([ids])))
    return out


def test_a_generator(tiny_generator: Path) -> None:
    loaded = load(str(tiny_generator))
    theirs = tf.AutoModelForCausalLM.from_pretrained(tiny_generator)
    ids = loaded.tokenizer.encode("The quick brown fox").ids
    assert float((logits(loaded, ids) - theirs(torch.tensor([ids])).logits[0].detach()).abs().max()) < 1e-5
    assert (loaded.task, loaded.family, loaded.dtype) == ("generate", "llama", "float32")
    assert loaded.max_tokens == checkpoints.POSITIONS
    assert loaded.chat is not None
    assert loaded.chat.render([{"role": "user", "content": "Hi"}]).endswith("<|im_start|>assistant\n")
    assert not loaded.network.training


def test_a_tied_output_is_the_token_embedding(tiny_generator: Path) -> None:
    loaded = load(str(tiny_generator))
    assert loaded.head.output.weight is loaded.network.tokens.weight
    assert loaded.weight_bytes == 4 * sum(p.numel() for p in loaded.network.parameters())


def test_a_tied_output_that_is_stored_separately(tiny_generator: Path, tmp_path: Path) -> None:
    def copy(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    same = load(str(with_tensors(tiny_generator, tmp_path / "same", copy)))
    assert same.head.output.weight is same.network.tokens.weight
    untied = load(str(with_tensors(tiny_generator, tmp_path / "apart", differ)))
    assert torch.equal(untied.head.output.weight, untied.network.tokens.weight + 1)


def with_sparse_tensors(folder: Path, sizes: dict[str, int]) -> Path:
    """Adds tensors of zeros, of so many bytes each, which take no room on the disk."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    end = len(data)
    for name, count in sizes.items():
        header[name] = {"dtype": "F32", "shape": [count // 4], "data_offsets": [end, end + count]}
        end += count
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + data)
    os.truncate(file, 8 + len(written) + end)
    return folder


def test_files_much_longer_than_what_the_network_reads_are_refused(tiny_generator: Path, tmp_path: Path) -> None:
    """They would be hashed whole, for a calibration or a self-test: 400 GiB take minutes, and other loads wait."""
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"
    small = with_sparse_tensors(Path(shutil.copytree(tiny_generator, tmp_path / "small")), {ignored: 1 << 29})
    assert WeightReader(describe_source(str(small))).parameter_count
    long = with_sparse_tensors(Path(shutil.copytree(tiny_generator, tmp_path / "long")), {ignored: 400 << 30})
    said = r"the files of this network have 42949\d+ bytes, and it reads \d+ of them; \d+ are the most; save"
    with pytest.raises(CheckpointError, match=said) as raised:
        WeightReader(describe_source(str(long)))
    assert raised.value.file == str(long / "model.safetensors")


def test_a_long_file_of_an_adapter_is_refused(tiny_generator: Path, tmp_path: Path) -> None:
    described = describe_source(str(tiny_generator))
    other = tmp_path / "adapter_model.safetensors"
    other.touch()
    os.truncate(other, 400 << 30)
    name, entry = next(iter(described.entries.items()))
    spoiled = replace(entry, source=replace(entry.source, path=other))
    with pytest.raises(CheckpointError, match="the files of this network have") as raised:
        WeightReader(replace(described, entries={**described.entries, name: spoiled}))
    assert raised.value.file == str(other)


def test_huge_tables_are_not_compared(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an output is tied is read while the folder is described, before the memory for it is estimated."""
    described = describe_source(str(tiny_generator))
    config = replace(described.config, vocab_size=1 << 30, width=64)
    entry = next(iter(described.entries.values()))
    table = replace(entry, name="lm_head.weight", shape=(1 << 30, 64))
    monkeypatch.setattr(head_config, "has_same_bytes", lambda *_: pytest.fail("they are read"))
    with pytest.raises(CheckpointError, match="it has 68719476736 numbers, and 8589934592 are the most where two are"):
        head_config.is_embedding_copy(table, table, config)


def test_an_untied_output(tmp_path: Path) -> None:
    config = tf.GPT2Config(vocab_size=400, n_embd=32, n_layer=1, n_head=2, n_positions=64, tie_word_embeddings=False)
    tokenizer = checkpoints.byte_level_bpe()
    theirs = tf.GPT2LMHeadModel(config)
    loaded = load(str(checkpoints.save(theirs, tokenizer, tmp_path)))
    with torch.inference_mode():
        assert float((logits(loaded, [5, 6, 7]) - theirs(torch.tensor([[5, 6, 7]])).logits[0]).abs().max()) < 1e-5
    assert loaded.head.output.weight is not loaded.network.tokens.weight


def test_a_classifier(tiny_classifier: Path) -> None:
    loaded = load(str(tiny_classifier))
    theirs = tf.AutoModelForSequenceClassification.from_pretrained(tiny_classifier)
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_classifier)
    with torch.inference_mode():
        wanted = torch.cat([theirs(**tokenizer(text, return_tensors="pt")).logits.softmax(-1) for text in TEXTS])
    assert float((answers(loaded) - wanted).abs().max()) < 1e-5
    assert (loaded.task, loaded.labels, loaded.chat) == ("classify", checkpoints.LABELS, None)


def test_a_ranker(tiny_ranker: Path) -> None:
    loaded = load(str(tiny_ranker))
    theirs = tf.AutoModelForSequenceClassification.from_pretrained(tiny_ranker)
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_ranker)
    pair = ("capital of France", "Paris, of course.")
    with torch.inference_mode():
        wanted = theirs(**tokenizer(*pair, return_tensors="pt")).logits.sigmoid()
    assert float((answers(loaded, [pair]) - wanted).abs().max()) < 1e-5
    assert (loaded.task, len(loaded.labels)) == ("rank", 1)


def test_an_embedder(tiny_embedder: Path) -> None:
    loaded = load(str(tiny_embedder))
    theirs = tf.AutoModel.from_pretrained(tiny_embedder)
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_embedder)
    with torch.inference_mode():
        means = [theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    wanted = torch.nn.functional.normalize(torch.stack(means), dim=-1)
    assert float((answers(loaded) - wanted).abs().max()) < 1e-5
    assert loaded.task == "embed"


def test_a_plain_encoder_is_an_embedder_with_a_warning(
    tiny_embedder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_embedder, tmp_path / "plain")
    (tmp_path / "plain" / "modules.json").unlink()
    with caplog.at_level(logging.WARNING):
        loaded = load(str(tmp_path / "plain"))
    assert (loaded.task, loaded.head.pooling, loaded.head.normalise) == ("embed", "mean", False)
    assert "mean" in caplog.text


def test_a_head_that_an_embedder_does_not_use_is_ignored(
    tiny_classifier: Path, tiny_embedder: Path, tmp_path: Path
) -> None:
    folder = edited(tiny_classifier, tmp_path / "both")
    shutil.copy(tiny_embedder / "modules.json", folder)
    shutil.copytree(tiny_embedder / "1_Pooling", folder / "1_Pooling")
    assert load(str(folder)).task == "embed"


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False}, "weighted"),
        ({"pooling_mode": "weightedmean"}, "weighted"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt"),
    ],
)
def test_poolings(tiny_embedder: Path, tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    shutil.copytree(tiny_embedder, tmp_path / "e")
    checkpoints.write_json(tmp_path / "e" / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **config})
    assert load(str(tmp_path / "e")).head.pooling == pooling


def test_input_limits(tiny_embedder: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    shorter = edited(tiny_embedder, tmp_path / "a", "sentence_bert_config.json", max_seq_length=40)
    assert load(str(shorter)).max_tokens == 40
    longer = edited(tiny_embedder, tmp_path / "b", "sentence_bert_config.json", max_seq_length=4000)
    assert load(str(longer)).max_tokens == checkpoints.POSITIONS
    configured = edited(tiny_classifier, tmp_path / "c", "tokenizer_config.json", model_max_length=100)
    assert load(str(configured)).max_tokens == 100
    for name, length in (("d", int(1e30)), ("f", 0.5), ("g", True)):
        unlimited = edited(tiny_classifier, tmp_path / name, "tokenizer_config.json", model_max_length=length)
        assert describe_source(str(unlimited)).max_tokens == checkpoints.POSITIONS


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": None}, "softmax"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        (
            {
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            "sigmoid",
        ),
    ],
)
def test_the_score_activation_is_that_of_the_checkpoint(
    tiny_classifier: Path, tmp_path: Path, changes: dict[str, Any], activation: str
) -> None:
    assert load(str(edited(tiny_classifier, tmp_path / "c", **changes))).head.score_activation == activation


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"problem_type": None}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
    ],
)
def test_a_single_score_is_closed_as_by_the_pipeline(
    tiny_ranker: Path, tmp_path: Path, changes: dict[str, Any], activation: str
) -> None:
    config = json.loads((tiny_ranker / "config.json").read_text())
    left = {key: None for key in config if key.startswith(("sentence_transformers", "sbert_ce"))}
    folder = edited(tiny_ranker, tmp_path / "r", **left, **changes)
    loaded = load(str(folder))
    assert loaded.head.score_activation == activation
    theirs = tf.pipeline("text-classification", model=str(folder), device="cpu")("a good film")[0]["score"]
    ids = loaded.tokenizer.encode("a good film").ids
    with torch.inference_mode():
        states = loaded.network(RaggedBatch.of([ids]))
        rows, starts = loaded.head.needed_rows([0, len(ids)])
        ours = loaded.head.postprocess(loaded.head(states[rows], starts))
    assert ours.item() == pytest.approx(theirs, abs=1e-5)


def test_a_single_score_of_a_cross_encoder_is_a_probability(tiny_ranker: Path, tmp_path: Path) -> None:
    """sentence-transformers does not read the type of the problem."""
    changes: dict[str, Any] = {"problem_type": "regression", "sentence_transformers": {"version": "4.1.0"}}
    assert load(str(edited(tiny_ranker, tmp_path / "r", **changes))).head.score_activation == "sigmoid"


def test_an_unknown_older_score_activation_is_refused_by_name(tiny_classifier: Path, tmp_path: Path) -> None:
    folder = edited(tiny_classifier, tmp_path / "c", sbert_ce_default_activation_function="torch.nn.Tanh")
    with pytest.raises(UnsupportedError, match=r"sbert_ce_default_activation_function 'torch\.nn\.Tanh' is not known"):
        load(str(folder))


def test_labels_are_ordered_by_their_ids(tiny_classifier: Path, tmp_path: Path) -> None:
    names = {str(index): f"label {index}" for index in (10, 2, 0, 1, *range(3, 10))}

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["classifier.weight"], tensors["classifier.bias"] = torch.zeros(11, 32), torch.zeros(11)

    folder = with_tensors(edited(tiny_classifier, tmp_path / "c", id2label=names), tmp_path / "w", widen)
    assert load(str(folder)).labels == tuple(f"label {index}" for index in range(11))


def test_stop_tokens_come_from_all_configuration_files(tiny_generator: Path, tmp_path: Path) -> None:
    folder = edited(tiny_generator, tmp_path / "g", "generation_config.json", eos_token_id=[7, 9])
    loaded = load(str(edited(folder, folder, eos_token_id=11)))
    assert loaded.stop_tokens == {7, 9, 11, loaded.tokenizer.eos_id}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("config", {"chat_template.jinja": "jinja"}),
        ("config", {"chat_template.json": '{"chat_template": "json"}'}),
        ("config", {"additional_chat_templates/default.jinja": "more"}),
        ("config", {"chat_template.jinja": "jinja", "additional_chat_templates/default.jinja": "more"}),
        (None, {"additional_chat_templates/default.jinja": "more", "chat_template.json": '{"chat_template": "json"}'}),
        ({"default": "named", "tool_use": "tools"}, {}),
        ([{"name": "default", "template": "first"}, {"name": "default", "template": "second"}], {}),
    ],
)
def test_the_chat_template_is_the_one_that_transformers_chooses(
    tiny_generator: Path, tmp_path: Path, config: Any, files: dict[str, str]
) -> None:
    folder = edited(tiny_generator, tmp_path / "g", "tokenizer_config.json", chat_template=config)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    chat = describe_source(str(folder)).chat
    assert chat is not None
    assert chat.source == tf.AutoTokenizer.from_pretrained(folder).get_chat_template()


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_long_chat_template_is_not_read(tiny_generator: Path, tmp_path: Path, name: str) -> None:
    folder = edited(tiny_generator, tmp_path / "g", "config.json")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("t " * (1 << 20))
    with pytest.raises(CheckpointError, match=f"{Path(name).name}: is longer than 1 MiB"):
        describe_source(str(folder))


@pytest.mark.parametrize("form", ["jinja", "json", "config", "named"])
def test_chat_templates_are_read_from_every_location(tiny_generator: Path, tmp_path: Path, form: str) -> None:
    folder = edited(tiny_generator, tmp_path / "g", "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert load(str(folder)).chat is None
    template = "{{ bos_token }}{{ messages[0]['content'] }}!"
    match form:
        case "jinja":
            (folder / "chat_template.jinja").write_text(template)
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}<tool_call>")
        case "json":
            checkpoints.write_json(folder / "chat_template.json", {"chat_template": template})
        case "config":
            edited(folder, folder, "tokenizer_config.json", chat_template=template)
        case "named":
            named = [
                {"name": "tool_use", "template": "{{ tools[0] }}<tool_call>"},
                {"name": "default", "template": template},
            ]
            edited(folder, folder, "tokenizer_config.json", chat_template=named)
    chat = load(str(folder)).chat
    assert chat is not None
    assert chat.render([{"role": "user", "content": "Hi"}]) == "<|endoftext|>Hi!"
    with_tools = chat.render([{"role": "user", "content": "Hi"}], variables={"tools": ["add"]})
    assert with_tools == ("add<tool_call>" if form in ("jinja", "named") else "<|endoftext|>Hi!")
    assert chat.format.listing == (form in ("jinja", "named"))


def test_shards_equal_one_file(tiny_classifier: Path, tmp_path: Path) -> None:
    model = tf.AutoModelForSequenceClassification.from_pretrained(tiny_classifier)
    shutil.copytree(tiny_classifier, tmp_path / "s")
    (tmp_path / "s" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "s", max_shard_size="40KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 2
    assert torch.equal(answers(load(str(tmp_path / "s"))), answers(load(str(tiny_classifier))))


def test_one_file_is_read_beside_an_index_of_others(tiny_classifier: Path, tmp_path: Path) -> None:
    """As transformers does: the shards may be left of another state."""
    shutil.copytree(tiny_classifier, tmp_path / "s")
    shard, tensors = "model-00001-of-00001.safetensors", load_file(tiny_classifier / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, tmp_path / "s" / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    checkpoints.write_json(tmp_path / "s" / "model.safetensors.index.json", index)
    read = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "s").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(answers(load(str(tmp_path / "s"))), answers(load(str(tiny_classifier))))


def test_another_file_of_weights_by_name_is_refused(tiny_classifier: Path, tmp_path: Path) -> None:
    """transformers reads the file that `transformers_weights` names."""
    folder = edited(tiny_classifier, tmp_path / "s", transformers_weights="other.safetensors")
    with pytest.raises(UnsupportedError, match=r"transformers_weights is 'other\.safetensors', and .* model\.saf"):
        describe_source(str(folder))
    describe_source(str(edited(folder, folder, transformers_weights="model.safetensors")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes_are_converted(tiny_classifier: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    loaded = load(str(with_tensors(tiny_classifier, tmp_path / "c", cast)))
    assert {parameter.dtype for parameter in loaded.network.parameters()} == {torch.float32}
    kept = load_file(tmp_path / "c" / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(loaded.network.tokens.weight, kept.float())
    halved = load(str(tiny_classifier), dtype=torch.bfloat16)
    assert (halved.dtype, halved.weight_bytes * 2) == ("bfloat16", loaded.weight_bytes)


def test_progress_increases_to_the_total(tiny_classifier: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(str(tiny_classifier), progress=lambda done, total: calls.append((done, total)))
    done = [each for each, _ in calls]
    assert done == sorted(done)
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 0
    assert len({total for _, total in calls}) == 1


def test_loading_in_another_thread(tiny_generator: Path) -> None:
    got: list[Checkpoint] = []
    thread = threading.Thread(target=lambda: got.append(load(str(tiny_generator))))
    thread.start()
    thread.join()
    assert torch.equal(logits(got[0], [5, 6, 7]), logits(load(str(tiny_generator)), [5, 6, 7]))


MEASURE = """
import re, sys
from pathlib import Path
from polyhead.models.checkpoint import load

def memory(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

load(sys.argv[1])  # what any first load costs: imports, caches
for source in sys.argv[2:]:
    before = memory("VmRSS")
    loaded = load(source)
    print((memory("VmHWM") - before) / loaded.weight_bytes, loaded.weight_bytes)
    del loaded
"""
ROWS = 800_000  # of 64 numbers. One tensor has nearly all weights: the worst case for a reader that copies a tensor
NARROW = tf.LlamaConfig(
    vocab_size=384, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=64, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def large_folder(path: Path) -> Path:
    checkpoints.save(tf.LlamaForCausalLM(NARROW), checkpoints.byte_level_bpe(), path)

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.zeros(ROWS, 64)

    return with_tensors(edited(path, path, vocab_size=ROWS), path, enlarge)


def large_gguf(path: Path) -> Path:
    weights = gguf_files.converted("llama", gguf_files.torch_seeded(tf.LlamaForCausalLM(NARROW)))
    weights["token_embd.weight"] = torch.zeros(ROWS, 64 // 32 * 34, dtype=torch.uint8)
    kinds = lambda name, tensor: "Q8_0" if tensor.dtype == torch.uint8 else "F32"  # noqa: E731
    return gguf_files.write(path, "llama", gguf_files.decoder_metadata(NARROW), weights, kinds)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")
def test_peak_memory_while_loading(tiny_generator: Path, tmp_path: Path) -> None:
    sources = [tiny_generator, large_folder(tmp_path / "folder"), large_gguf(tmp_path / "file.gguf")]
    command = [sys.executable, "-c", MEASURE, *map(str, sources)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    measured = [line.split() for line in out.splitlines()]
    assert len(measured) == 2
    for ratio, weights in measured:
        assert int(weights) > 200e6
        assert 0.9 < float(ratio) < 1.3


def with_prompts(folder: Path, target: Path, config: Any) -> Path:
    shutil.copytree(folder, target)
    checkpoints.write_json(target / "config_sentence_transformers.json", config)
    return target


def test_prompts_of_an_embedder(tiny_embedder: Path, tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    named = load(str(with_prompts(tiny_embedder, tmp_path / "named", {"prompts": prompts})))
    assert named.prompts == {**prompts, "": ""}
    given = {"prompts": prompts, "default_prompt_name": "query"}
    assert load(str(with_prompts(tiny_embedder, tmp_path / "default", given))).prompts[""] == "query: "
    assert load(str(tiny_embedder)).prompts == {"": ""}
    for name, wrong, sentence in [
        ("a", {"default_prompt_name": "query"}, "default_prompt_name 'query' is none of its prompts: there are none"),
        ("b", {"prompts": {"query": 1}}, "prompts should be an object of strings"),
        ("c", {"prompts": {"q" * 1001: ""}}, "prompts has a string of 1001 characters"),
        ("d", {"prompts": {"q": "x" * 4097}}, "prompts has a string of 4097 characters"),
        ("e", {"prompts": {f"{n}": "x" for n in range(500)}}, "prompts has 500 prompts; 256 are the most"),
    ]:
        with pytest.raises(CheckpointError, match=sentence):
            load(str(with_prompts(tiny_embedder, tmp_path / name, wrong)))


def test_unsupported_sparse_poolings_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.encoder(tmp_path, tf.BertForMaskedLM)
    kinds, paths = ("MLMTransformer", "SpladePooling"), ("", "1_SpladePooling")
    types = [f"sentence_transformers.sparse_encoder.models.{kind}.{kind}" for kind in kinds]
    modules = [{"idx": n, "path": path, "type": kind} for n, (kind, path) in enumerate(zip(types, paths, strict=True))]
    checkpoints.write_json(folder / "modules.json", modules)
    (folder / "1_SpladePooling").mkdir()
    for strategy, activation in (("mean", "relu"), ("max", "gelu")):
        config = {"pooling_strategy": strategy, "activation_function": activation}
        checkpoints.write_json(folder / "1_SpladePooling" / "config.json", config)
        with pytest.raises(UnsupportedError, match=r"1_SpladePooling.*is not known; known are (max, sum|relu, log1p)"):
            load(str(folder))
    for strategy, activation in (("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")):
        config = {"pooling_strategy": strategy, "activation_function": activation}
        checkpoints.write_json(folder / "1_SpladePooling" / "config.json", config)
        loaded = load(str(folder))
        assert (loaded.task, loaded.head.sparse) == ("fill", SparsePooling(strategy == "sum", activation != "relu"))


def test_a_text_is_as_long_as_the_shorter_side_that_reads_it(tmp_path: Path) -> None:
    tokenizer = checkpoints.roberta_bpe()
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
    led = tf.LEDConfig(
        **sizes, vocab_size=len(tokenizer), d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, attention_window=[4],
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=16, pad_token_id=1, eos_token_id=2,
        bos_token_id=0, decoder_start_token_id=2,
    )  # fmt: skip
    folder = checkpoints.save(tf.LEDForQuestionAnswering(led), tokenizer, tmp_path)
    loaded = load(str(folder))
    assert loaded.max_tokens == 16
    assert loaded.network.config.max_positions == 64
