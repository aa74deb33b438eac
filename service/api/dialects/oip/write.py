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
from ....text.answer_spans import SpanAnswer
from ....text.detokenizer import AnswerDelta
from ....text.encoder_outputs import EncoderOutput, FillOutput, ScoreOutput, SpanOutput, TagOutput
from ...shared import pipeline_outputs as findings
from ...shared.hf_generation_write import finish_reason, list_tokens
from ...shared.streaming import dumps_sliced
from .tensors import OutputTensor, TensorBody, write_tensors
from .wire import HEAD_INPUTS, InferRequest, TextRequest

MODEL_VERSION = "1"  # a name has one model at a time
EXTENSIONS = ("binary_tensor_data", "generate")
NUMBER_BYTES, CHAR_BYTES, OVERHEAD_BYTES = 64, 5, 256  # bytes for each number, character and text of an answer
OutputBuilder = Callable[[Model, Sequence[Any]], list[OutputTensor]]


def float_matrix(name: str, rows: Sequence[NDArray[np.float64]]) -> OutputTensor:
    """[N, C]"""
    return OutputTensor(name, "FP32", (len(rows), len(rows[0])), np.concatenate(rows))


def float_vector(name: str, values: Sequence[float]) -> OutputTensor:
    return OutputTensor(name, "FP32", (len(values),), values)


def string_vector(name: str, values: Sequence[str]) -> OutputTensor:
    return OutputTensor(name, "BYTES", (len(values),), values)


# What is kept of each text's answer until all are there


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Numbers, and the name of the largest where they are labels'."""

    values: NDArray[np.float64]
    label: str = ""


@dataclass(frozen=True, slots=True)
class JsonRow:
    """What is found in a text, as JSON; of spans the `best` beside it."""

    text: str
    best: str = ""
    score: float = 0.0


def keep_reply(model: Model, reply: EncoderOutput) -> ScoreRow | JsonRow:
    match reply:
        case ScoreOutput(values=values):
            row = np.asarray(values, np.float64)
            return ScoreRow(row, model.labels[int(row.argmax())] if model.task == "classify" else "")
        case TagOutput(entities=found):
            return JsonRow(dump_json(map(findings.write_entity, found)))
        case SpanOutput(answers=spans):
            best = spans[0] if spans else SpanAnswer("", 0.0, 0, 0)
            return JsonRow(dump_json(map(findings.write_span, spans)), best.text, best.score)
        case FillOutput(masks=masks):
            return JsonRow(dump_json(findings.write_masks(masks)))
        case _:
            raise AssertionError("a head of this protocol answers otherwise")


def row_bytes(one: ScoreRow | JsonRow) -> int:
    """Bytes: as it is kept, gathered, and twice as JSON while that is put together."""
    match one:
        case ScoreRow():
            return OVERHEAD_BYTES + NUMBER_BYTES * len(one.values) + CHAR_BYTES * len(one.label)
        case JsonRow():
            return OVERHEAD_BYTES + CHAR_BYTES * (len(one.text) + len(one.best))


def dump_json(value: Any) -> str:
    return dumps_sliced(value).decode()


# What each head says


def build_classify_outputs(model: Model, rows: Sequence[ScoreRow]) -> list[OutputTensor]:  # noqa: ARG001
    return [
        float_matrix("probabilities", [one.values for one in rows]),
        string_vector("label", [one.label for one in rows]),
    ]


def build_rank_outputs(model: Model, rows: Sequence[ScoreRow]) -> list[OutputTensor]:  # noqa: ARG001
    return [float_vector("score", [float(one.values[0]) for one in rows])]


def build_embed_outputs(model: Model, rows: Sequence[ScoreRow]) -> list[OutputTensor]:  # noqa: ARG001
    return [float_matrix("embedding", [one.values for one in rows])]


def build_tag_outputs(model: Model, found: Sequence[JsonRow]) -> list[OutputTensor]:  # noqa: ARG001
    return [string_vector("entities", [one.text for one in found])]


def build_span_outputs(model: Model, found: Sequence[JsonRow]) -> list[OutputTensor]:  # noqa: ARG001
    return [
        string_vector("answers", [one.text for one in found]),
        string_vector("answer", [one.best for one in found]),
        float_vector("score", [one.score for one in found]),
    ]


def build_fill_outputs(model: Model, found: Sequence[JsonRow]) -> list[OutputTensor]:  # noqa: ARG001
    return [string_vector("words", [one.text for one in found])]


def build_generate_outputs(model: Model, replies: Sequence[AnswerDelta]) -> list[OutputTensor]:  # noqa: ARG001
    return [
        string_vector("text", [one.text for one in replies]),
        string_vector("finish_reason", [one.finish for one in replies]),
    ]


OUTPUT_BUILDERS: Mapping[Task, OutputBuilder] = {
    "classify": build_classify_outputs,
    "rank": build_rank_outputs,
    "embed": build_embed_outputs,
    "tag": build_tag_outputs,
    "span": build_span_outputs,
    "fill": build_fill_outputs,
    "generate": build_generate_outputs,
}


def describe_outputs(model: Model) -> dict[str, tuple[str, list[int]]]:
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
    there = describe_outputs(model)
    for index, wanted in enumerate(wire.outputs):
        if wanted.name not in there:
            where = f"outputs[{index}].name"
            message = f"{where}: {model.name} has no output {wanted.name!r}; it has {', '.join(there)}"
            raise BadRequest(message, param=where)


def write_infer(wire: InferRequest, model: Model, replies: Sequence[Any]) -> TensorBody:
    """The outputs that are wanted, in that order; all, if none is named."""
    said = {tensor.name: tensor for tensor in OUTPUT_BUILDERS[model.task](model, replies)}
    wanted = list(dict.fromkeys(one.name for one in wire.outputs)) or list(said)
    return write_tensors(write_envelope(wire, model), [said[name] for name in wanted], select_binary(wire, wanted))


def select_binary(wire: InferRequest, wanted: Sequence[str]) -> frozenset[str]:
    """What an output says of itself goes before what the request says of all."""
    said = {
        one.name: one.parameters.binary_data for one in wire.outputs if "binary_data" in one.parameters.model_fields_set
    }
    return frozenset(name for name in wanted if said.get(name, wire.parameters.binary_data_output))


def write_text_response(wire: TextRequest, model: Model, replies: Sequence[AnswerDelta]) -> dict[str, Any]:
    """Several answers are lists, as tensors of several numbers are there."""
    every: dict[str, list[Any]] = {
        "text_output": [one.text for one in replies],
        "finish_reason": [one.finish for one in replies],
    }
    if wire.options.details:
        every["details"] = [
            {"finish_reason": finish_reason(one), "logprobs": list_tokens(model, one)} for one in replies
        ]
    return write_envelope(wire, model) | (
        every if len(replies) > 1 else {name: said[0] for name, said in every.items()}
    )


def write_text_chunk(wire: TextRequest, model: Model, piece: AnswerDelta) -> dict[str, Any]:
    """The last says so, and why it ends."""
    end = {"finish_reason": piece.finish} if piece.finish else {}
    return write_envelope(wire, model) | {"text_output": piece.text, "done": bool(piece.finish), **end}


def write_envelope(wire: InferRequest | TextRequest, model: Model) -> dict[str, Any]:
    return {"model_name": model.name, "model_version": MODEL_VERSION, **({"id": wire.id} if wire.id else {})}


def write_server(extensions: Sequence[str]) -> dict[str, Any]:
    return {"name": "polyhead", "version": VERSION, "extensions": [*EXTENSIONS, *extensions]}


def write_oip_model(model: Model) -> dict[str, Any]:
    """`labels`, ours, are in the order of the columns of probabilities."""
    outputs = describe_outputs(model).items()
    return {
        "name": model.name,
        "versions": [MODEL_VERSION],
        "platform": "polyhead",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in HEAD_INPUTS[model.task].names],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in outputs],
        "parameters": {"task": model.task, "max_tokens": model.max_tokens, "labels": list(model.labels)},
    }


def write_oip_error(error: PolyheadError) -> dict[str, Any]:
    return {"error": error.message}
