"""The parts of a chat answer, however its text is split; tools in the prompt; the grammar of tool calls."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.chat_format import BARE, LISTED, TAGGED, ChatFormat, ToolCallStyle, detect_format
from polyhead.models.checkpoint import load
from polyhead.models.core.errors import TemplateError
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.grammar import Grammar
from polyhead.service.structured.vocabulary_bytes import VocabularyBytes
from polyhead.service.text.answer_delta import (
    AnswerDelta,
    AnswerPart,
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
    Usage,
    join_deltas,
    text_parts,
)
from polyhead.service.text.chat_parser import ChatParser, ExpectedOutput
from polyhead.service.text.chat_prompt import add_tools, build_answer_grammar
from polyhead.service.text.generation_request import ChatMessages, ToolDefinition, ToolOptions
from polyhead.service.text.tool_call_parser import ToolCallParser
from tests.models.chat.test_template_sandbox import reference
from tests.support.dialogue_templates import CODER, HERMES2, LLAMA31, QWEN3, QWEN25, R1, SMOLLM2
from tests.support.edits import edited
from tests.support.scripted import model

TAGS = ("<think>", "</think>")
FORMATS = {
    "hermes": ChatFormat(TAGGED, True, *TAGS),
    "llama": ChatFormat(BARE, True, *TAGS),
    "plain": ChatFormat(LISTED, False, *TAGS),
}
TOOLS = frozenset({"add", "now"})
ADD = '{"name": "add", "arguments": {"a": "}\\"{", "b": [1, {}]}}'
NOW = '{"name": "now", "arguments": {}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {}]}'


# Templates


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
def test_the_format_of_tool_calls_is_read_from_the_template(
    source: str, style: ToolCallStyle, listing: bool, thinks: bool
) -> None:
    assert detect_format(source) == ChatFormat(style, listing, *(TAGS if thinks else ("", "")))
    assert ChatTemplate(source).format == detect_format(source)


CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 and 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
OFFERED = (
    ToolDefinition(
        "add", "Adds < numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ),
    ToolDefinition("now"),
)


@pytest.mark.parametrize("source", [QWEN25, QWEN3, LLAMA31])
def test_tools_and_calls_in_the_prompt_equal_the_reference(source: str) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    chat = add_tools(ChatMessages(tuple(TALK)), ToolOptions(OFFERED), template.format)
    expected = reference().apply_chat_template(
        TALK,
        tools=[tool.as_template_object for tool in OFFERED],
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert template.render(chat.messages, variables={"tools": chat.tools}) == expected
    assert "Adds < numbers." in expected


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    chat = add_tools(ChatMessages(tuple(TALK)), ToolOptions(OFFERED), detect_format(SMOLLM2))
    assert not chat.tools
    system, user, assistant, returned = chat.messages
    assert system["content"].startswith("Be brief.\n\nYou can call these functions")
    assert json.dumps(OFFERED[0].as_template_object["function"]) in system["content"]
    assert (user, assistant) == (TALK[1], {"role": "assistant", "content": '{"name": "add", "arguments": {"a": 1}}'})
    assert returned == {"role": "user", "content": "add returned:\n2"}
    alone = add_tools(ChatMessages(tuple(TALK[1:2])), ToolOptions(OFFERED), detect_format(SMOLLM2))
    assert [message["role"] for message in alone.messages] == ["system", "user"]


def test_with_tool_choice_none_the_prompt_has_only_earlier_calls() -> None:
    for source in (QWEN25, SMOLLM2):
        chat = add_tools(ChatMessages(tuple(TALK)), ToolOptions(OFFERED, "none"), detect_format(source))
        written = ChatTemplate(source).render(chat.messages, variables={"tools": chat.tools or None})
        assert "Adds" not in written
        assert '{"name": "add", "arguments": {"a": 1}}' in written


# The beginning of an answer


@pytest.mark.parametrize("content", ["Sure, ", " 1, 2,", "", "a\n\n"])
@pytest.mark.parametrize("source", [QWEN25, LLAMA31, R1, SMOLLM2])
def test_a_prefix_is_continued_as_in_the_reference(source: str, content: str) -> None:
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


# Answers


def parse(pieces: Sequence[str], expected: ExpectedOutput, finish: str = "stop") -> AnswerDelta:
    """The whole answer, as one delta."""
    count = len(pieces)
    last: Any = AnswerDelta(finish=finish, token_count=count, usage=Usage(3, count))  # type: ignore[arg-type]
    deltas = [AnswerDelta(text_parts(text), token_count=number) for number, text in enumerate(pieces, 1)]
    return join_deltas(parse_deltas([*deltas, last], expected))


def parse_deltas(deltas: Sequence[AnswerDelta], expected: ExpectedOutput) -> list[AnswerDelta]:
    parser = ChatParser(expected)
    return [delta for delta in map(parser.push, deltas) if not delta.is_empty]


def plain(parts: Sequence[AnswerPart]) -> list[Any]:
    """Return the parts without call ids, which are random."""
    return [replace(part, id="") if isinstance(part, ToolCallStart) else part for part in parts]


ONE = [ToolCallStart(0, "", "add"), ArgumentsDelta(0, ARGUMENTS)]
TWO = [*ONE, ToolCallStart(1, "", "now"), ArgumentsDelta(1, "{}")]
CASES: list[tuple[str, str, str, list[Any], str]] = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", ONE, "calls"),
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>\n", "", TWO, "calls"),
    ("hermes", f"I will. \n<tool_call>{ADD}</tool_call>", "", [TextDelta("I will."), *ONE], "calls"),
    ("hermes", f"<tool_call>{ADD}</tool_call> So.", "", [*ONE, TextDelta(" So.")], "calls"),
    ("hermes", f"<tool_call>{ADD}", "", ONE, "calls"),
    ("hermes", f"a < b <tool_call {NOW} ", "", [TextDelta(f"a < b <tool_call {NOW} ")], "stop"),
    (
        "hermes",
        ' <tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "",
        [TextDelta(' <tool_call>{"name": "other", "arguments": {}}</tool_call>')],
        "stop",
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {}, "name": "other"}</tool_call>',
        "",
        [TextDelta('<tool_call>{"arguments": {}, "name": "other"}</tool_call>')],
        "stop",
    ),
    ("hermes", "<tool_call>hm</tool_call>\n", "", [TextDelta("<tool_call>hm</tool_call>\n")], "stop"),
    ("hermes", '<tool_call>{"name": "now", "argu', "", [TextDelta('<tool_call>{"name": "now", "argu')], "stop"),
    ("hermes", ADD, "", [TextDelta(ADD)], "stop"),
    ("llama", ADD.replace("arguments", "parameters"), "", ONE, "calls"),
    ("llama", f"<|python_tag|>{ADD}; {NOW}", "", TWO, "calls"),
    ("llama", '{"type": "function",\n"name": "add", "parameters": ' + ARGUMENTS + "}", "", ONE, "calls"),
    ("llama", '{"name": "other", "parameters": {}}', "", [TextDelta('{"name": "other", "parameters": {}}')], "stop"),
    ("llama", f"Well: {ADD}", "", [TextDelta(f"Well: {ADD}")], "stop"),
    ("llama", "<|python_tag|>print(1)", "", [TextDelta("<|python_tag|>print(1)")], "stop"),
    ("plain", f"\n[{ADD}, {NOW}]", "", TWO, "calls"),
    ("plain", f"{ADD} and more", "", [*ONE, TextDelta(" and more")], "calls"),
    ("plain", '{\n  "name": "add",\n  "arguments": ' + ARGUMENTS + "\n}", "", ONE, "calls"),
    ("plain", '{"name": "Ada", "age": 36}', "", [TextDelta('{"name": "Ada", "age": 36}')], "stop"),
    ("plain", f"[{ADD[:-1]}", "", ONE, "calls"),
    ("plain", "[1, 2]", "", [TextDelta("[1, 2]")], "stop"),
    ("plain", '{"a": [}', "", [TextDelta('{"a": [}')], "stop"),
    (
        "hermes",
        "<think>\nWell, </thin\n</think>\n\nYes. ",
        "may",
        [ReasoningDelta("Well, </thin"), TextDelta("Yes. ")],
        "stop",
    ),
    ("plain", f"Hm.\n</think>\n\n{ADD}", "does", [ReasoningDelta("Hm."), *ONE], "calls"),
    ("plain", "Hm. </thi", "does", [ReasoningDelta("Hm. </thi")], "stop"),
    ("plain", "</think>\n\nYes.", "does", [TextDelta("Yes.")], "stop"),
    ("plain", "\n<thin>", "may", [TextDelta("\n<thin>")], "stop"),
    ("plain", "", "may", [], "stop"),
]


@pytest.mark.parametrize(("name", "text", "thinks", "parts", "finish"), CASES)
@given(cuts=st.lists(st.integers(1, 12), max_size=80))
def test_an_answer_is_parsed_for_any_split(
    name: str, text: str, thinks: Any, parts: Any, finish: str, cuts: list[int]
) -> None:
    said = parse(split(text, cuts), ExpectedOutput(FORMATS[name], TOOLS, thinks))
    assert plain(said.parts) == parts
    assert said.finish == finish


def split(text: str, cuts: Sequence[int]) -> list[str]:
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    return [piece for piece in (*pieces, rest) if piece]


FRAGMENTS = [
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
@given(bits=st.lists(st.sampled_from(FRAGMENTS), max_size=20), cuts=st.lists(st.integers(1, 30), max_size=10))
def test_text_that_is_not_a_call_is_kept(name: str, bits: list[str], cuts: list[int]) -> None:
    text = "".join(bits)
    one, other = (parse(pieces, ExpectedOutput(FORMATS[name], TOOLS)) for pieces in ([text], split(text, cuts)))
    assert plain(one.parts) == plain(other.parts)
    if not any(isinstance(part, ToolCallStart) for part in one.parts):
        assert "".join(part.text for part in one.parts if isinstance(part, TextDelta)) == text


def test_arguments_are_streamed() -> None:
    deltas = [AnswerDelta(text_parts(char)) for char in f"<tool_call>\n{ADD}\n</tool_call>"]
    expected = ExpectedOutput(FORMATS["hermes"], TOOLS)
    first, *said, last = parse_deltas([*deltas, AnswerDelta(finish="length")], expected)
    assert plain(first.parts) == [ToolCallStart(0, "", "add"), ArgumentsDelta(0, "{")]
    assert [said.parts for said in said] == [(ArgumentsDelta(0, char),) for char in ARGUMENTS[1:]]
    assert (last.finish, last.parts) == ("length", ())


@pytest.mark.parametrize(
    ("text", "held"),
    [('{"name": "add", "ar', 19), ('{"name": "addr', 0), ('[{"na', 5), ('{"a', 0), ("[1", 0), (" {", 2)],
)
def test_an_object_is_held_back_while_it_may_be_a_call(text: str, held: int) -> None:
    calls = ToolCallParser(LISTED, TOOLS)
    shown = [part for char in text for part in calls.push(char)]
    assert "".join(part.text for part in shown if isinstance(part, TextDelta)) == text[: len(text) - held]
    assert "".join(part.text for part in [*shown, *calls.close()] if isinstance(part, TextDelta)) == text


def test_reasoning_tokens_are_counted() -> None:
    format = FORMATS["plain"]
    assert parse(["<think>", "a", "b", "</think>", "c"], ExpectedOutput(format, reasoning="may")).reasoning_tokens == 4
    assert parse(["a", "b"], ExpectedOutput(format, reasoning="does"), "length").reasoning_tokens == 2
    assert parse(["a", "b"], ExpectedOutput(format, reasoning="may")).reasoning_tokens == 0
    assert parse(["a</think>b"], ExpectedOutput(format)).parts == (TextDelta("a</think>b"),)


def test_tags_that_are_control_tokens_are_text(tiny_generator: Path, tmp_path: Path) -> None:
    folder = edited(tiny_generator, tmp_path)
    (folder / "chat_template.jinja").write_text(QWEN3)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<|mark|>"])
    backend.save(str(folder / "tokenizer.json"))
    loaded = load(str(folder))
    said = f"<think>Hm.</think>Well.<tool_call>\n{NOW}\n</tool_call>"
    ids = loaded.tokenizer.encode(said + "<|mark|><|im_end|>", special=False).ids
    assert loaded.tokenizer.token_id("<tool_call>") in ids
    stream = loaded.tokenizer.stream()
    utterance = parse([stream.push(id) for id in ids], ExpectedOutput(loaded.chat.format, TOOLS, "may"))  # type: ignore[union-attr]
    expected = [ReasoningDelta("Hm."), TextDelta("Well."), ToolCallStart(0, "", "now"), ArgumentsDelta(0, "{}")]
    assert plain(utterance.parts) == expected
    talker = model(folder, "talker", "generate", tokenizer=loaded.tokenizer, vocab_size=loaded.tokenizer.vocab_size)
    lexicon = VocabularyBytes(talker)
    assert [lexicon.token_bytes[id].decode() for id in sorted(lexicon.special_tokens)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|mark|>",
    ]


# Grammars of answers


def test_a_schema_for_the_answer_needs_tagged_calls() -> None:
    document = Grammar("schema", '{"type": "object"}', "response_format")
    assert build_answer_grammar(ToolOptions(), FORMATS["plain"], document) == document
    assert build_answer_grammar(ToolOptions(OFFERED, "none"), FORMATS["plain"], document) == document
    for kind in ("regex", "lark"):
        with pytest.raises(BadRequest, match="response_format: is not supported together with tools"):
            build_answer_grammar(ToolOptions(OFFERED), FORMATS["hermes"], replace(document, kind=kind))
    with pytest.raises(BadRequest, match="response_format: is not supported together with tools"):
        build_answer_grammar(ToolOptions(OFFERED), FORMATS["plain"], document)


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
def test_an_object_is_a_call_if_it_begins_with_the_name_of_a_tool(style: ToolCallStyle, text: str, may: bool) -> None:
    assert matches(ToolOptions(OFFERED), style, text.replace("KEY", style.key)) == may


def test_calls_in_a_list() -> None:
    several = '[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]'
    assert matches(ToolOptions(OFFERED), LISTED, several)
    assert matches(ToolOptions(OFFERED), LISTED, several.replace("[", "[\n "))
    assert matches(ToolOptions(OFFERED, "required"), LISTED, several)
    assert not matches(ToolOptions(OFFERED, parallel=False), LISTED, several)
    assert not matches(ToolOptions(OFFERED), LISTED, several.replace("1}", '"1"}'))
    assert not matches(ToolOptions(OFFERED), LISTED, several[:-1])


def matches(tools: ToolOptions, style: ToolCallStyle, text: str) -> bool:
    """Whether the grammar accepts the answer, byte by byte."""
    grammar = build_answer_grammar(tools, ChatFormat(style), None)
    assert grammar
    matcher = LLMatcher(LLTokenizer("byte"), grammar.source)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
