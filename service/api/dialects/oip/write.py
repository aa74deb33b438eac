"""Writes the responses of the Open Inference Protocol: output tensors of each head, model metadata, and errors.

Scores are tensors of numbers.  Results found in a text, such as entities, are one JSON string for each text.
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
from ....metrics.inference_counts import Duration, InferenceCounts
from ....text.answer_delta import AnswerDelta
from ....text.answer_spans import SpanAnswer
from ....text.encoder_outputs import EncoderOutput, FillOutput, ScoreOutput, SpanOutput, TagOutput
from ...shared import pipeline_outputs
from ...shared.hf_generation_write import finish_reason, list_tokens
from ...shared.streaming import dumps_sliced
from .tensors import OutputTensor, TensorBody, write_tensors
from .wire import HEAD_INPUTS, InferRequest, TextRequest

MODEL_VERSION = "1"  # each name has one model at a time
EXTENSIONS = (
    *("binary_tensor_data", "classification", "generate", "model_configuration"),
    *("schedule_policy", "statistics"),
)
CLASS_BYTES = 64  # bytes of the value and the index of a class, as a text
CONFIG_TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32"}  # Triton's names in configurations
NUMBER_BYTES, CHAR_BYTES, OVERHEAD_BYTES = 64, 5, 256  # bytes for each number, character and text of an answer
OutputBuilder = Callable[[Model, Sequence[Any]], list[OutputTensor]]


def float_matrix(name: str, rows: Sequence[NDArray[np.float64]]) -> OutputTensor:
    """[N, C]"""
    return OutputTensor(name, "FP32", (len(rows), len(rows[0])), np.concatenate(rows))


def float_vector(name: str, values: Sequence[float]) -> OutputTensor:
    return OutputTensor(name, "FP32", (len(values),), values)


def string_vector(name: str, values: Sequence[str]) -> OutputTensor:
    return OutputTensor(name, "BYTES", (len(values),), values)


# What is kept of each text's answer until all are complete


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Numbers, and the label with the highest score for classifiers."""

    values: NDArray[np.float64]
    label: str = ""


@dataclass(frozen=True, slots=True)
class JsonRow:
    """Results in one text as JSON; for answer spans also the `best` one."""

    text: str
    best: str = ""
    score: float = 0.0


def keep_reply(model: Model, reply: EncoderOutput) -> ScoreRow | JsonRow:
    match reply:
        case ScoreOutput(values=values):
            row = np.asarray(values, np.float64)
            return ScoreRow(row, model.labels[int(row.argmax())] if model.task == "classify" else "")
        case TagOutput(entities=found):
            return JsonRow(dump_json(map(pipeline_outputs.write_entity, found)))
        case SpanOutput(answers=spans):
            best = spans[0] if spans else SpanAnswer("", 0.0, 0, 0)
            return JsonRow(dump_json(map(pipeline_outputs.write_span, spans)), best.text, best.score)
        case FillOutput(masks=masks):
            return JsonRow(dump_json(pipeline_outputs.write_masks(masks)))
        case _:
            raise AssertionError("no output for this kind of reply")


def row_bytes(one: ScoreRow | JsonRow) -> int:
    """Bytes of a row: as it is kept, and as JSON, which exists twice while it is joined."""
    match one:
        case ScoreRow():
            return OVERHEAD_BYTES + NUMBER_BYTES * len(one.values) + CHAR_BYTES * len(one.label)
        case JsonRow():
            return OVERHEAD_BYTES + CHAR_BYTES * (len(one.text) + len(one.best))


def dump_json(value: Any) -> str:
    return dumps_sliced(value).decode()


# The outputs of each head


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
    "choose": build_rank_outputs,
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
        case "rank" | "choose":
            return {"score": ("FP32", [-1])}
        case "tag":
            return {"entities": ("BYTES", [-1])}
        case "span":
            return {"answers": ("BYTES", [-1]), "answer": ("BYTES", [-1]), "score": ("FP32", [-1])}
        case "fill":
            return {"words": ("BYTES", [-1])}
        case "generate":
            return {"text": ("BYTES", [-1]), "finish_reason": ("BYTES", [-1])}
        case "label_spans" | "label_texts" | "decide":
            return {}  # a request has no tensor of labels, or of questions


# Writing


def check_outputs(wire: InferRequest, model: Model) -> None:
    """Raises BadRequest if the model does not have a requested output."""
    outputs = describe_outputs(model)
    for index, output in enumerate(wire.outputs):
        if output.name not in outputs:
            where = f"outputs[{index}].name"
            message = f"{where}: {model.name} has no output {output.name!r}; it has {', '.join(outputs)}"
            raise BadRequest(message, param=where)
        datatype, shape = outputs[output.name]
        if output.parameters.classification and (datatype != "FP32" or len(shape) != 2):
            where = f"outputs[{index}].parameters.classification"
            raise BadRequest(f"{where}: only of an output with a row of numbers for each text", param=where)


def class_counts(wire: InferRequest) -> dict[str, int]:
    """The outputs that are answered as classes, and how many of each row."""
    return {one.name: one.parameters.classification for one in wire.outputs if one.parameters.classification}


def class_bytes(wire: InferRequest, model: Model) -> int:
    """Bytes of the classes of one text, at most."""
    counts = class_counts(wire).values()
    label = max(map(len, model.labels), default=0) if counts else 0
    return sum(min(count, row_size(model)) * (CLASS_BYTES + CHAR_BYTES * label) for count in counts)


def row_size(model: Model) -> int:
    """The numbers in a row of the model's matrix."""
    return len(model.labels) if model.task == "classify" else model.width


def classify_rows(model: Model, tensor: OutputTensor, count: int) -> OutputTensor:
    """The `count` largest numbers of each row with their indexes and labels: [N, C] -> [N, count], or all C."""
    rows = np.asarray(tensor.values).reshape(tensor.shape)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    labels = [f":{label}" for label in model.labels] if model.task == "classify" else [""] * rows.shape[1]
    texts = [
        f"{row[place]:f}:{place}{labels[place]}"
        for row, places in zip(rows, order.tolist(), strict=True)
        for place in places
    ]
    return OutputTensor(tensor.name, "BYTES", order.shape, texts)


def write_infer(wire: InferRequest, model: Model, replies: Sequence[Any]) -> TensorBody:
    """The requested outputs in the requested order; all, if none is named."""
    tensors = {tensor.name: tensor for tensor in OUTPUT_BUILDERS[model.task](model, replies)}
    tensors |= {name: classify_rows(model, tensors[name], count) for name, count in class_counts(wire).items()}
    names = list(dict.fromkeys(one.name for one in wire.outputs)) or list(tensors)
    return write_tensors(write_envelope(wire, model), [tensors[name] for name in names], select_binary(wire, names))


def select_binary(wire: InferRequest, names: Sequence[str]) -> frozenset[str]:
    """The outputs that are sent as binary data.  The setting of an output has priority over that of the request."""
    overrides = {
        one.name: one.parameters.binary_data for one in wire.outputs if "binary_data" in one.parameters.model_fields_set
    }
    return frozenset(name for name in names if overrides.get(name, wire.parameters.binary_data_output))


def write_text_response(wire: TextRequest, model: Model, replies: Sequence[AnswerDelta]) -> dict[str, Any]:
    """Several answers are lists."""
    lists: dict[str, list[Any]] = {
        "text_output": [one.text for one in replies],
        "finish_reason": [one.finish for one in replies],
    }
    if wire.options.details:
        lists["details"] = [
            {"finish_reason": finish_reason(one), "logprobs": list_tokens(model, one)} for one in replies
        ]
    return write_envelope(wire, model) | (
        lists if len(replies) > 1 else {name: values[0] for name, values in lists.items()}
    )


def write_text_chunk(wire: TextRequest, model: Model, piece: AnswerDelta) -> dict[str, Any]:
    """A stream event; the last has `done` and the finish reason."""
    end = {"finish_reason": piece.finish} if piece.finish else {}
    return write_envelope(wire, model) | {"text_output": piece.text, "done": bool(piece.finish), **end}


def write_envelope(wire: InferRequest | TextRequest, model: Model) -> dict[str, Any]:
    return {"model_name": model.name, "model_version": MODEL_VERSION, **({"id": wire.id} if wire.id else {})}


def write_server(extensions: Sequence[str]) -> dict[str, Any]:
    return {"name": "polyhead", "version": VERSION, "extensions": [*EXTENSIONS, *extensions]}


def write_oip_model(model: Model) -> dict[str, Any]:
    """The metadata of a model.  `labels`, an extension, are in the order of the columns of probabilities."""
    outputs = describe_outputs(model).items()
    return {
        "name": model.name,
        "versions": [MODEL_VERSION],
        "platform": "polyhead",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in HEAD_INPUTS[model.task].names],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in outputs],
        "parameters": {"task": model.task, "max_tokens": model.max_tokens, "labels": list(model.labels)},
    }


def write_config(model: Model) -> dict[str, Any]:
    """The model's configuration in Triton's form.  Shapes are whole, so there is no `max_batch_size`."""
    described = write_oip_model(model)
    parameters = {"task": model.task, "max_tokens": str(model.max_tokens)}
    return {
        "name": model.name,
        "platform": "polyhead",
        "backend": "polyhead",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [write_config_tensor(tensor) for tensor in described["inputs"]],
        "output": [write_config_tensor(tensor) for tensor in described["outputs"]],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }


def write_config_tensor(tensor: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tensor["name"], "data_type": CONFIG_TYPES[tensor["datatype"]], "dims": tensor["shape"]}


def write_statistics(model: Model, counts: InferenceCounts) -> dict[str, Any]:
    nothing = Duration()
    stages = {
        "success": counts.done,
        "fail": counts.failed,
        "queue": counts.waiting,
        "compute_input": counts.tokenising,
        "compute_infer": counts.steps,
        "compute_output": nothing,
        "cache_hit": nothing,
        "cache_miss": nothing,
    }
    return {
        "name": model.name,
        "version": MODEL_VERSION,
        "last_inference": int(1000 * counts.last_end),
        "inference_count": counts.done.count,
        "execution_count": counts.steps.count,
        "inference_stats": {name: write_duration(duration) for name, duration in stages.items()},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": write_duration(nothing),
                "compute_infer": write_duration(duration),
                "compute_output": write_duration(nothing),
            }
            for size, duration in sorted(counts.batches.items())
        ],
    }


def write_duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": int(1e9 * duration.seconds)}


def write_oip_error(error: PolyheadError) -> dict[str, Any]:
    return {"error": error.message}
