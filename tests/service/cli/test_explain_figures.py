"""Explanations as figures: every number is drawn at its place, all letters are drawn, and equal numbers give equal
bytes."""

import base64
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from polyhead.models.core.errors import ModelError
from polyhead.service.cli import explain_figures as figures
from polyhead.service.cli import plotting as canvas
from polyhead.service.cli.explain_command import format_answer

Answer = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"
WORDS = ("[CLS]", "i", "loved", "the", "$film", "--", r"$\x$", "\n", "日本", "[SEP]")
LABEL = {"kind": "label", "label": "POSITIVE", "index": 1, "score": 4.125, "probability": 0.998}
COMPLETE = {"difference": 5.2, "sum": 5.19, "delta": -0.01, "holds": True}


def answer(method: str, count: int = len(WORDS), written: int = 0) -> Answer:
    """An answer of so many tokens, the last of which were generated."""
    tokens = [
        {
            "index": index,
            "token": WORDS[index % len(WORDS)],
            "special": WORDS[index % len(WORDS)].startswith("["),
            "part": "output" if index >= count - written else "input",
        }
        for index in range(count)
    ]
    return {"model": "sentiment", "method": method, "tokens": tokens, "attributions": [], "attention": []}


def weights(kind: str, layers: list[int], heads: list[int], rows: range, columns: range) -> Answer:
    shape = (len(layers), len(heads), len(rows), len(columns))
    values = np.random.default_rng(0).dirichlet(np.ones(len(columns)), shape[:3]).astype(np.float32)
    sides = {"rows": [*rows], "columns": [*columns], "shape": list(shape)}
    return {"kind": kind, "layers": layers, "heads": heads, **sides, "values": values.tolist()}


def attributed(target: Answer, count: int, **more: Any) -> Answer:
    return {"target": target, "tokens": np.linspace(-1, 2, count).tolist(), **more}


def one_head() -> Answer:
    return answer("attention") | {"attention": [weights("self", [3], [5], range(10), range(10))]}


def several_heads() -> Answer:
    return answer("attention") | {"attention": [weights("self", [0, 4], [1, 2, 7], range(10), range(10))]}


def alignment() -> Answer:
    read, message = range(10), range(10, 14)
    parts = {"encoder": (read, read), "decoder": (message, message), "cross": (message, read)}
    return answer("attention", 14, written=4) | {
        "attention": [weights(kind, [0, 1], [0, 1], *sides) for kind, sides in parts.items()]
    }


def rollout() -> Answer:
    looking = [weights("rollout", [0], [0], range(10), range(10))]
    return answer("attention_rollout") | {"attention": looking, "attributions": [attributed(LABEL, 10)]}


def gradients(count: int = 60) -> Answer:
    found = [attributed(LABEL, count, completeness=COMPLETE)]
    return answer("integrated_gradients", count) | {"attributions": found}


def generated() -> Answer:
    found = [attributed({"kind": "token", "token": 6 + n, "id": 3, "score": 1.0}, 10) for n in range(4)]
    return answer("gradient_x_input", written=4) | {"attributions": found}


KINDS = [one_head, several_heads, alignment, rollout, gradients, generated]


class ParsedFigure:
    """A figure as in its file: groups by name, and its text (each text is there as a comment)."""

    def __init__(self, picture: Path) -> None:
        self.text = picture.read_text("utf-8")
        self.tree = ElementTree.fromstring(self.text)
        self.groups = {str(group.get("id")): group for group in self.tree.iter(f"{SVG}g") if group.get("id")}
        self.said = [message.strip() for message in re.findall(r"<!--(.*?)-->", self.text, re.DOTALL)]

    def cells(self, name: str) -> int:
        return len(self.groups[name].findall(f"{SVG}path"))

    def fills(self, name: str) -> list[str]:
        return [re.search(r"fill: (#\w+)", str(path.get("style")))[1] for path in self.groups[name].iter(f"{SVG}path")]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Answer]], ParsedFigure]:
    """A figure of each answer."""

    @cache
    def draw(made: Callable[[], Answer]) -> ParsedFigure:
        picture = tmp_path_factory.mktemp("figures") / "figure.svg"
        canvas.save_figure(figures.draw_answer(made()), picture)
        return ParsedFigure(picture)

    return draw


@pytest.mark.parametrize("suffix", canvas.SUFFIXES)
def test_the_same_numbers_are_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        canvas.save_figure(figures.draw_answer(alignment()), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"other{suffix}").read_bytes()


@pytest.mark.parametrize("made", KINDS)
def test_every_token_can_be_read(made: Callable[[], Answer], drawn: Callable[..., ParsedFigure]) -> None:
    """Tokens with mathematics, with the end of an XML comment, with line breaks, and with letters that the font
    lacks."""
    shown = drawn(made)
    assert {"loved", "$film", "- -", r"$\x$", r"\n"} <= {*shown.said}
    assert {"日本", r"\u65e5\u672c"} & {*shown.said}
    assert "<text" not in shown.text  # letters are outlines


def test_a_head_is_a_map_with_a_cell_for_each_pair(drawn: Callable[..., ParsedFigure]) -> None:
    result, shown = one_head(), drawn(one_head)
    assert shown.cells("self-3-5") == 100
    assert any("layer 3, head 5" in message for message in shown.said)
    assert shown.said.count("loved") == 2  # query and key
    ys = [
        float(re.match(r"M \S+ (\S+)", str(cell.get("d")))[1]) for cell in shown.groups["self-3-5"].iter(f"{SVG}path")
    ]
    assert ys[0] == min(ys)  # the first row is at the top
    values = np.array(result["attention"][0]["values"]).ravel()
    fills = shown.fills("self-3-5")
    darkness = [sum(bytes.fromhex(fill[1:])) for fill in fills]
    assert darkness[int(values.argmax())] == min(darkness)
    assert darkness[int(values.argmin())] == max(darkness)


def test_several_heads_are_small_maps_in_the_order_of_layers(drawn: Callable[..., ParsedFigure]) -> None:
    shown = drawn(several_heads)
    names = [f"self-{layer}-{head}" for layer in (0, 4) for head in (1, 2, 7)]
    assert [name for name in shown.groups if name.startswith("self")] == names
    assert all(shown.cells(name) == 100 for name in names)
    assert [message for message in shown.said if message.startswith("layer")] == [
        f"layer {layer}, head {head}" for layer in (0, 4) for head in (1, 2, 7)
    ]


def test_many_cells_are_drawn_as_an_image(drawn: Callable[..., ParsedFigure]) -> None:
    rows = range(50)
    shown = drawn(lambda: answer("attention", 50) | {"attention": [weights("self", [0], [0, 1], rows, rows)]})
    assert len(list(shown.tree.iter(f"{SVG}image"))) == 2 + 1  # and the colours are right
    assert len(shown.text) < 150_000


def test_an_alignment_has_target_rows_and_source_columns(drawn: Callable[..., ParsedFigure]) -> None:
    result, shown = alignment(), drawn(alignment)
    assert shown.cells("cross") == 4 * 10
    assert {"written", "read"} <= {*shown.said}
    assert any("mean of heads 0 to 1 of layers 0 to 1" in message for message in shown.said)
    mean = np.array(result["attention"][2]["values"]).mean((0, 1)).ravel()
    darkness = [sum(bytes.fromhex(fill[1:])) for fill in shown.fills("cross")]
    assert darkness[int(mean.argmax())] == min(darkness)


def test_a_rollout_shows_the_row_that_answers(drawn: Callable[..., ParsedFigure]) -> None:
    shown = drawn(rollout)
    assert shown.cells("rollout") == 100
    assert sum(name.startswith("bar-") for name in shown.groups) == 10


def test_attributions_are_bars_red_up_and_blue_down(drawn: Callable[..., ParsedFigure]) -> None:
    shown = drawn(gradients)
    bars = [name for name in shown.groups if name.startswith("bar-")]
    assert len(bars) == 60
    red, blue = (bytes.fromhex(shown.fills(bar)[0][1:]) for bar in (bars[-1], bars[0]))
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    message = " ".join(shown.said)
    assert "why POSITIVE (score 4.125, probability 0.998)" in message
    assert "5.190" in message
    assert "delta -0.01" in message
    assert "more steps" not in message


def test_attributions_that_do_not_add_up_have_a_note(drawn: Callable[..., ParsedFigure]) -> None:
    result = gradients(8)
    result["attributions"][0]["completeness"] = COMPLETE | {"holds": False}
    assert "more steps" in " ".join(drawn(lambda: result).said)


def test_no_label_of_sixty_overlaps_its_neighbour() -> None:
    figure = figures.draw_answer(gradients())
    with canvas.fixed_style():
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(boxes) == 60
    assert all(one.x1 <= other.x0 for one, other in pairwise(boxes))


def test_each_generated_token_is_a_row_over_all_tokens(drawn: Callable[..., ParsedFigure]) -> None:
    shown = drawn(generated)
    assert shown.cells("attributions") == 4 * 10


def test_weights_can_come_packed_or_only_the_largest() -> None:
    entry = weights("self", [0], [0, 1], range(5), range(5))
    whole = np.array(entry["values"], np.float32)
    packed = {"dtype": "float16", "data": base64.b64encode(whole.astype("<f2").tobytes()).decode()}
    assert np.allclose(figures.attention_weights(entry | {"values": packed}), whole, atol=1e-3)
    largest = [[[[[int(row.argmax()), float(row.max())]] for row in head] for head in layer] for layer in whole]
    kept = figures.attention_weights({name: entry[name] for name in entry if name != "values"} | {"top": largest})
    assert np.array_equal(kept.max(-1), whole.max(-1))
    assert np.array_equal(kept.argmax(-1), whole.argmax(-1))
    assert (kept > 0).sum() == 10


@pytest.mark.parametrize(
    ("shape", "columns"), [([1, 1, 1, 3 * 10**8], 3), ([1, 1, 1], 3), ([1, 1, 1, -1], 3), ([1, 2, 1, 3], 3), ([], 3)]
)
def test_a_stated_shape_that_the_answer_does_not_have_is_refused(shape: list[int], columns: int) -> None:
    """Before memory is taken for it: a server may answer anything."""
    entry = weights("self", [0], [0], range(1), range(columns)) | {"shape": shape}
    for given in (entry, entry | {"top": [[[[]]]]}):
        with pytest.raises(ModelError, match="the answer states weights of the shape"):
            figures.attention_weights(given)


def test_an_answer_with_too_many_weights_is_refused() -> None:
    sides = {"layers": range(1000), "heads": range(1000), "rows": range(1000), "columns": range(1000)}
    with pytest.raises(ModelError, match=f"{figures.MAX_WEIGHTS} are read"):
        figures.attention_weights({**sides, "shape": [1000] * 4, "top": []})


def test_long_tokens_are_shown_cut() -> None:
    """An answer repeats them for each row, and fills up the others to the width of the longest."""
    long = {"token": "w" * 10**6, "special": False, "text": 0}
    given = gradients()
    given = given | {"output": "", "tokens": [long, *given["tokens"][1:]]}
    lines = format_answer(given).splitlines()
    assert max(map(len, lines)) < 2 * figures.MAX_TOKEN
    assert any(line.startswith("w" * figures.MAX_TOKEN + " ") for line in lines)


@pytest.mark.parametrize(
    ("picture", "message"), [("figure.jpeg", ".svg, .pdf or .png"), ("nowhere/figure.svg", "no folder")]
)
def test_an_invalid_figure_path_is_rejected_before_any_computation(picture: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        canvas.check_plot_path(tmp_path / picture)


def test_a_missing_plotting_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(canvas, "HAS_MATPLOTLIB", False)
    with pytest.raises(ModelError, match=re.escape("pip install 'polyhead[explain]'")):
        canvas.check_plot_path(tmp_path / "figure.svg")


def test_an_alignment_names_the_predicted_token(drawn: Callable[..., ParsedFigure]) -> None:
    """The row of a token is for the token that it predicts: the first row is not that of the start token."""
    rows = figures.next_token_labels(alignment(), [10, 11, 12, 13])
    assert [label.text for label in rows] == ["i", "loved", "the", "(end)"]
    assert "(end)" in drawn(alignment).said


def test_byte_level_pieces_are_decoded() -> None:
    result = {"tokens": [{"token": piece} for piece in ("f", "Ã¼r", "ĠÐ´Ð°", "Ċ", "<s>", "Ã")]}
    assert figures.token_texts(result) == ["f", "ür", "␣да", "\n", "<s>", r"\xc3"]
    plain = {"tokens": [{"token": piece} for piece in ("café", "Ã¼", "▁the")]}
    assert figures.token_texts(plain) == ["café", "Ã¼", "▁the"]
