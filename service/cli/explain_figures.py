"""What POST /v1/explain answers, as a figure for a paper: `drawn(answer)`.

Knows the answer's fields and nothing of models, requests or files (service.cli.plotting has those).  The one idea:
what was asked decides the form.  Weights are maps, rows looking at columns; attributions of one target are bars, a
bar a token; those of many, of which each is a token that was written, are a map again; an encoder-decoder's are its
alignment."""

import base64
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyhead.models.tokenizer.token_text import byte_alphabet

from . import plotting as canvas
from .plotting import CELL, LABEL, PRESENT, Label, Matrix, spelled

if PRESENT:
    from matplotlib.figure import Figure

NARROWEST = 3.4  # inches: a column of a paper
MARGIN = 1.0  # for labels, beside or below what is drawn
LINE = 60  # bars side by side
LEAST_MAP = 0.6  # inches of the side of a small map
BAR = 1.5  # inches of a row of bars
LONGEST_QUOTE = 40  # characters
END = "(end)"  # what is written when nothing more is
SPACE = "␣"
ALPHABET = byte_alphabet()
DISGUISED = [letter for letter, byte in ALPHABET.items() if byte in b" \n"]
METHODS = {
    "attention": "attention",
    "attention_rollout": "attention rollout",
    "attention_flow": "attention flow",
    "gradient_x_input": "gradient × input",
    "integrated_gradients": "integrated gradients",
    "occlusion": "occlusion",
}
Told = Mapping[str, Any]
Numbers = NDArray[np.float32]


def drawn(told: Told) -> "Figure":
    """Every number of the answer, but of alignments the mean of the heads that it has."""
    with canvas.styled():
        kinds = {entry["kind"]: entry for entry in told.get("attention", ())}
        targets = told.get("attributions", ())
        if "cross" in kinds:
            return alignment(told, kinds["cross"])
        if "rollout" in kinds or "flow" in kinds:
            return through_layers(told, *kinds.values())
        if kinds:
            return maps(told, next(iter(kinds.values())))
        if len(targets) > 1 or targets[0]["target"]["kind"] == "token":
            return of_each(told)
        return of_one(told, targets[0])


def labels(told: Told, indexes: Sequence[int]) -> list[Label]:
    pieces = texts(told)
    return [Label(spelled(pieces[index]), bool(told["tokens"][index]["special"])) for index in indexes]


def texts(told: Told) -> list[str]:
    """What tokens stand for, with a mark for a space: pieces that are bytes in disguise cannot be read."""
    pieces = [str(token["token"]) for token in told["tokens"]]
    if not any(mark in piece for piece in pieces for mark in DISGUISED):
        return pieces
    return [unmasked(piece) if ALPHABET.keys() >= set(piece) else piece for piece in pieces]


def unmasked(piece: str) -> str:
    return bytes(ALPHABET[letter] for letter in piece).decode("utf-8", "backslashreplace").replace(" ", SPACE)


def weights(entry: Told) -> Numbers:
    """[L, H, Q, K], however they were asked for; of those of which only the largest were, the others are 0."""
    if "top" not in entry:
        values = entry["values"]
        if isinstance(values, Mapping):
            values = np.frombuffer(base64.b64decode(values["data"]), np.dtype(values["dtype"]).newbyteorder("<"))
        return np.asarray(values, np.float32).reshape(entry["shape"])
    found, places = np.zeros(entry["shape"], np.float32), {index: at for at, index in enumerate(entry["columns"])}
    for layer, head, row in np.ndindex(*entry["shape"][:3]):
        for index, weight in entry["top"][layer][head][row]:
            found[layer, head, row, places[index]] = weight
    return found


def titled(figure: "Figure", told: Told, more: Sequence[str] = ()) -> "Figure":
    """Whose answer it is above, what there is to say of it below."""
    return around(figure, f"{told['model']}: {METHODS[told['method']]}", more)


def around(figure: "Figure", above: str, below: Sequence[str]) -> "Figure":
    """A title and a caption, in lines that have room."""
    letters = int(figure.get_figwidth() * 72 / (LABEL * 0.6))
    title, *lines = (textwrap.fill(spelled(line), letters) for line in (above, *below))
    figure.suptitle(title, fontsize=LABEL + 1, parse_math=False)
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=LABEL, parse_math=False)
    return figure


def canvas_of(width: float, height: float) -> "Figure":
    return Figure(figsize=(max(width, NARROWEST), height), layout="constrained")


def single(shown: Matrix, scale: canvas.Scale, axis: tuple[str, str]) -> "Figure":
    """One map; `axis` says what its rows and its columns are."""
    rows, columns = (canvas.cell(count) for count in shown.values.shape)
    height, width = shown.values.shape[0] * rows, shown.values.shape[1] * columns
    figure = canvas_of(width + MARGIN + 0.6, max(height, 0.8) + MARGIN + 0.5)
    axes = figure.subplots()
    mapped = canvas.matrix(axes, shown, canvas.norm([shown.values], scale), scale)
    canvas.across(axes, shown.rows, "y", rows)
    canvas.across(axes, shown.columns, "x", columns)
    axes.set(ylabel=axis[0], xlabel=axis[1])
    canvas.explain(figure, mapped, axes)
    return figure


def alignment(told: Told, entry: Told) -> "Figure":
    """What was written over what was read (Bahdanau et al. 2015, figure 3)."""
    mean = weights(entry).mean((0, 1))
    shown = Matrix(mean, following(told, entry["rows"]), labels(told, entry["columns"]), "cross")
    figure = single(shown, "share", ("written", "read"))
    return titled(figure, told, [f"cross-attention, {of_heads(entry)}"])


def following(told: Told, rows: Sequence[int]) -> list[Label]:
    """Who looks from a token's row does so to write the next one."""
    last = len(told["tokens"]) - 1
    return [Label(END, True) if row == last else labels(told, [row + 1])[0] for row in rows]


def of_heads(entry: Told) -> str:
    layers, heads = entry["layers"], entry["heads"]
    if len(layers) == len(heads) == 1:
        return f"layer {layers[0]}, head {heads[0]}"
    return f"mean of heads {listed(heads)} of layers {listed(layers)}"


def listed(numbers: Sequence[int]) -> str:
    """Neighbours as a range."""
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def through_layers(told: Told, entry: Told) -> "Figure":
    """The matrix, and below it the row of the token that answers (Abnar and Zuidema 2020, arXiv:2005.00928)."""
    values, rows, columns = weights(entry)[0, 0], labels(told, entry["rows"]), labels(told, entry["columns"])
    inches = canvas.cell(max(values.shape))
    height, width = values.shape[0] * inches, values.shape[1] * inches
    answering = answered(told, entry)
    figure = canvas_of(width + MARGIN + 0.6, height + MARGIN + 0.5 + (BAR if len(answering) else 0))
    ratios = [max(height, 0.8), BAR] if len(answering) else [1.0]
    grid = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    shared = canvas.norm([values], "share")
    mapped = canvas.matrix(grid[0], Matrix(values, rows, columns, entry["kind"]), shared, "share")
    canvas.across(grid[0], rows, "y", inches)
    canvas.across(grid[0], columns, "x", inches)
    canvas.explain(figure, mapped, grid[0])
    if len(answering):
        canvas.bars(grid[1], answering, columns, canvas.shades(answering))
        grid[1].set(xlim=(0, len(answering)), ylabel="the row that answers")
    return titled(figure, told, ["rows look at columns, through all layers"])


def answered(told: Told, entry: Told) -> Numbers:
    """The row of the token that answers, over the columns of the matrix."""
    if not told.get("attributions"):
        return np.empty(0, np.float32)
    return np.asarray(told["attributions"][0]["tokens"], np.float32)[entry["columns"]]


def maps(told: Told, entry: Told) -> "Figure":
    """One map a head, layers below each other; of one head a large one."""
    values, rows, columns = weights(entry), labels(told, entry["rows"]), labels(told, entry["columns"])
    depth, heads, _, count = values.shape
    if depth == heads == 1:
        figure = single(Matrix(values[0, 0], rows, columns, name_of(entry, 0, 0)), "share", ("", ""))
        return titled(figure, told, [f"{of_heads(entry)}: rows look at columns"])
    inches = max(canvas.cell(count * heads), LEAST_MAP / count)
    width, height = inches * count * heads, inches * len(rows) * depth
    figure = canvas_of(width + MARGIN + 0.6, height + MARGIN + 0.15 * depth)
    grid = figure.subplots(depth, heads, squeeze=False)
    shared = canvas.norm([values], "share")
    for layer, head in np.ndindex(depth, heads):
        axes = grid[layer, head]
        title = f"layer {entry['layers'][layer]}, head {entry['heads'][head]}"
        shown = Matrix(values[layer, head], rows, columns, name_of(entry, layer, head), title, depth * heads)
        mapped = canvas.matrix(axes, shown, shared, "share")
        canvas.across(axes, rows if head == 0 else (), "y", inches)
        canvas.across(axes, columns if layer == depth - 1 else (), "x", inches)
    canvas.explain(figure, mapped, grid)
    return titled(figure, told, ["rows look at columns"])


def name_of(entry: Told, layer: int, head: int) -> str:
    return f"{entry['kind']}-{entry['layers'][layer]}-{entry['heads'][head]}"


def of_each(told: Told) -> "Figure":
    """A row for each token that was written, or other target."""
    every = told["attributions"]
    values = np.asarray([each["tokens"] for each in every], np.float32)
    rows = [Label(spelled(short(told, each["target"]))) for each in every]
    shown = Matrix(values, rows, labels(told, range(values.shape[1])), "attributions")
    figure = single(shown, "signed", ("written", "because of"))
    return titled(figure, told, complete(every))


def of_one(told: Told, each: Told) -> "Figure":
    """A bar a token, in as many rows as it takes."""
    values = np.asarray(each["tokens"], np.float32)
    starts = range(0, max(len(values), 1), LINE)
    longest = min(len(values), LINE)
    figure = canvas_of(longest * CELL + 0.6, len(starts) * (BAR + 0.5) + 0.8)
    shades, every = canvas.shades(values), labels(told, range(len(values)))
    lowest, highest = min(float(values.min(initial=0)), 0.0), max(float(values.max(initial=0)), 0.0)
    spare = (highest - lowest or 1.0) * 0.05
    for number, start in enumerate(starts):
        axes = figure.add_subplot(len(starts), 1, number + 1)
        line = slice(start, start + LINE)
        canvas.bars(axes, values[line], every[line], shades[line])
        axes.set(ylabel="attribution", xlim=(0, longest), ylim=(lowest - spare, highest + spare))
    return titled(figure, told, [said(told, each["target"]), *complete([each])])


def said(told: Told, target: Told) -> str:
    """What is explained, and how sure the model is of it."""
    figures = [f"score {target['score']:.3f}"] if target.get("score") is not None else []
    if target.get("probability") is not None:
        figures.append(f"probability {target['probability']:.3f}")
    return f"{named(told, target)} ({', '.join(figures)})" if figures else named(told, target)


def named(told: Told, target: Told) -> str:
    match target["kind"]:
        case "label":
            return f"why {target['label']}"
        case "tag":
            return f"why “{texts(told)[target['token']]}” is {target['label']}"
        case "span":
            return f"why the answer is “{quoted(target['text'])}”"
        case "word":
            return f"why “{target['word']}” in the place of mask {target['mask']}"
        case "similarity":
            return f"why it is like “{quoted(target['text'])}”"
        case "text":
            return "where the answer comes from"
        case _:
            return f"why “{texts(told)[target['token']]}” was written"


def short(told: Told, target: Told) -> str:
    """The same as a label."""
    return str(texts(told)[target["token"]] if "token" in target else target.get("label") or target["text"])


def quoted(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def complete(every: Sequence[Told]) -> list[str]:
    """Whether attributions add up to what they are to explain (Sundararajan et al. 2017, arXiv:1703.01365)."""
    found = [each["completeness"] for each in every if each.get("completeness")]
    if not found:
        return []
    worst = max(found, key=lambda each: abs(each["delta"]))
    line = f"attributions add up to the distance of scores from the baseline's, within {abs(worst['delta']):.2g}"
    if len(found) == 1:
        line = (
            f"attributions add up to {worst['sum']:.3f}, scores differ from the baseline's by {worst['difference']:.3f}"
        )
        line += f": delta {worst['delta']:.2g}"
    return [line if all(each["holds"] for each in found) else f"{line}; that is too much, take more steps"]


def important(told: Told, name: str) -> "Figure":
    """What service.cli.head_importance found: layers below each other, a cell a head, a dot where it is more than
    chance.
    """
    heads = told["heads"]
    parts = list(dict.fromkeys(head["part"] for head in heads))
    sizes = [max(head["layer"] for head in heads if head["part"] == part) + 1 for part in parts]
    widest = max(head["head"] for head in heads) + 1
    with canvas.styled():
        figure = canvas_of(widest * 2 * CELL + MARGIN, sum(sizes) * 2 * CELL + MARGIN + 0.4 * len(parts))
        grid = figure.subplots(len(parts), 1, squeeze=False, height_ratios=sizes)[:, 0]
        shared = canvas.norm([np.array([head["importance"] for head in heads], np.float32)], "signed")
        for axes, part in zip(grid, parts, strict=True):
            mapped = map_of(axes, [head for head in heads if head["part"] == part], shared)
            axes.set(ylabel="layer" if len(parts) == 1 else f"{part}, layer", xlabel="head")
        canvas.explain(figure, mapped, grid)
        figures = ", ".join(f"{figure} {value:.3f}" for figure, value in told["baseline"].items())
        below = [f"{what(told)}; dots: more than three standard errors", f"as it is: {figures} ({told['rows']} rows)"]
        return around(figure, f"{name}: importance of heads", below)


def short_name(source: str) -> str:
    """The end of a path, whose last folder many call by the same name."""
    return "/".join(Path(source).parts[-2:])


def what(told: Told) -> str:
    figure = "cross-entropy" if "cross-entropy" in told["baseline"] else next(iter(told["baseline"]))
    return f"{'rise' if figure == 'cross-entropy' else 'loss'} of {figure} without the head"


def map_of(axes: Any, heads: Sequence[Told], shared: Any) -> Any:
    """The map of one part's heads."""
    depth, width = (max(head[name] for head in heads) + 1 for name in ("layer", "head"))
    values = np.zeros((depth, width), np.float32)
    for head in heads:
        values[head["layer"], head["head"]] = head["importance"]
    rows, columns = ([Label(str(number)) for number in range(count)] for count in (depth, width))
    mapped = canvas.matrix(axes, Matrix(values, rows, columns, f"heads-{heads[0]['part']}"), shared, "signed")
    canvas.across(axes, rows, "y", 2 * CELL)
    canvas.across(axes, columns, "x", 2 * CELL)
    axes.tick_params(axis="x", rotation=0)
    sure = [(head["head"] + 0.5, head["layer"] + 0.5) for head in heads if head["sure"]]
    axes.plot(*zip(*sure, strict=True), ".", color="black", markersize=2.5) if sure else None
    return mapped
