"""`polyhead explain`: the answer of POST /v1/explain without a server; as text, as JSON, as a figure."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from transformers import BertForMaskedLM, BertForQuestionAnswering, BertForTokenClassification
from typer.testing import CliRunner

from polyhead.models.core.errors import ModelError
from polyhead.service.cli import main as cli
from polyhead.service.cli import plotting as canvas
from polyhead.service.cli.explain_command import NO_OUTPUT, find_model, format_answer, parse_numbers
from polyhead.service.core.request import ExplainMethod
from tests.support import checkpoints
from tests.support.processes import Process
from tests.support.translators import translator

TEXT = "A good film, but far too long."
QUESTION, CONTEXT = "What is the capital?", "The capital of France is Paris, of course."


def polyhead(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["explain", *map(str, arguments)])


def text_output(*arguments: object) -> dict[str, Any]:
    result = polyhead(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models by task."""
    made = tmp_path_factory.mktemp("models")
    checkpoints.encoder(made / "tag", BertForTokenClassification)
    checkpoints.encoder(made / "span", BertForQuestionAnswering)
    checkpoints.encoder(made / "fill", BertForMaskedLM)
    translator(made / "translate", "marian")
    return made


@pytest.mark.parametrize("method", get_args(ExplainMethod))
def test_every_method_is_printed_and_drawn(method: ExplainMethod, tiny_classifier: Path, tmp_path: Path) -> None:
    result = polyhead(tiny_classifier, TEXT, "--method", method, "--plot", tmp_path / "out.svg")
    assert result.exit_code == 0, result.output
    figure = (tmp_path / "out.svg").read_text()
    drawn = {"attention": ("self-0-0", "self-1-3"), "attention_rollout": ("rollout",), "attention_flow": ("flow",)}
    assert all(f'<g id="{name}"' in figure for name in drawn.get(method, ("bar-0", "bar-9")))
    assert all(f"<!-- {word} -->" in figure for word in ("film", "[CLS]"))
    if method == "attention":
        assert result.stdout.startswith("self attention, mean of heads 0 to 3 of layers 0 to 1\n[CLS]: ")
    else:
        assert re.match(r"why (negative|neutral|positive)", result.stdout)
        assert re.search(r"^film +[+-]\d\.\d{4}$", result.stdout, re.MULTILINE)


def test_json_output_equals_the_answer_of_the_server(tiny_classifier: Path) -> None:
    found = text_output(
        tiny_classifier, TEXT, "--method", "integrated_gradients", "--target", "neutral", "--steps", 200
    )
    assert [token["token"] for token in found["tokens"]][:3] == ["[CLS]", "a", "good"]
    [each] = found["attributions"]
    assert each["target"].items() >= {"kind": "label", "label": "neutral", "index": 1}.items()
    assert each["completeness"]["holds"]
    assert sum(each["tokens"]) == pytest.approx(each["completeness"]["sum"], abs=1e-4)
    assert sum(part["score"] for part in each["characters"]) == pytest.approx(sum(each["tokens"]), abs=1e-4)


def test_only_the_layers_and_heads_that_are_named(tiny_classifier: Path) -> None:
    [entry] = text_output(tiny_classifier, TEXT, "--layers", "1", "--heads", "0-1,3")["attention"]
    assert (entry["layers"], entry["heads"]) == ([1], [0, 1, 3])
    assert np.allclose(np.array(entry["values"]).sum(-1), 1, atol=1e-5)


def test_a_pair_is_read_together(tiny_ranker: Path) -> None:
    found = text_output(tiny_ranker, QUESTION, CONTEXT, "--method", "occlusion", "--window", 3)
    assert {token["text"] for token in found["tokens"]} == {0, 1, None}


def test_a_vector_is_explained_by_what_it_is_compared_with(tiny_embedder: Path) -> None:
    found = text_output(tiny_embedder, TEXT, "A bad film.", "--method", "gradient_x_input")
    assert found["attributions"][0]["target"].items() >= {"kind": "similarity", "text": "A bad film."}.items()
    assert -1 <= found["attributions"][0]["target"]["score"] <= 1


@pytest.mark.parametrize(
    ("task", "arguments", "kind"),
    [
        ("tag", [TEXT, "--target", '{"start": 2, "end": 6}'], "tag"),
        ("span", [QUESTION, CONTEXT], "span"),
        ("fill", ["A [MASK] film.", "--target", "good"], "word"),
    ],
)
def test_answers_of_other_tasks_are_printed(task: str, arguments: list[str], kind: str, folder: Path) -> None:
    found = polyhead(folder / task, *arguments, "--method", "gradient_x_input")
    assert found.exit_code == 0, found.output
    assert {"tag": "why “good” is ", "span": "why the answer is “", "word": "why “good” in the place of mask 0"}[
        kind
    ] in found.stdout


def test_a_generated_answer_has_a_row_for_each_token(tiny_generator: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    result = polyhead(
        tiny_generator, "The quick", "--method", "gradient_x_input", "--target", " brown fox", "--plot", out
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("wrote ' brown fox'\n")
    rows = len(result.stdout.splitlines()) - 1
    cells = re.search(r'<g id="attributions">(.*?)</g>', out.read_text(), re.DOTALL)
    assert cells is not None
    assert rows > 1
    assert cells[1].count("<path") % rows == 0


def test_the_answer_of_an_encoder_decoder_is_aligned_with_its_source(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    result = polyhead(folder / "translate", "A good film", "--method", "attention", "--max-tokens", 5, "--plot", out)
    assert result.exit_code == 0, result.output
    assert "cross attention, mean of heads 0 to 1 of layers 0 to 2" in result.stdout
    assert '<g id="cross"' in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--target", "angry", "--method", "occlusion"],
            "has no label 'angry'; there are: negative, neutral",
        ),
        (["--target", '{"label": ', "--method", "occlusion"], "--target: is not JSON"),
        (["--layers", "7"], "layers: the network has 2, counted from 0, got 7"),
        (["--heads", "one"], "--heads: numbers are expected, as in 0,5 or 0-3, not 'one'"),
        (["--plot", "out.jpeg"], "--plot: out.jpeg is to end in .svg, .pdf or .png"),
    ],
)
def test_errors_are_one_message(arguments: list[str], message: str, tiny_classifier: Path) -> None:
    result = polyhead(tiny_classifier, TEXT, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_text_output_needs_no_plotting_library(tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> frozenset[int]:
        raise NameError

    monkeypatch.setattr(canvas, "drawable_letters", missing)
    monkeypatch.setattr(canvas, "fixed_style", missing)
    for method in ("attention", "occlusion"):
        assert polyhead(tiny_classifier, TEXT, "--method", method).exit_code == 0


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    result = polyhead(tmp_path / "nothing", TEXT)
    assert result.exit_code == 1
    assert "nothing" in result.stderr


def test_settings_of_keys_are_not_needed(tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_API_KEY", "secret")
    assert polyhead(tiny_classifier, TEXT, "--layers", "0", "--heads", "0").exit_code == 0


def test_numbers_are_single_ones_and_ranges() -> None:
    assert parse_numbers("--layers", "0, 4-6,2") == [0, 4, 5, 6, 2]
    with pytest.raises(ModelError):
        parse_numbers("--layers", "-1")


def test_a_server_can_be_asked(tiny_quick_start: Process, tiny_classifier: Path) -> None:
    url = tiny_quick_start.url
    [found] = text_output("sentiment", TEXT, "--steps", 20, "--url", url.removeprefix("http://"))["attributions"]
    [expected] = text_output(tiny_classifier, TEXT, "--steps", 20)["attributions"]
    assert found["target"]["label"] == expected["target"]["label"]
    assert found["tokens"] == pytest.approx(expected["tokens"], abs=1e-5)  # threads differ, so sums have another order
    pair = polyhead("minilm", TEXT, "A film.", "--method", "gradient_x_input", "--url", url)
    assert pair.exit_code == 0, pair.output
    unknown = polyhead("other", TEXT, "--url", url)
    assert unknown.exit_code == 1
    assert "serves no model that is called 'other'; it serves: smollm2, minilm, sentiment" in unknown.stderr
    silent = polyhead("sentiment", TEXT, "--url", "http://127.0.0.1:9")
    assert silent.exit_code == 1
    assert "does not answer" in silent.stderr


def test_a_model_that_writes_nothing_is_said_to() -> None:
    assert format_answer({"output": "", "attributions": [], "attention": [], "tokens": []}) == NO_OUTPUT


@pytest.mark.parametrize("content", ["<html>", "[]", '{"data": [{"id": "m"}]}', '{"data": [1]}'])
def test_another_server_is_named(content: str) -> None:
    async def ask() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=content))
        async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:
            await find_model(client, "m")

    with pytest.raises(ModelError, match="http://other is no Polyhead server"):
        asyncio.run(ask())
