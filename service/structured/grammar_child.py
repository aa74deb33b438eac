"""The child process that checks grammars: reads a question from each line of standard input, writes an answer to each.

A client's grammar may take any amount of time and memory to compile, and llguidance cannot be interrupted.  So each is
compiled here first, and in the server only if that succeeded.  Imports nothing else of the service.
"""

import json
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import lru_cache, reduce
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

if platform.system() == "Linux":  # macOS refuses these limits and Windows has none; both are untested
    import resource

MEMORY_LIMIT, STACK_LIMIT = 1 << 30, 4 << 20  # bytes; the stack is half of a server thread's
MAX_TRIALS = 300  # of parts of a schema, to find the one at fault
MAX_ERROR_CHARS = 300
MAX_PLACE_CHARS = 200  # of a place in a schema that a message repeats

# Documents of a schema are written on one line, as Python writes them: with fixed spaces, most of what is not a
# value is forced.  A model that may write any number of spaces sometimes writes nothing else.
WHITESPACE = r" |\r?\n[ \t]{0,40}"
MAX_LEXER_STATES = 50_000

Steps = tuple[str | int, ...]
NAMED_SUBSCHEMAS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")  # schemas by names
LISTED_SUBSCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE_SUBSCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "contains", "not")
COMBINING = frozenset(("$ref", "anyOf", "oneOf", "allOf", "not"))  # keywords whose schemas hold for the same value
NAMING_KEYS = frozenset(("properties", "patternProperties"))
OTHER_KEYS = frozenset(("additionalProperties", "unevaluatedProperties"))
VALUE_KEYS, ANNOTATIONS = ("const", "enum"), ("default", "example", "examples")
# The keywords of limits, and the sign of those that are beyond all integers of 64 bits and so are none.
LIMIT_KEYS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
MAX_EXACT, MAX_INTEGER = 1 << 53, (1 << 63) - 1
LONG_NUMBER = re.compile(r"\d{16}|\d[eE]")  # shorter numbers are exact

ERROR_MESSAGES = {
    r"Unimplemented keys: \[(.*)\]": "keywords that are not supported: {}",
    r"Expecting object schema.*": "must be an object",
    r"Unknown format: (.*)": "the format {} is not supported",
    r"oneOf constraints are not supported.*": "oneOf is supported where no two alternatives can hold; say anyOf",
    r"Resource '(.*)' is not present in a registry.*": "{} is not fetched; put what it refers to into $defs",
    r".*NoExtensionBias.*": "there is nothing that it allows",
    r".*too many expressions constructed.*": "is too complex",
    r"Failed to generate regex for (?:integer|float) range: .*": "a limit has too many digits; leave it out",
    r"(?:Parser Error: )?Current row has .*": "is too complex: too many alternatives in one place",
}


def set_parser_limits(lexer_states: int, *, verbose: bool) -> LLParserLimits:
    """The limits of a parser.  `verbose`: its errors have its statistics."""
    return LLParserLimits(max_items_in_row=10_000, max_lexer_states=lexer_states, verbose_errors=verbose)


def to_llguidance(kind: str, source: str) -> str:
    """The grammar in llguidance's form.  Raises ValueError for a malformed one."""
    match kind:
        case "object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', {"whitespace_pattern": WHITESPACE})
        case "schema" | "open_schema":
            return LLMatcher.grammar_from_json_schema(
                source if kind == "open_schema" else close_source(source),
                {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source)]
            return "start: CHOICE\nCHOICE: " + " | ".join(texts)
        case _ if "::=" in source:
            return str(any_to_lark(source))
        case _:
            return source


@lru_cache(maxsize=32)  # an agent sends the same tools with each request
def close_source(source: str) -> str:
    """The text of a schema with its objects closed; what is no JSON object is left for llguidance's error."""
    try:
        schema = json.loads(source)
        return json.dumps(schema) if isinstance(schema, dict) and close_objects(schema) else source
    except (ValueError, RecursionError):
        return source


def close_objects(schema: dict[str, Any]) -> int:
    """Let objects that name properties, and do not say whether there may be others, have no others.

    OpenAI's strict schemas, vLLM and llama.cpp do the same: in JSON Schema such an object may have any other key, and a
    small model invents and repeats keys until its answer is cut.  An object to which several schemas apply stays open,
    because a property that one of them names would be forbidden by another.  Changes `schema`, and returns how many
    objects were closed.
    """
    found: dict[int, dict[str, Any]] = {}
    combined: set[int] = set()  # the ids of schemas that apply to a value together with another
    left: list[tuple[dict[str, Any], bool]] = [(schema, False)]
    while left:
        part, is_combined = left.pop()
        if id(part) in (combined if is_combined else found):
            continue
        found[id(part)] = part
        applied = [*applied_schemas(part, schema)]
        if is_combined or combines_schemas(part):
            combined.add(id(part))
            left += ((each, True) for each in applied)
        left += ((each, False) for _, each in subschemas(part))
        left += ((each, False) for each in applied)
    closed = [part for at, part in found.items() if at not in combined and names_all_keys(part)]
    for part in closed:
        part["additionalProperties"] = False
    return len(closed)


def combines_schemas(part: dict[str, Any]) -> bool:
    """Whether more than one schema applies to a value of `part`, or one that excludes values."""
    combining, every = part.keys() & COMBINING, part.get("allOf")
    if combining and (len(combining) > 1 or part.keys() & NAMING_KEYS):
        return True
    return "not" in part or (isinstance(every, list) and len(every) > 1)


def applied_schemas(part: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that apply to the same value as `part`."""
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(listed := part.get(key), list):
            yield from (each for each in listed if isinstance(each, dict))
    if isinstance(negated := part.get("not"), dict):
        yield negated
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target: Any = root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        if isinstance(target, dict):
            yield target


def names_all_keys(part: dict[str, Any]) -> bool:
    """Whether `part` is a schema of objects that can be closed: what it requires is among what it names."""
    named, required = part.get("properties", {}), part.get("required", [])
    if not part.keys() & NAMING_KEYS or part.keys() & OTHER_KEYS:
        return False
    if not isinstance(named, dict) or not isinstance(required, list):
        return False
    least = part.get("minProperties", 0)
    return all(isinstance(key, str) and key in named for key in required) and (
        "patternProperties" in part or (isinstance(least, int | float) and least <= len(named))
    )


def grammar_error(tokenizer: LLTokenizer, grammar: str) -> str:
    """llguidance's error message for the grammar; empty if it is valid."""
    limits = set_parser_limits(MAX_LEXER_STATES, verbose=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits).get_error()


def check_grammar(question: dict[str, Any]) -> dict[str, str]:
    """The `grammar` in llguidance's form, or what is `wrong` with it, and at which `place` of a schema."""
    kind, source = question["kind"], question["source"]
    is_schema = kind in ("schema", "open_schema")
    if is_schema and (place := find_long_pattern(source, question["pattern"])):
        return {"wrong": f"must have at most {question['pattern']} characters", "place": place}
    if is_schema and (inexact := find_inexact_number(source)):
        return {"wrong": inexact.wrong, "place": inexact.place}
    tokenizer = build_byte_tokenizer(question["size"], tuple(question["ends"]), tuple(map(tuple, question["special"])))
    try:
        grammar = to_llguidance(kind, source)
    except (GbnfToLarkError, ValueError, RecursionError) as malformed:
        return {"wrong": readable_error(str(malformed)), "place": ""}
    error = grammar_error(tokenizer, grammar)
    if not error:
        return {"grammar": grammar}
    if not is_schema:
        return {"wrong": readable_error(error), "place": ""}
    place, error = narrow_error(
        json.loads(source), error, lambda part: grammar_error(tokenizer, to_llguidance(kind, json.dumps(part)))
    )
    return {"wrong": readable_error(error), "place": place}


def find_long_pattern(source: str, longest: int) -> str:
    """The place of a pattern in a schema that has more than `longest` characters; empty if there is none."""
    if len(source) <= longest:
        return ""
    try:
        left: list[tuple[Place | None, Any]] = [(None, json.loads(source))]
    except (ValueError, RecursionError):
        return ""  # invalid JSON is reported later
    while left:
        place, part = left.pop()
        if isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str) and len(pattern) > longest:
                return write_place(Place(place, "pattern"))
            named = part.get("patternProperties")
            if isinstance(named, dict) and any(len(pattern) > longest for pattern in named):
                return write_place(Place(place, "patternProperties"))
            left += ((Place(place, name), inner) for name, inner in part.items() if isinstance(inner, dict | list))
        elif isinstance(part, list):
            left += ((Place(place, at), inner) for at, inner in enumerate(part) if isinstance(inner, dict | list))
    return ""


class SchemaFault(NamedTuple):
    """What is wrong with a schema, and the place of the part at fault."""

    wrong: str
    place: str


def find_inexact_number(source: str) -> SchemaFault | None:
    """A number of a schema's values or limits that llguidance reads as another one: it has floats of 64 bits,
    and answers with integers of 64 bits."""
    if not LONG_NUMBER.search(source):
        return None
    try:
        left: list[tuple[Place | None, Any, str]] = [(None, json.loads(source), "schema")]
    except (ValueError, RecursionError):
        return None  # invalid JSON is reported later
    while left:
        place, part, kind = left.pop()
        if kind == "value" and is_number(part) and not is_exact(part):
            return describe_inexact(part, place)
        if not isinstance(part, dict | list):
            continue
        for step, inner in part.items() if isinstance(part, dict) else enumerate(part):
            found = Place(place, step)
            if kind == "schema" and step in LIMIT_KEYS and is_number(inner) and not is_exact_limit(inner, step):
                return describe_inexact(inner, found)
            if kind != "schema" or isinstance(step, int):
                left.append((found, inner, "schema" if kind == "names" else kind))
            elif step not in ANNOTATIONS:
                inner_kind = "value" if step in VALUE_KEYS else "names" if step in NAMED_SUBSCHEMAS else "schema"
                left.append((found, inner, inner_kind))
    return None


def describe_inexact(number: float, place: "Place | None") -> SchemaFault:
    wrong = f"{str(number)[:40]} is not followed exactly, because numbers of a schema are read as floats of 64 bits"
    return SchemaFault(f"{wrong}; use at most {MAX_EXACT}, or a string", write_place(place))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_exact(number: float) -> bool:
    """Whether llguidance writes this value as it is.  It has the largest integer for the float above it."""
    return number == MAX_INTEGER or (abs(number) < MAX_INTEGER and float(number) == number)


def is_exact_limit(number: float, key: str) -> bool:
    """Whether llguidance follows this limit.  It writes the float with the fewest digits, and the last whole number
    inside an exclusive limit is a float, too."""
    is_exclusive, sign = key.startswith("exclusive"), LIMIT_KEYS[key]
    last = number - sign if is_exclusive else number
    if max(abs(number), abs(last)) <= MAX_EXACT or last * sign >= MAX_INTEGER:
        return True
    return not is_exclusive and abs(number) < MAX_INTEGER and Decimal(repr(float(number))) == number


class Place(NamedTuple):
    """Where a part of a JSON value stands: the place of what contains it, None for the whole value, and the step from
    there.  Parts share the places of what contains them, so a long key is in memory once for all that is below it.
    """

    parent: "Place | None"
    step: str | int


def list_steps(place: Place | None) -> Steps:
    """The keys and indexes from the whole value to `place`, each key cut to MAX_PLACE_CHARS characters."""
    steps = list[str | int]()
    while place is not None:
        steps.append(place.step if isinstance(place.step, int) else place.step[:MAX_PLACE_CHARS])
        place = place.parent
    return tuple(reversed(steps))


def write_place(place: Place | None) -> str:
    """The steps to `place`, cut to MAX_PLACE_CHARS characters."""
    return spell_steps(list_steps(place))[:MAX_PLACE_CHARS]


@lru_cache(maxsize=4)
def build_byte_tokenizer(size: int, ends: tuple[int, ...], special: tuple[tuple[int, str], ...]) -> LLTokenizer:
    """A tokenizer of `size` tokens: single bytes, and the special tokens that a grammar may name."""
    tokens = [b""] * size
    for token, spelled in special:
        tokens[token] = spelled.encode()
    free = (token for token in range(size) if not tokens[token] and token not in ends)
    for byte, token in zip(range(256), free, strict=False):
        tokens[token] = bytes([byte])
    return LLTokenizer(
        TokenizerWrapper(ByteTokenizer(tokens, ends, [token for token, _ in special])), eos_token=list(ends)
    )


class ByteTokenizer:
    """A tokenizer with the attributes that TokenizerWrapper needs."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: tuple[int, ...], special: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, ends[0], special
        self._token_of_byte = {spelled: token for token, spelled in enumerate(tokens) if token not in special}

    def __call__(self, text: bytes) -> list[int]:
        return [self._token_of_byte[bytes([byte])] for byte in text if bytes([byte]) in self._token_of_byte]


def narrow_error(schema: Any, error: str, fault: Callable[[Any], str]) -> tuple[str, str]:
    """The place of the smallest part of a schema with the same error, and the error."""
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema} if schema else {}
    place: Place | None = None
    part, left = schema, MAX_TRIALS
    while left > 0:
        for steps, child in subschemas(part):
            left -= 1
            if fault(shared | child) == error:
                place, part = reduce(Place, steps, place), child
                break
            if left <= 0:
                break
        else:
            break
    return write_place(place), error


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """The schemas directly inside a schema, and the steps to them: a keyword, and the name or the index in it."""
    for key in NAMED_SUBSCHEMAS:
        if isinstance(named := schema.get(key), dict):
            yield from (((key, name), child) for name, child in named.items() if isinstance(child, dict))
    for key in LISTED_SUBSCHEMAS:
        if isinstance(listed := schema.get(key), list):
            yield from (((key, at), child) for at, child in enumerate(listed) if isinstance(child, dict))
    for key in SINGLE_SUBSCHEMAS:
        if isinstance(child := schema.get(key), dict):
            yield (key,), child


def spell_steps(steps: Steps) -> str:
    """("anyOf", 0, "items") -> ".anyOf[0].items"."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def readable_error(error: str) -> str:
    """llguidance's error message in one line, without repetitions of the source."""
    error = error.partition("\n<state>\n")[0].removesuffix("\n<non-verbose/>")
    for pattern, template in ERROR_MESSAGES.items():
        if found := re.fullmatch(pattern, error, re.DOTALL):
            return template.format(*(group.replace('"', "") for group in found.groups()))
    if "\nerror: " in error:  # of a regular expression; the line before marks the column
        before, _, after = error.rpartition("\nerror: ")
        column = len(before.rpartition("\n")[2].rstrip("^")) - 3
        return shorten(f"character {column}: {after.splitlines()[0]}")
    if found := re.match(r"(?:at )?(\d+)\((\d+)\): ([^\n]*)", error):
        return shorten(f"line {found[1]}, column {found[2]}: {found[3]}")
    return shorten(error.partition("\n")[0])


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def main() -> None:
    if platform.system() == "Linux":
        for kind, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, MEMORY_LIMIT),
            (resource.RLIMIT_STACK, STACK_LIMIT),
        ):
            _, hard = resource.getrlimit(kind)  # which a process may not raise
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (least, least))
    write_line("")  # ready
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])  # of processor time; then this process is killed
        answer = check_grammar(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_line(json.dumps(answer))


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
