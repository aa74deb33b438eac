"""Every encoder family, loaded from a folder that transformers wrote, equals transformers.

States, scores and labels are compared, by torch and by the compiled step where it supports the network.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf

from polyhead.models.architectures import FAMILIES
from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.core.errors import InvarianceError, UnsupportedError
from polyhead.models.executors.contract import Executor
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.models.network.ragged import RaggedBatch
from polyhead.service.config.settings import Settings
from polyhead.service.core.request import Encode
from polyhead.service.engine.encoder_worker import pack_texts
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.training.export.adapter_folder import check_layer_names, head_names
from polyhead.training.loop.errors import RecipeError
from tests.support import checkpoints

TEXTS = ["A good film", "What is the capital of France? Paris, of course. " * 14, ("dull", "far too long"), "0 1 2 3"]
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
CLOSE = 2e-5
SHAPE = dict(num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=checkpoints.POSITIONS)
BERT = dict(SHAPE, hidden_size=32, intermediate_size=48)
LLAMA = dict(BERT, num_key_value_heads=2)
GPT2 = dict(n_layer=2, n_head=4, n_embd=32, n_positions=checkpoints.POSITIONS)
GEMMA = dict(LLAMA, head_dim=16, query_pre_attn_scalar=24, sliding_window=4)
MODERN = dict(BERT, num_hidden_layers=4, local_attention=6)
DEBERTA = BERT | checkpoints.DISENTANGLED

MakeConfig = Callable[..., tf.PreTrainedConfig]
# The configuration, the class that is saved, and the reason why the compiled step does not support it, or "".
CASES: dict[str, tuple[MakeConfig, Any, str]] = {
    "electra": (partial(tf.ElectraConfig, **BERT, embedding_size=32), tf.ElectraModel, ""),
    "electra-narrow": (
        partial(tf.ElectraConfig, **BERT, embedding_size=24),
        tf.ElectraModel,
        "",
    ),
    "electra-classifier": (
        partial(tf.ElectraConfig, **BERT, embedding_size=32),
        tf.ElectraForSequenceClassification,
        "",
    ),
    "electra-narrow-classifier": (
        partial(tf.ElectraConfig, **BERT, embedding_size=24, hidden_act="gelu_new"),
        tf.ElectraForSequenceClassification,
        "",
    ),
    "mpnet": (partial(tf.MPNetConfig, **BERT), tf.MPNetModel, "its scores have a bias by distance"),
    "mpnet-classifier": (
        partial(tf.MPNetConfig, **BERT),
        tf.MPNetForSequenceClassification,
        "its scores have a bias by distance",
    ),
    "albert": (
        partial(tf.AlbertConfig, **BERT, embedding_size=24),
        tf.AlbertModel,
        "",
    ),
    "albert-classifier": (
        partial(tf.AlbertConfig, **BERT, embedding_size=32, hidden_act="gelu"),
        tf.AlbertForSequenceClassification,
        "",
    ),
    "deberta": (partial(tf.DebertaV2Config, **DEBERTA), tf.DebertaV2Model, "its scores have a bias by distance"),
    "deberta-classifier": (
        partial(tf.DebertaV2Config, **DEBERTA, pooler_hidden_act="gelu", type_vocab_size=2),
        tf.DebertaV2ForSequenceClassification,
        "its scores have a bias by distance",
    ),
    "modernbert": (partial(tf.ModernBertConfig, **MODERN), tf.ModernBertModel, ""),
    "modernbert-classifier": (
        partial(tf.ModernBertConfig, **MODERN, classifier_pooling="mean", classifier_activation="silu"),
        tf.ModernBertForSequenceClassification,
        "",
    ),
    "modernbert-biased": (
        partial(
            tf.ModernBertConfig,
            **MODERN,
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        ),
        tf.ModernBertForSequenceClassification,
        "",
    ),
    "gpt": (partial(tf.OpenAIGPTConfig, **GPT2), tf.OpenAIGPTModel, ""),
    "gpt-classifier": (partial(tf.OpenAIGPTConfig, **GPT2, afn="relu"), tf.OpenAIGPTForSequenceClassification, ""),
    "gpt2": (partial(tf.GPT2Config, **GPT2), tf.GPT2Model, ""),
    "gpt2-classifier": (partial(tf.GPT2Config, **GPT2), tf.GPT2ForSequenceClassification, ""),
    "gemma3": (partial(tf.Gemma3TextConfig, **GEMMA), tf.Gemma3TextModel, ""),
    "gemma3-classifier": (partial(tf.Gemma3TextConfig, **GEMMA), tf.Gemma3TextForSequenceClassification, ""),
}

DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
CASES |= {
    f"{name}{kind}".lower(): (partial(getattr(tf, f"{name}Config"), **LLAMA), getattr(tf, name + kind), "")
    for name in DECODERS
    for kind in ("Model", "ForSequenceClassification")
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Any, str]:
    """The loaded checkpoint, the same loaded by transformers, and why the compiled step does not support it, or ""."""
    make_config, kind, refusal = CASES[request.param]
    folder = saved(make_config, kind, tmp_path_factory.mktemp("folder"))
    return load(str(folder)), kind.from_pretrained(folder, attn_implementation="eager").eval(), refusal


def saved(make_config: MakeConfig, kind: Any, folder: Path, **more: Any) -> Path:
    """A checkpoint folder of random weights, biases and norms included."""
    tokenizer = checkpoints.word_piece()
    torch.manual_seed(4)
    labels = {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}} | more
    theirs = kind(make_config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **labels))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def head_output(loaded: Checkpoint, executor: Executor) -> torch.Tensor:
    """The output of the head for all texts before its activation, computed in one step."""
    head: Any = loaded.head
    encodings = loaded.tokenizer.encode_batch(TEXTS)
    rows = pack_texts([Encode("text", tuple(e.ids), segments=tuple(e.segments)) for e in encodings])
    expected, starts = head.needed_rows(rows.starts)
    rows.output_rows.extend(expected)
    out: torch.Tensor = head(executor.step(rows), starts)
    return out


@torch.inference_mode()
def reference_output(loaded: Checkpoint, theirs: Any) -> torch.Tensor:
    """The same by transformers, one text at a time."""
    answers = []
    for encoding in loaded.tokenizer.encode_batch(TEXTS):
        ids, segments = torch.tensor([encoding.ids]), torch.tensor([encoding.segments])
        out = theirs(ids, **({"token_type_ids": segments} if loaded.config.segments else {}))
        answers.append(out.logits if loaded.task == "classify" else out.last_hidden_state.mean(1))
    return torch.cat(answers)


def test_it_equals_transformers(case: tuple[Checkpoint, Any, str]) -> None:
    loaded, theirs, _ = case
    expected = reference_output(loaded, theirs)
    assert float((head_output(loaded, TorchExecutor(loaded.network)) - expected).abs().max()) < CLOSE
    assert float((expected[0] - expected[1]).abs().max()) > 100 * CLOSE, "the texts have different outputs"
    assert loaded.labels == (tuple(LABELS.values()) if loaded.task == "classify" else ())


@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
def test_the_compiled_step_equals_transformers_or_refuses(case: tuple[Checkpoint, Any, str]) -> None:
    loaded, theirs, refusal = case
    assert unsupported_reason(loaded.config) == refusal
    if refusal:
        with pytest.raises(UnsupportedError, match=refusal):
            NativeExecutor(loaded.network, precision="float32")
        return
    executor = NativeExecutor(loaded.network, precision="float32")
    assert float((head_output(loaded, executor) - reference_output(loaded, theirs)).abs().max()) < CLOSE


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
@torch.inference_mode()
def test_a_decoder_that_pools_its_last_token_equals_transformers(name: str, tmp_path: Path) -> None:
    """As published in folders of sentence-transformers: saved as the network alone, or with its output layer."""
    shape, vectors = partial(getattr(tf, f"{name}Config"), **LLAMA, tie_word_embeddings=True), []
    for kind in ("Model", "ForCausalLM"):
        folder = saved(shape, getattr(tf, name + kind), tmp_path / kind)
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
    loaded = load(str(saved(partial(tf.LlamaConfig, **LLAMA), tf.LlamaForSequenceClassification, tmp_path, **one)))
    assert (loaded.task, loaded.labels, loaded.config.causal) == ("rank", ("relevance",), True)


@pytest.mark.parametrize("name", ["electra", "albert", "mpnet", "modernbert", "gpt2"])
def test_trained_heads_have_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    """The names of head layers. A layer that is stored fused with others has no name of its own."""
    make_config, kind, _ = CASES[f"{name}-classifier"]
    folder = saved(make_config, kind, tmp_path)
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
    base = saved(partial(tf.LlamaConfig, **LLAMA, tie_word_embeddings=False), tf.LlamaForCausalLM, tmp_path / "base")
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
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"share_att_key": False}, "share_att_key is False: only True"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"pos_att_type": "c2p"}, "pos_att_type 'c2p'"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"conv_kernel_size": 3}, "without conv_kernel_size"),
    (tf.DebertaV2Config(**DEBERTA).to_dict(), {"embedding_size": 16}, "embedding_size 16"),
]


@pytest.mark.parametrize(("shape", "change", "message"), REFUSED)
def test_unsupported_configurations_are_refused_by_name(
    shape: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    family = FAMILIES[shape["model_type"]]
    family.config(shape)
    with pytest.raises(UnsupportedError, match=message):
        family.config({**shape, **change})


@pytest.mark.parametrize("name", ["albert", "mpnet", "modernbert", "gpt2"])
@torch.inference_mode()
def test_the_batch_changes_no_answer_in_deterministic_mode(name: str, tmp_path: Path) -> None:
    make_config, kind, _ = CASES[f"{name}-classifier"]
    loaded = load(str(saved(make_config, kind, tmp_path)))
    make_invariant(loaded.network, loaded.head)
    head: Any = loaded.head
    ids = [encoding.ids for encoding in loaded.tokenizer.encode_batch(TEXTS)]
    batches = [RaggedBatch.of(ids), *(RaggedBatch.of([each]) for each in ids)]
    together, *alone = (head(loaded.network(batch), list(batch.starts)) for batch in batches)
    assert torch.equal(together, torch.cat(alone))


def test_deterministic_mode_refuses_disentangled_attention(tmp_path: Path) -> None:
    make_config, kind, _ = CASES["deberta"]
    loaded = load(str(saved(make_config, kind, tmp_path)))
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
    make_config, kind, refusal = CASES["mpnet-classifier"]
    sources = {"judge": str(tiny_classifier), "odd": str(saved(make_config, kind, tmp_path))}
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
