"""`polyhead quality`: the served precision compared with float32 of the same file; as text, as JSON, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, BertForQuestionAnswering, BertForTokenClassification, LlamaForCausalLM
from typer.testing import CliRunner

from polyhead.models import checkpoint
from polyhead.models.core.errors import CheckpointError, ModelError
from polyhead.models.native.library import runnable_targets
from polyhead.service.cli import determinism, quality
from polyhead.service.cli import main as cli
from polyhead.service.cli.checkpoint_source import open_checkpoint
from polyhead.service.cli.differences import EncodedText, LayerErrors, ModelOutput, ScoreComparison
from polyhead.service.cli.quality import QualityMeasurement
from polyhead.service.cli.quantize_command import quantize
from polyhead.service.config.settings import read_settings
from polyhead.service.runtime import quickstart
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from tests.support import checkpoints
from tests.support.edits import with_tensors
from tests.support.explained import both
from tests.support.gguf_files import converted, decoder_metadata, write
from tests.support.translators import translator

native = pytest.mark.skipif(not runnable_targets(), reason="no compiler was there when polyhead was installed")
FIGURES = {
    "predictions",
    "kl_mean",
    "kl_p99",
    "kl_max",
    "top1_agreement",
    "perplexity",
    "reference_perplexity",
    "logprob_change_mean",
    "logprob_change_max",
}
COMMON = {
    "source",
    "task",
    "text",
    "tokens",
    "precision",
    "executor",
    "reference",
    "layer_errors",
    "worst_layer",
    "worst_layer_growth",
}


def polyhead(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["quality", *map(str, arguments)])


def measured(*arguments: object) -> dict[str, Any]:
    result = polyhead(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: object) -> str:
    """The message on the error output, without progress."""
    result = polyhead(*arguments)
    assert result.exit_code == 1, result.output
    assert not result.stdout
    return str(result.stderr.rpartition("\x1b[K")[2])


# Generators


def test_float32_does_not_differ_from_itself(tiny_generator: Path) -> None:
    found = measured(tiny_generator)
    assert found.keys() == COMMON | FIGURES
    assert found["precision"] == "float32"
    assert (found["kl_mean"], found["kl_max"], found["logprob_change_max"]) == (0, 0, 0)
    assert found["top1_agreement"] == 1
    assert found["perplexity"] == found["reference_perplexity"] > 1
    assert found["layer_errors"] == [0, 0]
    assert (found["tokens"], found["predictions"]) == (448, 444)


@native
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_fewer_bits_differ(tiny_generator: Path, precision: str) -> None:
    found = measured(tiny_generator, "--precision", precision)
    assert found["precision"] == precision
    assert found["executor"].startswith("native-")
    assert found["reference"].startswith("float32 by native-")
    assert 0 < found["kl_mean"] <= found["kl_p99"] <= found["kl_max"] < 1
    assert 0 < found["logprob_change_mean"] <= found["logprob_change_max"] < 1
    assert 0.5 < found["top1_agreement"] <= 1
    assert len(found["layer_errors"]) == 2
    assert all(0 < error < 0.2 for error in found["layer_errors"])
    before = [0, *found["layer_errors"]]
    growth = [after - each for each, after in zip(before, found["layer_errors"], strict=False)]
    assert found["worst_layer"] == growth.index(max(growth))
    assert found["worst_layer_growth"] == max(growth)


@native
def test_the_default_precision_of_a_file_is_compared(tiny_generator: Path, tmp_path: Path) -> None:
    """As served: a quantised file in its default precision."""
    model = LlamaForCausalLM.from_pretrained(tiny_generator)
    tensors = converted("llama", model)

    def kind_of(name: str, tensor: torch.Tensor) -> str:
        return "Q8_0" if tensor.dim() == 2 else "F32"

    path = write(tmp_path / "tiny.gguf", "llama", decoder_metadata(model.config), tensors, kind_of)
    found = measured(path)
    assert found["precision"] == "int8"
    assert 0 < found["kl_mean"] < 0.1


@native
def test_text_output(tiny_generator: Path) -> None:
    result = polyhead(tiny_generator, "--precision", "int8")
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert "int8 by native-" in first
    assert "448 tokens of the text that comes with polyhead" in first
    names = [
        "KL divergence, nats",
        "same most likely token",
        "perplexity",
        "change of log p",
        "relative error of states",
    ]
    assert all(line.startswith(name) for line, name in zip(lines, names, strict=True))
    assert "of 0 to 1 (+0." in lines[-1]
    assert "float32: steps: 0 of 4" in result.stderr


def test_a_text_of_the_user(tiny_generator: Path, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100, encoding="utf-8")
    found = measured(tiny_generator, "--text", text, "--tokens", 600)
    assert (found["text"], found["tokens"], found["predictions"]) == (str(text), 600, 596)


def test_windows_lie_evenly_over_the_text(tiny_generator: Path) -> None:
    what = checkpoint.describe_source(str(tiny_generator))
    text = quality.TEXT_FILE.read_text(encoding="utf-8")
    ids = what.tokenizer.encode(text, special=False).ids
    for tokens in (32, 100, 448, 2000, len(ids)):
        steps = quality.cut_windows(what, text, "it", tokens)
        parts = [passage.tokens for [passage] in steps]
        assert tokens - len(parts) < sum(map(len, parts)) <= tokens
        assert all(len(part) <= min(512, checkpoints.POSITIONS) for part in parts)
        assert parts[0] == ids[: len(parts[0])]
        assert len(parts) == 1 or parts[-1] == ids[-len(parts[-1]) :]


def test_the_default_text_has_several_styles() -> None:
    text = quality.TEXT_FILE.read_text(encoding="utf-8")
    assert 5000 < len(text.encode()) < 8000
    assert all(part in text for part in ("import csv", "#include", "SELECT", '{"order"', "Nachbar", "musée", "图书馆"))


# Encoders


@native
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_classifier_s_labels(tiny_classifier: Path, precision: str) -> None:
    found = measured(tiny_classifier, "--precision", precision)
    assert found.keys() == COMMON | {
        "texts",
        "answers",
        "label_agreement",
        "probability_change_mean",
        "probability_change_max",
    }
    assert found["texts"] == found["answers"] >= quality.MIN_TEXTS
    # Its weights are random, so some texts have labels that are nearly tied.
    assert found["label_agreement"] > (0.5 if precision == "int8" else 0.99)
    assert 0 <= found["probability_change_mean"] <= found["probability_change_max"] < 0.1
    assert (found["probability_change_max"] > 0) == (precision == "int8")
    assert "same label " in polyhead(tiny_classifier, "--precision", precision).stdout


@native
def test_an_embedder_s_vectors(tiny_embedder: Path) -> None:
    found = measured(tiny_embedder, "--precision", "int8")
    assert 0.98 < found["cosine_min"] <= found["cosine_p1"] <= found["cosine_mean"] < 1
    assert measured(tiny_embedder, "--precision", "float32")["cosine_min"] == pytest.approx(1, abs=1e-9)
    assert "cosine with the reference's vector" in polyhead(tiny_embedder).stdout


@native
def test_a_ranker_s_order(tiny_ranker: Path) -> None:
    found = measured(tiny_ranker, "--precision", "int8")
    assert 0.8 < found["order_agreement"] <= 1
    assert 0 < found["score_change_max"] < 0.1
    assert "same order of two pairs" in polyhead(tiny_ranker).stdout


@native
@pytest.mark.parametrize("kind", [BertForTokenClassification, BertForQuestionAnswering, BertForMaskedLM])
def test_heads_that_answer_for_tokens(kind: Any, tmp_path: Path) -> None:
    found = measured(checkpoints.encoder(tmp_path / "model", kind), "--precision", "int8", "--tokens", 400)
    assert found["answers"] > found["texts"]
    assert 0.8 < found["label_agreement"] <= 1
    assert 0 < found["probability_change_max"] < 0.2


def test_networks_without_a_compiled_step_are_compared_on_torch(tmp_path: Path) -> None:
    both("mpnet", tmp_path / "mpnet")
    found = measured(tmp_path / "mpnet")
    assert (found["executor"], found["reference"]) == ("torch", "float32 by torch")
    assert found["probability_change_max"] == 0
    assert len(found["layer_errors"]) == 2


# Figures


def test_the_error_of_a_layer_is_the_mean_of_each_token_s_own() -> None:
    """An exact token with a state that is a thousand times as long must not hide errors of the others."""
    expected = torch.ones(2, 4, 8)
    expected[:, 0] = 1000
    wrong = expected.clone()
    wrong[1, 1:] += 0.5
    errors = LayerErrors()
    errors.add(expected, wrong)
    errors.add(expected[:, 1:], expected[:, 1:])
    assert errors.means() == pytest.approx([0, 3 * 0.5 / 7])


def test_orders_are_compared_pair_by_pair() -> None:
    scores = ScoreComparison()
    for expected, found in ((0.1, 0.1), (0.2, 0.4), (0.3, 0.2)):
        scores.add(EncodedText([], []), *(ModelOutput(torch.tensor([[value]])) for value in (expected, found)))
    assert scores.figures()["order_agreement"] == pytest.approx(2 / 3)
    assert scores.figures()["score_change_max"] == pytest.approx(0.2)


# Errors


def test_errors_are_one_message(tiny_generator: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    assert f"--text: {text} cannot be read" in refused(tiny_generator, "--text", text)
    text.write_text("Too short.", encoding="utf-8")
    assert "tokens of it are read; at least 32 are needed" in refused(tiny_generator, "--text", text)
    assert f"{text} has 1 sentences; at least 8 are needed" in refused(tiny_classifier, "--text", text)
    text.write_bytes(b"\xff\xfe\xff")
    assert f"--text: {text} cannot be read" in refused(tiny_generator, "--text", text)
    assert polyhead(tiny_generator, "--precision", "int3").exit_code == 2
    assert polyhead(tmp_path / "absent").exit_code == 1


def test_a_tokenizer_is_tried_before_it_is_read(
    tiny_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that reads a model has a child process try its tokenizer first, as serve does."""

    def refuse(_: TokenizerCheck, source: Path, __: object) -> None:
        raise CheckpointError("the child process ended", file=str(source))

    monkeypatch.setattr(TokenizerCheck, "check_folder", refuse)
    for read in (
        lambda: QualityMeasurement(str(tiny_generator), read_settings({})),
        lambda: quantize(str(tiny_generator), tmp_path / "out", "int8", None, lambda *_: None),
        lambda: open_checkpoint(str(tiny_generator)),
        lambda: determinism.load_checkpoint(read_settings({"models": {"verified": str(tiny_generator)}})),
    ):
        with pytest.raises(CheckpointError, match="the child process ended"):
            read()


def test_an_encoder_decoder_is_rejected(tmp_path: Path) -> None:
    translator(tmp_path / "translate", "marian")
    assert "it reads one text and writes another" in refused(tmp_path / "translate")


def test_networks_of_torch_alone_have_no_int8(tmp_path: Path) -> None:
    both("mpnet", tmp_path / "mpnet")
    assert "the compiled step cannot compute this network" in refused(tmp_path / "mpnet", "--precision", "int8")


def test_nan_answers_are_rejected(tiny_generator: Path, tmp_path: Path) -> None:
    def make_nan(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38)

    broken = with_tensors(tiny_generator, tmp_path / "broken", make_nan)
    assert "not finite" in refused(broken)


def test_a_tokenizer_with_more_tokens_than_the_network_is_rejected(tiny_generator: Path, tiny_classifier: Path) -> None:
    what = checkpoint.describe_source(str(tiny_generator))
    with pytest.raises(ModelError, match="makes token 384 of the text, and the network has 384 tokens"):
        quality.check_tokens(what, [3, 384], [])
    assert quality.check_tokens(what, [3, 4], [0, 2]) == EncodedText([3, 4], [])
    what = checkpoint.describe_source(str(tiny_classifier))
    with pytest.raises(ModelError, match="makes segment 2 of the text, and the network has 2 segments"):
        quality.check_tokens(what, [3, 4], [0, 2])


def test_invalid_settings_exit_with_code_2(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_EXECUTOR", "torch")
    assert polyhead(tiny_generator, "--precision", "int8").exit_code == 2
    found = measured(tiny_generator)
    assert found["executor"] == "torch"
    assert found["kl_max"] < 1e-4


def test_a_quick_start_model_has_a_name(tiny_embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "fetch_all", lambda folder: None)
    monkeypatch.setattr(quickstart, "sources", lambda folder: {"minilm": str(tiny_embedder)})
    monkeypatch.chdir(tmp_path)
    assert measured("minilm")["task"] == "embed"
