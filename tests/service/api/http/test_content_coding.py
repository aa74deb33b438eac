"""Bodies that are sent compressed: read as if they were not, within the same limits."""

import asyncio
import gzip
import importlib.util
import json
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from polyhead.service.api.http import content_coding
from polyhead.service.api.http.content_coding import (
    ACCEPTED_CODINGS,
    MAX_FRAMES,
    MAX_OVERHEAD_BYTES,
    PIECE_BYTES,
    SLICE_BYTES,
    make_decoder,
)
from polyhead.service.core.errors import BadRequest, UnsupportedType
from polyhead.service.core.model import Model
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, Headroom, MemoryClaim
from tests.support.scripted import Registry, application, echo, model

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 1 << 16
SKIPPED = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"  # a frame without content
SKIPPED_EMPTY = SKIPPED[:4] + bytes(4)
FRAME = b"\x28\xb5\x2f\xfd\x00"  # begins a frame; the exponent of its window follows
EMPTY_BLOCK = bytes(3)
ASKED = json.dumps({"model": "talker", "prompt": [5, 6], "max_tokens": 1}).encode()


def in_frames(data: bytes, size: int) -> bytes:
    return b"".join(zstd.compress(data[start : start + size]) for start in range(0, len(data), size))


def with_window(data: bytes, log: int) -> bytes:
    """A frame whose window has 2^log bytes."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return compressor.compress(data) + compressor.flush()


@pytest.fixture(scope="module")
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture(scope="module")
def app(talker: Model) -> FastAPI:
    return application(Registry([talker], echo), max_body_bytes=LIMIT)


def sent(app: FastAPI, coding: str, *bodies: bytes) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://testserver") as client:
            return [await client.post("/v1/completions", content=body, headers=headers) for body in bodies]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(ASKED)),
        ("X-GZip", gzip.compress(ASKED)),
        ("deflate", zlib.compress(ASKED)),
        ("identity", ASKED),
        ("gzip", gzip.compress(ASKED + b" " * (LIMIT - len(ASKED)))),
        ("zstd", zstd.compress(ASKED)),
        ("ZSTD", SKIPPED + in_frames(ASKED, 10) + SKIPPED),
        ("zstd", zstd.compress(ASKED + b" " * (LIMIT - len(ASKED)))),
        ("zstd", with_window(ASKED, 23)),
    ],
    ids=["gzip", "x-gzip", "deflate", "identity", "at the limit", "zstd", "frames", "zstd at the limit", "long window"],
)
def test_a_compressed_body_is_read(app: FastAPI, coding: str, body: bytes) -> None:
    [answer] = sent(app, coding, body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("coding", "body", "status", "said"),
    [
        ("gzip", ASKED, 400, "the body: is not gzip data"),
        ("deflate", gzip.compress(ASKED), 400, "the body: is not deflate data"),
        ("gzip", gzip.compress(ASKED)[:-3], 400, "the body: its gzip data is cut short"),
        ("gzip", b"", 400, "the body: its gzip data is cut short"),
        ("gzip", gzip.compress(ASKED) + b"{}", 400, "the body: has bytes after the end of its gzip data"),
        ("br", ASKED, 415, "Content-Encoding: 'br' is not supported; send gzip, deflate, zstd or no coding"),
        ("gzip, gzip", ASKED, 415, "Content-Encoding: 'gzip, gzip' is not supported"),
        ("gzip", gzip.compress(bytes(LIMIT + 1)), 413, f"the body has more than {LIMIT} bytes"),
        ("gzip", gzip.compress(bytes(1 << 24)), 413, f"the body has more than {LIMIT} bytes"),
        ("zstd", ASKED, 400, "the body: is not zstd data"),
        ("zstd", zstd.compress(ASKED) + b"{}", 400, "the body: is not zstd data"),
        ("zstd", zstd.compress(ASKED)[:-3], 400, "the body: its zstd data is cut short"),
        ("zstd", zstd.compress(ASKED) + FRAME, 400, "the body: its zstd data is cut short"),
        ("zstd", b"", 400, "the body: its zstd data is cut short"),
        ("zstd", SKIPPED, 400, "the body is not valid JSON"),
        ("zstd", with_window(ASKED, 24), 400, "the body: is not zstd data with a window of 8388608 bytes at most: "),
        ("zstd", FRAME + b"\xa8" + EMPTY_BLOCK, 400, "the body: is not zstd data with a window of 8388608 bytes"),
        ("zstd", zstd.compress(bytes(LIMIT + 1)), 413, f"the body has more than {LIMIT} bytes"),
        ("zstd", zstd.compress(bytes(1 << 24)), 413, f"the body has more than {LIMIT} bytes"),
        ("zstd", in_frames(bytes(LIMIT + 1), LIMIT // 2), 413, f"the body has more than {LIMIT} bytes"),
        ("zstd", SKIPPED_EMPTY * (MAX_FRAMES + 1), 400, f"the body: has more than {MAX_FRAMES} frames of zstd"),
    ],
    ids=[
        *("plain", "gzip", "cut", "empty", "more", "br", "twice", "above the limit", "far above"),
        *("plain zstd", "plain after zstd", "zstd cut", "second frame cut", "no frame", "only skipped", "window"),
        *("largest window", "zstd above the limit", "zstd far above", "frames above", "many frames"),
    ],
)
def test_what_cannot_be_decoded_is_refused(app: FastAPI, coding: str, body: bytes, status: int, said: str) -> None:
    [answer] = sent(app, coding, body)
    assert answer.status_code == status
    assert answer.headers.get("accept-encoding") == (ACCEPTED_CODINGS if status == 415 else None)
    assert answer.json()["error"]["message"].startswith(said)


def expand(coding: str, data: bytes, split: int) -> Iterator[bytes]:
    decoder = make_decoder([coding])
    assert decoder is not None
    for start in range(0, len(data), split):
        yield from decoder.decode(data[start : start + split])
    decoder.finish()


@pytest.mark.parametrize(
    ("coding", "packed"),
    [("gzip", gzip.compress(bytes(1 << 22))), ("zstd", with_window(bytes(1 << 22), 18))],
    ids=["gzip", "zstd"],
)
def test_a_body_expands_in_bounded_pieces(coding: str, packed: bytes) -> None:
    for split in (1, 100, len(packed)):
        found = [len(piece) for piece in expand(coding, packed, split)]
        assert sum(found) == 1 << 22
        assert max(found) <= PIECE_BYTES
    with pytest.raises(BadRequest, match="cut short"):
        list(expand(coding, packed[:-1], len(packed)))


def empty_deflate_blocks() -> bytes:
    packer = zlib.compressobj()
    return packer.compress(b"") + packer.flush(zlib.Z_SYNC_FLUSH) + b"\x00\x00\x00\xff\xff" * (1 << 17)


@pytest.mark.parametrize(
    ("coding", "data"),
    [("deflate", empty_deflate_blocks()), ("zstd", FRAME + b"\x00" + EMPTY_BLOCK * (1 << 18))],
    ids=["deflate", "zstd"],
)
def test_a_body_that_expands_to_nothing_is_read_in_slices_and_given_up(coding: str, data: bytes) -> None:
    found = list[int]()
    with pytest.raises(BadRequest, match=f"its {coding} data is {MAX_OVERHEAD_BYTES} bytes longer than what"):
        found.extend(len(piece) for piece in expand(coding, data, len(data)))
    assert not any(found), "others had a turn after each slice"
    assert len(found) == MAX_OVERHEAD_BYTES // SLICE_BYTES + 1


def test_data_that_cannot_be_compressed_is_not_taken_for_nothing() -> None:
    noise = random.Random(0).randbytes(1 << 19)
    for coding, packed in (("gzip", gzip.compress(noise)), ("zstd", zstd.compress(noise))):
        assert b"".join(expand(coding, packed, len(packed))) == noise


def test_memory_of_the_decoder_is_claimed_before_it_is_taken(talker: Model) -> None:
    room = Headroom(free=ALLOCATOR_BYTES + (40 << 20))
    app = application(Registry([talker], echo), max_body_bytes=LIMIT, headroom=room)
    taken = int(room.total) - (256 << 10)
    with MemoryClaim(room).reserved(taken, "others"):
        gzipped, frames = sent(app, "gzip", gzip.compress(ASKED)), sent(app, "zstd", zstd.compress(ASKED))
    assert gzipped[0].status_code == 200
    assert frames[0].status_code == 429, frames[0].text
    assert frames[0].json()["error"]["message"].startswith("the body takes about 0 MiB")


def test_a_python_without_zstd_reads_the_other_codings(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("backports", "compression"):
        monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.spec_from_file_location(f"{content_coding.__name__}_alone", content_coding.__file__)
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, alone)
    spec.loader.exec_module(alone)
    assert alone.ACCEPTED_CODINGS == "gzip, deflate"
    with pytest.raises(UnsupportedType, match="'zstd' is not supported; send gzip, deflate or no coding"):
        alone.make_decoder(["zstd"])
