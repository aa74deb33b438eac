"""Bodies that are sent compressed: read as if they were not, within the same limits."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from polyhead.service.api.http.content_coding import PIECE_BYTES, make_decoder
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.model import Model
from tests.support.scripted import Registry, application, echo, model

LIMIT = 1 << 16
ASKED = json.dumps({"model": "talker", "prompt": [5, 6], "max_tokens": 1}).encode()


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
    ],
    ids=["gzip", "x-gzip", "deflate", "identity", "at the limit"],
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
        ("br", ASKED, 415, "Content-Encoding: 'br' is not supported; send gzip, deflate or no coding"),
        ("zstd", ASKED, 415, "Content-Encoding: 'zstd' is not supported; send gzip, deflate or no coding"),
        ("gzip, gzip", ASKED, 415, "Content-Encoding: 'gzip, gzip' is not supported"),
        ("gzip", gzip.compress(bytes(LIMIT + 1)), 413, f"the body has more than {LIMIT} bytes"),
        ("gzip", gzip.compress(bytes(1 << 24)), 413, f"the body has more than {LIMIT} bytes"),
    ],
    ids=["plain", "gzip", "cut", "empty", "more", "br", "zstd", "twice", "above the limit", "far above"],
)
def test_what_cannot_be_decoded_is_refused(app: FastAPI, coding: str, body: bytes, status: int, said: str) -> None:
    [answer] = sent(app, coding, body)
    assert answer.status_code == status
    assert answer.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
    assert answer.json()["error"]["message"].startswith(said)


def test_a_body_expands_in_bounded_pieces() -> None:
    def pieces(data: Sequence[bytes]) -> list[int]:
        decoder = make_decoder(["gzip"])
        assert decoder is not None
        found = [len(piece) for part in data for piece in decoder.decode(part)]
        decoder.finish()
        return found

    packed = gzip.compress(bytes(1 << 22))
    for split in (1, 100, len(packed)):
        found = pieces([packed[start : start + split] for start in range(0, len(packed), split)])
        assert sum(found) == 1 << 22
        assert max(found) <= PIECE_BYTES
    with pytest.raises(BadRequest, match="cut short"):
        pieces([packed[:-1]])
