"""Fields for structured answers in every dialect."""

import tracemalloc
from typing import Any, Literal

import orjson
import pytest
from openai import pydantic_function_tool
from openai.lib._parsing._completions import type_to_response_format_param
from pydantic import BaseModel

from polyhead.service.api.dialects.openai.wire import ChatRequest, CompletionRequest, read_chat, read_completion
from polyhead.service.api.shared.response_formats import (
    StructuredOutputs,
    TextFormat,
    TgiGrammar,
    check_strict_schema,
    convert_format,
)
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.grammar import Grammar
from tests.support.schemas import NAMED_CITY

TALK = {"model": "chat", "messages": [{"role": "user", "content": "Who?"}]}


OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("asked", "kind", "source", "field"),
    [
        ({}, None, "", ""),
        ({"response_format": {"type": "text"}}, None, "", ""),
        ({"response_format": {"type": "json_object"}}, "object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}}},
            "schema",
            '{"const":null}',
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"const": None}, "strict": False},
                }
            },
            "open_schema",
            '{"const":null}',
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": {}}}, "schema", "{}", "structured_outputs.json"),
        ({"structured_outputs": {"json": "{}"}}, "schema", "{}", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "ß"]}}, "choice", '["a","ß"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, "lark", "start: A", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "object", "", "structured_outputs.json_object"),
        ({"guided_json": {}}, "schema", "{}", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": "start: A"}, "lark", "start: A", "guided_grammar"),
    ],
)
def test_every_field_for_a_form_is_read(asked: dict[str, Any], kind: Any, source: str, field: str) -> None:
    wanted = Grammar(kind, source, field) if kind else None
    assert read_chat(ChatRequest.read(TALK | asked)).grammar == wanted
    assert read_completion(CompletionRequest.read({"model": "chat", "prompt": "x"} | asked)).grammar == wanted


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is required where the type is"),
        (
            {"response_format": {"type": "text", "json_schema": NAMED_CITY}},
            "response_format.json_schema: only together with",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "scheme": {}}}},
            "response_format.json_schema.scheme: is not a known field; did you mean schema?",
        ),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json: must be a JSON schema: an object, or its text"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: must have at least 1 item(s)"),
        ({"structured_outputs": {"structural_tag": "x"}}, 'structured_outputs.structural_tag: "x" is not supported by'),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs.regex: an answer has one format, and structured_outputs.json gives another; give one",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex: an answer has one format, and response_format gives another; give one",
        ),
        ({"guided_regex": "a" * 200_000}, "guided_regex: must have at most 16384 characters, has 200000"),
        (
            {"structured_outputs": {"regex": "a" * 16_385}},
            "structured_outputs.regex: must have at most 16384 characters",
        ),
        ({"guided_grammar": "a" * 65_537}, "guided_grammar: must have at most 65536 characters, has 65537"),
        ({"guided_json": {"const": "a" * 65_536}}, "guided_json: must have at most 65536 characters, has 65548"),
        ({"guided_json": " " * 65_537}, "guided_json: must have at most 65536 characters, has 65537"),
        ({"guided_choice": ["a" * 4000] * 20}, "guided_choice: must have at most 65536 characters, has 80061"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 70_000}}}},
            "response_format.json_schema.schema: must have at most 65536 characters, has 70012",
        ),
    ],
)
def test_incomplete_and_contradictory_fields_are_rejected(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_chat(ChatRequest.read(TALK | asked))
    assert error.value.message.startswith(sentence)
    assert error.value.param == sentence.partition(":")[0]


def test_fields_of_other_dialects() -> None:
    assert convert_format(TextFormat.read({"type": "text"}), "text.format") is None
    flat = TextFormat.read({"type": "json_schema", "name": "x", "schema": OBJECT})
    assert convert_format(flat, "text.format") == Grammar("schema", '{"type":"object"}', "text.format.schema")
    for given, wanted in (
        ({"type": "json", "value": OBJECT}, Grammar("schema", '{"type":"object"}', "grammar.value")),
        ({"type": "json_schema", "value": {"schema": {}}}, Grammar("schema", "{}", "grammar.value.schema")),
        ({"type": "regex", "value": "a"}, Grammar("regex", "a", "grammar.value")),
    ):
        assert convert_format(TgiGrammar.read(given), "grammar") == wanted
    with pytest.raises(BadRequest, match=r"^grammar\.value: must have at most 16384 characters, has 20000"):
        convert_format(TgiGrammar.read({"type": "regex", "value": "a" * 20_000}), "grammar")
    for wrong in ({"type": "regex", "value": {}}, {"type": "json_schema", "value": {}}):
        with pytest.raises(BadRequest, match=r"^grammar\.value: must be "):
            convert_format(TgiGrammar.read(wrong), "grammar")
    with pytest.raises(BadRequest, match=r"^grammar\.value\.strict: must be true or false") as error:
        convert_format(TgiGrammar.read({"type": "json_schema", "value": {"schema": {}, "strict": 3}}), "grammar")
    assert error.value.param == "grammar.value.strict"
    assert convert_format(StructuredOutputs(), "structured_outputs") is None


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CLOSED = "'additionalProperties' is required to be supplied and to be false."
REQUIRED = "'required' is required to be supplied and to be an array including every key in properties."
TEXT = {"type": "string"}
MAYBE = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object"}, f"(), {CLOSED}"),
        ({"properties": {}}, f"(), {CLOSED}"),
        ({"type": ["object", "null"]}, f"(), {CLOSED}"),
        (objects(a=TEXT, b=TEXT) | {"required": ["a"]}, f"(), {REQUIRED} Missing 'b'."),
        (objects(**{"": TEXT}) | {"required": []}, f"(), {REQUIRED} Missing ''."),
        (objects(a=TEXT) | {"required": "a"}, f"(), {REQUIRED} Missing 'a'."),
        (objects(a=TEXT) | {"required": ["a", "c"]}, f"(), {REQUIRED} Extra required key 'c' supplied."),
        (objects(a=objects(b={"type": "object"})), f"('properties', 'a', 'properties', 'b'), {CLOSED}"),
        (objects(a={"type": "array", "items": {"type": "object"}}), f"('properties', 'a', 'items'), {CLOSED}"),
        (objects(a=MAYBE), f"('properties', 'a', 'anyOf', '1'), {REQUIRED} Missing 'a'."),
        (objects(a={"$ref": "#/$defs/A"}) | {"$defs": {"A": {"type": "object"}}}, f"('$defs', 'A'), {CLOSED}"),
        (objects() | {"additionalProperties": {}}, f"(), {CLOSED}"),
    ],
)
def test_a_schema_that_is_called_strict_and_is_not_is_refused_in_the_words_of_openai(
    schema: dict[str, Any], words: str
) -> None:
    def ask(**strictness: bool) -> list[dict[str, Any]]:
        named = {"name": "x", "schema": schema} | strictness
        function = {"name": "x", "parameters": schema} | strictness
        tools = [{"type": "function", "function": function}]
        return [{"response_format": {"type": "json_schema", "json_schema": named}}, {"tools": tools}]

    fields = ("response_format.json_schema.schema", "tools[0].function.parameters")
    for asked, field, subject in zip(ask(strict=True), fields, ("response_format", "function"), strict=True):
        if field.startswith("tools") and schema.get("type", "object") != "object":
            continue  # refused for its type
        with pytest.raises(BadRequest) as error:
            read_chat(ChatRequest.read(TALK | asked))
        assert error.value.message == f"Invalid schema for {subject} 'x': In context={words}"
        assert error.value.param == field
    if schema.get("type", "object") == "object":
        for asked in (*ask(), *ask(strict=False)):
            read_chat(ChatRequest.read(TALK | asked))


class Part(BaseModel):
    size: int
    note: str | None = None


class Whole(BaseModel):
    parts: list[Part]
    kind: Literal["a", "b"] = "a"


def test_schemas_that_the_official_client_makes_of_classes_are_strict() -> None:
    made = {"response_format": type_to_response_format_param(Whole), "tools": [pydantic_function_tool(Whole)]}
    read = read_chat(ChatRequest.read(TALK | made))
    assert read.grammar is not None
    assert '"strict":true' in orjson.dumps(made).decode()


def test_long_names_in_a_schema_that_is_not_strict_are_shortened() -> None:
    schema = objects(**{"a" * 4000: {"type": "object"}})
    for given in (schema, objects(**{"b" * 4000: TEXT}) | {"required": []}):
        asked = {"type": "json_schema", "name": "x", "schema": given, "strict": True}
        with pytest.raises(BadRequest) as error:
            convert_format(TextFormat.read(asked), "text.format")
        assert len(error.value.message) < 400


def test_a_long_key_of_a_strict_schema_is_kept_once_for_all_parts_below_it() -> None:
    """Where each part has a text with its whole place, this takes 40 MB."""
    schema = objects(**{"x" * 20_000: {"anyOf": [{} for _ in range(2000)]}})
    tracemalloc.start()
    try:
        check_strict_schema(schema, "response_format 'x'", "schema")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3_000_000
