"""Draws the answer of POST /v1/explain, and of `polyhead heads`, as a figure for a paper.

The kind of answer decides the form.  Attention weights are maps of rows that attend to columns.  Attributions of one
target are bars, one per token; those of several targets are a map.  Cross-attention of an encoder-decoder is an
alignment.
"""

import base64
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyhead.models.core.errors import ModelError
from polyhead.models.tokenizer.token_text import byte_alphabet

from . import plotting as canvas
from .plotting import CELL_INCHES, HAS_MATPLOTLIB, LABEL_POINTS, AxisLabel, LabelledMatrix, escape_undrawable

if HAS_MATPLOTLIB:
    from matplotlib.figure import Figure

MIN_WIDTH = 3.4  # inches: the width of a column of a paper
MARGIN = 1.0  # inches for labels beside and below a plot
BARS_PER_ROW = 60  # bars in a row
MIN_MAP_SIDE = 0.6  # inches, smallest side of a map
BAR_ROW_HEIGHT = 1.5  # inches, height of a row of bars
MAX_QUOTE = 40  # characters
MAX_TOKEN = 128  # characters that are shown of a token
MAX_WEIGHTS = 1 << 28  # attention weights of an answer whose missing ones are filled up
END_LABEL = "(end)"  # the label of the end of the text
SPACE_MARK = "␣"
BYTE_ALPHABET = byte_alphabet()
BYTE_LEVEL_MARKS = [letter for letter, byte in BYTE_ALPHABET.items() if byte in b" \n"]
METHOD_TITLES = {
    "attention": "attention",
    "attention_rollout": "attention rollout",
    "attention_flow": "attention flow",
    "gradient_x_input": "gradient × input",
    "integrated_gradients": "integrated gradients",
    "occlusion": "occlusion",
}
JsonObject = Mapping[str, Any]
FloatArray = NDArray[np.float32]


def draw_answer(answer: JsonObject) -> "Figure":
    """Draw an answer.  All its numbers are shown; of an alignment, the mean over heads."""
    with canvas.fixed_style():
        kinds = {entry["kind"]: entry for entry in answer.get("attention", ())}
        targets = answer.get("attributions", ())
        if "cross" in kinds:
            return draw_alignment(answer, kinds["cross"])
        if "rollout" in kinds or "flow" in kinds:
            return draw_rollout(answer, *kinds.values())
        if kinds:
            return draw_attention_maps(answer, next(iter(kinds.values())))
        if len(targets) > 1 or targets[0]["target"]["kind"] == "token":
            return draw_target_map(answer)
        return draw_token_bars(answer, targets[0])


def token_labels(answer: JsonObject, indexes: Sequence[int]) -> list[AxisLabel]:
    pieces = token_texts(answer)
    return [AxisLabel(escape_undrawable(pieces[index]), bool(answer["tokens"][index]["special"])) for index in indexes]


def token_texts(answer: JsonObject) -> list[str]:
    """Return the tokens' texts, or their beginnings: an answer repeats them for each row.  Byte-level pieces are
    decoded, with a mark for a space.
    """
    pieces = [str(token["token"])[:MAX_TOKEN] for token in answer["tokens"]]
    if not any(mark in piece for piece in pieces for mark in BYTE_LEVEL_MARKS):
        return pieces
    return [decode_piece(piece) if BYTE_ALPHABET.keys() >= set(piece) else piece for piece in pieces]


def decode_piece(piece: str) -> str:
    return bytes(BYTE_ALPHABET[letter] for letter in piece).decode("utf-8", "backslashreplace").replace(" ", SPACE_MARK)


def attention_weights(entry: JsonObject) -> FloatArray:
    """Return attention weights [L, H, Q, K] from any of the answer's encodings.  With `top`, missing weights are 0.

    Raises ModelError if the shape is not that of its layers, heads, rows and columns, or too large.
    """
    shape = [len(entry[name]) for name in ("layers", "heads", "rows", "columns")]
    if [*entry["shape"]] != shape or math.prod(shape) > MAX_WEIGHTS:
        stated = f"{str(entry['shape'])[:MAX_QUOTE]!r}"
        raise ModelError(f"the answer states weights of the shape {stated}, and has {shape}; {MAX_WEIGHTS} are read")
    if "top" not in entry:
        values = entry["values"]
        if isinstance(values, Mapping):
            values = np.frombuffer(base64.b64decode(values["data"]), np.dtype(values["dtype"]).newbyteorder("<"))
        return np.asarray(values, np.float32).reshape(entry["shape"])
    dense, columns = np.zeros(entry["shape"], np.float32), {index: at for at, index in enumerate(entry["columns"])}
    for layer, head, row in np.ndindex(*entry["shape"][:3]):
        for index, weight in entry["top"][layer][head][row]:
            dense[layer, head, row, columns[index]] = weight
    return dense


def add_model_title(figure: "Figure", answer: JsonObject, more: Sequence[str] = ()) -> "Figure":
    """Add the model's name and the method as a title, and lines as a caption."""
    return add_captions(figure, f"{answer['model']}: {METHOD_TITLES[answer['method']]}", more)


def add_captions(figure: "Figure", above: str, below: Sequence[str]) -> "Figure":
    """Add a title and a caption, wrapped to the figure's width."""
    letters = int(figure.get_figwidth() * 72 / (LABEL_POINTS * 0.6))
    title, *lines = (textwrap.fill(escape_undrawable(line), letters) for line in (above, *below))
    figure.suptitle(title, fontsize=LABEL_POINTS + 1, parse_math=False)
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=LABEL_POINTS, parse_math=False)
    return figure


def new_figure(width: float, height: float) -> "Figure":
    return Figure(figsize=(max(width, MIN_WIDTH), height), layout="constrained")


def draw_single_map(matrix: LabelledMatrix, scale: canvas.Scale, axis: tuple[str, str]) -> "Figure":
    """Draw one map; `axis` names its rows and its columns."""
    rows, columns = (canvas.cell_inches(count) for count in matrix.values.shape)
    height, width = matrix.values.shape[0] * rows, matrix.values.shape[1] * columns
    figure = new_figure(width + MARGIN + 0.6, max(height, 0.8) + MARGIN + 0.5)
    axes = figure.subplots()
    mapped = canvas.draw_matrix(axes, matrix, canvas.shared_norm([matrix.values], scale), scale)
    canvas.label_axis(axes, matrix.rows, "y", rows)
    canvas.label_axis(axes, matrix.columns, "x", columns)
    axes.set(ylabel=axis[0], xlabel=axis[1])
    canvas.add_colour_bar(figure, mapped, axes)
    return figure


def draw_alignment(answer: JsonObject, entry: JsonObject) -> "Figure":
    """Draw generated tokens over source tokens (Bahdanau et al. 2015, figure 3)."""
    mean = attention_weights(entry).mean((0, 1))
    matrix = LabelledMatrix(
        mean, next_token_labels(answer, entry["rows"]), token_labels(answer, entry["columns"]), "cross"
    )
    figure = draw_single_map(matrix, "share", ("written", "read"))
    return add_model_title(figure, answer, [f"cross-attention, {describe_heads(entry)}"])


def next_token_labels(answer: JsonObject, rows: Sequence[int]) -> list[AxisLabel]:
    """Return the label of the token after each row: a row's attention is used to predict the next token."""
    last = len(answer["tokens"]) - 1
    return [AxisLabel(END_LABEL, True) if row == last else token_labels(answer, [row + 1])[0] for row in rows]


def describe_heads(entry: JsonObject) -> str:
    layers, heads = entry["layers"], entry["heads"]
    if len(layers) == len(heads) == 1:
        return f"layer {layers[0]}, head {heads[0]}"
    return f"mean of heads {format_range(heads)} of layers {format_range(layers)}"


def format_range(numbers: Sequence[int]) -> str:
    """Format consecutive numbers as a range, others as a list."""
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def draw_rollout(answer: JsonObject, entry: JsonObject) -> "Figure":
    """Draw rollout or flow as a map, and below it the row of the predicting token (Abnar and Zuidema 2020,
    arXiv:2005.00928).
    """
    values, rows, columns = (
        attention_weights(entry)[0, 0],
        token_labels(answer, entry["rows"]),
        token_labels(answer, entry["columns"]),
    )
    inches = canvas.cell_inches(max(values.shape))
    height, width = values.shape[0] * inches, values.shape[1] * inches
    answering = answer_row(answer, entry)
    figure = new_figure(width + MARGIN + 0.6, height + MARGIN + 0.5 + (BAR_ROW_HEIGHT if len(answering) else 0))
    ratios = [max(height, 0.8), BAR_ROW_HEIGHT] if len(answering) else [1.0]
    grid = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    shared = canvas.shared_norm([values], "share")
    mapped = canvas.draw_matrix(grid[0], LabelledMatrix(values, rows, columns, entry["kind"]), shared, "share")
    canvas.label_axis(grid[0], rows, "y", inches)
    canvas.label_axis(grid[0], columns, "x", inches)
    canvas.add_colour_bar(figure, mapped, grid[0])
    if len(answering):
        canvas.draw_bars(grid[1], answering, columns, canvas.bar_colours(answering))
        grid[1].set(xlim=(0, len(answering)), ylabel="the predicting row")
    return add_model_title(figure, answer, ["rows attend to columns, through all layers"])


def answer_row(answer: JsonObject, entry: JsonObject) -> FloatArray:
    """Return the attributions of the predicting token for the columns of the map; empty if there are none."""
    if not answer.get("attributions"):
        return np.empty(0, np.float32)
    return np.asarray(answer["attributions"][0]["tokens"], np.float32)[entry["columns"]]


def draw_attention_maps(answer: JsonObject, entry: JsonObject) -> "Figure":
    """Draw one map per head, layers below each other; a large one if there is only one."""
    values, rows, columns = (
        attention_weights(entry),
        token_labels(answer, entry["rows"]),
        token_labels(answer, entry["columns"]),
    )
    depth, heads, _, count = values.shape
    if depth == heads == 1:
        figure = draw_single_map(LabelledMatrix(values[0, 0], rows, columns, map_name(entry, 0, 0)), "share", ("", ""))
        return add_model_title(figure, answer, [f"{describe_heads(entry)}: rows attend to columns"])
    inches = max(canvas.cell_inches(count * heads), MIN_MAP_SIDE / count)
    width, height = inches * count * heads, inches * len(rows) * depth
    figure = new_figure(width + MARGIN + 0.6, height + MARGIN + 0.15 * depth)
    grid = figure.subplots(depth, heads, squeeze=False)
    shared = canvas.shared_norm([values], "share")
    for layer, head in np.ndindex(depth, heads):
        axes = grid[layer, head]
        title = f"layer {entry['layers'][layer]}, head {entry['heads'][head]}"
        matrix = LabelledMatrix(values[layer, head], rows, columns, map_name(entry, layer, head), title, depth * heads)
        mapped = canvas.draw_matrix(axes, matrix, shared, "share")
        canvas.label_axis(axes, rows if head == 0 else (), "y", inches)
        canvas.label_axis(axes, columns if layer == depth - 1 else (), "x", inches)
    canvas.add_colour_bar(figure, mapped, grid)
    return add_model_title(figure, answer, ["rows attend to columns"])


def map_name(entry: JsonObject, layer: int, head: int) -> str:
    return f"{entry['kind']}-{entry['layers'][layer]}-{entry['heads'][head]}"


def draw_target_map(answer: JsonObject) -> "Figure":
    """Draw attributions of several targets as a map with a row for each."""
    every = answer["attributions"]
    values = np.asarray([each["tokens"] for each in every], np.float32)
    rows = [AxisLabel(escape_undrawable(target_label(answer, each["target"]))) for each in every]
    matrix = LabelledMatrix(values, rows, token_labels(answer, range(values.shape[1])), "attributions")
    figure = draw_single_map(matrix, "signed", ("target", "because of"))
    return add_model_title(figure, answer, describe_completeness(every))


def draw_token_bars(answer: JsonObject, each: JsonObject) -> "Figure":
    """Draw attributions of one target as bars, in as many rows as needed."""
    values = np.asarray(each["tokens"], np.float32)
    starts = range(0, max(len(values), 1), BARS_PER_ROW)
    longest = min(len(values), BARS_PER_ROW)
    figure = new_figure(longest * CELL_INCHES + 0.6, len(starts) * (BAR_ROW_HEIGHT + 0.5) + 0.8)
    shades, every = canvas.bar_colours(values), token_labels(answer, range(len(values)))
    lowest, highest = min(float(values.min(initial=0)), 0.0), max(float(values.max(initial=0)), 0.0)
    spare = (highest - lowest or 1.0) * 0.05
    for number, start in enumerate(starts):
        axes = figure.add_subplot(len(starts), 1, number + 1)
        line = slice(start, start + BARS_PER_ROW)
        canvas.draw_bars(axes, values[line], every[line], shades[line])
        axes.set(ylabel="attribution", xlim=(0, longest), ylim=(lowest - spare, highest + spare))
    return add_model_title(
        figure, answer, [describe_target_score(answer, each["target"]), *describe_completeness([each])]
    )


def describe_target_score(answer: JsonObject, target: JsonObject) -> str:
    """Describe the target with its score and its probability."""
    figures = [f"score {target['score']:.3f}"] if target.get("score") is not None else []
    if target.get("probability") is not None:
        figures.append(f"probability {target['probability']:.3f}")
    return f"{describe_target(answer, target)} ({', '.join(figures)})" if figures else describe_target(answer, target)


def describe_target(answer: JsonObject, target: JsonObject) -> str:
    match target["kind"]:
        case "label":
            return f"why {target['label']}"
        case "tag":
            return f"why “{token_texts(answer)[target['token']]}” is {target['label']}"
        case "span":
            return f"why the answer is “{shorten_quote(target['text'])}”"
        case "word":
            return f"why “{target['word']}” in the place of mask {target['mask']}"
        case "similarity":
            return f"why it is like “{shorten_quote(target['text'])}”"
        case "text":
            return "where the answer comes from"
        case _:
            return f"why “{token_texts(answer)[target['token']]}” was written"


def target_label(answer: JsonObject, target: JsonObject) -> str:
    """Return the target as an axis label."""
    return str(token_texts(answer)[target["token"]] if "token" in target else target.get("label") or target["text"])


def shorten_quote(text: str) -> str:
    return text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}…"


def describe_completeness(every: Sequence[JsonObject]) -> list[str]:
    """Say whether attributions add up to the change of the score (completeness, Sundararajan et al. 2017,
    arXiv:1703.01365).
    """
    results = [each["completeness"] for each in every if each.get("completeness")]
    if not results:
        return []
    worst = max(results, key=lambda each: abs(each["delta"]))
    line = f"attributions add up to the distance of scores from the baseline's, within {abs(worst['delta']):.2g}"
    if len(results) == 1:
        line = (
            f"attributions add up to {worst['sum']:.3f}, scores differ from the baseline's by {worst['difference']:.3f}"
        )
        line += f": delta {worst['delta']:.2g}"
    return [line if all(each["holds"] for each in results) else f"{line}; the difference is large, take more steps"]


def draw_importance(answer: JsonObject, name: str) -> "Figure":
    """Draw the importance of heads: a row per layer, a cell per head, a dot where it is significant."""
    heads = answer["heads"]
    parts = list(dict.fromkeys(head["part"] for head in heads))
    sizes = [max(head["layer"] for head in heads if head["part"] == part) + 1 for part in parts]
    widest = max(head["head"] for head in heads) + 1
    with canvas.fixed_style():
        figure = new_figure(widest * 2 * CELL_INCHES + MARGIN, sum(sizes) * 2 * CELL_INCHES + MARGIN + 0.4 * len(parts))
        grid = figure.subplots(len(parts), 1, squeeze=False, height_ratios=sizes)[:, 0]
        shared = canvas.shared_norm([np.array([head["importance"] for head in heads], np.float32)], "signed")
        for axes, part in zip(grid, parts, strict=True):
            mapped = draw_head_map(axes, [head for head in heads if head["part"] == part], shared)
            axes.set(ylabel="layer" if len(parts) == 1 else f"{part}, layer", xlabel="head")
        canvas.add_colour_bar(figure, mapped, grid)
        figures = ", ".join(f"{figure} {value:.3f}" for figure, value in answer["baseline"].items())
        below = [
            f"{describe_importance(answer)}; dots: more than three standard errors",
            f"as it is: {figures} ({answer['rows']} rows)",
        ]
        return add_captions(figure, f"{name}: importance of heads", below)


def short_name(source: str) -> str:
    """Return the last two parts of a path: many models share the name of their last folder."""
    return "/".join(Path(source).parts[-2:])


def describe_importance(answer: JsonObject) -> str:
    figure = "cross-entropy" if "cross-entropy" in answer["baseline"] else next(iter(answer["baseline"]))
    return f"{'rise' if figure == 'cross-entropy' else 'loss'} of {figure} without the head"


def draw_head_map(axes: Any, heads: Sequence[JsonObject], shared: Any) -> Any:
    """Draw the map of one part's heads."""
    depth, width = (max(head[name] for head in heads) + 1 for name in ("layer", "head"))
    values = np.zeros((depth, width), np.float32)
    for head in heads:
        values[head["layer"], head["head"]] = head["importance"]
    rows, columns = ([AxisLabel(str(number)) for number in range(count)] for count in (depth, width))
    mapped = canvas.draw_matrix(
        axes, LabelledMatrix(values, rows, columns, f"heads-{heads[0]['part']}"), shared, "signed"
    )
    canvas.label_axis(axes, rows, "y", 2 * CELL_INCHES)
    canvas.label_axis(axes, columns, "x", 2 * CELL_INCHES)
    axes.tick_params(axis="x", rotation=0)
    sure = [(head["head"] + 0.5, head["layer"] + 0.5) for head in heads if head["sure"]]
    axes.plot(*zip(*sure, strict=True), ".", color="black", markersize=2.5) if sure else None
    return mapped
