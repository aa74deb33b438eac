"""The objects of files and batches, as clients send and get them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import Field, StringConstraints

from ....core.errors import BadRequest
from ...batches.batch import Batch, Endpoint, Status
from ...batches.file_store import StoredFile
from ...shared.dialect import MetadataPairs, Wire, between
from ...shared.json_body import parse_json

MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 24 * 3600
WINDOW = "24h"
MOMENTS: tuple[Status, ...] = get_args(Status)[1:]  # validating begins when the batch is created


class KeptFor(Wire):
    anchor: Literal["created_at"]
    seconds: Annotated[int, between(MIN_KEPT_S, MAX_KEPT_S)]


class BatchRequest(Wire):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: MetadataPairs = Field(default_factory=dict)
    output_expires_after: KeptFor | None = None


class LineRequest(Wire):
    """A line of a batch's file."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def read_line(endpoint: str, number: int, line: bytes) -> tuple[str, bytes]:
    """The custom_id and the body of a line.  Raises BadRequest."""
    wire = LineRequest.read(parse_json(line, f"line {number}"))
    if wire.url != endpoint:
        message = f"must be {endpoint!r}, the endpoint of the batch, got {wire.url[:60]!r}"
        raise BadRequest(f"url: {message}", param="url")
    if wire.body.get("stream"):
        raise BadRequest("body.stream: the answers of a batch are not streamed; leave it out", param="body.stream")
    return wire.custom_id, orjson.dumps(wire.body)


def write_file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def write_batch(batch: Batch) -> dict[str, Any]:
    ended = batch.has_ended
    errors = [
        {"code": error.code, "message": error.message, "line": error.line or None, "param": error.param or None}
        for error in batch.errors
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": (batch.output_file or None) if ended else None,
        "error_file_id": (batch.error_file or None) if ended else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in MOMENTS},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata or None,
    }


def write_list(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
