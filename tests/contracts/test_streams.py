"""The contract: a stream shows whole characters, nothing of a stop string, and the same text as an answer in one piece.

The server is real; only what the network says is given, token by token, so that every split can be had.
"""

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
from tests.support.processes import Faulted

FIRST_MARK = 10
TEXTS = [
    "👩‍👩‍👧 and 🏳️‍🌈, 👍🏽 x 🇫🇷!",  # joined, coloured and paired
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
def server(exact: Faulted) -> Faulted:
    return exact


def spelled(pieces: dict[bytes, int], data: bytes, most: Callable[[], int]) -> tuple[int, ...]:
    """Tokens for `data`, each of at most so many bytes."""
    tokens, start = [], 0
    while start < len(data):
        end = max(end for end in range(start + 1, start + 1 + max(most(), 1)) if data[start:end] in pieces)
        tokens.append(pieces[data[start:end]])
        start = end
    return tuple(tokens)


def cut(text: str, stops: Sequence[str]) -> str:
    """What is to be shown: everything before the stop string that is complete first, the longest of equals."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def both(server: Faulted, asked: Sequence[dict[str, Any]]) -> list[tuple[Answer, Answer]]:
    """Each answer in a stream, and in one piece."""

    async def all_of_them() -> list[Answer]:
        bodies = [body | {"stream": stream} for body in asked for stream in (True, False)]
        return list(await asyncio.gather(*(ask(server.url, COMPLETIONS, body) for body in bodies)))

    answers = asyncio.run(all_of_them())
    return list(zip(answers[::2], answers[1::2], strict=True))


def said(server: Faulted, scripts: Sequence[tuple[int, ...]], **others: Any) -> list[tuple[Answer, Answer]]:
    """What the server makes of a network that says `scripts`."""
    marks = range(FIRST_MARK, FIRST_MARK + len(scripts))
    server.arm(*(Fault("say", token=mark, script=script) for mark, script in zip(marks, scripts, strict=True)))
    pairs = both(
        server, [completion([mark], len(script), **others) for mark, script in zip(marks, scripts, strict=True)]
    )
    server.arm()
    return pairs


@pytest.mark.parametrize("longest", [1, 2, 3, 16], ids=lambda most: f"{most} bytes a token")
def test_characters_are_never_split(server: Faulted, pieces: dict[bytes, int], longest: int) -> None:
    scripts = [spelled(pieces, text.encode(), lambda: longest) for text in TEXTS]
    for text, (streamed, whole) in zip(TEXTS, said(server, scripts), strict=True):
        assert streamed.text == whole.text == text
        assert all(delta and not set(delta) & {"\ufffd"} for delta in streamed.deltas[:-1])
        assert len(streamed.deltas) > len(text) / 4, "nothing is held back that need not be"


def test_what_is_no_text_is_shown_as_such(server: Faulted, pieces: dict[bytes, int]) -> None:
    """Half a character at the end, in the middle, and bytes that are none."""
    broken = [b"a\xf0\x9f\x98", b"\xe6\x97b", b"\x80\xbfc", b"\xff\xfe\xf8", "é".encode()[:1] + "日".encode()]
    scripts = [spelled(pieces, data, lambda: 1) for data in broken]
    for data, (streamed, whole) in zip(broken, said(server, scripts), strict=True):
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
def test_stop_strings_in_a_stream(server: Faulted, pieces: dict[bytes, int], text: str, stops: list[str]) -> None:
    scripts = [spelled(pieces, text.encode(), lambda longest=longest: longest) for longest in (1, 2, 3, 16)]
    for streamed, whole in said(server, scripts, stop=stops):
        assert streamed.text == whole.text == cut(text, stops)
        finish = "stop" if cut(text, stops) != text else "length"
        assert f'"finish_reason":"{finish}"' in streamed.data[-2]
        assert whole.choice["finish_reason"] == finish
    assert server.rest()


def test_streamed_is_not_streamed(server: Faulted) -> None:
    """Whatever a network of random weights says, greedy and seeded."""
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
def test_nothing_of_a_stop_string_is_shown_and_nothing_before_it_lost(
    tokenizer: Tokenizer, pieces: dict[bytes, int], text: str, stops: list[str], splits: list[int], logprobs: int
) -> None:
    """Over any split of any text over tokens: what has been shown is never taken back, and in the end is all."""
    draws = iter(splits * len(text.encode()) * 2)
    tokens = spelled(pieces, text.encode(), lambda: next(draws))
    expected = cut(text, stops)
    request = Generate("test", (5,), len(tokens) + 1, logprobs=logprobs)
    transcript = Detokenizer(tokenizer, StopRules(tuple(stops)), request)
    shown = ""
    for token in tokens:
        piece = transcript.push(GeneratedToken(token))
        shown += piece.text
        assert expected.startswith(shown)
        if transcript.is_stopped:
            break
    else:
        last = transcript.close(Done("length", 1, len(tokens)))
        shown += last.text
        assert last.finish == ("stop" if transcript.is_stopped else "length")
    assert shown == expected
    assert transcript.is_stopped == (expected != text)
