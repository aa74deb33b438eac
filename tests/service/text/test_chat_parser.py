"""What is told apart in an answer, however it arrives; how tools are told, and what calls of them must look like."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.chat_format import BARE, LISTED, TAGGED, Format, Style, format_of
from polyhead.models.checkpoint import load
from polyhead.models.core.errors import TemplateError
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.grammar import Grammar
from polyhead.service.structured.vocabulary_bytes import Lexicon
from polyhead.service.text.chat_parser import (
    Arguments,
    Call,
    Expected,
    Part,
    Thought,
    Utterance,
    Words,
    conversed,
    whole_utterances,
)
from polyhead.service.text.chat_prompt import Tool, Tools, called, told
from polyhead.service.text.detokenizer import Piece, Usage
from polyhead.service.text.prompts import Chat
from polyhead.service.text.tool_call_parser import Calls
from tests.models.chat.test_template_sandbox import reference
from tests.support.dialogue_templates import CODER, HERMES2, LLAMA31, QWEN3, QWEN25, R1, SMOLLM2
from tests.support.edits import edited
from tests.support.scripted import model

TAGS = ("<think>", "</think>")
FORMATS = {
    "hermes": Format(TAGGED, True, *TAGS),
    "llama": Format(BARE, True, *TAGS),
    "plain": Format(LISTED, False, *TAGS),
}
TOOLS = frozenset({"add", "now"})
ADD = '{"name": "add", "arguments": {"a": "}\\"{", "b": [1, {}]}}'
NOW = '{"name": "now", "arguments": {}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {}]}'


# What templates say


@pytest.mark.parametrize(
    ("source", "style", "listing", "thinks"),
    [
        (QWEN25, TAGGED, True, False),
        (QWEN3, TAGGED, True, True),
        (HERMES2, TAGGED, True, False),
        (LLAMA31, BARE, True, False),
        (R1, LISTED, False, True),
        (CODER, LISTED, False, False),
        (SMOLLM2, LISTED, False, False),
    ],
)
def test_a_template_says_how_it_calls_tools(source: str, style: Style, listing: bool, thinks: bool) -> None:
    assert format_of(source) == Format(style, listing, *(TAGS if thinks else ("", "")))
    assert ChatTemplate(source).format == format_of(source)


CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 and 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
OFFERED = (
    Tool("add", "Adds < numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    Tool("now"),
)


@pytest.mark.parametrize("source", [QWEN25, QWEN3, LLAMA31])
def test_tools_and_calls_are_written_as_the_reference_writes_them(source: str) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    chat = told(Chat(tuple(TALK)), Tools(OFFERED), template.format)
    expected = reference().apply_chat_template(
        TALK, tools=[tool.told for tool in OFFERED], chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert template.render(chat.messages, variables={"tools": chat.tools}) == expected
    assert "Adds < numbers." in expected


def test_a_template_without_tools_is_told_in_words() -> None:
    chat = told(Chat(tuple(TALK)), Tools(OFFERED), format_of(SMOLLM2))
    assert not chat.tools
    system, user, assistant, returned = chat.messages
    assert system["content"].startswith("Be brief.\n\nYou can call these functions")
    assert json.dumps(OFFERED[0].told["function"]) in system["content"]
    assert (user, assistant) == (TALK[1], {"role": "assistant", "content": '{"name": "add", "arguments": {"a": 1}}'})
    assert returned == {"role": "user", "content": "add returned:\n2"}
    alone = told(Chat(tuple(TALK[1:2])), Tools(OFFERED), format_of(SMOLLM2))
    assert [message["role"] for message in alone.messages] == ["system", "user"]


def test_without_a_choice_nobody_is_told_of_tools_and_earlier_calls_remain() -> None:
    for source in (QWEN25, SMOLLM2):
        chat = told(Chat(tuple(TALK)), Tools(OFFERED, "none"), format_of(source))
        written = ChatTemplate(source).render(chat.messages, variables={"tools": chat.tools or None})
        assert "Adds" not in written
        assert '{"name": "add", "arguments": {"a": 1}}' in written


# The beginning of an answer


@pytest.mark.parametrize("content", ["Sure, ", " 1, 2,", "", "a\n\n"])
@pytest.mark.parametrize("source", [QWEN25, LLAMA31, R1, SMOLLM2])
def test_a_prefix_is_gone_on_with_as_the_reference_does(source: str, content: str) -> None:
    messages = [TALK[1], {"role": "assistant", "content": content}]
    expected = reference().apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert ours.render(messages, add_generation_prompt=False, continued=True) == expected
    assert expected.rstrip().endswith(content.strip())


def test_a_prefix_that_the_template_leaves_out_is_an_error() -> None:
    with pytest.raises(TemplateError, match="does not write the last message as it is"):
        ChatTemplate("{{ messages[0].content }}").render(
            [TALK[1], {"role": "assistant", "content": "a"}], continued=True
        )


# What answers say


def heard(pieces: Sequence[str], expected: Expected, finish: str = "stop") -> Utterance:
    async def answers() -> AsyncGenerator[tuple[int, Piece], None]:
        for count, text in enumerate(pieces):
            yield 0, Piece(text, tokens=count + 1)
        yield 0, Piece("", finish=finish, tokens=len(pieces), usage=Usage(3, len(pieces)))  # type: ignore[arg-type]

    async def whole() -> Utterance:
        [utterance] = await whole_utterances(1, conversed(answers(), expected))
        return utterance

    return asyncio.run(whole())


def plain(parts: Sequence[Part]) -> list[Any]:
    """Without ids, which are drawn."""
    return [replace(part, id="") if isinstance(part, Call) else part for part in parts]


ONE = [Call(0, "", "add"), Arguments(0, ARGUMENTS)]
TWO = [*ONE, Call(1, "", "now"), Arguments(1, "{}")]
SAID: list[tuple[str, str, str, list[Any], str]] = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", ONE, "calls"),
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>\n", "", TWO, "calls"),
    ("hermes", f"I will. \n<tool_call>{ADD}</tool_call>", "", [Words("I will."), *ONE], "calls"),
    ("hermes", f"<tool_call>{ADD}</tool_call> So.", "", [*ONE, Words(" So.")], "calls"),
    ("hermes", f"<tool_call>{ADD}", "", ONE, "calls"),
    ("hermes", f"a < b <tool_call {NOW} ", "", [Words(f"a < b <tool_call {NOW} ")], "stop"),
    (
        "hermes",
        ' <tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "",
        [Words(' <tool_call>{"name": "other", "arguments": {}}</tool_call>')],
        "stop",
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {}, "name": "other"}</tool_call>',
        "",
        [Words('<tool_call>{"arguments": {}, "name": "other"}</tool_call>')],
        "stop",
    ),
    ("hermes", "<tool_call>hm</tool_call>\n", "", [Words("<tool_call>hm</tool_call>\n")], "stop"),
    ("hermes", '<tool_call>{"name": "now", "argu', "", [Words('<tool_call>{"name": "now", "argu')], "stop"),
    ("hermes", ADD, "", [Words(ADD)], "stop"),
    ("llama", ADD.replace("arguments", "parameters"), "", ONE, "calls"),
    ("llama", f"<|python_tag|>{ADD}; {NOW}", "", TWO, "calls"),
    ("llama", '{"type": "function",\n"name": "add", "parameters": ' + ARGUMENTS + "}", "", ONE, "calls"),
    ("llama", '{"name": "other", "parameters": {}}', "", [Words('{"name": "other", "parameters": {}}')], "stop"),
    ("llama", f"Well: {ADD}", "", [Words(f"Well: {ADD}")], "stop"),
    ("llama", "<|python_tag|>print(1)", "", [Words("<|python_tag|>print(1)")], "stop"),
    ("plain", f"\n[{ADD}, {NOW}]", "", TWO, "calls"),
    ("plain", f"{ADD} and more", "", [*ONE, Words(" and more")], "calls"),
    ("plain", '{\n  "name": "add",\n  "arguments": ' + ARGUMENTS + "\n}", "", ONE, "calls"),
    ("plain", '{"name": "Ada", "age": 36}', "", [Words('{"name": "Ada", "age": 36}')], "stop"),
    ("plain", f"[{ADD[:-1]}", "", ONE, "calls"),
    ("plain", "[1, 2]", "", [Words("[1, 2]")], "stop"),
    ("plain", '{"a": [}', "", [Words('{"a": [}')], "stop"),
    ("hermes", "<think>\nWell, </thin\n</think>\n\nYes. ", "may", [Thought("Well, </thin"), Words("Yes. ")], "stop"),
    ("plain", f"Hm.\n</think>\n\n{ADD}", "does", [Thought("Hm."), *ONE], "calls"),
    ("plain", "Hm. </thi", "does", [Thought("Hm. </thi")], "stop"),
    ("plain", "</think>\n\nYes.", "does", [Words("Yes.")], "stop"),
    ("plain", "\n<thin>", "may", [Words("\n<thin>")], "stop"),
    ("plain", "", "may", [], "stop"),
]


@pytest.mark.parametrize(("name", "text", "thinks", "parts", "finish"), SAID)
@given(cuts=st.lists(st.integers(1, 12), max_size=80))
def test_an_answer_is_told_apart_however_it_arrives(
    name: str, text: str, thinks: Any, parts: Any, finish: str, cuts: list[int]
) -> None:
    said = heard(split(text, cuts), Expected(FORMATS[name], TOOLS, thinks))
    assert plain(said.parts) == parts
    assert said.finish == finish


def split(text: str, cuts: Sequence[int]) -> list[str]:
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    return [piece for piece in (*pieces, rest) if piece]


BITS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    '{"name": "add", "arguments": {',
    "}",
    "[",
    "]",
    ";",
    ",",
    " ",
    "x",
    '"',
    "<",
]


@pytest.mark.parametrize("name", FORMATS)
@given(bits=st.lists(st.sampled_from(BITS), max_size=20), cuts=st.lists(st.integers(1, 30), max_size=10))
def test_nothing_that_is_no_call_is_lost(name: str, bits: list[str], cuts: list[int]) -> None:
    text = "".join(bits)
    one, other = (heard(pieces, Expected(FORMATS[name], TOOLS)) for pieces in ([text], split(text, cuts)))
    assert plain(one.parts) == plain(other.parts)
    if not any(isinstance(part, Call) for part in one.parts):
        assert "".join(part.text for part in one.parts if isinstance(part, Words)) == text


def test_arguments_come_as_they_are_written() -> None:
    async def answers() -> AsyncGenerator[tuple[int, Piece], None]:
        for char in f"<tool_call>\n{ADD}\n</tool_call>":
            yield 0, Piece(char)
        yield 0, Piece("", finish="length")

    async def every() -> list[Utterance]:
        return [said async for _, said in conversed(answers(), Expected(FORMATS["hermes"], TOOLS))]

    first, *said, last = asyncio.run(every())
    assert plain(first.parts) == [Call(0, "", "add"), Arguments(0, "{")]
    assert [said.parts for said in said] == [(Arguments(0, char),) for char in ARGUMENTS[1:]]
    assert (last.finish, last.parts) == ("length", ())


@pytest.mark.parametrize(
    ("text", "held"),
    [('{"name": "add", "ar', 19), ('{"name": "addr', 0), ('[{"na', 5), ('{"a', 0), ("[1", 0), (" {", 2)],
)
def test_an_object_is_held_back_while_it_may_be_a_call(text: str, held: int) -> None:
    calls = Calls(LISTED, TOOLS)
    shown = [part for char in text for part in calls.push(char)]
    assert "".join(part.text for part in shown if isinstance(part, Words)) == text[: len(text) - held]
    assert "".join(part.text for part in [*shown, *calls.close()] if isinstance(part, Words)) == text


def test_thoughts_are_counted() -> None:
    format = FORMATS["plain"]
    assert heard(["<think>", "a", "b", "</think>", "c"], Expected(format, thinks="may")).thought_tokens == 4
    assert heard(["a", "b"], Expected(format, thinks="does"), "length").thought_tokens == 2
    assert heard(["a", "b"], Expected(format, thinks="may")).thought_tokens == 0
    assert heard(["a</think>b"], Expected(format)).parts == (Words("a</think>b"),)


def test_tags_that_a_vocabulary_has_as_control_tokens_are_text(tiny_generator: Path, tmp_path: Path) -> None:
    folder = edited(tiny_generator, tmp_path)
    (folder / "chat_template.jinja").write_text(QWEN3)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<|mark|>"])
    backend.save(str(folder / "tokenizer.json"))
    loaded = load(str(folder))
    said = f"<think>Hm.</think>Well.<tool_call>\n{NOW}\n</tool_call>"
    ids = loaded.tokenizer.encode(said + "<|mark|><|im_end|>", special=False).ids
    assert loaded.tokenizer.find("<tool_call>") in ids
    stream = loaded.tokenizer.stream()
    utterance = heard([stream.push(id) for id in ids], Expected(loaded.chat.format, TOOLS, "may"))  # type: ignore[union-attr]
    expected = [Thought("Hm."), Words("Well."), Call(0, "", "now"), Arguments(0, "{}")]
    assert plain(utterance.parts) == expected
    talker = model(folder, "talker", "generate", tokenizer=loaded.tokenizer, vocab_size=loaded.tokenizer.vocab_size)
    lexicon = Lexicon(talker)
    assert [lexicon.spelled[id].decode() for id in sorted(lexicon.special)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|mark|>",
    ]


# What answers must look like


def test_a_form_of_the_answer_where_calls_are_told_apart_by_a_tag_only() -> None:
    document = Grammar("schema", '{"type": "object"}', "response_format")
    assert called(Tools(), FORMATS["plain"], document) == document
    assert called(Tools(OFFERED, "none"), FORMATS["plain"], document) == document
    for kind in ("regex", "lark"):
        with pytest.raises(BadRequest, match="response_format: is not done together with tools"):
            called(Tools(OFFERED), FORMATS["hermes"], replace(document, kind=kind))
    with pytest.raises(BadRequest, match="response_format: is not done together with tools"):
        called(Tools(OFFERED), FORMATS["plain"], document)


FREE = [
    ("", True),
    ("Hello {", True),
    ('{"answer": 42}', True),
    ('[1, {"name": "now"}]', True),
    ('{"name": "nowhere", "KEY": {}}', True),
    ('{"name": "now"}', False),
    ('{"name": "now", "KEY": {}}', True),
    ('\n{\n "type": "function",\n "name": "now", "KEY": {}}', True),
    ('{"name": "add", "KEY": {"a": 1}}', True),
    ('{"name": "add", "KEY": {"a": "1"}}', False),
    ('{"name": "add", "KEY": {}} and more', False),
]


@pytest.mark.parametrize(("text", "may"), FREE)
@pytest.mark.parametrize("style", [LISTED, BARE])
def test_an_object_is_a_call_where_it_begins_with_the_name_of_a_tool(style: Style, text: str, may: bool) -> None:
    assert fits(Tools(OFFERED), style, text.replace("KEY", style.key)) == may


def test_calls_in_a_list() -> None:
    several = '[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]'
    assert fits(Tools(OFFERED), LISTED, several)
    assert fits(Tools(OFFERED), LISTED, several.replace("[", "[\n "))
    assert fits(Tools(OFFERED, "required"), LISTED, several)
    assert not fits(Tools(OFFERED, parallel=False), LISTED, several)
    assert not fits(Tools(OFFERED), LISTED, several.replace("1}", '"1"}'))
    assert not fits(Tools(OFFERED), LISTED, several[:-1])


def fits(tools: Tools, style: Style, text: str) -> bool:
    """Whether it may be an answer, byte by byte."""
    grammar = called(tools, Format(style), None)
    assert grammar
    matcher = LLMatcher(LLTokenizer("byte"), grammar.source)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
