"""Requests and events as bytes: they are decoded unchanged, and invalid data is rejected."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyhead.models.chat import ChatTemplate
from polyhead.models.core.decision_prompt import DecisionPrompt, LabelSchemaPrompt, OptionMarkPrompt
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core import errors
from polyhead.service.core.calibration import Calibration, ReliabilityBin
from polyhead.service.core.grammar import Grammar, Thinking
from polyhead.service.core.guide import GuideSpec
from polyhead.service.core.request import (
    AttentionWeights,
    Attribution,
    BeamSearchOptions,
    Done,
    Encode,
    ExplainTextRequest,
    ExplanationProgress,
    ExplanationResult,
    Failed,
    Generate,
    GeneratedToken,
    HeadOutput,
    PromptScores,
    Sampling,
    Terms,
    TokenCandidates,
    TokenOutputs,
)
from polyhead.service.decisions.calibration_file import MAX_MAPS, RELIABILITY_BINS
from polyhead.service.fleet import frames
from polyhead.service.fleet.frames import FrameError, RequestStarted, pack, unpack
from tests.support.calibrations import served_map
from tests.support.scripted import model


def floats(*values: float, shape: tuple[int, ...]) -> "memoryview[float]":
    import numpy as np

    return memoryview(np.array(values, "f").reshape(shape))


MESSAGES: list[Any] = [
    Generate(
        "x",
        (1, 2, 1 << 23),
        7,
        frozenset({1, 2}),
        Sampling(seed=(1 << 63) - 1, bias=((3, -math.inf),), banned=((1, 2), (3,))),
        logprobs=2,
        adapter=3,
        group="g",
        beams=BeamSearchOptions(3, forced_end_tokens=(1,)),
        guide=GuideSpec(Grammar("regex", "[ab]+", "regex"), Thinking("<a>", "</a>", 3)),
        prompt_logprobs=1,
        salt="s",
        source=(9, 8),
    ),
    Encode("y", (1,), (0,), "words", raw=True, rows=(0,), targets=(5,), question="noul"),
    ExplainTextRequest("z", (1, 2), "occlusion", goals=(((0, 1), (1, 1)),), kept_rows=frozenset({0}), baseline=-1),
    ExplainTextRequest(
        "y", (1, 2, 3), "occlusion", label_rows=(0, 1), text_rows=(2,), question="noul", reports_progress=True
    ),
    ExplanationProgress(0.5),
    GeneratedToken(5, -math.inf, ((1, -0.5),), 16),
    PromptScores(((-0.25, ()), (-math.inf, ((7, -1.5),)))),
    HeadOutput([0.1, math.inf]),
    TokenOutputs(floats(1.5, -2.5, shape=(1, 2))),
    TokenOutputs(floats(shape=(0,))),
    TokenCandidates((((1, 0.5), (2, 0.25)), ())),
    ExplanationResult(
        (AttentionWeights("cross", (0,), (1,), floats(1, 2, 3, 4, shape=(1, 1, 2, 2))),),
        (Attribution(floats(1, 2, shape=(2,)), 0.5, 2.0),),
        (0,),
    ),
    Done("stop", 3, 4, 2, token=9),
    RequestStarted(0.25),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_values_are_decoded_unchanged(message: Any) -> None:
    heard = unpack(pack(message))
    assert replace(heard, terms=message.terms) == message if hasattr(message, "terms") else heard == message
    assert type(heard) is type(message)


def test_every_request_and_event_can_be_encoded() -> None:
    from typing import get_args

    from polyhead.service.core.request import Event, Request

    kinds = {*get_args(Request), *get_args(Event)}
    assert kinds <= frames.CODECS.keys()
    assert kinds - {Failed} == {type(message) for message in MESSAGES} & kinds


@pytest.mark.parametrize("kind", frames.ERROR_TYPES.values(), ids=lambda kind: kind.__name__)
def test_errors_keep_their_class(kind: type[errors.PolyheadError]) -> None:
    error = kind("it is so", param="x", retry_after=3)
    error.model, error.task = "chat", "generate"
    heard = unpack(pack(Failed(error))).error
    assert type(heard) is kind
    assert vars(heard) == vars(error)


def test_deadlines_are_sent_as_remaining_seconds() -> None:
    before = perf_counter() + 10
    heard = unpack(pack(Terms("me", -1, before, "f" * 32)))
    assert (heard.owner, heard.priority, heard.trace) == ("me", -1, "f" * 32)
    assert 0 <= heard.deadline - before < 1
    assert unpack(pack(Terms())).deadline == math.inf


@pytest.mark.parametrize(
    "prompt",
    [
        LabelSchemaPrompt(2.0),
        OptionMarkPrompt(1, 2, 3, 192, (1.0, 0.5, 2.0), (("choice", "3-5", 1.5), ("noul", "2", 0.5))),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_models_are_decoded_unchanged(tiny_generator: Path, prompt: DecisionPrompt) -> None:
    known = model(tiny_generator, "decider", "decide", decision_prompt=prompt)
    _, data, created = frames.pack_model(known)
    heard = frames.unpack_model(data, created)
    assert replace(heard, tokenizer=known.tokenizer) == known


def test_the_largest_calibration_is_decoded_unchanged() -> None:
    bins = tuple(ReliabilityBin(number / 15, 0.5, 1) for number in range(RELIABILITY_BINS))
    whole = replace(served_map(), before=replace(served_map().before, bins=bins))
    calibration = Calibration((replace(whole, after=whole.before),) * MAX_MAPS)
    assert unpack(pack(calibration)) == calibration


def test_tokenizers_and_templates_are_decoded_unchanged(tiny_generator: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_generator)
    heard = unpack(pack(tokenizer))
    assert heard.encode("A naïve <|im_start|> fox 🙂").ids == tokenizer.encode("A naïve <|im_start|> fox 🙂").ids
    assert (heard.eos_id, heard.vocab_size, heard.parts) == (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.parts)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", tool_use="{{ tools }}", bos_token="<s>")
    heard = unpack(pack(template))
    assert heard.render([{"content": "hi"}]) == "<s>hi"
    assert heard.parts == template.parts


@given(st.binary(max_size=200))
def test_invalid_data_is_rejected(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        unpack(data)


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb(msgpack.ExtType(127, b"")),
        msgpack.packb(msgpack.ExtType(frames.CODEC_NUMBERS[GeneratedToken], pack((1, 2, 3, 4, 5, 6)))),
        msgpack.packb(msgpack.ExtType(frames.CODEC_NUMBERS[TokenOutputs], pack(((b"12345", (1,)),)))),
        pack([1])[:-1],
    ],
)
def test_values_outside_of_the_table_are_rejected(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(data)


def test_types_outside_of_the_table_are_not_encoded() -> None:
    with pytest.raises(FrameError, match="object cannot be sent"):
        pack(object())
    with pytest.raises(FrameError, match="int cannot be sent"):
        pack(1 << 64)
