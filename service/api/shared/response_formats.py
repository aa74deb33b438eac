"""Formats that an answer must have, in the fields of OpenAI, vLLM and text-generation-inference.

Each is converted to one `Grammar`, which keeps the field's name for error messages.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal, Protocol

import orjson
from pydantic import Field

from polyhead.models.core.errors import show_value

from ...core.errors import BadRequest
from ...core.grammar import MAX_GRAMMAR_CHARS, MAX_REGEX_CHARS, Grammar
from ...structured.grammar_child import MAX_PLACE_CHARS, Place, list_steps, subschemas, write_place
from .dialect import MAX_QUOTED_CHARS, EngineRequest, NeutralValues, Wire, max_chars, max_items, must_be, quote_json

MAX_CHOICES, MAX_CHOICE_CHARS = 10_000, 4096
REQUIRED_RULE = "'required' is required to be supplied and to be an array including every key in properties."

Regex = Annotated[str, Field(min_length=1), max_chars(MAX_REGEX_CHARS)]
GrammarSource = Annotated[str, Field(min_length=1), max_chars(MAX_GRAMMAR_CHARS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]],
    Field(min_length=1, fail_fast=True),
    max_items(MAX_CHOICES),
]
Schema = Annotated[
    dict[str, Any] | Annotated[str, Field(min_length=1)], must_be("a JSON schema: an object, or its text")
]
FormatType = Literal["text", "json_object", "json_schema"]


class JsonSchema(Wire):
    """A schema with a name.  With `strict: false` objects may have keys that it does not name."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str = ""
    body: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = True


class ResponseFormat(Wire):
    """OpenAI's format, in completions and chat.  Hugging Face's clients send a schema as `value` of a json_object."""

    type: FormatType
    json_schema: JsonSchema | None = None
    value: dict[str, Any] | None = None


class TextFormat(Wire):
    """OpenAI's format in responses: the schema stands beside the type."""

    type: FormatType
    name: Annotated[str, Field(max_length=256)] = ""
    description: str = ""
    body: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool = True


class StructuredOutputs(Wire):
    """vLLM's format: one of the first five fields."""

    unsupported: ClassVar[NeutralValues] = {
        "structural_tag": (),
        "disable_fallback": (False, True),  # there is no fallback
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False, True),  # of an object that names its properties, as always
        "whitespace_pattern": (),
    }

    body: Annotated[Schema, Field(alias="json")] = ""
    regex: Regex = ""
    choice: Choices = Field(default_factory=list)
    grammar: GrammarSource = ""
    json_object: bool = False


class TgiGrammar(Wire):
    """text-generation-inference's format: the value is a schema, a schema with a name, or a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: Schema


class FormattedRequest(EngineRequest):
    """The fields with which completions and chat set a format; only one may be used."""

    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Schema = ""
    guided_regex: Regex = ""
    guided_choice: Choices = Field(default_factory=list)
    guided_grammar: GrammarSource = ""
    guided_decoding_backend: Annotated[str, Field(max_length=256)] = ""  # ignored: there is one implementation


def read_grammar(wire: FormattedRequest) -> Grammar | None:
    """The format, if one is given.  Raises BadRequest if two are given."""
    grammars = [
        convert_format(wire.response_format, "response_format"),
        convert_format(wire.structured_outputs, "structured_outputs"),
        schema_grammar(wire.guided_json, "guided_json") if wire.guided_json != "" else None,
        Grammar("regex", wire.guided_regex, "guided_regex") if wire.guided_regex else None,
        choice_grammar(wire.guided_choice, "guided_choice") if wire.guided_choice else None,
        Grammar("lark", wire.guided_grammar, "guided_grammar") if wire.guided_grammar else None,
    ]
    return select_grammar([grammar for grammar in grammars if grammar])


def convert_format(format: ResponseFormat | TextFormat | StructuredOutputs | TgiGrammar, field: str) -> Grammar | None:
    """The grammar of one format; `field` is its name in the body.  Raises BadRequest if it is not complete."""
    match format:
        case ResponseFormat():
            named = format.json_schema
            if format.value is not None:
                return value_grammar(format, f"{field}.value")
            place = f"{field}.json_schema.schema"
            schema = schema_grammar(named.body, place, strict=named.strict) if named else None
            if named and says_strict(named):
                check_strict_schema(named.body, f"response_format {named.name!r}", place)
            return convert_typed(format.type, schema, f"{field}.json_schema")
        case TextFormat():
            place = f"{field}.schema"
            schema = schema_grammar(format.body, place, strict=format.strict) if format.body is not None else None
            if format.body and says_strict(format):
                check_strict_schema(format.body, f"response_format {format.name!r}", place)
            return convert_typed(format.type, schema, place)
        case StructuredOutputs():
            return convert_structured(format, field)
        case TgiGrammar():
            return convert_tgi_grammar(format, f"{field}.value")


def convert_typed(kind: FormatType, schema: Grammar | None, given: str) -> Grammar | None:
    """`given` is the name of the field with the schema."""
    if kind != "json_schema":
        if schema is not None:
            raise BadRequest(f'{given}: only together with type: "json_schema", got {kind!r}', param=given)
        return Grammar("object", "", given.rpartition(".")[0]) if kind == "json_object" else None
    if schema is None:
        raise BadRequest(f'{given}: is required where the type is "json_schema"', param=given)
    return schema


def value_grammar(format: ResponseFormat, place: str) -> Grammar:
    """The grammar of the schema in `value`."""
    if format.type != "json_object" or format.json_schema is not None:
        problem = 'a schema, only together with type: "json_object" and without json_schema'
        raise BadRequest(f"{place}: {problem}", param=place)
    assert format.value is not None, "it is given"
    return schema_grammar(format.value, place)


def convert_structured(outputs: StructuredOutputs, field: str) -> Grammar | None:
    grammars = [
        schema_grammar(outputs.body, f"{field}.json") if outputs.body != "" else None,
        Grammar("regex", outputs.regex, f"{field}.regex") if outputs.regex else None,
        choice_grammar(outputs.choice, f"{field}.choice") if outputs.choice else None,
        Grammar("lark", outputs.grammar, f"{field}.grammar") if outputs.grammar else None,
        Grammar("object", "", f"{field}.json_object") if outputs.json_object else None,
    ]
    return select_grammar([grammar for grammar in grammars if grammar])


def convert_tgi_grammar(grammar: TgiGrammar, place: str) -> Grammar:
    match grammar.type, grammar.value:
        case "regex", str(expression):
            check_source_length(expression, place, MAX_REGEX_CHARS)
            return Grammar("regex", expression, place)
        case "regex", _:
            raise BadRequest(f'{place}: must be a string where the type is "regex"', param=place)
        case "json_schema", dict(value) if "schema" in value:
            named = read_named_schema(value, place)
            return schema_grammar(named.body, f"{place}.schema", strict=named.strict)
        case "json_schema", _:
            raise BadRequest(f'{place}: must be an object with a "schema"', param=place)
        case _, value:
            return schema_grammar(value, place)


def read_named_schema(value: dict[str, Any], place: str) -> JsonSchema:
    try:
        return JsonSchema.read(value)
    except BadRequest as error:
        raise BadRequest(f"{place}.{error.message}", param=f"{place}.{error.param}") from None


def schema_grammar(body: dict[str, Any] | str, field: str, *, strict: bool = True) -> Grammar:
    """The grammar of a JSON schema, or of its text.  If `strict`, objects have no keys but those that they name."""
    try:
        source = body if isinstance(body, str) else orjson.dumps(body).decode()
    except orjson.JSONEncodeError:  # orjson parses deeper nesting than it serializes
        raise BadRequest(f"{field}: is nested too deeply", param=field) from None
    check_source_length(source, field)
    return Grammar("schema" if strict else "open_schema", source, field)


class StrictFields(Protocol):
    """A wire object with `strict`, which is true by default."""

    @property
    def strict(self) -> bool: ...

    @property
    def model_fields_set(self) -> set[str]: ...


def says_strict(wire: StrictFields) -> bool:
    """Whether a client says `strict: true`, rather than nothing."""
    return wire.strict and "strict" in wire.model_fields_set


def check_strict_schema(schema: dict[str, Any], subject: str, field: str) -> None:
    """Raises BadRequest, with OpenAI's rules and words, where an object of a schema that is called strict has no
    `additionalProperties: false`, or where its `required` is not the list of its `properties`.

    `subject` is what has the schema.  Its size is checked before, since all of it is looked through.
    """
    for place, part in walk_schemas(schema):
        if problem := find_looseness(part):
            context = repr(tuple(map(str, list_steps(place))))
            if len(context) > MAX_PLACE_CHARS:
                context = context[:MAX_PLACE_CHARS] + "..."
            raise BadRequest(f"Invalid schema for {subject}: In context={context}, {problem}", param=field)


def find_looseness(part: dict[str, Any]) -> str:
    """Why an object may have other keys than those that its schema names, or fewer; empty if there is no reason."""
    kind, named = part.get("type"), part.get("properties")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if not is_object and not isinstance(named, dict) and "additionalProperties" not in part:
        return ""
    if part.get("additionalProperties") is not False:
        return "'additionalProperties' is required to be supplied and to be false."
    keys = named if isinstance(named, dict) else {}
    required = part.get("required", [])
    given = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set[str]()
    if (lacking := next((key for key in keys if key not in given), None)) is not None:
        return f"{REQUIRED_RULE} Missing {show_value(lacking, MAX_QUOTED_CHARS)}."
    if (added := next((key for key in sorted(given) if key not in keys), None)) is not None:
        return f"{REQUIRED_RULE} Extra required key {show_value(added, MAX_QUOTED_CHARS)} supplied."
    return ""


def check_closed_schema(schema: dict[str, Any], field: str) -> None:
    """Raises BadRequest, as Anthropic does, where a schema that is called strict allows keys that it does not name.

    Its size is checked before.  Without `additionalProperties`, which Anthropic demands, an object is closed anyway.
    """
    for place, part in walk_schemas(schema):
        if part.get("additionalProperties", False) is not False:
            message = "must be false, or left out, in a strict schema"
            where = f"{field}{write_place(place)}.additionalProperties"
            raise BadRequest(f"{where}: {message}, got {quote_json(part['additionalProperties'])}", param=where)


def walk_schemas(schema: dict[str, Any]) -> Iterator[tuple[Place | None, dict[str, Any]]]:
    """`schema` and all schemas inside it, each with its place, in their order."""
    left: list[tuple[Place | None, dict[str, Any]]] = [(None, schema)]
    while left:
        place, part = left.pop()
        yield place, part
        left += reversed([(reduce(Place, steps, place), inner) for steps, inner in subschemas(part)])


def choice_grammar(texts: Sequence[str], field: str) -> Grammar:
    source = orjson.dumps(list(texts)).decode()
    check_source_length(source, field)
    return Grammar("choice", source, field)


def check_source_length(source: str, field: str, longest: int = MAX_GRAMMAR_CHARS) -> None:
    """Raises BadRequest for a long source, which would take long to compile and to run at each step."""
    if len(source) > longest:
        raise BadRequest(f"{field}: must have at most {longest} characters, has {len(source)}", param=field)


def select_grammar(grammars: Sequence[Grammar]) -> Grammar | None:
    if len(grammars) > 1:
        first, second = grammars[0].field, grammars[1].field
        raise BadRequest(f"{second}: an answer has one format, and {first} gives another; give one", param=second)
    return grammars[0] if grammars else None
