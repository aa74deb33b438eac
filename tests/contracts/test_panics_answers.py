"""A panic of a library while an answer is detokenized or guided ends that answer alone and frees what it held."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.panics import run_library, text_failure
from polyhead.models.tokenizer.token_text import TokenSpelling, TokenStream
from polyhead.service.api.dialects.openai import routes as openai
from polyhead.service.core.request import Generate
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.structured import guide_compiler as guides
from tests.contracts.test_panics import PATIENCE_S, PanicException, panic
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served

PANIC_WORD = "panic"  # marks the request whose tokens cause a panic
COMPLETION = {"model": "chat", "prompt": "The fox", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", COMPLETION),
    "several": ("/v1/completions", COMPLETION | {"prompt": ["The fox", "A dog", "A bird"]}),
    "chat": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", {"model": "chat", "input": "Hello", "max_output_tokens": 16, "temperature": 0}),
    "messages": ("/v1/messages", {"model": "chat", "messages": CHAT["messages"], "max_tokens": 4, "temperature": 0}),
    "tgi": ("/models/chat/generate", {"inputs": "The fox", "parameters": {"max_new_tokens": 4}}),
    "hf": ("/models/chat", {"inputs": "The fox", "parameters": {"max_new_tokens": 4}}),
}
PANICS: dict[str, Callable[..., Any]] = {"reported": lambda *_: run_library(panic, text_failure), "raw": panic}


async def settled(client: Client) -> None:
    """Wait until no tokens are in flight."""
    while float(await client.metric("polyhead_tokens_in_flight")):
        await asyncio.sleep(0.005)


async def is_well(client: Client) -> None:
    answer = await client.says("chat")
    assert answer.status_code == 200, answer.text
    await settled(client)
    assert float(await client.metric('polyhead_kv_blocks_used{model="chat"')) == 0


def error_of(answer: httpx.Response) -> str:
    """The text of an error answer, or of a stream whose last event is an error."""
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    message = orjson.loads(lines[-1].removeprefix("data: ")) if lines else answer.json()
    assert "error" in message or message["type"] == "response.failed", answer.text
    assert sum('"error":{' in line or '"error":"' in line for line in lines) <= 1
    return answer.text


@pytest.mark.parametrize("kind", PANICS)
@pytest.mark.parametrize("after", [0, 2])
def test_a_panic_in_detokenization_fails_that_answer(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: int
) -> None:
    """At its first token or in the middle: in every dialect, whole and streamed."""
    real = TokenStream.push

    def pushing() -> Callable[..., str]:
        count = [0]

        def push(self: TokenStream, token: int) -> str:
            count[0] += 1
            return PANICS[kind]() if count[0] > after else real(self, token)

        return push

    async def act(client: Client) -> None:
        async with asyncio.timeout(4 * PATIENCE_S):
            for path, body in ROUTES.values():
                for stream in (False, True):
                    if stream and path == "/models/chat":
                        continue
                    way = path + "_stream" if stream and path.endswith("generate") else path
                    streamed = {"stream": True} if stream and way == path and not path.startswith("/models") else {}
                    with monkeypatch.context() as patched:
                        patched.setattr(TokenStream, "push", pushing())
                        answer = await client.ask("POST", way, body | streamed)
                    message = error_of(answer)
                    assert "library fail" in message, (way, message)
                    await settled(client)
                await is_well(client)

    served(act, {"chat": tiny_generator})


def test_other_requests_are_answered_after_a_panic(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TokenSpelling.token_bytes

    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            fine = await client.says("chat", 20)
            [token, *_] = (await client.ask("POST", "/tokenize", {"inputs": PANIC_WORD})).json()[0]

            def spell(self: TokenSpelling, id: int, *, first: bool = False) -> bytes:
                return panic() if id == token["id"] else real(self, id, first=first)

            monkeypatch.setattr(TokenSpelling, "token_bytes", spell)
            odd = COMPLETION | {"logit_bias": {str(token["id"]): 100}, "stream": True}
            answers = await asyncio.gather(
                client.says("chat", 20), client.ask("POST", "/v1/completions", odd), client.says("chat", 20)
            )
            assert "a library failed: PanicException" in error_of(answers[1])
            for answer in (answers[0], answers[2]):
                assert answer.json()["choices"] == fine.json()["choices"]
            await settled(client)

    served(act, {"chat": tiny_generator})


@pytest.mark.parametrize("method", ["advance", "forced", "fill", "begin"])
def test_a_panic_of_the_grammar_library_fails_that_answer(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls = {"advance": "consume_tokens", "forced": "compute_ff_tokens", "fill": "unsafe_compute_mask_ptr"}

    class Panicking:
        """A matcher that makes the library panic."""

        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return panic if name == calls.get(method) else getattr(self._matcher, name)

        def deep_copy(self) -> Any:
            return panic() if method == "begin" else Panicking(self._matcher.deep_copy())

    real = guides.compile_guide

    def compile_panicking(*given: Any) -> Any:
        """The guide is tried before it is used; that does not panic."""
        guide = real(*given)
        guide.lexer.matcher = Panicking(guide.lexer.matcher)
        return guide

    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with monkeypatch.context() as patched:
                patched.setattr(guides, "compile_guide", compile_panicking)
                answers = await asyncio.gather(
                    client.ask("POST", "/v1/completions", COMPLETION | {"guided_regex": "[a-z]{40}"}),
                    client.says("chat", 9),
                )
            assert [answer.status_code for answer in answers] == [500, 200], answers[0].text
            assert "a library failed: PanicException" in answers[0].text
            await is_well(client)

    served(act, {"chat": tiny_generator})


def test_a_request_that_a_worker_rejects_gets_an_error(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive with it are accepted."""
    real = GeneratorWorker.submit

    def submit(self: GeneratorWorker, ticket: Any) -> None:
        assert isinstance(ticket.request, Generate)
        if ticket.request.max_tokens == 3:
            raise PanicException("as it is begun")
        real(self, ticket)

    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with monkeypatch.context() as patched:
                patched.setattr(GeneratorWorker, "submit", submit)
                answers = await asyncio.gather(client.says("chat", 3), client.says("chat", 4))
            assert [answer.status_code for answer in answers] == [500, 200]
            assert "a library failed: PanicException: as it is begun" in answers[0].text
            await is_well(client)

    served(act, {"chat": tiny_generator})


def test_a_panic_in_a_handler_fails_that_request(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with monkeypatch.context() as patched:
                patched.setattr(openai, "write_completion", panic)
                answer = await client.says("chat")
            assert answer.status_code == 500
            assert "a library failed: PanicException" in answer.text
            await is_well(client)

    served(act, {"chat": tiny_generator})


def test_a_tokenizer_that_fails_outside_its_threads_is_an_error(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with monkeypatch.context() as patched:
                patched.setattr(Tokenizer, "is_special", lambda *_: run_library(panic, text_failure))
                asked = {"inputs": "The fox", "parameters": {"max_new_tokens": 4, "details": True}}
                answer = await client.ask("POST", "/models/chat/generate", asked)
            assert answer.status_code >= 424
            assert "the tokenizers library fails on this text" in answer.text
            await is_well(client)

    served(act, {"chat": tiny_generator})
