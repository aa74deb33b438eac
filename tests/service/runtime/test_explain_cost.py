"""The cost of an explanation: the operations that torch counts, and errors that suggest what would be possible."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.explain import (
    ExplanationRequest,
    HeadSize,
    InputTokens,
    Method,
    estimate_operations,
    explain,
)
from polyhead.models.explain import cost_estimate as estimate
from polyhead.models.network.model_config import ModelConfig
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import AnswerTooLarge
from polyhead.service.runtime.explain_cost import CHUNK_TOKENS, GIGA, WorkLimit, explainer_memory_need
from polyhead.service.runtime.memory_budget import measure_model
from tests.support import decision_models
from tests.support.explained import KINDS, both, count_operations, driven

ROWS = 32
METHODS = [method for method in get_args(Method) if method != "attention_flow"]  # mostly operations of other kinds
SHOWING = ("attention", "attention_rollout", "attention_flow")
SHAPE: dict[str, Any] = {
    "max_positions": 8192,
    "kv_heads": 3,
    "head_width": 64,
    "vocab_size": 49_152,
    "gated_mlp": True,
}
MINILM = ModelConfig(
    **SHAPE | {"kv_heads": 12, "head_width": 32, "vocab_size": 30_522, "gated_mlp": False},
    **{"width": 384, "depth": 6, "heads": 12, "mlp_width": 1536, "causal": False},
)
SMOLLM2 = ModelConfig(**SHAPE, width=576, depth=30, heads=9, mlp_width=1536, causal=True)
QWEN = ModelConfig(
    **SHAPE | {"kv_heads": 2, "vocab_size": 151_936}, width=896, depth=24, heads=14, mlp_width=4864, causal=True
)
LIMIT = Settings().explain_gflop * GIGA


@pytest.fixture(scope="module", params=KINDS)
def explained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Checkpoint]:
    """A kind of network, a network that is explained, and its checkpoint."""
    folder = tmp_path_factory.mktemp("explained")
    _, watched = both(request.param, folder)
    return request.param, watched, load(str(folder))


@pytest.mark.parametrize("method", METHODS)
def test_operations_are_those_that_torch_counts(
    explained: tuple[str, Any, Checkpoint], method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch counts nothing for a CPU's fused attention, so its count may be lower."""
    monkeypatch.setattr(estimate, "LAYER_OVERHEAD", 0)
    kind, watched, loaded = explained
    text = InputTokens(tuple(range(5, 5 + ROWS)))
    goals = () if method in SHOWING else (((0, 1),), ((0, 0),))
    asked = ExplanationRequest(
        text, method, goals, steps=5, baseline=0, window=3, compared_text=text if kind == "bert-vector" else None
    )
    counted = count_operations(lambda: driven(explain(watched, asked, piece=CHUNK_TOKENS)))
    estimated = estimate_operations(loaded.config, loaded.decoder_config, asked, CHUNK_TOKENS)
    assert 0.9 * counted <= estimated <= 1.5 * counted


def request_of(method: Method, rows: int, goals: int = 1, steps: int = 50) -> ExplanationRequest:
    cells = tuple(((rows - 1 - number, 7),) for number in range(goals))
    return ExplanationRequest(
        InputTokens((5,) * rows), method, () if method in SHOWING else cells, steps=steps, baseline=1
    )


def refusal(config: ModelConfig, asked: ExplanationRequest, most: int = LIMIT) -> str:
    """Return the error message; empty if the request is allowed."""
    try:
        WorkLimit(config, config, most).check(asked)
    except AnswerTooLarge as error:
        return error.message if error.message.startswith(f"{error.param}: {asked.method} of ") else "another error"
    return ""


@pytest.mark.parametrize("method", get_args(Method))
def test_one_limit_holds_for_networks_of_all_sizes(method: Method) -> None:
    """With the default limit any method explains a text of 20 tokens; what takes minutes is rejected."""
    for config in (MINILM, SMOLLM2, QWEN):
        assert not refusal(config, request_of(method, 20, steps=8))
        needed = estimate_operations(config, config, request_of(method, 20, steps=8), CHUNK_TOKENS)
        assert refusal(config, request_of(method, 20, steps=8), needed - 1)
        assert not refusal(config, request_of(method, 20, steps=8), needed)


def test_the_prompt_that_took_100_seconds_is_refused_with_what_would_do() -> None:
    asked = request_of("integrated_gradients", 47, goals=16)
    assert refusal(SMOLLM2, asked)
    more = 1600 * GIGA
    said = refusal(SMOLLM2, asked, more)
    assert "47 tokens, 16 targets, 50 steps takes about " in said
    assert "at most 1600 are computed (the server's setting explain_gflop)" in said
    [steps] = re.findall(r"at most (\d+) steps?", said)
    [targets] = re.findall(r"at most (\d+) targets?", said)
    assert said.endswith("or the method gradient_x_input")
    for number, changed in ((int(steps), "steps"), (int(targets), "targets")):
        for extra in (0, 1):
            few = replace(
                asked, **{"steps": number + extra} if changed == "steps" else {"goals": asked.goals[: number + extra]}
            )
            assert bool(refusal(SMOLLM2, few, more)) == bool(extra), f"{number + extra} {changed}"
    assert not refusal(SMOLLM2, replace(asked, method="gradient_x_input"))
    assert not refusal(MINILM, request_of("integrated_gradients", 47)), "a small network has more steps for the same"


def test_a_larger_window_is_not_less_work() -> None:
    """A window begins at every row, so longer windows are hardly fewer."""
    one, eight = (replace(request_of("occlusion", 400), window=window) for window in (1, 8))
    assert estimate_operations(QWEN, QWEN, eight) > 0.9 * estimate_operations(QWEN, QWEN, one)
    assert refusal(QWEN, eight, 1000 * GIGA).endswith("ask for a shorter input, or the method gradient_x_input")


def test_many_small_passes_cost_their_calls() -> None:
    """A tiny network: only the number of passes takes long."""
    tiny = replace(MINILM, width=8, heads=1, kv_heads=1, head_width=8, mlp_width=8, depth=2)
    assert refusal(tiny, request_of("integrated_gradients", 300, goals=256, steps=1000))
    assert not refusal(tiny, request_of("integrated_gradients", 40, steps=1000))


def test_the_layers_of_a_head_count(tmp_path: Path) -> None:
    """In the limit of work, and in the memory that is reserved for an explainer."""
    asked, head = request_of("integrated_gradients", 40), HeadSize(numbers=10**7, features=10**4)
    needed = estimate_operations(MINILM, MINILM, asked, CHUNK_TOKENS)
    WorkLimit(MINILM, MINILM, needed).check(asked)
    with pytest.raises(AnswerTooLarge):
        WorkLimit(MINILM, MINILM, needed, head).check(asked)
    sizes = [
        measure_model("decider", describe_source(str(decision_models.laya(tmp_path / str(depth), head_layers=depth))))
        for depth in (0, 4)
    ]
    without, layered = (explainer_memory_need(size, Settings()).workspace for size in sizes)
    added = sizes[1].checkpoint_size.explained_head.features - sizes[0].checkpoint_size.explained_head.features
    most = 2 * 4 * added * sizes[0].context  # bytes of the features and their gradients, for every token
    assert 0.5 * most < layered - without <= most
