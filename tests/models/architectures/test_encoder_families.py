"""What families of encoders need beside equal answers (tests/families/test_encoders.py): names of trained heads,
adapters, refusals, deterministic mode, and the choice of an executor."""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf

from polyhead.models.architectures import FAMILIES
from polyhead.models.checkpoint import describe_source, load
from polyhead.models.checkpoint.unmerged_adapter import BaseModel
from polyhead.models.core.errors import CheckpointError, InvarianceError, UnsupportedError
from polyhead.models.executors.contract import Executor
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.varlen import is_supported
from polyhead.models.parallel.share import split_problem
from polyhead.service.config.settings import Settings
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.training.export.adapter_folder import check_layer_names, head_names
from polyhead.training.loop.errors import RecipeError
from tests.families.conformance import BERT, CLOSE, LABELS, TEXTS, Row, head_output, reference_output, save_checkpoint
from tests.families.test_encoders import DEBERTA, FIRST, GPT2, LLAMA, MODERN, ROWS, ULTRA, XLM
from tests.support import checkpoints
from tests.support.edits import edited

CASES = {
    "electra": "ElectraForSequenceClassification",
    "albert": "AlbertForSequenceClassification",
    "mpnet": "MPNetForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification-mean",
    "longformer": "LongformerForSequenceClassification",
    "big_bird": "BigBirdForQuestionAnswering",
    "gpt2": "GPT2ForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
}


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
@torch.inference_mode()
def test_a_decoder_that_pools_its_last_token_equals_transformers(name: str, tmp_path: Path) -> None:
    """As published in folders of sentence-transformers: saved as the network alone, or with its output layer."""
    shape, vectors = partial(getattr(tf, f"{name}Config"), **LLAMA, tie_word_embeddings=True), []
    for kind in ("Model", "ForCausalLM"):
        folder = save_checkpoint(Row(shape, getattr(tf, name + kind)), tmp_path / kind)
        checkpoints.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
        checkpoints.write_json(folder / "modules.json", listed)
        loaded, theirs = load(str(folder)), tf.AutoModel.from_pretrained(folder).eval()
        assert loaded.task == "embed"
        got = loaded.head.postprocess(head_output(loaded, TorchExecutor(loaded.network)))
        last = [theirs(torch.tensor([e.ids])).last_hidden_state[0, -1] for e in loaded.tokenizer.encode_batch(TEXTS)]
        assert float((got - torch.nn.functional.normalize(torch.stack(last), dim=-1)).abs().max()) < CLOSE
        vectors.append(got)
    assert vectors[0].shape == vectors[1].shape


def test_a_decoder_with_one_label_is_a_ranker(tmp_path: Path) -> None:
    one = {"id2label": {0: "relevance"}, "label2id": {"relevance": 0}}
    loaded = load(str(save_checkpoint(ROWS["LlamaForSequenceClassification"], tmp_path, **one)))
    assert (loaded.task, loaded.labels, loaded.config.causal) == ("rank", ("relevance",), True)


@pytest.mark.parametrize("name", ["electra", "albert", "mpnet", "modernbert", "gpt2"])
def test_trained_heads_have_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    """The names of head layers. A layer that is stored fused with others has no name of its own."""
    row = ROWS[CASES[name]]
    folder, kind = save_checkpoint(row, tmp_path), row.kind
    loaded, family = load(str(folder)), FAMILIES[name]
    names = head_names(family, family.heads[kind.__name__])
    theirs = kind.from_pretrained(folder).state_dict()
    assert {f"{ours}.weight" for ours in names} == {key for key in loaded.head.state_dict() if key.endswith("weight")}
    assert {f"{module}.weight" for module in names.values()} <= theirs.keys()
    layers = ["blocks.0.attention.query"]
    if name in ("modernbert", "gpt2"):
        with pytest.raises(RecipeError, match=r"attention\.query is stored transposed or as one with others"):
            check_layer_names(folder, family, layers)
    else:
        check_layer_names(folder, family, layers)


@torch.inference_mode()
def test_a_classifier_adapter_over_a_generator_equals_peft(tmp_path: Path) -> None:
    """A LoRA of PEFT with a classification head, over a folder with a language head only."""
    row = Row(tf.LlamaConfig, tf.LlamaForCausalLM, dict(LLAMA, tie_word_embeddings=False))
    base = save_checkpoint(row, tmp_path / "base")
    targets = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    reference = tf.LlamaForSequenceClassification.from_pretrained(base)
    theirs = peft.get_peft_model(reference, peft.LoraConfig(task_type="SEQ_CLS", r=4, **targets)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    loaded = load(f"{base}+{tmp_path / 'adapter'}")
    assert (loaded.task, loaded.labels) == ("classify", tuple(LABELS.values()))
    assert (
        float((head_output(loaded, TorchExecutor(loaded.network)) - reference_output(loaded, theirs)).abs().max())
        < CLOSE
    )


ALBERT, MODERNBERT = tf.AlbertConfig(**BERT).to_dict(), tf.ModernBertConfig(**MODERN).to_dict()
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ALBERT, {"num_hidden_groups": 2}, "num_hidden_groups 2"),
    (ALBERT, {"inner_group_num": 2}, "inner_group_num 2"),
    (tf.MPNetConfig(**BERT).to_dict(), {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64"),
    (MODERNBERT, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None}, "windowed layers"),
    (tf.OpenAIGPTConfig(**GPT2).to_dict(), {"afn": "tanh"}, "afn 'tanh' is not one of gelu, relu"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"pos_att_type": "c2p"}, "pos_att_type 'c2p'"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd 'batch_norm'"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"position_biased_input": True}, "position_biased_input is True: only"),
    (tf.SqueezeBertConfig(**BERT, embedding_size=32).to_dict(), {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05"),
    (tf.RoFormerConfig(**BERT).to_dict(), {"rotary_value": True}, "rotary_value is True: only False"),
    (
        tf.LongformerConfig(**BERT).to_dict(),
        {"attention_window": [4, 4, 8]},
        "attention_window .* only one even window",
    ),
    (tf.LongformerConfig(**BERT).to_dict(), {"sep_token_id": None}, "sep_token_id is None, which should be the number"),
    (tf.LongformerConfig(**BERT).to_dict(), {"sep_token_id": 10**6}, "sep_token_id is 1000000, which should be the"),
    (tf.BigBirdConfig(**BERT).to_dict(), {"attention_type": "sliding"}, "attention_type 'sliding' is not one of"),
    (tf.NomicBertConfig(**BERT).to_dict(), {"moe_every_n_layers": 2}, "moe_every_n_layers is 2: only 0"),
    (tf.NomicBertConfig(**BERT).to_dict(), {"activation_function": "gelu"}, "activation_function is 'gelu'"),
    (tf.DebertaConfig(**FIRST).to_dict(), {"talking_head": True}, "talking_head is True: only False"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"embedding_size": 16}, "embedding_size 16"),
    (tf.XLMConfig(**XLM).to_dict(), {"causal": True}, "causal is True: only False"),
    (tf.XLMConfig(**XLM).to_dict(), {"n_langs": 4}, "n_langs is 4: embeddings of languages"),
]


@pytest.mark.parametrize(("shape", "change", "message"), REFUSED)
def test_unsupported_configurations_are_refused_by_name(
    shape: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    family = FAMILIES[shape["model_type"]]
    family.config(shape)
    with pytest.raises(UnsupportedError, match=message):
        family.config({**shape, **change})


@pytest.mark.parametrize("name", ["albert", "mpnet", "modernbert", "gpt2", "longformer", "big_bird"])
@torch.inference_mode()
def test_the_batch_changes_no_answer_in_deterministic_mode(name: str, tmp_path: Path) -> None:
    loaded = load(str(save_checkpoint(ROWS[CASES[name]], tmp_path)))
    make_invariant(loaded.network, loaded.head)
    head: Any = loaded.head
    ids = [encoding.ids for encoding in loaded.tokenizer.encode_batch(TEXTS)]
    batches = [RaggedBatch.of(ids), *(RaggedBatch.of([each]) for each in ids)]
    together, *alone = (head(loaded.network(batch), list(batch.starts)) for batch in batches)
    assert torch.equal(together, torch.cat(alone))


def test_global_tokens_are_those_of_the_head(tmp_path: Path) -> None:
    """A folder that embeds has none, whatever its architecture."""
    folder = save_checkpoint(ROWS[CASES["longformer"]], tmp_path)
    config = load(str(folder)).config
    assert (config.global_tokens, is_supported(config)) == ("first", False)
    assert "its global tokens have projections" in split_problem(config, 2)
    reference = tf.LongformerForSequenceClassification.from_pretrained(folder)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    peft.get_peft_model(reference, lora).save_pretrained(tmp_path / "adapter")
    checkpoints.write_json(folder / "modules.json", [{"path": "", "type": "sentence_transformers.models.Transformer"}])
    embedder = load(str(folder))
    assert (embedder.task, embedder.config.global_tokens) == ("embed", "")
    base = BaseModel(describe_source(str(folder)))
    with pytest.raises(UnsupportedError, match=r"reads attention with other global tokens.*load it merged"):
        base.plan_adapter(tmp_path / "adapter")


def test_sparse_attention_limits_the_length_of_texts(tmp_path: Path) -> None:
    """Up to the length at which the reference changes to full attention."""
    loaded = load(str(save_checkpoint(ROWS["BigBirdModel"], tmp_path, num_random_blocks=1)))
    assert loaded.max_tokens == loaded.config.max_positions == (5 + 2) * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default_language": None}, "default_language is None, which should be one of languages"),
        ({"default_language": "fr_XX"}, "default_language is 'fr_XX', which should be one of languages, .*en_XX"),
        ({"languages": "de_DE"}, "which should be one of languages, 'de_DE'"),
        ({"adapter_layer_norm": True}, "adapter_layer_norm is True: only False"),
        ({"adapter_reduction_factor": 64}, "adapter_reduction_factor is 64, which should be 32 at most"),
    ],
)
def test_xmod_reads_texts_in_the_language_of_the_configuration(
    change: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_checkpoint(ROWS["XmodModel"], tmp_path / "saved")
    with caplog.at_level(logging.INFO):
        config = load(str(folder)).config
    assert "texts are read as de_DE" in caplog.text
    assert "a narrow MLP follows" in unsupported_reason(config)
    assert "a narrow MLP follows" in split_problem(config, 2)
    with pytest.raises(UnsupportedError, match=message):
        load(str(edited(folder, tmp_path / "changed", **change)))


class NoCache:
    """A cache without keys. The reference's FlauBERT with pre-norm layers fails with its own."""

    def get_seq_length(self) -> int:
        return 0

    def __getitem__(self, layer: int) -> None:
        """No keys of a layer."""


@torch.inference_mode()
def test_flaubert_with_pre_norm_has_no_last_norm(tmp_path: Path) -> None:
    folder = save_checkpoint(ROWS["FlaubertModel"], tmp_path, pre_norm=True)
    loaded, theirs = load(str(folder)), tf.FlaubertModel.from_pretrained(folder).eval()
    executors: list[Executor] = [TorchExecutor(loaded.network)]
    if runnable_targets():
        executors.append(NativeExecutor(loaded.network, precision="float32"))
    texts = loaded.tokenizer.encode_batch(TEXTS)
    expected = torch.cat([theirs(torch.tensor([e.ids]), cache=NoCache()).last_hidden_state.mean(1) for e in texts])
    for executor in executors:
        assert float((head_output(loaded, executor) - expected).abs().max()) < CLOSE


def test_ultrabert_lists_windows_and_bases_by_layer() -> None:
    """As published configurations do; the reference turns the lists into fields by the kind of a layer."""
    bases = [1e3, 1e3, 1e5]
    old = {**ULTRA, "vocab_size": 99, "attention_windows": [4, 4, 0], "rope_theta": bases}
    shape, newer = (FAMILIES["ultrabert"].config(each) for each in (old, tf.UltrabertConfig(**old).to_dict()))
    assert shape == newer
    assert (shape.window, shape.windowed) == (5, (True, True, False))
    assert (shape.window_rope_base, shape.rope_base) == (1e3, 1e5)


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (65, 1), (3, 5)])
def test_convolutions_are_bounded(size: int, groups: int, tmp_path: Path) -> None:
    folder = save_checkpoint(ROWS["DebertaV2Model-convolution"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    checkpoints.write_json(folder / "config.json", config | {"conv_kernel_size": size, "conv_groups": groups})
    with pytest.raises(CheckpointError, match=r"convolution(_groups)? is \d+, which should be"):
        load(str(folder))


def test_deterministic_mode_refuses_disentangled_attention(tmp_path: Path) -> None:
    loaded = load(str(save_checkpoint(ROWS["DebertaV2Model"], tmp_path)))
    with pytest.raises(InvarianceError, match="products with distance vectors"):
        make_invariant(loaded.network, loaded.head)


def executors_of(settings: Settings) -> dict[str, str]:
    """The executor of each model of a server."""

    async def run() -> dict[str, str]:
        metrics = Metrics(settings.models)
        engine = Engine(metrics)
        engine.start()
        try:
            registry = ModelRegistry(engine, settings, observer=metrics)
            await registry.load_all()
            return {model.name: model.executor for model in registry.models()}
        finally:
            await engine.close(0)

    return asyncio.run(run())


@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
def test_torch_serves_networks_that_the_compiled_step_does_not_support(
    tmp_path: Path, tiny_classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside models that it supports. Settings that only the compiled step supports are refused for the model."""
    folder = save_checkpoint(ROWS["MPNetForSequenceClassification"], tmp_path)
    sources, refusal = {"judge": str(tiny_classifier), "odd": str(folder)}, "its scores have a bias by distance"
    with caplog.at_level(logging.INFO, "polyhead.loader"):
        found = executors_of(Settings(device="cpu", models=sources, threads=2))
    assert found == {"odd": "torch", "judge": f"native-{runnable_targets()[0]}"}
    messages = [message for message in caplog.messages if refusal in message]
    assert messages == [
        f"odd: torch computes it, not the compiled step: {refusal}; it has 1 thread, and with --executor torch, for "
        "all models, 2"
    ]
    for change, named in (({"precision": "int8"}, "precision: int8"), ({"executor": "native"}, "executor: native")):
        with pytest.raises(UnsupportedError, match=f"{named} is asked for.*{refusal}"):
            choose_placement(Settings(device="cpu", **change), config=load(sources["odd"]).config)
        assert executors_of(Settings(device="cpu", models=sources, **change)).keys() == {"judge"}
