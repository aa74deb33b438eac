"""What the Open Inference Protocol answers: each head's output tensors, descriptions of models, and errors.

Knows no engine.  The one idea: a number a text, or a row of them, is a tensor of numbers; what is found in a text is
JSON, a string a text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.errors import BadRequest, PolyheadError
from ....core.model import Model
from ....core.request import Task
from ....core.version import VERSION
from ....text.answer_spans import Answer
from ....text.detokenizer import Piece
from ....text.pipelines import Found, Guessed, Reply, Scores, Tagged
from ...shared import pipeline_outputs as findings
from ...shared.hf_generation_write import reason, tokens
from ...shared.streaming import dumps_sliced
from .tensors import Body, Tensor, written
from .wire import TAKES, InferRequest, TextRequest

MODEL_VERSION = "1"  # a name has one model at a time
EXTENSIONS = ("binary_tensor_data", "generate")
NUMBER_JSON, STRING_JSON, BESIDE = 64, 5, 256  # bytes for each number, character and text of an answer
Outputs = Callable[[Model, Sequence[Any]], list[Tensor]]


def floats(name: str, rows: Sequence[NDArray[np.float64]]) -> Tensor:
    """[N, C]"""
    return Tensor(name, "FP32", (len(rows), len(rows[0])), np.concatenate(rows))


def numbers(name: str, values: Sequence[float]) -> Tensor:
    return Tensor(name, "FP32", (len(values),), values)


def strings(name: str, values: Sequence[str]) -> Tensor:
    return Tensor(name, "BYTES", (len(values),), values)


# What is kept of each text's answer until all are there


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers, and the name of the largest where they are labels'."""

    values: NDArray[np.float64]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Spelled:
    """What is found in a text, as JSON; of spans the `best` beside it."""

    text: str
    best: str = ""
    score: float = 0.0


def kept(model: Model, reply: Reply) -> Row | Spelled:
    match reply:
        case Scores(values=values):
            row = np.asarray(values, np.float64)
            return Row(row, model.labels[int(row.argmax())] if model.task == "classify" else "")
        case Tagged(entities=found):
            return Spelled(spelled(map(findings.entity, found)))
        case Found(answers=spans):
            best = spans[0] if spans else Answer("", 0.0, 0, 0)
            return Spelled(spelled(map(findings.span, spans)), best.text, best.score)
        case Guessed(masks=masks):
            return Spelled(spelled(findings.words(masks)))
        case _:
            raise AssertionError("a head of this protocol answers otherwise")


def weight(one: Row | Spelled) -> int:
    """Bytes: as it is kept, gathered, and twice as JSON while that is put together."""
    match one:
        case Row():
            return BESIDE + NUMBER_JSON * len(one.values) + STRING_JSON * len(one.label)
        case Spelled():
            return BESIDE + STRING_JSON * (len(one.text) + len(one.best))


def spelled(value: Any) -> str:
    return dumps_sliced(value).decode()


# What each head says


def classified(model: Model, rows: Sequence[Row]) -> list[Tensor]:  # noqa: ARG001
    return [floats("probabilities", [one.values for one in rows]), strings("label", [one.label for one in rows])]


def ranked(model: Model, rows: Sequence[Row]) -> list[Tensor]:  # noqa: ARG001
    return [numbers("score", [float(one.values[0]) for one in rows])]


def embedded(model: Model, rows: Sequence[Row]) -> list[Tensor]:  # noqa: ARG001
    return [floats("embedding", [one.values for one in rows])]


def labelled(model: Model, found: Sequence[Spelled]) -> list[Tensor]:  # noqa: ARG001
    return [strings("entities", [one.text for one in found])]


def answered(model: Model, found: Sequence[Spelled]) -> list[Tensor]:  # noqa: ARG001
    return [
        strings("answers", [one.text for one in found]),
        strings("answer", [one.best for one in found]),
        numbers("score", [one.score for one in found]),
    ]


def filled(model: Model, found: Sequence[Spelled]) -> list[Tensor]:  # noqa: ARG001
    return [strings("words", [one.text for one in found])]


def generated(model: Model, replies: Sequence[Piece]) -> list[Tensor]:  # noqa: ARG001
    return [strings("text", [one.text for one in replies]), strings("finish_reason", [one.finish for one in replies])]


SAYS: Mapping[Task, Outputs] = {
    "classify": classified,
    "rank": ranked,
    "embed": embedded,
    "tag": labelled,
    "span": answered,
    "fill": filled,
    "generate": generated,
}


def outputs_of(model: Model) -> dict[str, tuple[str, list[int]]]:
    """Datatype and shape of each output; -1 is the number of texts."""
    rows = {"classify": ("probabilities", len(model.labels)), "embed": ("embedding", model.width)}
    match model.task:
        case "classify" | "embed":
            name, width = rows[model.task]
            label = {"label": ("BYTES", [-1])} if model.task == "classify" else {}
            return {name: ("FP32", [-1, width]), **label}
        case "rank":
            return {"score": ("FP32", [-1])}
        case "tag":
            return {"entities": ("BYTES", [-1])}
        case "span":
            return {"answers": ("BYTES", [-1]), "answer": ("BYTES", [-1]), "score": ("FP32", [-1])}
        case "fill":
            return {"words": ("BYTES", [-1])}
        case "generate":
            return {"text": ("BYTES", [-1]), "finish_reason": ("BYTES", [-1])}


# What is written


def check_outputs(wire: InferRequest, model: Model) -> None:
    """Raises BadRequest for what the model does not say, before it is asked."""
    there = outputs_of(model)
    for index, wanted in enumerate(wire.outputs):
        if wanted.name not in there:
            where = f"outputs[{index}].name"
            message = f"{where}: {model.name} has no output {wanted.name!r}; it has {', '.join(there)}"
            raise BadRequest(message, param=where)


def write(wire: InferRequest, model: Model, replies: Sequence[Any]) -> Body:
    """The outputs that are wanted, in that order; all, if none is named."""
    said = {tensor.name: tensor for tensor in SAYS[model.task](model, replies)}
    wanted = list(dict.fromkeys(one.name for one in wire.outputs)) or list(said)
    return written(envelope(wire, model), [said[name] for name in wanted], binary_of(wire, wanted))


def binary_of(wire: InferRequest, wanted: Sequence[str]) -> frozenset[str]:
    """What an output says of itself goes before what the request says of all."""
    said = {
        one.name: one.parameters.binary_data for one in wire.outputs if "binary_data" in one.parameters.model_fields_set
    }
    return frozenset(name for name in wanted if said.get(name, wire.parameters.binary_data_output))


def write_text(wire: TextRequest, model: Model, replies: Sequence[Piece]) -> dict[str, Any]:
    """Several answers are lists, as tensors of several numbers are there."""
    every: dict[str, list[Any]] = {
        "text_output": [one.text for one in replies],
        "finish_reason": [one.finish for one in replies],
    }
    if wire.options.details:
        every["details"] = [{"finish_reason": reason(one), "logprobs": tokens(model, one)} for one in replies]
    return envelope(wire, model) | (every if len(replies) > 1 else {name: said[0] for name, said in every.items()})


def chunk_text(wire: TextRequest, model: Model, piece: Piece) -> dict[str, Any]:
    """The last says so, and why it ends."""
    end = {"finish_reason": piece.finish} if piece.finish else {}
    return envelope(wire, model) | {"text_output": piece.text, "done": bool(piece.finish), **end}


def envelope(wire: InferRequest | TextRequest, model: Model) -> dict[str, Any]:
    return {"model_name": model.name, "model_version": MODEL_VERSION, **({"id": wire.id} if wire.id else {})}


def write_server(extensions: Sequence[str]) -> dict[str, Any]:
    return {"name": "polyhead", "version": VERSION, "extensions": [*EXTENSIONS, *extensions]}


def write_model(model: Model) -> dict[str, Any]:
    """`labels`, ours, are in the order of the columns of probabilities."""
    outputs = outputs_of(model).items()
    return {
        "name": model.name,
        "versions": [MODEL_VERSION],
        "platform": "polyhead",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in TAKES[model.task].names],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in outputs],
        "parameters": {"task": model.task, "max_tokens": model.max_tokens, "labels": list(model.labels)},
    }


def write_error(error: PolyheadError) -> dict[str, Any]:
    return {"error": error.message}
