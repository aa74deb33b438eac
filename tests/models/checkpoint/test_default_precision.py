"""The default precision of a model follows its stored weights. It is in the log and in the metrics."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any, cast

import pytest
import transformers as tf
from prometheus_client.parser import text_string_to_metric_families

from polyhead.models import checkpoint
from polyhead.models.checkpoint.default_precision import choose_precision
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.core.files import SourceFile
from polyhead.models.executors.contract import Executor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.service.config.settings import Settings
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.memory_budget import measure_model, smallest_need
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from tests.support import gguf_files

compiled = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
NARROW = tf.LlamaConfig(
    vocab_size=400,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def entries(**matrices: int) -> list[TensorEntry]:
    """A matrix with the given number of rows of 32 columns in each format, and a long float32 vector."""
    file = SourceFile(Path("file"), ())
    vector = TensorEntry(file, "norm", "F32", (1 << 20,), 0, None)
    return [
        vector,
        *(TensorEntry(file, kind, kind, (rows, 32), 0, None) for kind, rows in matrices.items()),
    ]


@pytest.mark.parametrize(
    ("matrices", "precision", "reason"),
    [
        ({"F32": 9}, "float32", "as F32"),
        ({"BF16": 9, "F32": 1}, "float32", "as BF16"),
        ({"Q4_1": 9, "Q8_0": 3, "F32": 1}, "int4", "as Q4_1, Q8_0"),
        ({"Q4_0": 3, "Q4_1": 2, "Q6_K": 4}, "int4", "as Q6_K, Q4_0, Q4_1"),
        ({"Q4_0": 2, "Q5_0": 3}, "int4", "as Q5_0, Q4_0"),
        ({"Q5_0": 3, "Q6_K": 1, "F32": 3}, "int8", "as Q5_0, Q6_K"),
        ({"Q8_0": 9, "F16": 8}, "int8", "as Q8_0"),
        ({"Q4_K": 9, "Q6_K": 3}, "int4", "as Q4_K, Q6_K"),
        ({"Q8_0": 9, "F32": 10}, "float32", "as F32"),
        ({"F16": 5, "Q4_1": 4, "Q8_0": 2}, "int4", "as Q4_1, Q8_0"),
        ({"TQ2_0": 9, "Q6_K": 1}, "int4", "as TQ2_0, Q6_K"),
        ({"Q1_0": 9}, "int4", "as Q1_0"),
        ({"IQ4_XS": 9, "Q5_K": 2}, "int8", "as IQ4_XS, Q5_K"),
        ({"MXFP4": 9, "NVFP4": 2, "IQ4_NL": 1}, "int8", "as MXFP4, NVFP4, IQ4_NL"),
        ({"IQ3_S": 9, "Q4_K": 2}, "float32", "as IQ3_S"),
        ({"IQ2_XXS": 9, "Q2_K": 2}, "float32", "as IQ2_XXS"),
        ({"int8": 9, "F32": 2}, "int8", "as int8"),
        ({"int4": 9, "F32": 2}, "int4", "as int4"),
    ],
)
def test_the_default_precision_is_that_of_most_weights(matrices: dict[str, int], precision: str, reason: str) -> None:
    choice = choose_precision(entries(**matrices))
    assert (choice.precision, choice.reason) == (precision, f"its weights are stored {reason}")


def test_without_matrices_weights_are_floats() -> None:
    """Such a checkpoint is refused later, by the names of what is missing."""
    choice = choose_precision(entries())
    assert (choice.precision, choice.reason) == ("float32", "it has no matrices")


def stored(path: Path, kind: str) -> Path:
    """A tiny generator in a GGUF file with all matrices in one format."""
    weights = gguf_files.converted("llama", gguf_files.torch_seeded(tf.LlamaForCausalLM(NARROW)))
    kinds = lambda name, tensor: kind if tensor.dim() > 1 else "F32"  # noqa: E731
    return gguf_files.write(path / f"{kind}.gguf", "llama", gguf_files.decoder_metadata(NARROW), weights, kinds)


def packed_as(executor: Executor) -> str:
    """The precision in which the compiled step packed the weights."""
    plan = cast(NativeExecutor, executor)._packed.plan
    return ("float32", "int8", "int4", "int4", "int8")[plan.layers[0].input.format]


def dtypes(settings: Settings) -> dict[str, str]:
    """The dtype of each model. Asserts that the executor, the model's description and the metrics agree."""
    packed: list[str] = []

    def executed(executor: Executor) -> Executor:
        packed.append("float32" if settings.executor == "torch" else packed_as(executor))
        return executor

    async def run() -> dict[str, str]:
        metrics = Metrics(settings.models)
        engine = Engine(metrics)
        engine.start()
        try:
            registry = ModelRegistry(engine, settings, observer=metrics, executor_hook=executed)
            await registry.load_all()
            served = {model.name: model.dtype for model in registry.models()}
        finally:
            await engine.close(0)
        families = text_string_to_metric_families(metrics.render("")[0].decode())
        info = next(family for family in families if family.name == "polyhead_model_info")
        assert {sample.labels["model"]: sample.labels["dtype"] for sample in info.samples} == served
        assert list(served.values()) == packed
        return served

    return asyncio.run(run())


@compiled
def test_each_model_is_computed_in_its_stored_precision(
    tmp_path: Path, tiny_classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {"four": stored(tmp_path, "Q4_1"), "eight": stored(tmp_path, "Q8_0"), "judge": tiny_classifier}
    settings = Settings(device="cpu", models={name: str(source) for name, source in sources.items()})
    with caplog.at_level(logging.INFO, "polyhead.loader"):
        assert dtypes(settings) == {"four": "int4", "eight": "int8", "judge": "float32"}
    messages = [message for message in caplog.messages if "since" in message]
    assert messages == [
        "four: int4, since its weights are stored as Q4_1",
        "eight: int8, since its weights are stored as Q8_0",
        "judge: float32, since its weights are stored as F32; --precision int8 is faster, smaller and less exact",
    ]
    ready = [
        message for message in caplog.messages if re.match(r"four is ready: llama, generate, int4 by native", message)
    ]
    assert len(ready) == 1


@compiled
@pytest.mark.parametrize("given", [{"precision": "int8"}, {"precision": "float32"}, {"executor": "torch"}])
def test_a_setting_applies_to_every_model(
    tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The torch executor does not compute in integers."""
    with caplog.at_level(logging.INFO, "polyhead.loader"):
        dtype_of = dtypes(Settings(device="cpu", models={"four": str(stored(tmp_path, "Q4_1"))}, **given))
    assert dtype_of == {"four": given.get("precision", "float32")}
    assert not [message for message in caplog.messages if "since" in message]


@compiled
def test_memory_is_planned_for_the_precision(tmp_path: Path) -> None:
    measured = measure_model("four", checkpoint.describe_source(str(stored(tmp_path, "Q4_0"))))
    auto, int4, full = (
        smallest_need(measured, Settings(device="cpu", precision=precision))
        for precision in ("auto", "int4", "float32")
    )
    assert auto == int4
    assert auto.weights < full.weights / 2
    assert auto.cache < full.cache


def test_a_gpu_computes_in_half_precision_for_any_stored_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    stored_precision = choose_precision(entries(Q4_1=1))
    assert choose_placement(Settings(), stored_precision).precision == "bfloat16"
    assert choose_placement(Settings(device="cpu", executor="torch"), stored_precision).precision == "float32"
    assert choose_placement(Settings(device="cpu", block_size=32), stored_precision).precision == "float32"
