"""Contract: a stream has whole characters, nothing of a stop string, and the same text as a whole answer.

The server is real; only the tokens of the network are given by the test, so that every split can be tested."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core.request import Done, Generate, GeneratedToken
from polyhead.service.text.detokenizer import Detokenizer
from polyhead.service.text.stop_strings import StopRules
from tests.support.crowd import COMPLETIONS, Answer, ask, completion, prompts
from tests.support.faults import Fault
from tests.support.processes import FaultServer

FIRST_MARK = 10
TEXTS = [
    "👩‍👩‍👧 and 🏳️‍🌈, 👍🏽 x 🇫🇷!",  # joined, with skin tone, and of two code points
    "e\u0301 a\u0308\u0323 ไทย नमस्ते",  # combining
    "日本語のテキスト、中文，한국어。",
    "plain, naïve, größer\n\tand «quoted»",
    "🙂" * 12,
]


@pytest.fixture(scope="module")
def tokenizer(tiny_generator: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_generator)


@pytest.fixture(scope="module")
def pieces(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.piece_bytes(id): id for id in range(3, tokenizer.vocab_size)}


@pytest.fixture(scope="module")
def server(exact: FaultServer) -> FaultServer:
    return exact


def tokens_of(pieces: dict[bytes, int], data: bytes, most: Callable[[], int]) -> tuple[int, ...]:
    """Tokens for `data`, each of at most `most()` bytes."""
    tokens, start = [], 0
    while start < len(data):
        end = max(end for end in range(start + 1, start + 1 + max(most(), 1)) if data[start:end] in pieces)
        tokens.append(pieces[data[start:end]])
        start = end
    return tuple(tokens)


def cut(text: str, stops: Sequence[str]) -> str:
    """The expected text: everything before the stop string that is complete first, the longest of those that end
    there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def both(server: FaultServer, asked: Sequence[dict[str, Any]]) -> list[tuple[Answer, Answer]]:
    """Each answer as a stream and whole."""

    async def all_of_them() -> list[Answer]:
        bodies = [body | {"stream": stream} for body in asked for stream in (True, False)]
        return list(await asyncio.gather(*(ask(server.url, COMPLETIONS, body) for body in bodies)))

    answers = asyncio.run(all_of_them())
    return list(zip(answers[::2], answers[1::2], strict=True))


def scripted_answers(
    server: FaultServer, scripts: Sequence[tuple[int, ...]], **others: Any
) -> list[tuple[Answer, Answer]]:
    """The answers of the server when the network generates `scripts`."""
    marks = range(FIRST_MARK, FIRST_MARK + len(scripts))
    server.arm(*(Fault("say", token=mark, script=script) for mark, script in zip(marks, scripts, strict=True)))
    pairs = both(
        server, [completion([mark], len(script), **others) for mark, script in zip(marks, scripts, strict=True)]
    )
    server.arm()
    return pairs


@pytest.mark.parametrize("longest", [1, 2, 3, 16], ids=lambda most: f"{most} bytes a token")
def test_characters_are_never_split(server: FaultServer, pieces: dict[bytes, int], longest: int) -> None:
    scripts = [tokens_of(pieces, text.encode(), lambda: longest) for text in TEXTS]
    for text, (streamed, whole) in zip(TEXTS, scripted_answers(server, scripts), strict=True):
        assert streamed.text == whole.text == text
        assert all(delta and not set(delta) & {"\ufffd"} for delta in streamed.deltas[:-1])
        assert len(streamed.deltas) > len(text) / 4, "text was held back without need"


def test_invalid_utf8_is_sent_as_replacement_characters(server: FaultServer, pieces: dict[bytes, int]) -> None:
    """Incomplete characters at the end and in the middle, and invalid bytes."""
    broken = [b"a\xf0\x9f\x98", b"\xe6\x97b", b"\x80\xbfc", b"\xff\xfe\xf8", "é".encode()[:1] + "日".encode()]
    scripts = [tokens_of(pieces, data, lambda: 1) for data in broken]
    for data, (streamed, whole) in zip(broken, scripted_answers(server, scripts), strict=True):
        assert streamed.text == whole.text == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("Hello, world", ["lo, w"]),
        ("a 🙂🙃🙂 b", ["🙃"]),
        ("aaab aab", ["aab"]),
        ("one\n\ntwo", ["\n\n", "two"]),
        ("abcabcabd", ["abcabd"]),
        ("no such", ["suchlike"]),
        ("日本語のテキスト", ["のテ", "語の"]),
    ],
)
def test_stop_strings_in_a_stream(server: FaultServer, pieces: dict[bytes, int], text: str, stops: list[str]) -> None:
    scripts = [tokens_of(pieces, text.encode(), lambda longest=longest: longest) for longest in (1, 2, 3, 16)]
    for streamed, whole in scripted_answers(server, scripts, stop=stops):
        assert streamed.text == whole.text == cut(text, stops)
        finish = "stop" if cut(text, stops) != text else "length"
        assert f'"finish_reason":"{finish}"' in streamed.data[-2]
        assert whole.choice["finish_reason"] == finish
    assert server.rest()


def test_a_streamed_answer_equals_a_whole_one(server: FaultServer) -> None:
    """For the tokens of a network with random weights, greedy and seeded."""
    asked = [completion(prompt, 40, ignore_eos=False) for prompt in prompts(16, 12, seed=12)]
    asked += [completion(prompt, 40, temperature=1.0, seed=n) for n, prompt in enumerate(prompts(16, 12, seed=13))]
    for streamed, whole in both(server, asked):
        assert streamed.text == whole.text
        assert f'"finish_reason":"{whole.choice["finish_reason"]}"' in streamed.data[-2]
        assert streamed.data[-1] == "[DONE]"


CHARACTERS = st.sampled_from("ab\n é日🙂")


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(CHARACTERS, max_size=24),
    stops=st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=3),
    splits=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    logprobs=st.sampled_from((-1, 0)),
)
def test_stop_strings_are_removed_and_all_text_before_them_is_sent(
    tokenizer: Tokenizer, pieces: dict[bytes, int], text: str, stops: list[str], splits: list[int], logprobs: int
) -> None:
    """For any split of any text over tokens: text that was sent is never taken back, and at the end all of it was
    sent."""
    draws = iter(splits * len(text.encode()) * 2)
    tokens = tokens_of(pieces, text.encode(), lambda: next(draws))
    expected = cut(text, stops)
    request = Generate("test", (5,), len(tokens) + 1, logprobs=logprobs)
    transcript = Detokenizer(tokenizer, StopRules(tuple(stops)), request)
    sent = ""
    for token in tokens:
        piece = transcript.push(GeneratedToken(token))
        sent += piece.text
        assert expected.startswith(sent)
        if transcript.is_stopped:
            break
    else:
        last = transcript.close(Done("length", 1, len(tokens)))
        sent += last.text
        assert last.finish == ("stop" if transcript.is_stopped else "length")
    assert sent == expected
    assert transcript.is_stopped == (expected != text)
