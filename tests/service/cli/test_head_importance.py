"""Importance of attention heads on labelled texts, by ablating one head at a time: the measurement, the output, and
errors in rows."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForTokenClassification,
)
from typer.testing import CliRunner

from polyhead.models.core.errors import ModelError
from polyhead.service.cli import head_importance as heads
from polyhead.service.cli import labelled_files as labelled
from polyhead.service.cli import main as cli
from polyhead.service.cli.checkpoint_source import open_checkpoint
from polyhead.service.cli.head_accuracy import standardised_ranks
from polyhead.service.cli.head_importance import HeadAblation, compare_figures
from tests.support import checkpoints
from tests.support.edits import with_tensors
from tests.support.translators import translator

Rows = list[dict[str, Any]]
TEXTS = checkpoints.CORPUS
WIDTH = 8  # of a head of the tiny networks
LABELLED = [{"text": text, "label": checkpoints.LABELS[n % 3]} for n, text in enumerate(TEXTS)]
ALONE = [{"text": text} for text in TEXTS]
TAGGED = [{"tokens": text.split(), "tags": ["MISC", "O"] * len(text.split())} for text in TEXTS]
TAGGED = [row | {"tags": row["tags"][: len(row["tokens"])]} for row in TAGGED]
ASKED = [{"question": "What?", "context": text, "answer": " ".join(text.split()[1:3])} for text in TEXTS]
PAIRS = [{"text": text, "text_pair": TEXTS[0], "label": n % 2} for n, text in enumerate(TEXTS)]
PIECES = [" ".join(text.split()[n:]) for text in TEXTS for n in range(min(len(text.split()), 6))]
SCORED = [{"text": text, "text_pair": TEXTS[0], "score": n % 4} for n, text in enumerate(PIECES)]
BOTH = [{"text": text, "translation": text[::-1]} for text in TEXTS]


def polyhead(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["heads", *map(str, arguments)])


def written(path: Path, rows: Rows) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignores progress."""


@pytest.fixture
def measured(tmp_path: Path) -> Callable[[Path, Rows], HeadAblation]:
    return lambda folder, rows: HeadAblation(
        open_checkpoint(str(folder)), labelled.read_rows(written(tmp_path / "rows.jsonl", rows))
    )


@pytest.fixture(scope="module")
def single_head_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier in which only the third head of the second layer depends on the text."""
    folder = checkpoints.classifier(tmp_path_factory.mktemp("lonely"), seed=5)

    def silent(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            for name in ("weight", "bias"):
                values = tensors[f"bert.encoder.layer.{layer}.attention.self.value.{name}"]
                kept = values[2 * WIDTH : 3 * WIDTH].clone()
                values.zero_()
                if layer == 1:
                    values[2 * WIDTH : 3 * WIDTH] = kept * 4
        tensors["classifier.bias"].zero_()
        tensors["classifier.weight"].mul_(20)  # so that its answers are certain

    return with_tensors(folder, folder, silent)


@pytest.fixture(scope="module")
def own_labels(single_head_classifier: Path) -> Rows:
    """Texts with the answers of that classifier as labels."""
    network, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(single_head_classifier),
        AutoTokenizer.from_pretrained(single_head_classifier),
    )
    with torch.no_grad():
        message = [network(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in PIECES]
    assert len({*message}) > 1
    return [{"text": text, "label": label} for text, label in zip(PIECES, message, strict=True)]


def test_the_only_relevant_head_is_found(
    single_head_classifier: Path, own_labels: Rows, measured: Callable[[Path, Rows], HeadAblation]
) -> None:
    trial = measured(single_head_classifier, own_labels)
    assert trial.baseline["accuracy"] == 1
    first, *others = trial.ablate_heads(ignore_progress)
    assert (first.part, first.layer, first.head) == ("self", 1, 2)
    most = max(sum(row["label"] == label for row in own_labels) for label in range(3))
    assert first.changes["accuracy"].change <= most / len(own_labels) - 1 + 1e-9  # the same answer to every text
    assert all(change.change == change.error == 0 for head in others for change in head.changes.values())
    assert not any(head.is_significant for head in others)


CASES: dict[str, tuple[Callable[[Path], object], Rows, str, str]] = {
    "classify": (checkpoints.classifier, LABELLED, "bert.encoder.layer.{}.attention.output.dense.weight", "self"),
    "rank": (checkpoints.ranker, PAIRS, "bert.encoder.layer.{}.attention.output.dense.weight", "self"),
    "embed": (checkpoints.embedder, SCORED, "encoder.layer.{}.attention.output.dense.weight", "self"),
    "generate": (checkpoints.generator, ALONE, "model.layers.{}.self_attn.o_proj.weight", "self"),
    "tag": (
        lambda folder: checkpoints.encoder(folder, BertForTokenClassification),
        TAGGED,
        "bert.encoder.layer.{}.attention.output.dense.weight",
        "self",
    ),
    "span": (
        lambda folder: checkpoints.encoder(folder, BertForQuestionAnswering),
        ASKED,
        "bert.encoder.layer.{}.attention.output.dense.weight",
        "self",
    ),
    "fill": (
        lambda folder: checkpoints.encoder(folder, BertForMaskedLM),
        ALONE,
        "bert.encoder.layer.{}.attention.output.dense.weight",
        "self",
    ),
    "translate": (
        lambda folder: translator(folder, "marian"),
        BOTH,
        "model.decoder.layers.{}.encoder_attn.out_proj.weight",
        "cross",
    ),
}


@pytest.mark.parametrize("task", CASES)
def test_an_ablated_head_equals_zero_output_weights(
    task: str, tmp_path: Path, measured: Callable[[Path, Rows], HeadAblation]
) -> None:
    """The same network with the head removed by hand from its file has the same scores as the ablated one."""
    made, rows, name, part = CASES[task]
    folder = tmp_path / "whole"
    made(folder)
    whole = measured(folder, rows)
    assert whole.loaded.task == task
    found = next(each for each in whole.ablate_heads(ignore_progress) if each.part == part)
    assert any(abs(change.change) > 1e-4 for change in found.changes.values())

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors[name.format(found.layer)]
        width = weight.size(1) // (2 if task == "translate" else 4)
        weight[:, found.head * width : (found.head + 1) * width] = 0

    less = measured(with_tensors(folder, tmp_path / "cut", cut), rows)
    for figure, value in whole.baseline.items():
        assert value + found.changes[figure].change == pytest.approx(less.baseline[figure], abs=1e-5)
    assert not whole.instrumented.silenced  # all heads are used again


def test_figures_are_those_of_the_reference(
    tiny_classifier: Path, measured: Callable[[Path, Rows], HeadAblation]
) -> None:
    network = AutoModelForSequenceClassification.from_pretrained(tiny_classifier)
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier)
    with torch.no_grad():
        logits = torch.cat([network(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    right = torch.arange(len(TEXTS)) % 3
    baseline = measured(tiny_classifier, LABELLED).baseline
    assert baseline["cross-entropy"] == pytest.approx(F.cross_entropy(logits, right).item(), abs=1e-5)
    assert baseline["accuracy"] == pytest.approx((logits.argmax(-1) == right).float().mean().item())


def test_a_generator_is_measured_by_each_next_token(
    tiny_generator: Path, measured: Callable[[Path, Rows], HeadAblation]
) -> None:
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_generator),
        AutoTokenizer.from_pretrained(tiny_generator),
    )
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
        losses = [F.cross_entropy(network(each).logits[0, :-1], each[0, 1:], reduction="sum").item() for each in ids]
    trial = measured(tiny_generator, ALONE)
    expected = sum(losses) / sum(each.size(1) - 1 for each in ids)
    assert trial.baseline["cross-entropy"] == pytest.approx(expected, abs=1e-5)
    assert f"perplexity {np.exp(expected):.2f}" in heads.format_summary(trial)


def test_standard_errors_are_those_of_paired_differences() -> None:
    draw = np.random.default_rng(0)
    before, after = draw.normal(size=(2, 50, 1))
    [change] = compare_figures(before, after, np.ones(50))
    added = (after - before)[:, 0]
    assert change.change == pytest.approx(added.mean())
    assert change.error == pytest.approx(added.std(ddof=1) / np.sqrt(50))


def test_standard_errors_of_unequal_texts_are_jackknife_errors() -> None:
    draw = np.random.default_rng(1)
    counts = draw.integers(5, 40, 200).astype(float)
    before, after = np.add(draw.normal(size=(2, 200, 1)), [[[0.0]], [[3.0]]]) * counts[:, None]
    [change] = compare_figures(before, after, counts)
    added = (after - before)[:, 0]
    without = (added.sum() - added) / (counts.sum() - counts)
    jackknife = np.sqrt(199 / 200 * ((without - without.mean()) ** 2).sum())
    assert change.error == pytest.approx(jackknife, rel=0.02)


def test_rank_correlation_is_spearman_s(tiny_embedder: Path, measured: Callable[[Path, Rows], HeadAblation]) -> None:
    trial = measured(tiny_embedder, SCORED[:7])
    payload = np.random.default_rng(0).normal(size=(7, 1))
    order = payload[:, 0].argsort().argsort() + 1.0
    scores = np.array([1.5, 3.5, 5.5, 7, 1.5, 3.5, 5.5])  # ranks of 0 1 2 3 0 1 2, ties shared
    expected = np.corrcoef(order, scores)[0, 1]
    assert trial.metric.figures(trial.samples, payload).mean() == pytest.approx(expected)
    assert standardised_ranks(np.array([3.0, 3.0, 3.0])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("tiny_classifier", '{"text": "fine", "label": "postive"}', r"label: 'postive' is none of .*negative, neutral"),
        ("tiny_classifier", '{"text": "fine", "label": 3}', "label: 3 is none of the model's labels: .*or 0 to 2"),
        ("tiny_classifier", '{"text": "fine", "label": true}', "label: True is none"),
        pytest.param(
            "tiny_classifier", f'{{"text": "fine", "label": "{"9" * 5000}"}}', "label: '999.* is none", id="long label"
        ),
        pytest.param(
            "tiny_embedder",
            f'{{"text": "a", "text_pair": "b", "score": {"9" * 400}}}',
            "score: a number is expected, not 999",
            id="long number",
        ),
        ("tiny_classifier", '{"text": "", "label": 1}', "text: some text is expected, not ''"),
        ("tiny_classifier", '{"txt": "fine", "label": 1}', "text: is missing; there are: txt, label"),
        ("tiny_classifier", '{"text": "fine"', "is not JSON"),
        ("tiny_classifier", '["fine"]', "an object with fields is expected"),
        ("tiny_ranker", '{"text": "fine", "label": 1}', "text_pair: is missing"),
        ("tiny_embedder", '{"text": "fine", "label": 1}', "score: vectors have no labels"),
        (
            "tiny_embedder",
            '{"text": "a", "text_pair": "b", "score": "high"}',
            "score: a number is expected, not 'high'",
        ),
    ],
)
def test_errors_of_a_row_have_its_place(
    kind: str, line: str, message: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(SCORED[0] | {'label': 1})}\n\n{line}\n")
    result = polyhead(request.getfixturevalue(kind), data)
    assert result.exit_code == 1
    assert re.search(rf"rows\.jsonl, line 3:.*{message}", result.output), result.output


@pytest.mark.parametrize(
    ("case", "row", "message"),
    [
        ("tag", {"tokens": ["a", "b"], "tags": ["O"]}, "tags: there are 1 for 2 tokens"),
        ("tag", {"tokens": 5, "tags": ["O"]}, "tokens: a list of words is expected"),
        (
            "span",
            {"question": "Who?", "context": "It was Ann.", "answer": "Bea"},
            "answer: is not in the context",
        ),
        ("span", {"question": "Who?", "context": "Ann", "answer": "Ann", "start": 1}, "not in the context at 1"),
    ],
)
def test_unknown_labels_are_rejected(
    case: str, row: dict[str, Any], message: str, tmp_path: Path, measured: Callable[[Path, Rows], HeadAblation]
) -> None:
    CASES[case][0](tmp_path / "model")
    with pytest.raises(ModelError, match=rf"line 2: .*{message}"):
        measured(tmp_path / "model", [CASES[case][1][0], row])


def test_csv_and_plain_lines_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('text,label\n"a, b\nc",1\nd,0\n')
    assert [row.values["text"] for row in labelled.read_rows(tmp_path / "rows.csv")] == ["a, b\nc", "d"]
    (tmp_path / "rows.tsv").write_text('\ufefftext\tlabel\r\n"a\t1\r\nb"\t0\r\n', encoding="utf-8")
    assert [dict(row.values) for row in labelled.read_rows(tmp_path / "rows.tsv")] == [
        {"text": '"a', "label": "1"},
        {"text": 'b"', "label": "0"},
    ]
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert [(row.line, row.values["text"]) for row in labelled.read_rows(tmp_path / "lines.txt")] == [
        (1, "one"),
        (3, "two"),
    ]


def test_a_limit_takes_rows_evenly_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("".join(f"{n}\n" for n in range(100)))
    assert [row.line for row in labelled.read_rows(tmp_path / "lines.txt", 4)] == [1, 26, 51, 76]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xlsx", b"", "must be JSON lines"),
        ("rows.txt", b"\xff\xfe\xff", "cannot be read"),
        ("rows.csv", b"text,label\n", "holds no rows"),
        ("rows.csv", b"text,label\na,b,c\n", "line 2: has more fields than the first line names"),
        ("rows.csv", b'text,label\n"a,b\n', "is no row of a table"),
    ],
)
def test_files_that_hold_no_rows_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        labelled.read_rows(tmp_path / name)


def test_the_command_prints_the_baseline_first_and_draws_a_map(
    single_head_classifier: Path, own_labels: Rows, tmp_path: Path
) -> None:
    data = written(tmp_path / "rows.jsonl", own_labels)
    result = polyhead(single_head_classifier, data, "--plot", tmp_path / "heads.svg")
    assert result.exit_code == 0, result.output
    first, names, most, *others = result.stdout.splitlines()
    assert first.startswith("as it is: accuracy 1.0000, cross-entropy ")
    assert re.search(rf"\({len(PIECES)} rows\); always \w+ would be right in 0\.\d+", first)
    assert names.split() == ["layer", "head", "accuracy", "cross-entropy"]
    assert most.split()[:2] == ["1", "2"]
    assert "*" in most
    assert len(others) == 7 + 1
    assert "7 of 8" in result.stderr
    figure = (tmp_path / "heads.svg").read_text()
    cells = re.search(r'<g id="heads-self">(.*?)</g>', figure, re.DOTALL)
    assert cells is not None
    assert cells[1].count("<path") == 8
    assert "importance of heads" in figure


def test_json_output_has_the_same_values(single_head_classifier: Path, own_labels: Rows, tmp_path: Path) -> None:
    payload = json.loads(
        polyhead(single_head_classifier, written(tmp_path / "rows.jsonl", own_labels), "--limit", 8, "--json").stdout
    )
    assert payload["rows"] == 8
    assert payload["baseline"]["accuracy"] == 1
    [head] = [head for head in payload["heads"] if head["changes"]["cross-entropy"]["change"]]
    assert {"part": "self", "layer": 1, "head": 2}.items() <= head.items()
    assert {*head["changes"]["cross-entropy"]} == {"change", "error"}


def test_an_interrupted_run_writes_no_partial_file(
    tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(trial: HeadAblation, say: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HeadAblation, "ablate_heads", stop)
    data = written(tmp_path / "rows.jsonl", LABELLED)
    result = polyhead(tiny_classifier, data, "--plot", tmp_path / "heads.svg")
    assert result.exit_code == 130
    assert "stopped; nothing is written" in result.stderr
    assert not (tmp_path / "heads.svg").exists()
