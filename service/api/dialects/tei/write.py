"""Writes the responses of text-embeddings-inference.  Its token offsets count bytes of UTF-8."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from polyhead.models.tokenizer import Encoding

from ....config.settings import Settings
from ....core.errors import (
    BadRequest,
    EmptyInput,
    Expired,
    Overloaded,
    PolyheadError,
    StepFailed,
    Stopped,
    TooLong,
    TooMany,
    Unavailable,
    WrongTask,
)
from ....core.model import Model
from ....core.version import VERSION
from ....resources.request_memory import MemoryClaim
from ....text.tokenization import spell_tokens
from ...shared.encoding_calls import ReplyWriter, max_label_bytes, max_vector_bytes
from ...shared.head_options import MAX_STOPS
from ...shared.hf_generation import MAX_BEST_OF
from ...shared.pipeline_outputs import rank_labels
from ...shared.streaming import as_float32, dump_chunks
from .wire import PredictRequest, TeiRerankRequest, is_single


def write_tei_error(error: PolyheadError) -> dict[str, Any]:
    return {"error": error.message, "error_type": error_type(error)}


def error_type(error: PolyheadError) -> str:
    match error:
        case EmptyInput():
            return "Empty"
        case Overloaded():
            return "Overloaded"
        case Unavailable() | Stopped():
            return "Unhealthy"
        case StepFailed() | Expired() | WrongTask():
            return "Backend"
        case _:
            return "Validation"


def tei_status(error: PolyheadError) -> int:
    """An invalid body is 422, one that is too large 413; what the model cannot do, or fails at, is 424."""
    match error:
        case StepFailed() | WrongTask():
            return 424
        case TooLong() | TooMany():
            return 413
        case BadRequest(param=param) if param and not isinstance(error, EmptyInput):
            return 422
        case _:
            return error.status


def predict_writer(model: Model, wire: PredictRequest) -> ReplyWriter:
    return ReplyWriter(
        write_one=lambda answer: rank_labels(model.labels, answer.values),
        is_single=is_single(wire),
        max_bytes=max_label_bytes(model.label_bytes),
        write_error=write_tei_error,
    )


def write_ranks(wire: TeiRerankRequest, values: Sequence[float]) -> list[dict[str, Any]]:
    ranks = [
        {"index": index, "score": score} | ({"text": text} if wire.return_text else {})
        for index, (text, score) in enumerate(zip(wire.texts, values, strict=True))
    ]
    return sorted(ranks, key=lambda rank: -rank["score"])


def write_tokenize(
    model: Model, texts: Sequence[str], encodings: Sequence[Encoding], claim: MemoryClaim
) -> list[bytes]:
    """JSON in parts: a list of tokens for each text."""
    parts = list[bytes]()
    for text, encoding in zip(texts, encodings, strict=True):
        special = [id for id, is_special in zip(encoding.ids, encoding.special, strict=True) if is_special]
        names = dict(zip(special, spell_tokens(model, special, claim, "inputs"), strict=True))
        parts += dump_chunks(write_tokens(text, encoding, names), before=b"," if parts else b"[")
    return [*parts, b"]"] if parts else [b"[]"]


def write_tokens(text: str, encoding: Encoding, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """The tokens of one text; `names` are the special tokens by id."""
    borders = [0, *accumulate(len(char.encode()) for char in text)]  # character offset -> byte offset
    last = len(text)
    for id, special, (start, stop) in zip(encoding.ids, encoding.special, encoding.offsets, strict=True):
        start, stop = min(start, last), min(stop, last)  # a tokenizer may add a suffix that is not part of the text
        place = {"start": None, "stop": None} if special else {"start": borders[start], "stop": borders[stop]}
        yield {"id": id, "text": names[id] if special else text[start:stop], "special": special, **place}


def write_info(model: Model, settings: Settings) -> dict[str, Any]:
    return {
        "model_id": model.source,
        "model_sha": None,
        "model_dtype": model.dtype,
        "served_model_name": model.name,
        "model_type": model_type(model),
        "max_concurrent_requests": settings.max_requests,
        "max_input_length": model.max_tokens,
        "max_batch_tokens": settings.encoder_step_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_batch_texts,
        "auto_truncate": False,
        "tokenization_workers": settings.tokenizer_threads,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    } | (generation_info(model, settings) if model.task == "generate" else {})


def generation_info(model: Model, settings: Settings) -> dict[str, Any]:
    """The fields that text-generation-inference has in addition."""
    return {
        "model_pipeline_tag": "text2text-generation" if model.generation_defaults else "text-generation",
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": model.max_tokens - 1,
        "max_total_tokens": model.max_tokens,
        "validation_workers": settings.tokenizer_threads,
        "router": "polyhead",
    }


def model_type(model: Model) -> dict[str, Any]:
    labels = {
        "id2label": {str(index): label for index, label in enumerate(model.labels)},
        "label2id": {label: index for index, label in enumerate(model.labels)},
    }
    match model.task:
        case "classify":
            return {"classifier": labels}
        case "rank":
            return {"reranker": labels}
        case "embed":
            return {"embedding": {"pooling": model.pooling, "width": model.width}}
        case "choose":
            return {"chooser": {}}
        case "generate":
            return {"generator": {}}
        case "tag":
            return {"token_classifier": labels}
        case "span":
            return {"question_answerer": {}}
        case "fill":
            return {"mask_filler": {}}
        case "label_spans":
            return {"span_labeller": {}}
        case "label_texts":
            return {"zero_shot_classifier": {}}
        case "decide":
            return {"decider": {}}


def vector_writer(model: Model) -> ReplyWriter:
    return ReplyWriter(
        write_one=lambda answer: as_float32(answer.values),
        write_error=write_tei_error,
        max_bytes=max_vector_bytes(model.width),
    )


# rows: [T, W]
TOKEN_VECTOR_WRITER = ReplyWriter(write_one=lambda answer: as_float32(answer.rows), write_error=write_tei_error)
SPARSE_WRITER = ReplyWriter(
    write_one=lambda answer: ({"index": token, "value": weight} for token, weight in answer.weights),
    write_error=write_tei_error,
)
