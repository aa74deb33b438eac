"""Memory for requests: the share of each key, and what is kept only while no request needs its memory."""

import asyncio
import gc
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from polyhead.service.api.dialects.tokens import routes as tokens_routes
from polyhead.service.api.dialects.tokens.routes import write_tokens
from polyhead.service.core.errors import BadRequest, BodyTooLarge, Expired, Overloaded
from polyhead.service.core.grammar import Grammar
from polyhead.service.core.guide import GuideBusy
from polyhead.service.core.request import Terms
from polyhead.service.resources.key_share import KeyShare
from polyhead.service.resources.request_memory import (
    ALLOCATOR_BYTES,
    BYTES_PER_CONTAINER,
    MAX_CONTAINERS,
    Headroom,
    MemoryClaim,
)
from polyhead.service.structured.compiled_guide import CompiledGuide
from polyhead.service.structured.guide_compiler import GuideCompiler
from polyhead.service.text.tokenization import TextProcessor
from tests.service.api.access.test_auth import keys_file
from tests.support.scripted import Registry, application, ask, echo, model

MIB = 1 << 20
KEYS = {"a", "b"}


def shared(mib: int = 100, owners: set[str] = KEYS) -> Headroom:
    """Memory of which each of several keys may have a half."""
    return Headroom(ALLOCATOR_BYTES + mib * MIB, share=KeyShare(owners, 0.5))


def test_a_share_is_a_part_of_a_limit_where_there_are_several_keys() -> None:
    owners = {"a"}
    share = KeyShare(owners, 0.5)
    assert share.of(5) == 5
    owners.add("b")
    assert [share.of(5), share.of(1), share.of(math.inf)] == [2, 1, math.inf]


def test_a_key_holds_its_share_of_memory() -> None:
    headroom = shared()
    many = [MemoryClaim(headroom, "a") for _ in range(5)]
    for claim in many:
        claim.grow(10 * MIB, "the body")
    with pytest.raises(Overloaded, match=r"the list takes .* 1 MiB, and 0 are left .* this key, .* 50 \(key_share\)"):
        MemoryClaim(headroom, "a").grow(MIB, "the list")
    with pytest.raises(
        BodyTooLarge, match=r"51 MiB with the rest of its request, and a key has 50 of 100 for requests \(key_share\)"
    ):
        many[0].grow(41 * MIB, "the answer")
    MemoryClaim(headroom, "b").grow(50 * MIB, "the body")
    many[0].release()
    part = many[1].open_part()
    part.grow(10 * MIB, "a part")
    with pytest.raises(Overloaded):
        many[0].grow(1, "the body")
    assert headroom._reserved_of == {"a": 50 * MIB, "b": 50 * MIB}
    for claim in (*many, part):
        claim.release()
    assert headroom._reserved_of == {"b": 50 * MIB}


def test_a_request_that_has_ended_claims_no_more() -> None:
    headroom = shared()
    claim = MemoryClaim(headroom, "a")
    claim.grow(MIB, "the body")
    claim.release()
    claim.grow(MIB, "the body")
    claim.close()
    with pytest.raises(Expired, match="the answer is not needed any more"):
        claim.grow(MIB, "the answer")
    assert (headroom._reserved, headroom._reserved_of) == (0, {})


def test_a_request_that_ends_while_its_claim_grows_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    headroom = shared()
    claim, reserve = MemoryClaim(headroom, "a"), headroom.reserve

    def reserve_and_end(*arguments: Any) -> None:
        reserve(*arguments)
        claim.close()

    monkeypatch.setattr(headroom, "reserve", reserve_and_end)
    with pytest.raises(Expired):
        claim.grow(MIB, "the answer")
    assert (headroom._reserved, headroom._reserved_of) == (0, {})


def test_a_thread_that_goes_on_after_its_client_has_left_claims_nothing(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: what it claimed later was never released, and was missing in the share of its key."""
    headroom, talker = Headroom(), model(tiny_generator, "talker", "generate")
    app = application(Registry([talker], echo), headroom)
    begun, goes_on, ended = Event(), Event(), Event()
    errors = list[Exception]()

    def held_write(*arguments: Any) -> Any:
        begun.set()
        goes_on.wait()
        try:
            return write_tokens(*arguments)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            ended.set()

    monkeypatch.setattr(tokens_routes, "write_tokens", held_write)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as http:
            body = {"model": "talker", "prompt": "a film", "return_token_strs": True}
            call = asyncio.create_task(http.post("/tokenize", json=body))
            await asyncio.to_thread(begun.wait)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            assert headroom._reserved == 0
            goes_on.set()
            await asyncio.to_thread(ended.wait)

    asyncio.run(run())
    assert [type(error) for error in errors] == [Expired]
    assert headroom._reserved == 0


def test_what_a_request_has_counts_where_it_needs_more() -> None:
    """Found by an attack: what was missing was held by the request itself, and the answer was to try again."""
    claim = MemoryClaim(shared(), "a")
    claim.grow(20 * MIB, "the body")
    line, other = claim.open_part(), claim.open_part()
    line.grow(5 * MIB, "a line")
    with pytest.raises(BodyTooLarge, match="56 MiB"), line.reserved(31 * MIB, "the text"):
        pass
    with line.reserved(10 * MIB, "the text"):
        assert (claim.held, line.held, other.held) == (20 * MIB, 35 * MIB, 20 * MIB)
        with pytest.raises(BodyTooLarge, match="51 MiB"):
            line.grow(16 * MIB, "the answer")
        with pytest.raises(Overloaded, match="15 are left by other requests"):
            other.grow(16 * MIB, "another line, which will have room")
    line.close()
    with pytest.raises(Expired), line.reserved(1, "the text"):
        pass
    assert claim.held == claim._headroom._reserved == 20 * MIB


LONG_TEXT = "a" * 207_000  # takes less memory than there is, and more with its body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG_TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/tokenize", {"prompt": LONG_TEXT}),
        ("/tokenize", {"inputs": LONG_TEXT}),
        ("/v1/systemone", {"state": LONG_TEXT, "questions": {"q": {"type": "noul", "instructions": "Is it?"}}}),
        ("/v1/explain", {"input": LONG_TEXT}),
        ("/v1/embeddings", {"input": LONG_TEXT}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_text_that_can_never_fit_beside_its_body_is_not_asked_for_again(
    tiny_generator: Path, tiny_embedder: Path, path: str, body: Mapping[str, Any]
) -> None:
    """Found by an attack: it was answered 429, so a batch sent it again until the batch expired."""
    headroom = Headroom(free=0)
    if path == "/v1/embeddings":
        served = model(tiny_embedder, "it", "embed")
    else:
        served = model(tiny_generator, "it", "generate")
    named = {} if "inputs" in body else {"model": "it"}
    [refused] = ask(application(Registry([served], echo), headroom), (path, named | body))
    assert refused.status_code == 413, refused.text
    assert "of 2070" in refused.text
    assert headroom._reserved == 0


def test_one_key_or_none_has_all() -> None:
    for owners, owner in ((set(), ""), ({"a"}, "a")):
        MemoryClaim(shared(owners=owners), owner).grow(100 * MIB, "the body")


def test_claims_of_all_routes_are_those_of_the_key(tiny_embedder: Path, tmp_path: Path) -> None:
    """One key holds its share, whatever it is of: its calls and its lists are refused, those of another are not."""
    headroom, scopes = shared(), {"scopes": ["inference", "models"]}
    settings = {"keys_file": keys_file(tmp_path, a=scopes, b=scopes), "files_dir": str(tmp_path / "files")}
    app = application(Registry([model(tiny_embedder, "embed", "embed")], echo), headroom, **settings)
    body = {"model": "embed", "input": "x"}

    async def statuses(owner: str) -> list[int]:
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {owner}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", headers=headers) as http:
            answers = [await http.get("/v1/files"), await http.post("/v1/embeddings", json=body)]
        return [answer.status_code for answer in answers]

    async def run() -> None:
        files = app.state.batches.store.files
        await app.state.batches.open()
        for owner in "ab":
            await files.add(owner, "x", b"x")
        with MemoryClaim(headroom, "a").reserved(50 * MIB, "others"):
            assert await statuses("a") == [429, 429]
            assert await statuses("b") == [200, 200]
        assert await statuses("a") == [200, 200]
        files.close()

    asyncio.run(run())
    assert headroom._reserved_of == {}


def test_texts_that_are_tokenised_take_memory_of_their_key(tiny_embedder: Path) -> None:
    headroom, embedder = shared(), model(tiny_embedder, "embed", "embed")
    text = TextProcessor(threads=1, batch_limit=9, on_tokenised=lambda *_: None, headroom=headroom)

    async def tokenize(owner: str) -> Any:
        return await text.tokenize(embedder, ["a good film"], special=True, terms=Terms(owner))

    headroom.reserve(50 * MIB, "others", owner="a")
    with pytest.raises(Overloaded, match="key_share"):
        asyncio.run(tokenize("a"))
    assert asyncio.run(tokenize("b"))
    text.close()


def test_a_claim_shrinks_by_no_more_than_it_has() -> None:
    headroom = shared()
    claim = MemoryClaim(headroom, "a")
    claim.grow(5 * MIB, "the answer")
    claim.shrink(3 * MIB)
    assert headroom._reserved == headroom._reserved_of["a"] == 2 * MIB
    claim.release()
    claim.shrink(2 * MIB)
    assert (headroom._reserved, headroom._reserved_of) == (0, {})


def test_lexers_take_memory_of_the_key_whose_grammar_it_is(tiny_generator: Path) -> None:
    """Those of cached guides are used by all keys, and that of any object always."""
    headroom, talker = shared(), model(tiny_generator, "talker", "generate")
    guides = GuideCompiler(headroom)
    guides.compile(talker, Grammar("object", "", "response_format"), None, "a")
    assert headroom._reserved
    assert headroom._reserved_of == {}
    used, grammar = list[Any](), Grammar("regex", "[ab]+", "response_format")
    used.append(guides.compile(talker, grammar, None, "a"))
    used[0].lexer.claim.grow_to(4 * MIB)
    assert headroom._reserved_of == {}
    guides._trim_caches(0)  # an answer still has it
    assert headroom._reserved_of == {"a": 4 * MIB}
    used[0].lexer.claim.grow_to(5 * MIB)
    assert headroom._reserved == headroom._reserved_of["a"] == 5 * MIB
    used.clear()
    gc.collect()
    assert (headroom._reserved, headroom._reserved_of) == (0, {})
    guides.close()


def test_a_replaced_lexer_is_that_of_its_key_and_the_next_of_none(tiny_generator: Path) -> None:
    headroom, talker = shared(), model(tiny_generator, "talker", "generate")
    guides = GuideCompiler(headroom)
    guide = guides.compile(talker, Grammar("regex", "[ab]+", "response_format"), None, "a")
    assert isinstance(guide, CompiledGuide)
    first = guide.lexer
    try:
        guide.replace(first, "a")
    except GuideBusy as busy:
        busy.ready.exception()
    assert guide.replace(first, "a") is guide.lexer is not first
    assert headroom._reserved_of == {"a": first.claim.size}
    assert headroom._reserved == first.claim.size + guide.lexer.claim.size
    guides.close()


def test_a_lexer_that_leaves_the_cache_while_it_grows_is_that_of_its_key(tiny_generator: Path) -> None:
    headroom, talker = shared(), model(tiny_generator, "talker", "generate")
    guides = GuideCompiler(headroom)
    guide = guides.compile(talker, Grammar("regex", "[ab]+", "response_format"), None, "a")
    assert isinstance(guide, CompiledGuide)
    claim, size = guide.lexer.claim, guide.lexer.claim.size
    idle = guides.compile(talker, Grammar("regex", "[bc]+", "response_format"), None, "a")
    assert isinstance(idle, CompiledGuide)
    idle.lexer.claim.grow_to(6 * MIB)
    del idle
    others = MemoryClaim(headroom)
    others.grow(98 * MIB - headroom._reserved, "others")
    claim.grow_to(size + 3 * MIB)  # both are dropped for it
    assert (claim.size, headroom._reserved_of) == (size + 3 * MIB, {"a": size + 3 * MIB})
    others.release()
    assert headroom._reserved == claim.size
    guides.close()


def test_a_key_at_its_share_drops_no_guide_of_others(tiny_generator: Path) -> None:
    """Found in a review: each of its refused grammars emptied the caches of all keys."""
    headroom, talker = shared(), model(tiny_generator, "talker", "generate")
    guides, grammar = GuideCompiler(headroom), Grammar("regex", "[ab]+", "response_format")
    guide = guides.compile(talker, grammar, None, "b")
    headroom.reserve(50 * MIB, "others", owner="a")
    with pytest.raises(Overloaded, match="key_share"):
        guides.compile(talker, Grammar("regex", "[bc]+", "response_format"), None, "a")
    assert guides.find_cached(talker, grammar, None) is guide
    assert guides.compile(talker, grammar, None, "a") is guide
    guides.close()


def test_a_grammar_that_can_never_fit_beside_its_body_is_not_asked_for_again(tiny_generator: Path) -> None:
    headroom, talker = shared(), model(tiny_generator, "talker", "generate")
    text = TextProcessor(threads=1, batch_limit=9, on_tokenised=lambda *_: None, headroom=headroom)
    claim = MemoryClaim(headroom, "a")
    claim.grow(50 * MIB, "the body")
    grammar = Grammar("regex", "[ab]+", "response_format")
    with pytest.raises(BadRequest, match=r"response_format: the answer's form takes about .*key_share"):
        asyncio.run(text.for_request(claim).find_guide(talker, grammar, None, Terms("a")))
    claim.release()
    assert asyncio.run(text.for_request(claim).find_guide(talker, grammar, None, Terms("a")))
    text.close()


def test_what_is_kept_makes_room_for_requests() -> None:
    headroom, kept = shared(owners=set()), 0

    def evict(size: float) -> bool:
        nonlocal kept
        if size > kept:
            return False
        headroom.release(int(size))
        kept -= int(size)
        return True

    headroom.evict_kept = evict
    for _ in range(4):
        assert headroom.reserve_kept(10 * MIB)
        kept += 10 * MIB
    claim = MemoryClaim(headroom)
    claim.grow(60 * MIB, "the body")
    assert not headroom.reserve_kept(1), "nothing is evicted for what is kept"
    claim.grow(30 * MIB, "the body")
    assert kept == 10 * MIB
    with pytest.raises(Overloaded, match="11 MiB, and 0 are left by others"):
        MemoryClaim(headroom).grow(11 * MIB, "the body")
    assert kept == 10 * MIB, "it would not have been enough"


@pytest.mark.parametrize("mib", [256, 65_536])
def test_lists_and_objects_of_all_requests_are_bounded_whatever_memory_there_is(mib: int) -> None:
    """A garbage collection examines all of them in one piece."""
    headroom, held = Headroom(ALLOCATOR_BYTES + mib * MIB), 0
    with suppress(Overloaded):
        while held <= 2 * MAX_CONTAINERS:
            MemoryClaim(headroom).grow_by_containers(1 << 16, 0, "what the body contains")
            held += 1 << 16
    assert MAX_CONTAINERS - (1 << 16) <= held <= MAX_CONTAINERS


def test_a_list_takes_at_least_its_own_memory() -> None:
    assert Headroom(ALLOCATOR_BYTES + 32 * MIB).container_bytes == BYTES_PER_CONTAINER
    assert Headroom().container_bytes == BYTES_PER_CONTAINER
