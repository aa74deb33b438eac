"""Files and batches in OpenAI's format.  Each key sees its own."""

from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import BadRequest, NotFound
from ...batches.batch import Batch
from ...batches.batch_runner import BatchRunner
from ...batches.file_store import PIECE_BYTES, FileStore, StoredFile
from ...batches.record_folder import new_id
from ...shared.dialect import Dialect, admit_reader, between, describe_body, read_body, request_context, turn_taker
from ...shared.json_body import receive_body
from ...shared.openai_errors import write_openai_error
from ...shared.streaming import EventStream, JsonResponse
from .upload import read_upload
from .wire import MAX_KEPT_S, MIN_KEPT_S, BatchRequest, write_batch, write_file, write_list

MAX_LISTED_FILES, MAX_LISTED_BATCHES, LISTED_BATCHES = 10_000, 100, 20  # that a client may ask for, and gets
MAX_PAGE_FILES = 1000  # in one answer; `has_more` says that there are more, and clients ask for the next page
HELD_PIECES = 3  # of a content that is sent: the first, the one that is sent, and a copy of it in a buffer
FILE_BYTES = 4096  # of a file in a list: the entry and its JSON, with a name of any 255 characters
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_KEPT_S, "maximum": MAX_KEPT_S},
                    },
                }
            }
        },
    }
}
router = APIRouter(tags=["OpenAI"])
T = TypeVar("T", Batch, StoredFile)


class FileStream(EventStream):
    """The content of a file.  It is read as the client takes it, on threads that keys share."""

    media_type = "application/octet-stream"

    @classmethod
    async def open_file(cls, store: FileStore, file: StoredFile) -> Self:
        """Raises InsufficientStorage if the file cannot be read."""
        stream = await cls.open(store.read_pieces(file))
        given = PurePath(file.filename.replace("\\", "/")).name  # a client may save it under this name
        given = file.id if given in ("", "..") else given
        name = quote(given, safe="")
        named = f'filename="{name}"' if name == given else f"filename*=utf-8''{name}"
        headers = {"content-length": str(file.bytes), "content-disposition": f"attachment; {named}"}
        stream.init_headers(headers | {"x-content-type-options": "nosniff"})  # it is what a client has uploaded
        return stream


def runner(request: Request) -> BatchRunner:
    """Raises NotFound if this server keeps no files."""
    found: BatchRunner | None = request.app.state.batches
    if found is None:
        raise NotFound("files and batches are not kept here; the server needs a folder for them (--files-dir FOLDER)")
    return found


def files(request: Request) -> FileStore:
    return runner(request).store.files


def owner(request: Request) -> str:
    return request_context(request).owner


@router.post("/v1/files", openapi_extra=UPLOAD, summary="Upload a file of requests.")
async def upload_file(request: Request) -> Response:
    store, upload = files(request), await read_upload(request, turn_taker(request))
    return JsonResponse(write_file(await store.add(owner(request), upload.filename, upload.content, upload.seconds)))


@router.get("/v1/files", summary="The files of the key.")
async def list_files(
    request: Request,
    after: str = "",
    limit: Annotated[int, between(1, MAX_LISTED_FILES)] = MAX_LISTED_FILES,
    order: Literal["asc", "desc"] = "desc",
    purpose: str = "",
) -> Response:
    context = request_context(request)
    await turn_taker(request)()  # the files of all keys are looked at
    listed = files(request).list_files(context.owner, newest_first=order == "desc")
    found = (file for file in listed if purpose in ("", file.purpose))
    page, has_more = cut_page(found, after, min(limit, MAX_PAGE_FILES))
    admit_reader(request, FILE_BYTES * len(page), "the list")
    return JsonResponse(write_list([write_file(file) for file in page], has_more=has_more))


@router.get("/v1/files/{file_id}", summary="What is known of a file.")
async def show_file(request: Request, file_id: str) -> Response:
    return JsonResponse(write_file(files(request).find(file_id, owner(request))))


@router.get("/v1/files/{file_id}/content", summary="The content of a file.")
async def send_content(request: Request, file_id: str) -> Response:
    store, context = files(request), request_context(request)
    file = store.find(file_id, context.owner)
    store.hold(file.id)  # it is not deleted while it is sent
    context.cleanup.callback(store.release, file.id)
    context.claim.grow(HELD_PIECES * min(file.bytes, PIECE_BYTES), "the content")
    return await FileStream.open_file(store, file)


@router.delete("/v1/files/{file_id}", summary="Delete a file.")
async def delete_file(request: Request, file_id: str) -> Response:
    await files(request).delete(file_id, owner(request))
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches", openapi_extra=describe_body(BatchRequest), summary="Answer a file of requests.")
async def create_batch(request: Request) -> Response:
    batches, wire = runner(request), await read_body(request, BatchRequest)
    file = files(request).find(wire.input_file_id, owner(request))
    if file.purpose != "batch":
        message = "input_file_id: must be an uploaded file, got one that a batch has written"
        raise BadRequest(message, param="input_file_id")
    batch = Batch(
        id=new_id("batch_"),
        owner=file.owner,
        created_at=int(batches.store.clock()),
        endpoint=wire.endpoint,
        input_file=file.id,
        metadata=wire.metadata,
        output_seconds=wire.output_expires_after.seconds if wire.output_expires_after else 0,
    )
    return JsonResponse(write_batch(await batches.begin(batch)))


@router.get("/v1/batches", summary="The batches of the key.")
async def list_batches(
    request: Request, after: str = "", limit: Annotated[int, between(1, MAX_LISTED_BATCHES)] = LISTED_BATCHES
) -> Response:
    context = request_context(request)
    await turn_taker(request)()
    page, has_more = cut_page(runner(request).store.list_batches(context.owner), after, limit)
    admit_reader(request, sum(map(written_bytes, page)), "the list")
    return JsonResponse(write_list([write_batch(batch) for batch in page], has_more=has_more))


@router.get("/v1/batches/{batch_id}", summary="How far a batch is.")
async def show_batch(request: Request, batch_id: str) -> Response:
    batch = runner(request).store.find(batch_id, owner(request))
    admit_reader(request, written_bytes(batch), "the batch")
    return JsonResponse(write_batch(batch))


@router.post("/v1/batches/{batch_id}/cancel", summary="Answer no more requests of a batch.")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    await receive_body(request)  # clients send none, or an empty one
    return JsonResponse(write_batch(await runner(request).cancel(batch_id, owner(request))))


def written_bytes(batch: Batch) -> int:
    """Bytes of a batch in an answer: what is made of it, and its JSON."""
    return 2 * batch.kept_bytes


def cut_page(items: Iterator[T], after: str, limit: int) -> tuple[list[T], bool]:
    """Up to `limit` items behind the one with the id `after`, and whether there are more.  Raises BadRequest."""
    if after and not any(item.id == after for item in items):
        raise BadRequest(f"after: there is no {after[:60]!r} in this list", param="after")
    page = list(islice(items, limit + 1))
    return page[:limit], len(page) > limit


DIALECT = Dialect(
    name="OpenAI batches",
    prefixes=("/v1/files", "/v1/batches"),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)
