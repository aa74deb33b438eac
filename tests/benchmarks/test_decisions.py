"""The measurement of decisions: its figures, its samples, its formats, and its check of bits on a tiny model."""

import asyncio
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from benchmarks import decision_bits, decision_calibration, decision_formats, decision_peers, decisions
from benchmarks.decision_bits import Kind
from benchmarks.decision_formats import FORMATS, SERVED, area_under_curve, asking, calibration_error, measure
from benchmarks.decision_sets import NO, YES, Labelled, LabelledSet, cut, sample
from benchmarks.peer_runs import decision_client
from benchmarks.serving import serve
from polyhead.service.decisions.question import OptionScores

TEXTS = [f"text {number} of a fox" for number in range(6)]
QUESTION = {"type": "noul", "instructions": "Is it red?"}
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"a fox": None, "a dog": "It barks.", "a cat": None}}


def test_figures_of_known_probabilities() -> None:
    found = [OptionScores((share, 1 - share), 0.5) for share in (0.9, 0.6, 0.7, 0.2)]
    quality = measure((YES, YES, NO, NO), found)
    assert quality.accuracy == 0.75
    assert quality.auc == 0.75  # of four pairs one is in the wrong order
    assert quality.brier == pytest.approx(2 * (0.01 + 0.16 + 0.49 + 0.04) / 4)
    assert quality.ece == pytest.approx((0.1 + 0.4 + 0.7 + 0.2) / 4)
    assert quality.label_mass == 0.5


def test_a_constant_preference_does_not_change_the_area() -> None:
    positives = [True, False, True, False]
    assert area_under_curve([0.9, 0.8, 0.99, 0.7], positives) == 1.0
    assert area_under_curve([0.1, 0.1, 0.1, 0.1], positives) == 0.5


def test_calibrated_confidences_have_no_error() -> None:
    assert calibration_error([0.75] * 4, [True, True, True, False]) == 0
    assert calibration_error([0.95] * 4, [True, True, False, False]) == pytest.approx(0.45)


def test_calibrations_of_a_model_that_prefers_an_option() -> None:
    """The first option is always the likeliest: biases take that away, a temperature cannot."""
    right = [number % 3 for number in range(300)]
    found = [OptionScores((0.5, 0.45, 0.05) if answer == 1 else (0.5, 0.3, 0.2), 1.0) for answer in right]
    examples = [Labelled(f"text {number}", answer) for number, answer in enumerate(right)]
    rows = list(decision_calibration.compare_maps(LabelledSet("it", CHOICE, examples), found))
    maps = {row["map"].split(":")[0]: row for row in rows}
    assert list(maps) == ["none", "temperature", "platt", "isotonic", "bias", "auto"]
    assert maps["none"]["accuracy"] == maps["temperature"]["accuracy"] == pytest.approx(1 / 3)
    assert maps["bias"]["accuracy"] == pytest.approx(2 / 3, abs=0.05)
    assert maps["auto"]["log_loss"] == maps["bias"]["log_loss"] < 0.65 < maps["temperature"]["log_loss"]
    assert {row["held out"] for row in rows} == {300}
    assert not list(decision_calibration.compare_maps(LabelledSet("it", CHOICE, examples[:30]), found[:30]))


def test_a_sample_has_each_answer_equally_often() -> None:
    examples = [Labelled(f"text {number}", YES if number < 5 else NO) for number in range(100)]
    chosen = sample("some", QUESTION, [*examples, Labelled(" ", YES)], 10, 80).examples
    assert [each.answer for each in chosen].count(YES) == 5
    assert chosen == sample("some", QUESTION, examples, 10, 80).examples
    assert cut("one two\nthree four five", 4) == "one two\nthree four"


def test_the_first_format_writes_the_prompts_of_the_server(long_generator: Path) -> None:
    """So that the others are compared with what is served; and the others are different."""
    sets = [
        LabelledSet("predicates", QUESTION, [Labelled(TEXTS[0], YES), Labelled(TEXTS[1], NO)]),
        LabelledSet("choices", CHOICE, [Labelled(TEXTS[0], 0), Labelled(TEXTS[1], 2)]),
    ]

    async def run() -> list[dict[str, object]]:
        async with asking(str(long_generator), 1) as it:
            return [row async for row in decision_formats.compare(it, sets, [SERVED, "copy", "no hint"], (1, 2))]

    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(FORMATS, "copy", replace(FORMATS[SERVED]))
        rows = asyncio.run(run())
    found = {(row["set"], row["format"]): row["log_loss"] for row in rows}
    assert len(found) == len(rows) == 2 * 3 + 2
    for labelled in sets:
        assert found[labelled.name, SERVED] == found[labelled.name, "copy"] != found[labelled.name, "no hint"]
    assert found["choices", "1 orders"] == found["choices", SERVED] != found["choices", "2 orders"]


def test_bits_and_clients_of_a_server(long_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_bits, "COMPANY", 4)
    kind = Kind("tiny", "", "float32", {"is": QUESTION, "which": CHOICE}, writes=True)
    flags = ("--threads", "1", "--log-level", "warning", "--cache-tokens", "512", "--block-size", "16")
    with serve(f"it={long_generator}", *flags) as server:
        found = asyncio.run(decision_bits.repeat(server, kind, TEXTS, 16))
        assert found.repeats == dict.fromkeys(decision_bits.CASES, 4)
        assert not any(found.differing.values())
        calls = tmp_path / "calls.json"
        body = {"state": TEXTS[0], "questions": kind.questions}
        calls.write_text(json.dumps({"path": "/v1/systemone", "decisions": 2, "states": [[body], [body, body]]}))
        options = Namespace(url=server.url, calls=calls, clients=2, seconds=0.5, warm=0.1, first=0)
        assert asyncio.run(decision_client.run(options))["decisions/s"] > 0
        examples = [Labelled(text, YES) for text in TEXTS]
        together = asyncio.run(decisions.answer(server, LabelledSet("one question", QUESTION, examples)))
        asks = [replace(each, asks=QUESTION["instructions"]) for each in examples]
        alone = asyncio.run(decisions.answer(server, LabelledSet("questions of their own", {"type": "noul"}, asks)))
        assert together == alone
        assert len({each.probabilities for each in together}) == len(TEXTS)
        with httpx.Client(base_url=server.url) as http:
            _, tokens = decisions.ask(http, "it", TEXTS[0], decisions.questions(10))
            assert tokens > 10 * decisions.ask(http, "it", TEXTS[0], decisions.questions(1))[1] * 0.9


def test_other_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose answers depend on the salt, as if a stored prefix had other bits."""

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        if request.url.path == "/metrics":
            return httpx.Response(200, text='polyhead_preemptions_total{model="it"} 3.0\n')
        stored = json.loads(request.content).get("cache_salt") == decision_bits.STORED
        return httpx.Response(200, json={"answers": {"it": 0.25 if stored else 0.250001}, "diagnostics": {}})

    plain = httpx.AsyncClient
    monkeypatch.setattr(
        decision_bits.httpx, "AsyncClient", lambda **given: plain(transport=httpx.MockTransport(answer), **given)
    )
    kind = Kind("other", "", "int8", {})
    found = asyncio.run(decision_bits.repeat(Namespace(url="http://it"), kind, TEXTS, 8))  # type: ignore[arg-type]
    assert list(found.differing.values()) == [0, 2, 0, 2]
    assert found.preemptions == 3


def test_the_table_of_servers_has_the_ratio_to_the_best_of_the_others() -> None:
    ours, slow, fast = (
        {"model": "it", "server": name, "decisions/s": speed, "p50": 1.0}
        for name, speed in ((decision_peers.OURS_NAME, 90.0), ("slow", 10.0), ("fast", 20.0))
    )
    lacking = {"model": "it", "server": "lacking", "reason": "is not there"}
    shown = decision_peers.show("it", [ours, slow, fast, lacking])
    assert "4.50 times the best of the others (fast)" in shown
    assert "is not there" in shown
