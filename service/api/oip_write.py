"""What the Open Inference Protocol answers: each head's output tensors, descriptions of models, and errors.

Knows no engine.  The one idea: a number a text, or a row of them, is a tensor of numbers; what is found in a text is
JSON, a string a text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from service.answers import Found, Guessed, Scores, Tagged
from service.api import findings
from service.api.generation_write import reason, tokens
from service.api.oip_tensors import Body, Tensor, written
from service.api.oip_wire import TAKES, InferRequest, TextRequest
from service.errors import BadRequest, PolyheadError
from service.model import Model
from service.request import Task
from service.transcript import Piece
from service.version import VERSION

MODEL_VERSION = "1"  # a name has one model at a time
EXTENSIONS = ("binary_tensor_data", "generate")
Outputs = Callable[[Model, Sequence[Any]], list[Tensor]]


def floats(name: str, rows: Sequence[Sequence[float]]) -> Tensor:
    """[N, C]"""
    return Tensor(name, "FP32", (len(rows), len(rows[0])), [value for row in rows for value in row])


def numbers(name: str, values: Sequence[float]) -> Tensor:
    return Tensor(name, "FP32", (len(values),), values)


def strings(name: str, values: Sequence[str]) -> Tensor:
    return Tensor(name, "BYTES", (len(values),), values)


def spelled(values: Sequence[Any]) -> list[str]:
    return [orjson.dumps(value).decode() for value in values]


# What each head says


def classified(model: Model, replies: Sequence[Scores]) -> list[Tensor]:
    best = [model.labels[max(range(len(one.values)), key=one.values.__getitem__)] for one in replies]
    return [floats("probabilities", [one.values for one in replies]), strings("label", best)]


def ranked(model: Model, replies: Sequence[Scores]) -> list[Tensor]:  # noqa: ARG001
    return [numbers("score", [one.values[0] for one in replies])]


def embedded(model: Model, replies: Sequence[Scores]) -> list[Tensor]:  # noqa: ARG001
    return [floats("embedding", [one.values for one in replies])]


def labelled(model: Model, replies: Sequence[Tagged]) -> list[Tensor]:  # noqa: ARG001
    return [strings("entities", spelled([[findings.entity(each) for each in one.entities] for one in replies]))]


def answered(model: Model, replies: Sequence[Found]) -> list[Tensor]:  # noqa: ARG001
    best = [one.answers[0] if one.answers else None for one in replies]
    return [
        strings("answers", spelled([[findings.span(each) for each in one.answers] for one in replies])),
        strings("answer", [one.text if one else "" for one in best]),
        numbers("score", [one.score if one else 0.0 for one in best]),
    ]


def filled(model: Model, replies: Sequence[Guessed]) -> list[Tensor]:  # noqa: ARG001
    return [strings("words", spelled([findings.words(one.masks) for one in replies]))]


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
