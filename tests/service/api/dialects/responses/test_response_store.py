"""Kept responses: what is found, how much is kept, whose are removed, what continues a conversation."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.types import Message

from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.dialects.responses import response_store
from polyhead.service.api.dialects.responses.response_store import (
    EVICTED,
    NO_MEMORY,
    ResponseLimits,
    ResponseStore,
    StoredResponse,
    Turn,
)
from polyhead.service.api.dialects.responses.stored_items import count_characters
from polyhead.service.api.dialects.responses.wire import ResponseRequest
from polyhead.service.api.shared import dialect
from polyhead.service.api.shared.streaming import INLINE_BYTES
from polyhead.service.core.errors import NotFound, Overloaded
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Generate
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, UNBOUNDED_HEADROOM, Headroom, MemoryClaim
from tests.service.api.access.test_auth import keys_file
from tests.service.api.dialects.responses.test_routes import ASK, CALL, TOOL, sse
from tests.support.scripted import Registry, application, ask, model, token_events

PATH = "/v1/responses"
SIZE = 4000  # bytes of a response below, with its turn


def kept(name: str, owner: str = "", parent: Turn | None = None) -> StoredResponse:
    """A response of SIZE bytes with its turn."""
    item = b"x" * (1000 - response_store.TURN_BYTES - response_store.ITEM_BYTES)
    return StoredResponse(name, owner, [b"y" * (3000 - response_store.RESPONSE_BYTES)], Turn([item], [], parent))


def opened(count: float, **changes: Any) -> ResponseStore:
    """A store with room for `count` responses."""
    limits = {"seconds": 60, "share": 0.5} | changes
    return ResponseStore(ResponseLimits(int(count * SIZE), **limits), ("a", "b"))


def found(store: ResponseStore, owner: str, names: str) -> str:
    return "".join(name for name in names if not why_not(store, name, owner))


def why_not(store: ResponseStore, name: str, owner: str = "") -> str:
    try:
        store.find(name, owner)
    except NotFound as error:
        return error.message
    return ""


# Bounds


def test_a_key_with_most_makes_room_and_another_keeps_its_own() -> None:
    store = opened(8)
    for name in "123":
        store.keep(kept(name, "a"))
    for name in "45678":
        store.keep(kept(name, "b"))
    assert found(store, "a", "123") == "123"
    assert found(store, "b", "45678") == "5678"
    assert why_not(store, "4", "b") == f"the response '4' {response_store.REPLACED}"
    assert why_not(store, "4", "a") == "there is no response '4'"
    store.keep(kept("9", "c"))
    store.keep(kept("x", "c"))
    assert found(store, "b", "5678") == "678"
    assert store.size <= 8 * SIZE


def test_responses_are_counted() -> None:
    store = opened(100, responses=4)
    for name in "123":
        store.keep(kept(name, "a"))
    assert found(store, "a", "123") == "23"


def test_expired_responses_are_named() -> None:
    now = [0.0]
    store = ResponseStore(ResponseLimits(1 << 20, 60), clock=lambda: now[0])
    store.keep(kept("1"))
    now[0] = 59.0
    assert not why_not(store, "1")
    now[0] = 60.0
    assert why_not(store, "1") == "the response '1' has expired: responses are kept for 60 s (responses_seconds)"
    assert store.size == 0


def test_a_conversation_shares_its_turns_and_outlives_its_responses() -> None:
    headroom = Headroom(1 << 30)
    store = ResponseStore(ResponseLimits(1 << 20, 60), headroom=headroom)
    line = [kept("1")]
    for name in "234":
        line.append(kept(name, parent=line[-1].turn))
    for each in line:
        store.keep(each)
    assert store.size == 4 * SIZE
    assert headroom.shortfall(int(headroom.total)) == store.size
    for name in "123":
        store.delete(name, "")
        assert why_not(store, name) == f"the response {name!r} was deleted"
    assert len(store.find("4", "").input_items()) == 4
    assert store.size == SIZE + 3 * 1000
    store.delete("4", "")
    assert store.size == headroom.shortfall(int(headroom.total)) == 0
    store.keep(kept("5", parent=line[-1].turn))  # the request had begun before all others were deleted
    assert store.size == SIZE + 4 * 1000
    store.delete("5", "")
    assert store.size == 0


def test_what_fits_nowhere_is_not_kept_and_removes_nothing() -> None:
    store = opened(8)
    store.keep(kept("1", "a"))
    store.keep(StoredResponse("2", "a", [b"y" * (4 * SIZE)], Turn([], [], None)))
    assert why_not(store, "2", "a") == f"the response '2' {response_store.TOO_LARGE}"
    assert found(store, "a", "12") == "1"


def test_without_memory_nothing_is_kept() -> None:
    headroom = Headroom(1 << 30)
    store = ResponseStore(ResponseLimits(2 * SIZE, 60), headroom=headroom)
    first = kept("1")
    store.keep(first)
    store.keep(kept("2"))
    others = int(headroom.total) - 2 * SIZE
    headroom.reserve(others, "others")
    store.keep(kept("3", parent=first.turn))
    assert why_not(store, "3") == f"the response '3' {NO_MEMORY}"
    assert found(store, "", "123") == "12", "nothing was removed for it"
    headroom.release(others)
    for name in "12":
        store.delete(name, "")
    assert store.size == headroom.shortfall(int(headroom.total)) == 0


def test_too_many_responses_are_removed_of_the_key_with_most() -> None:
    """The number is short, not the bytes: a key with few large ones keeps them."""
    store = opened(1000, responses=9)
    for name in "12":
        store.keep(StoredResponse(name, "v", [b"y" * 10 * SIZE], Turn([], [], None)))
    for name in "abcd":
        store.keep(kept(name, "a"))
    for name in "efghij":
        store.keep(kept(name, "b"))
    assert [found(store, "v", "12"), found(store, "a", "abcd"), found(store, "b", "efghij")] == ["12", "bcd", "ghij"]


def test_kept_responses_make_room_for_requests() -> None:
    """The oldest of the key with most bytes go first, if that is enough."""
    headroom = Headroom(1 << 30)
    store = ResponseStore(ResponseLimits(1 << 20, 60), ("a", "b"), headroom)
    for name, owner in (("1", "a"), ("2", "b"), ("3", "b"), ("4", "b"), ("5", "a")):
        store.keep(kept(name, owner))
    claim = MemoryClaim(headroom)
    claim.grow(int(headroom.total) - 5 * SIZE, "the body")
    assert store.size == 5 * SIZE
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(claim.grow, SIZE + 1, "the answer").result()
    assert (found(store, "a", "15"), found(store, "b", "234")) == ("5", "34")
    assert why_not(store, "2", "b") == f"the response '2' {EVICTED}"
    with pytest.raises(Overloaded):
        MemoryClaim(headroom).grow(4 * SIZE, "the body")
    assert store.size == 3 * SIZE, "it would not have been enough"
    claim.release()
    assert headroom.shortfall(int(headroom.total)) == store.size


def test_responses_have_a_part_of_the_memory_for_requests(caplog: pytest.LogCaptureFixture) -> None:
    headroom = Headroom(ALLOCATOR_BYTES + (40 << 20))
    store = ResponseStore(ResponseLimits(1 << 30, 60), headroom=headroom)
    assert store.max_bytes == 10 << 20
    store.warn_of_less_room()
    assert caplog.messages == [
        "responses_mib 1024 is more than 1/4 of the 40 MiB for requests; 10 MiB of responses are kept"
    ]
    for name in "123":
        store.keep(StoredResponse(name, "", [b"y" * (4 << 20)], Turn([], [], None)))
    assert found(store, "", "123") == "23"
    store.keep(StoredResponse("4", "", [b"y" * (11 << 20)], Turn([], [], None)))
    assert why_not(store, "4") == f"the response '4' {response_store.TOO_LARGE}"
    caplog.clear()
    ResponseStore(ResponseLimits(1 << 20, 60), headroom=headroom).warn_of_less_room()
    assert not caplog.messages


def test_few_removed_responses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_REMOVED", 2)
    store = opened(2)
    for name in "1234":
        store.keep(kept(name, "a"))
    assert "there is no response" in why_not(store, "1", "a")
    assert "its room" in why_not(store, "2", "a")


# Routes


@pytest.fixture(scope="module")
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", max_tokens=2000)


@pytest.fixture
def served(talker: Model) -> tuple[FastAPI, Registry]:
    return serving(talker, "A fox.")


def serving(
    talker: Model, text: str, request_headroom: Headroom = UNBOUNDED_HEADROOM, **settings: Any
) -> tuple[FastAPI, Registry]:
    tokens = token_events(text, talker.tokenizer)

    def answer(model: Model, request: Generate) -> list[Any]:
        return [*tokens, Done("length" if request.max_tokens == 7 else "stop", 9, len(tokens), 4)]

    registry = Registry([talker], answer)
    return application(registry, request_headroom, **({"responses_mib": 1} | settings)), registry


def prompt_of(registry: Registry, talker: Model) -> str:
    return talker.tokenizer.decode(registry.requests[-1].tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_continued(served: tuple[FastAPI, Registry], talker: Model, *, stream: bool) -> None:
    app, registry = served
    [first] = ask(app, (PATH, ASK | {"instructions": "Be brief.", "stream": stream, "max_output_tokens": 7}))
    begun = sse(first)[-1]["response"] if stream else first.json()
    assert (begun["store"], begun["status"]) == (True, "incomplete")
    [second] = ask(app, (PATH, ASK | {"input": "And?", "previous_response_id": begun["id"]}))
    answer = second.json()
    assert answer["previous_response_id"] == begun["id"]
    prompt = prompt_of(registry, talker)
    assert "Be brief." not in prompt
    assert [prompt.index(text) for text in ("Hi", "A fox.", "And?")] == sorted(
        prompt.index(text) for text in ("Hi", "A fox.", "And?")
    )
    seen, last, items = ask(
        app,
        (f"{PATH}/{begun['id']}", None),
        (f"{PATH}/{answer['id']}", None),
        (f"{PATH}/{answer['id']}/input_items?order=asc", None),
    )
    assert (seen.json(), last.json()) == (begun, answer)
    assert [item["role"] for item in items.json()["data"]] == ["user", "assistant", "user"]


def test_tools_of_an_earlier_response_are_answered(talker: Model) -> None:
    app, registry = serving(talker, CALL)
    [called] = ask(app, (PATH, ASK | {"tools": [TOOL]}))
    [call] = called.json()["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    more = ASK | {"tools": [TOOL], "previous_response_id": called.json()["id"]}
    assert [answer.status_code for answer in ask(app, (PATH, more | {"input": [output]}))] == [200]
    assert prompt_of(registry, talker).endswith("42<assistant>")
    [wrong] = ask(app, (PATH, more | {"input": [output | {"call_id": "other"}]}))
    assert wrong.json()["error"]["param"] == "input[0].call_id"


def test_pages_of_items(served: tuple[FastAPI, Registry]) -> None:
    app, _ = served
    said = [{"role": "user", "content": str(number), "id": f"msg_{number}"} for number in range(5)]
    [answer] = ask(app, (PATH, ASK | {"input": said}))
    shown = f"{PATH}/{answer.json()['id']}"
    path, after, ids = f"{shown}/input_items?limit=2", "", list[str]()
    for _ in range(3):
        [page] = ask(app, (f"{path}&after={after}", None))
        after = page.json()["last_id"]
        ids += [item["id"] for item in page.json()["data"]]
        assert page.json()["has_more"] == (len(ids) < 5)
    assert ids == [f"msg_{number}" for number in (4, 3, 2, 1, 0)]
    wrong = ask(app, *((each, None) for each in (f"{path}&after=odd", f"{path}&limit=101", f"{shown}?stream=1")))
    assert [(one.status_code, one.json()["error"]["param"]) for one in wrong] == [
        *((400, "after"), (400, "limit"), (400, "stream")),
    ]


def test_who_keeps_what(served: tuple[FastAPI, Registry], talker: Model) -> None:
    """A server that keeps nothing refuses what needs it, and keeps nothing where a request does not say."""
    app, _ = served
    [unkept] = ask(app, (PATH, ASK | {"store": False}))
    assert unkept.json()["store"] is False
    [missing, unknown] = ask(
        app, (f"{PATH}/{unkept.json()['id']}", None), (PATH, ASK | {"previous_response_id": unkept.json()["id"]})
    )
    assert missing.status_code == 404
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "previous_response_not_found")
    app, _ = serving(talker, "A", responses_mib=0)
    plain, stored, continued, shown = ask(
        app,
        *((PATH, ASK | each) for each in ({}, {"store": True}, {"previous_response_id": "resp_1"})),
        (f"{PATH}/resp_1", None),
    )
    assert plain.json()["store"] is False
    assert [each.status_code for each in (stored, continued, shown)] == [400, 400, 404]
    for each in (stored, continued, shown):
        assert "--responses-mib" in each.json()["error"]["message"]


def test_a_conversation_is_bounded(served: tuple[FastAPI, Registry], monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = served
    monkeypatch.setattr("polyhead.service.api.dialects.responses.read.MAX_ITEMS", 3)
    [first] = ask(app, (PATH, ASK))
    [second] = ask(app, (PATH, ASK | {"previous_response_id": first.json()["id"]}))
    [third] = ask(app, (PATH, ASK | {"previous_response_id": second.json()["id"]}))
    assert second.status_code == 200
    assert third.json()["error"]["message"].startswith("input: the conversation before it has 4 items")


def test_a_long_conversation_takes_room(talker: Model) -> None:
    """More than a body may have is not read; what is read is claimed."""
    app, _ = serving(talker, "A", max_body_bytes=1024)
    [first] = ask(app, (PATH, ASK | {"input": "a" * 500}))
    [second] = ask(app, (PATH, ASK | {"input": "a" * 500, "previous_response_id": first.json()["id"]}))
    assert second.json()["error"]["param"] == "previous_response_id"
    assert "max_body_bytes" in second.json()["error"]["message"]


async def send_unread(app: FastAPI, path: str) -> "asyncio.Task[None]":
    """A request whose answer is written, and whose client reads nothing of it."""
    written = asyncio.Event()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            written.set()
            await asyncio.Event().wait()

    url = httpx.URL(f"http://testserver{path}")
    scope = {"type": "http", "method": "GET", "path": url.path, "query_string": url.query, "headers": [], "state": {}}
    task = asyncio.create_task(app(scope | {"raw_path": url.raw_path, "client": None}, receive, send))
    await written.wait()
    return task


@pytest.mark.parametrize(("below", "factor"), [("", 1), ("/input_items?order=asc", 3)])
@pytest.mark.parametrize("large", [False, True])
def test_a_response_that_is_read_slowly_is_claimed_though_it_was_deleted(
    talker: Model, below: str, factor: int, monkeypatch: pytest.MonkeyPatch, *, large: bool
) -> None:
    """A large one has a place in flight, too, of which a key has a share."""
    app, _ = serving(talker, "A", max_requests=1, request_headroom=Headroom(1 << 30))
    state: AppState = app.state.server
    size = 500
    if large:
        monkeypatch.setattr(dialect, "FREE_BYTES", size)

    async def act() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://testserver") as client:
            answer = await client.post(PATH, json=ASK | {"input": "a" * size, "user": "b" * size})
            shown = f"{PATH}/{answer.json()['id']}"
            whole = (await client.get(shown + below)).content
            kept = claimed(state)
            reader = await send_unread(app, shown + below)
            assert claimed(state) - kept >= (factor * size if below else len(whole))
            assert state.admission.in_flight == large
            other = await client.get(shown + below)
            assert other.status_code == (429 if large else 200), other.text
            app.state.responses.delete(shown.rpartition("/")[2], "")
            assert claimed(state) >= size, "it is still in memory"
            reader.cancel()
            await asyncio.wait({reader})
            assert claimed(state) == state.admission.in_flight == 0

    asyncio.run(act())


@pytest.mark.parametrize("below", ["", "/input_items"])
def test_a_response_makes_room_for_its_own_reading(talker: Model, below: str) -> None:
    """What is sent is claimed by its reader, and is not kept any more where both do not fit."""
    app, _ = serving(talker, "A", request_headroom=Headroom(1 << 30))
    headroom = app.state.server.headroom
    [answer] = ask(app, (PATH, ASK))
    headroom.reserve(int(headroom.total - claimed(app.state.server)), "others")
    path = f"{PATH}/{answer.json()['id']}{below}"
    read, again = ask(app, (path, None), (path, None))
    assert (read.status_code, again.status_code) == (200, 404), again.text
    assert claimed(app.state.server) <= headroom.total


def claimed(state: AppState) -> float:
    return state.headroom.shortfall(int(state.headroom.total))


def test_the_official_client_and_another_key(talker: Model, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, mine={"scopes": ["inference"]}, other={"scopes": ["inference"]})
    app, _ = serving(talker, "A fox.", keys_file=keys)
    work = {"model": "talker", "input": "Hi"}

    async def act() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport) as http:
            mine, other = (
                openai.AsyncOpenAI(api_key=key, base_url="http://testserver/v1", http_client=http, max_retries=0)
                for key in ("mine", "other")
            )
            first = await mine.responses.create(**work, store=True)
            second = await mine.responses.create(**work, previous_response_id=first.id)
            assert (await mine.responses.retrieve(second.id)).output_text == "A fox."
            items = [item async for item in mine.responses.input_items.list(second.id, limit=2, order="asc")]
            assert [item.role for item in items] == ["user", "assistant", "user"]
            for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
                with pytest.raises(openai.NotFoundError, match="there is no response"):
                    await call(first.id)
            with pytest.raises(openai.BadRequestError, match="there is no response"):
                await other.responses.create(**work, previous_response_id=first.id)
            await mine.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError, match="was deleted"):
                await mine.responses.retrieve(first.id)

    asyncio.run(act())


def test_many_items_without_text_are_written_on_a_thread() -> None:
    items = [{"role": "user", "content": ""}] * 4096
    wire = ResponseRequest.read(ASK | {"input": items})
    assert count_characters(wire.input) > INLINE_BYTES


def test_requests_remove_responses_of_the_key_that_has_most_at_each_time() -> None:
    store = opened(8)
    for name in "1234":
        store.keep(kept(name, "a"))
    for name in "56":
        store.keep(kept(name, "b"))
    assert store.evict(3 * SIZE)
    assert found(store, "a", "1234") + found(store, "b", "56") in ("4" + "56", "34" + "6")
    assert store.evict(3 * SIZE)
    assert store.size == 0
    assert not store.evict(1)
