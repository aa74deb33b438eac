"""Vectors that are compared: however many a call has, in portions, on a thread, and none is kept."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from polyhead.models.core.late_interaction import LateInteraction, TextRole
from polyhead.service.api.dialects.rerank import routes as rerank
from polyhead.service.api.dialects.tei import routes as tei
from polyhead.service.api.shared.encoding_calls import PORTION_NUMBERS
from polyhead.service.concurrency.time_slices import SLICE_SIZE
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Event, HeadOutput, Request
from polyhead.service.text import similarity
from polyhead.service.text.answer_delta import Usage
from polyhead.service.text.encoder_outputs import ScoreOutput, TokenVectors
from tests.support import scripted

WIDTH, MANY = 512, 5 * SLICE_SIZE - 1  # with the query portions of equal size
TEXTS = ["a film"] * MANY
CALLS: dict[str, tuple[Any, str, Any]] = {
    "hf": (similarity, "/models/embedder", {"inputs": {"source_sentence": "a fox", "sentences": TEXTS}}),
    "tei": (tei, "/models/embedder/similarity", {"inputs": {"source_sentence": "a fox", "sentences": TEXTS}}),
    "tei rerank": (tei, "/models/embedder/rerank", {"query": "a fox", "texts": TEXTS}),
    "rerank": (rerank, "/v1/rerank", {"model": "embedder", "query": "a fox", "documents": TEXTS}),
}


class Values(list[float]):
    """A vector that can be referred to weakly."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@pytest.mark.parametrize("call", CALLS)
def test_many_vectors_are_compared_in_portions_on_a_thread(
    tiny_embedder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    module, path, body = CALLS[call]
    alive, most, aside, sizes = WeakSet[Values](), list[int](), list[bool](), list[int]()

    def make() -> HeadOutput:
        values = Values([1.0] + [0.0] * (WIDTH - 1))
        alive.add(values)
        return HeadOutput(values)

    def script(model: Model, request: Request) -> Iterable[Event]:
        yield make()
        yield Done("encoded", 3)

    real = similarity.cosine_similarities

    def compare(query: ScoreOutput, others: Sequence[ScoreOutput]) -> list[float]:
        most.append(len(alive))
        aside.append(threading.current_thread() is not threading.main_thread())
        sizes.append(sum(len(each.values) for each in others))
        return real(query, others)

    monkeypatch.setattr(module, "cosine_similarities", compare)
    embedder = scripted.model(tiny_embedder, "embedder", "embed", width=WIDTH)
    registry = scripted.Registry([embedder], script)
    [answer] = scripted.ask(scripted.application(registry), (path, body))
    assert answer.status_code == 200, answer.text[:300]
    assert answer.text.count("1.0") >= MANY
    assert sum(sizes) == WIDTH * MANY
    assert max(sizes) <= PORTION_NUMBERS
    assert all(aside)
    assert max(most) <= 2 * SLICE_SIZE + 1


def test_cosines_are_those_of_all_vectors_at_once() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
    query, *others = (ScoreOutput(row.tolist(), Usage(1)) for row in rows)
    assert similarity.cosine_similarities(query, others) == pytest.approx((rows[1:] @ rows[0]).tolist(), rel=1e-5)


def test_a_long_query_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of a long query and a long document at once would take the square of their lengths."""
    rng, role = np.random.default_rng(0), TextRole("", -1, 512, 0, frozenset())
    query, document = (rng.normal(size=(rows, 8)).astype(np.float32) for rows in (300, 200))
    late, sizes = LateInteraction(role, role, 0, hides_expansion=False, averages=False), list[int]()
    real: Callable[..., Any] = similarity.largest_of

    def noted(products: Any) -> Any:
        sizes.append(products.size)
        return real(products)

    monkeypatch.setattr(similarity, "largest_of", noted)
    vectors = [TokenVectors(memoryview(each), Usage(1)) for each in (query, document)]
    [found] = similarity.late_similarities(late, vectors[0], vectors[1:])
    assert found == pytest.approx(float((query @ document.T).max(axis=1).sum()), rel=1e-5)
    assert max(sizes) <= similarity.QUERY_ROWS * len(document)
    assert len(sizes) == 3
