"""Sampling options that requests of each dialect leave to the checkpoint."""

from typing import Any

import pytest

from polyhead.service.api.dialects.anthropic import read as anthropic_read
from polyhead.service.api.dialects.anthropic import wire as anthropic_wire
from polyhead.service.api.dialects.hf import wire as hf_wire
from polyhead.service.api.dialects.oip import wire as oip_wire
from polyhead.service.api.dialects.openai import wire as openai_wire
from polyhead.service.api.dialects.responses import read as responses_read
from polyhead.service.api.dialects.responses import wire as responses_wire
from polyhead.service.api.shared.open_options import SUGGESTED_OPTIONS
from polyhead.service.text.generation_request import GenerationRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
READERS = {
    "completion": (openai_wire.CompletionRequest, openai_wire.read_completion, {"model": "m", "prompt": "Hi"}),
    "chat": (openai_wire.ChatRequest, openai_wire.read_chat, CHAT),
    "responses": (responses_wire.ResponseRequest, responses_read.read_response, {"model": "m", "input": "Hi"}),
    "anthropic": (anthropic_wire.MessagesRequest, anthropic_read.read_messages, CHAT),
}


def read(dialect: str, **more: Any) -> GenerationRequest:
    kind, reader, body = READERS[dialect]
    return reader(kind.model_validate({**body, **more}))  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", READERS)
def test_an_option_is_open_unless_the_request_sets_it(dialect: str) -> None:
    assert read(dialect).open_options == SUGGESTED_OPTIONS
    given = read(dialect, temperature=1.0, top_p=0.5)
    assert given.open_options == SUGGESTED_OPTIONS - {"temperature", "top_p"}
    assert given.sampling.temperature == 1.0


def test_null_leaves_an_option_open() -> None:
    assert "temperature" in read("chat", temperature=None).open_options


def test_a_beam_search_leaves_none_open() -> None:
    assert read("chat", use_beam_search=True, n=2).open_options == frozenset()


def test_dialects_that_decode_greedily_leave_none_open() -> None:
    """As the servers whose protocols these are."""
    for parameters in ({}, {"do_sample": True}):
        written = hf_wire.read_hf_generate(hf_wire.HfGenerateRequest.read({"inputs": "Hi", "parameters": parameters}))
        text = oip_wire.TextRequest.read({"text_input": "Hi", "parameters": parameters})
        for asked in (written, oip_wire.read_text_request(text, stream=False)):
            assert asked.open_options == frozenset()
            assert asked.sampling.temperature == (1.0 if parameters else 0.0)
