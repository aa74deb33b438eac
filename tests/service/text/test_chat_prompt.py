"""Conversations for templates that list no tools: calls and results are written as text."""

from pathlib import Path
from typing import Any

import pytest

from polyhead.models.chat import ChatTemplate
from polyhead.service.core.errors import TooLong
from polyhead.service.core.model import Model
from polyhead.service.core.request import Sampling
from polyhead.service.text import chat_prompt
from polyhead.service.text.chat_prompt import fit_chat
from polyhead.service.text.generation_request import ChatMessages, GenerationRequest
from tests.support.checkpoints import CHAT_TEMPLATE
from tests.support.scripted import model


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", chat=ChatTemplate(CHAT_TEMPLATE))


def conversation(name: str, results: int) -> GenerationRequest:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, *[result] * results]
    return GenerationRequest(field="messages", prompts=(ChatMessages(tuple(messages)),), sampling=Sampling())


def test_results_are_written_with_the_name_of_the_call(generator: Model) -> None:
    [chat] = fit_chat(conversation("f", 2), generator).prompts
    assert isinstance(chat, ChatMessages)
    assert chat.messages[-1] == {"role": "user", "content": "f returned:\n1\n\nf returned:\n1"}


def test_a_name_counts_for_each_result_before_any_is_written(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    calls_to_text = chat_prompt.calls_to_text
    monkeypatch.setattr(chat_prompt, "calls_to_text", lambda *given: written.append(given) or calls_to_text(*given))
    fit_chat(conversation("n" * 1000, 60), generator)
    assert len(written) == 1
    with pytest.raises(TooLong, match=r"^messages: has \d+ characters, at most 65536 are read"):
        fit_chat(conversation("n" * 1000, 70), generator)
    assert len(written) == 1
