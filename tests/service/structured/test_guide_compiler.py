"""Grammars and budgets of reasoning, followed with random tokens: the answer always has the requested form, with any
kind of vocabulary."""

import gc
import json
import re
import signal
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from polyhead.models.chat.chat_format import TAGGED, ChatFormat
from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.vocabulary import Vocabulary, sentencepiece_merges
from polyhead.service.core.errors import BadRequest, TooComplex, Unavailable
from polyhead.service.core.grammar import MAX_REGEX_CHARS, Grammar, Thinking
from polyhead.service.core.guide import Guide, GuideState
from polyhead.service.core.model import Model
from polyhead.service.structured import grammar_check as trial
from polyhead.service.structured import guide_compiler as kept
from polyhead.service.structured.compiled_guide import (
    MAX_FORCED_TOKENS,
    QUICK_FORCED_S,
    CompiledGuide,
    wait_for_mask,
)
from polyhead.service.structured.guide_compiler import GuideCompiler
from polyhead.service.text.chat_prompt import build_answer_grammar
from polyhead.service.text.generation_request import ToolDefinition, ToolOptions
from tests.support.checkpoints import CORPUS
from tests.support.scripted import model

FIELD = "response_format.json_schema.schema"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["tea", "größer", 3, None]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
THOUGHT = Thinking("", "</think>", 6)


def byte_level(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def byte_fallback(_: Path) -> Tokenizer:
    """As in Llama 2: a space before every text, and bytes for characters without a piece."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *bytes_,
        "\u2581",
        *map(chr, range(33, 127)),
        '{"',
        '":',
        "name",
        '"\u2581',
        "\u2581a",
    ]
    merges = [("{", '"'), ('"', ":"), ('"', "\u2581"), ("\u2581", "a")]
    backend = sentencepiece_merges(
        {piece: token for token, piece in enumerate(pieces)}, merges, unknown="<unk>", prefix_space=True
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(Vocabulary(backend, "<s>", "</s>"))


def metaspace(_: Path) -> Tokenizer:
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=list('{}[]:",ß0123456789-'),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(Vocabulary(backend, "<s>", "</s>"))


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    """With rows of the embedding that belong to no token."""
    known = model(tiny_generator, "talker", "generate")
    return model(tiny_generator, "talker", "generate", vocab_size=known.vocab_size + 37)


@pytest.fixture(scope="module")
def guides() -> Iterator[GuideCompiler]:
    made = GuideCompiler()
    yield made
    made.close()


def schema(body: Any) -> Grammar:
    return Grammar("schema", json.dumps(body), FIELD)


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts), "guided_choice")


def random_walk(
    model: Model, guide: Guide | None, seed: int, most: int = 400, *, use_forced: bool = True
) -> tuple[list[int], bool]:
    """The tokens of an answer, sampled from the allowed ones, and whether it came to an end."""
    assert guide is not None
    walk, random, tokens = guide.new_state(), Random(seed), list[int]()
    while not walk.is_finished and len(tokens) < most:
        words = np.zeros(-(-model.vocab_size // 32), np.int32)
        may = np.arange(model.tokenizer.vocab_size)
        if wait_for_mask(walk, words):
            may = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert len(may)
        drawn = [int(random.choice(may))]
        while drawn:
            if drawn[0] in model.stop_tokens:
                return tokens, True
            walk.advance(drawn[0])
            tokens += drawn
            drawn = walk.forced_tokens()[:1] if use_forced and len(tokens) < most else []
    return tokens, walk.is_finished


def text_of(model: Model, tokens: list[int]) -> str:
    return b"".join(map(model.tokenizer.piece_bytes, tokens)).decode()


def person(text: str) -> bool:
    said = json.loads(text)
    likes = said["likes"]
    return (
        text.startswith('{"name": "')
        and list(said) == ["name", "age", "likes"]
        and len(said["name"]) <= 8
        and said["age"] in range(100)
        and 1 <= len(likes) <= 2
        and all(like in ("tea", "größer", 3, None) for like in likes)
    )


@pytest.mark.parametrize("vocabulary", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize(
    ("grammar", "right"),
    [
        (Grammar("object", "", "response_format"), lambda text: isinstance(json.loads(text), dict)),
        (schema(PERSON), person),
        (Grammar("regex", "(ab|c){2,3}-[0-9]{2}", "guided_regex"), re.compile("(ab|c){2,3}-[0-9]{2}").fullmatch),
        (choice("yes", "no", 'so "so"'), ("yes", "no", 'so "so"').__contains__),
        (Grammar("lark", 'start: "a" b+\nb: "b" | "(" b ")"', "guided_grammar"), re.compile(r"a[b()]+").fullmatch),
        (Grammar("lark", 'root ::= "a" ("b" | "c")+ "d"', "guided_grammar"), re.compile("a[bc]+d").fullmatch),
    ],
)
def test_any_sampled_answer_has_the_requested_form(
    guides: GuideCompiler,
    tiny_generator: Path,
    vocabulary: Callable[[Path], Tokenizer],
    grammar: Grammar,
    right: Callable[[str], Any],
) -> None:
    tokenizer = vocabulary(tiny_generator)
    known = model(tiny_generator, "m", "generate", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size + 5)
    guide, ended = guides.compile(known, grammar, None), 0
    for seed in range(8):
        tokens, whole = random_walk(known, guide, seed, use_forced=seed % 2 == 0)
        assert not whole or right(text_of(known, tokens)), text_of(known, tokens)
        ended += whole
    assert ended >= 4


def test_forced_tokens_are_those_of_the_tokenizer(guides: GuideCompiler, generator: Model) -> None:
    guide = guides.compile(generator, schema({"const": "The quick brown fox"}), None)
    assert guide is not None
    walk = guide.new_state()
    words = np.zeros(-(-generator.vocab_size // 32), np.int32)
    forced = walk.forced_tokens()
    assert text_of(generator, forced).startswith('"The quick brown')
    assert forced == generator.tokenizer.encode('"The quick brown fox"', special=False).ids[: len(forced)]
    assert walk.fill_mask(words)
    assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == forced[:1]


def test_a_long_literal_is_forced_in_parts_and_computed_once(guides: GuideCompiler, generator: Model) -> None:
    """All of it in one step would delay other answers, and so would a search for it at each step."""
    literal = "".join(Random(1).choice("abcdefghij") for _ in range(3000))
    guide = guides.compile(generator, schema({"const": literal}), None)
    assert guide is not None
    walk = guide.new_state()
    asked, matcher, words = [0], walk._matcher, np.zeros(-(-generator.vocab_size // 32), np.int32)  # type: ignore[attr-defined]

    def compute_ff_tokens() -> list[int]:
        asked[0] += 1
        return matcher.compute_ff_tokens()

    walk._matcher = Counting(matcher, compute_ff_tokens)  # type: ignore[attr-defined]
    tokens = list[int]()
    while not walk.is_finished:
        assert walk.fill_mask(words)
        [token, *_] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if token in generator.stop_tokens:
            break
        walk.advance(token)
        forced = walk.forced_tokens()
        assert len(forced) <= MAX_FORCED_TOKENS
        for each in forced:
            walk.advance(each)
        tokens += [token, *forced]
    assert text_of(generator, tokens) == json.dumps(literal)
    assert asked[0] <= 8


class Counting:
    """A matcher whose forced tokens are computed by another function."""

    def __init__(self, matcher: Any, compute_ff_tokens: Any) -> None:
        self._matcher, self.compute_ff_tokens = matcher, compute_ff_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def count_searches(walk: GuideState, searches: list[int]) -> None:
    """Note in `searches` each search for the forced tokens of `walk`."""
    matcher = walk._matcher  # type: ignore[attr-defined]

    def compute_ff_tokens() -> list[int]:
        searches.append(1)
        found: list[int] = matcher.compute_ff_tokens()
        return found

    walk._matcher = Counting(matcher, compute_ff_tokens)  # type: ignore[attr-defined]


def test_answers_at_the_same_place_search_a_long_literal_once(guides: GuideCompiler, generator: Model) -> None:
    """The tokenizer took seconds of one step for 64 answers of a call."""
    literal = "".join(Random(2).choice("abcdefghij") for _ in range(3000))
    guide = guides.compile(generator, schema({"const": literal}), None)
    assert guide is not None
    searches, walks = list[int](), [guide.new_state() for _ in range(64)]
    for walk in walks:
        count_searches(walk, searches)
    first = walks[0].forced_tokens()
    assert len(first) == MAX_FORCED_TOKENS
    assert all(walk.forced_tokens() == first for walk in walks)
    assert len(searches) == 1


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_takes_long_to_be_forced_is_searched_with_the_next_mask(
    guides: GuideCompiler, generator: Model, is_slow: bool
) -> None:
    """The search is timed by the wall: most of it is done by threads of the tokenizer."""
    body = {"enum": [letter + "the quick brown fox jumps" for letter in "abcdefgh"]}
    guide, now = guides.compile(generator, schema(body), None), [0.0]
    assert isinstance(guide, CompiledGuide)

    def clock() -> float:
        now[0] += 1.5 * QUICK_FORCED_S if is_slow else 0.0
        return now[0]

    guide.memory.clock = clock
    searches, words = list[int](), np.zeros(-(-generator.vocab_size // 32), np.int32)
    answers, at_once = list[str](), list[bool]()
    for letter in "abcd":
        walk, tokens = guide.new_state(), generator.tokenizer.encode(f'"{letter}', special=False).ids
        for token in tokens:
            walk.advance(token)
        before = len(searches)
        count_searches(walk, searches)
        assert walk.forced_tokens(computes=False) == []
        assert len(searches) == before, "those of this step were left to the mask"
        forced = walk.forced_tokens()
        at_once.append(bool(forced))
        if not forced:
            assert walk.fill_mask(words)
            forced = walk.forced_tokens()
            assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == forced[:1]
        answers.append(text_of(generator, [*tokens, *forced]))
    assert at_once == [True, *[not is_slow] * 3]
    assert len(searches) == 4
    assert all(answer.startswith(f'"{letter}the quick') for letter, answer in zip("abcd", answers, strict=True))


def test_a_token_other_than_the_forced_one_is_accepted(guides: GuideCompiler, generator: Model) -> None:
    """A sampled token may spell the literal differently, as long as its forced tokens were not given out."""
    guide = guides.compile(generator, schema({"const": "The quick brown fox"}), None)
    assert isinstance(guide, CompiledGuide)
    guide.memory.clock = lambda: 0.0
    result, other = guide.new_state(), guide.new_state()
    result.advance(result.forced_tokens()[0])
    [quote] = generator.tokenizer.encode('"', special=False).ids
    other.advance(quote)
    assert text_of(generator, [quote, *other.forced_tokens()]).startswith('"The quick')


LONG = "a" * (MAX_REGEX_CHARS + 1)


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "text", "is_allowed"),
    [
        (NAMED, '{"a": 1}', True),
        (NAMED, '{"a": 1, "b": 2}', False),
        ({"type": "array", "items": NAMED}, '[{"b": 2}]', False),
        ({"$defs": {"x": NAMED}, "$ref": "#/$defs/x"}, '{"b": 2}', False),
        ({"anyOf": [NAMED, OTHER]}, '{"b": 2}', True),
        ({"anyOf": [NAMED, OTHER]}, '{"a": 1, "b": 2}', False),
        ({"type": "object", "properties": {}}, '{"b": 2}', False),
        (NAMED | {"additionalProperties": True}, '{"a": 1, "b": 2}', True),
        ({"type": "object"}, '{"b": 2}', True),
        ({"type": "object"}, '{"b": 2, "b": 2}', True),  # the request has no bound
        ({"type": "object", "maxProperties": 1}, '{"b": 2}', True),
        ({"type": "object", "maxProperties": 1}, '{"b": 2, "c": 2}', False),
        ({"allOf": [NAMED, OTHER]}, '{"a": 1, "b": 2}', True),
        ({"$defs": {"x": NAMED}, "allOf": [{"$ref": "#/$defs/x"}, OTHER]}, '{"a": 1, "b": 2}', True),
        (NAMED | {"anyOf": [OTHER]}, '{"a": 1, "b": 2}', True),
        (NAMED | {"required": ["b"]}, '{"b": 2, "a": 1}', False),  # declared properties come first
        (NAMED | {"required": ["b"]}, '{"a": 1, "b": 2}', True),
    ],
)
def test_an_object_that_names_its_properties_has_no_others(
    guides: GuideCompiler, generator: Model, body: Any, text: str, is_allowed: bool
) -> None:
    assert allows(guides, generator, schema(body), text) == is_allowed


def test_an_open_schema_allows_other_properties(guides: GuideCompiler, generator: Model) -> None:
    assert allows(guides, generator, Grammar("open_schema", json.dumps(NAMED), FIELD), '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a": 1, "b": 2}', True),
        ('{"a": 1, "a": 2}', False),
        ('{"b": 1, "a": 2}', False),  # named properties come first
        ('{"a": 1, "b": 2, "a": 3}', False),
        ('{"b": 1, "b": 2}', True),  # what the schema does not name may stand twice
    ],
)
def test_named_properties_of_an_open_object_stand_once(
    guides: GuideCompiler, generator: Model, text: str, *, is_allowed: bool
) -> None:
    for grammar in (Grammar("open_schema", json.dumps(NAMED), FIELD), schema(NAMED | {"additionalProperties": True})):
        assert allows(guides, generator, grammar, text) == is_allowed


@pytest.mark.parametrize("is_open", [True, False])
def test_arguments_of_a_tool_have_only_named_properties_unless_open(
    guides: GuideCompiler, generator: Model, is_open: bool
) -> None:
    tools = ToolOptions((ToolDefinition("f", "", NAMED, "tools[0]", is_open),), "required")
    grammar = build_answer_grammar(tools, ChatFormat(), None)
    assert grammar is not None
    call = '{"name": "f", "arguments": {"a": 1, "b": 2}}'
    assert allows(guides, generator, grammar, call) == is_open


def allows(guides: GuideCompiler, known: Model, grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows the tokens of `text`, one after the other."""
    guide = guides.compile(known, grammar, None)
    assert isinstance(guide, CompiledGuide)
    state = guide.new_state()
    for token in guide.vocabulary.tokenize(text.encode()):
        if token not in allowed_tokens(known, state):
            return False
        state.advance(token)
    return True


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"properties": {"a": {"anyOf": [{}, {"pattern": LONG}]}}}, ".properties.a.anyOf[1].pattern"),
        ({"type": "object", "patternProperties": {LONG: {}}}, ".patternProperties"),
        ({"$defs": {"x": {"pattern": LONG}}, "patternProperties": 5}, ".$defs.x.pattern"),
    ],
)
def test_a_long_pattern_in_a_schema_is_refused_by_its_place(
    guides: GuideCompiler, generator: Model, body: Any, place: str
) -> None:
    with pytest.raises(BadRequest) as error:
        guides.compile(generator, schema(body), None)
    assert error.value.message == f"{FIELD}{place}: must have at most {MAX_REGEX_CHARS} characters"
    tool = ToolDefinition("f", "", body | {"type": "object"}, "tools[0].function.parameters")
    with pytest.raises(BadRequest) as error:
        build_answer_grammar(ToolOptions((tool,), "required"), ChatFormat(), None)
    assert error.value.message == f"tools[0].function.parameters{place}: must have at most {MAX_REGEX_CHARS} characters"


def test_a_number_that_is_not_exact_is_refused_in_tools_and_beside_them() -> None:
    body = {"type": "object", "properties": {"id": {"enum": [(1 << 53) + 1]}}}
    for parameters, document, place in (
        (body, None, "tools[0].function.parameters"),
        ({"type": "object"}, schema(body), FIELD),
        ({"type": "object"}, Grammar("open_schema", json.dumps(body), FIELD), FIELD),
    ):
        tools = ToolOptions((ToolDefinition("f", "", parameters, "tools[0].function.parameters"),), "auto")
        with pytest.raises(BadRequest, match=r"\.properties\.id\.enum\[0\]: 9007199254740993 is not followed") as error:
            build_answer_grammar(tools, ChatFormat(TAGGED), document)
        assert error.value.message.startswith(place)


def test_schemas_of_tools_have_a_total_limit() -> None:
    tools = tuple(ToolDefinition(f"f{n}", "", {"const": "a" * 60_000}, f"tools[{n}]") for n in range(5))
    with pytest.raises(BadRequest, match="tools: their schemas must have at most 262144 characters together, have 30"):
        build_answer_grammar(ToolOptions(tools, "required"), ChatFormat(), None)


def test_control_tokens_are_not_text_but_may_be_named(guides: GuideCompiler, generator: Model) -> None:
    start = generator.tokenizer.token_id("<|im_start|>")
    tokens, whole = random_walk(
        generator, guides.compile(generator, Grammar("lark", f'start: "a" <[{start}]> "b"', "g"), None), 0
    )
    assert whole
    assert start in tokens
    spelled = guides.compile(generator, choice("<|im_start|>"), None)
    assert start not in random_walk(generator, spelled, 0)[0]


def test_a_model_without_an_end_token_ends_with_the_grammar(guides: GuideCompiler, tiny_generator: Path) -> None:
    endless = model(tiny_generator, "m", "generate", stop_tokens=frozenset())
    tokens, whole = random_walk(endless, guides.compile(endless, choice("yes", "no"), None), 1)
    assert whole
    assert text_of(endless, tokens) in ("yes", "no")


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (schema({"properties": {"a": {"items": {"format": "iri"}}}}), f"{FIELD}.properties.a.items: the format iri is"),
        (
            schema({"anyOf": [{}, {"uniqueItems": True}]}),
            f"{FIELD}.anyOf[1]: keywords that are not supported: uniqueIt",
        ),
        (
            schema({"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}),
            f"{FIELD}.$defs.x: keywords that are not supported",
        ),
        (
            schema({"$ref": "https://example.com/x"}),
            f"{FIELD}: https://example.com/x is not fetched; put what it refers",
        ),
        (schema({"$ref": "#/$defs/none"}), f"{FIELD}: Pointer '/$defs/none' does not exist"),
        (schema({"$ref": "#"}), f"{FIELD}: there is nothing that it allows"),
        (
            schema({"properties": {"id": {"enum": [(1 << 53) + 1]}}}),
            f"{FIELD}.properties.id.enum[0]: 9007199254740993 is not followed exactly, because numbers of a schema are "
            "read as floats of 64 bits; use at most 9007199254740992, or a string",
        ),
        (
            schema({"properties": {"id": {"type": "integer", "minimum": -(1 << 63)}}}),
            f"{FIELD}.properties.id: a limit has too many digits; leave it out",
        ),
        (schema({"type": "number", "maximum": 1e308}), f"{FIELD}: a limit has too many digits; leave it out"),
        (schema({"type": "text"}), f"{FIELD}: Invalid type: text"),
        (
            schema({"minimum": 5, "maximum": 3, "type": "integer"}),
            f"{FIELD}: Unsatisfiable schema: minimum (5) is greate",
        ),
        (schema([]), f"{FIELD}: must be an object"),
        (Grammar("schema", '{"a":', FIELD), f"{FIELD}: EOF while parsing a value at line 1 column 5"),
        (Grammar("schema", '{"a":' * 5000, FIELD), f"{FIELD}: recursion limit exceeded at line 1"),
        (schema({"allOf": [{"anyOf": [{"const": 30 * i + j} for j in range(30)]} for i in range(9)]}), f"{FIELD}: "),
        (Grammar("regex", "a(b", "guided_regex"), "guided_regex: character 2: unclosed group"),
        (Grammar("regex", "(?=a)b", "guided_regex"), "guided_regex: character 1: look-around, including"),
        (
            Grammar("regex", "(" * 9000 + ")" * 9000, "guided_regex"),
            "guided_regex: character 251: exceed the maximum number of nest",
        ),
        (Grammar("regex", "(a?){1000}a{1000}", "guided_regex"), "guided_regex: is too complex"),
        (Grammar("regex", "[^\\s\\S]", "guided_regex"), "guided_regex: there is nothing that it allows"),
        (Grammar("lark", 'start: "a"\nb; "c"', "guided_grammar"), "guided_grammar: line 2, column 2: "),
        (Grammar("lark", "start: " + "(" * 100_000, "guided_grammar"), "guided_grammar: line 1, column "),
        (
            Grammar("lark", "start: <|nothing|>", "guided_grammar"),
            "guided_grammar: line 1, column 8: unknown special tok",
        ),
        (
            Grammar("lark", "start: <[99999]>", "guided_grammar"),
            "guided_grammar: line 1, column 8: Token range end too",
        ),
        (Grammar("lark", "root ::= (", "guided_grammar"), "guided_grammar: "),
    ],
)
def test_invalid_grammars_are_rejected_with_their_place(
    guides: GuideCompiler, generator: Model, grammar: Grammar, sentence: str
) -> None:
    with pytest.raises(BadRequest) as error:
        guides.compile(generator, grammar, None)
    assert error.value.message.startswith(sentence)
    assert error.value.param == grammar.field
    assert len(error.value.message) < 500
    assert "\n" not in error.value.message


def test_a_slow_compilation_is_ended_and_the_next_works(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 0.3)
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    endless = schema(
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    )
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"is too complex: it takes more than 0\.3 s of a processor to compile"):
            guides.compile(generator, endless, None)
        monkeypatch.setattr(trial, "CPU_LIMIT_S", 5.0)
        assert guides.compile(generator, choice("yes", "no"), None) is not None
        monkeypatch.setattr(trial, "CPU_LIMIT_S", 0.3)
    guides.close()


def test_a_busy_machine_does_not_reject_a_grammar(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gets no processor for longer than the time limit of a grammar."""
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 0.3)
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    process = started_compiler(guides, generator)
    process.send_signal(signal.SIGSTOP)
    later = Timer(0.6, process.send_signal, [signal.SIGCONT])
    later.start()
    assert guides.compile(generator, choice("late"), None) is not None
    guides.close()


def test_a_machine_that_is_too_busy_is_reported_as_busy(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    started_compiler(guides, generator).send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match=r"the machine is too busy to compile the answer's form: it had 0\.2 s"):
        guides.compile(generator, choice("never"), None)
    monkeypatch.setattr(trial, "TIMEOUT_S", 10.0)
    assert guides.compile(generator, choice("never"), None) is not None
    guides.close()


def started_compiler(guides: GuideCompiler, generator: Model) -> "subprocess.Popen[bytes]":
    """The only compiler process, which has compiled a grammar."""
    guides.compile(generator, choice("first"), None)
    [process] = [each.child._process for each in guides._grammar_check._processes]
    assert process is not None
    return process


def test_a_compiler_that_was_ended_from_outside_is_started_again(
    generator: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    process = started_compiler(guides, generator)
    process.kill()
    process.wait()
    assert guides.compile(generator, choice("b"), None) is not None
    guides.close()
    [process] = [each.child._process for each in guides._grammar_check._processes]
    assert process is None


def test_shared_data_of_guides_is_prepared_before_the_first_request(
    guides: GuideCompiler, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = model(tiny_generator, "talker", "generate")
    guides.prepare(generator)
    monkeypatch.delattr(kept, "VocabularyBytes")
    assert guides.compile(generator, choice("a"), None) is not None


def test_guides_are_cached_and_the_oldest_is_evicted(
    guides: GuideCompiler, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MAX_CACHED_GUIDES", 2)
    generator = model(tiny_generator, "talker", "generate")
    first, second, third = choice("1"), choice("2"), choice("3")
    assert guides.find_cached(generator, first, None) is None
    found = guides.compile(generator, first, None)
    assert guides.compile(generator, Grammar("choice", first.source, "another"), None) is found
    guides.compile(generator, second, None)
    assert guides.find_cached(generator, first, None) is found
    guides.compile(generator, third, None)
    assert guides.find_cached(generator, second, None) is None
    assert guides.find_cached(generator, first, None) is found
    monkeypatch.setattr(kept, "MAX_CACHED_CHARS", 20)
    guides.compile(generator, choice("a" * 12), None)
    assert guides.find_cached(generator, first, None) is None


def test_an_unloaded_model_leaves_nothing_behind(guides: GuideCompiler, tiny_generator: Path) -> None:
    generator = model(tiny_generator, "talker", "generate")
    walk = guides.compile(generator, schema(PERSON), None).new_state()  # type: ignore[union-attr]
    gone = weakref.ref(generator.tokenizer)
    del generator
    gc.collect()
    assert gone() is None
    assert not walk.is_finished
    walk.forced_tokens()


def test_an_answer_that_becomes_too_complex_is_an_error(guides: GuideCompiler, generator: Model) -> None:
    guide = guides.compile(
        generator, Grammar("lark", r"start: T" + "\n" + r"T: /(?s:.*)/ & ~/(?s:.*)a.{16}b(?s:.*)/", "g"), None
    )
    with pytest.raises(TooComplex, match="the answer's form has become too complex: is too complex"):
        random_walk(generator, guide, 0, 4000)


# Reasoning


def test_reasoning_ends_at_its_budget_and_the_grammar_follows(guides: GuideCompiler, generator: Model) -> None:
    for seed in range(10):
        tokens, whole = random_walk(generator, guides.compile(generator, choice("yes", "no"), THOUGHT), seed)
        text = b"".join(map(generator.tokenizer.piece_bytes, tokens)).decode(errors="replace")
        assert whole
        assert re.search("</think>\n{0,2}(yes|no)$", text)
        assert len(generator.tokenizer.encode("</think>", special=False)) + 6 + 2 + 3 >= len(tokens)


def allowed_tokens(model: Model, walk: GuideState) -> set[int]:
    words = np.zeros(-(-model.vocab_size // 32), np.int32)
    assert walk.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("lines", [0, 1, 2])
@pytest.mark.parametrize("budget", [-1, 2])
def test_empty_lines_are_allowed_between_reasoning_and_answer(
    guides: GuideCompiler, generator: Model, lines: int, budget: int
) -> None:
    guide = guides.compile(generator, choice("yes"), Thinking("", "</think>", budget))
    assert guide is not None
    walk = guide.new_state()
    thought = generator.tokenizer.encode("ab" if budget >= 0 else "a</think>", special=False).ids
    for token in thought[: budget if budget >= 0 else None]:
        walk.advance(token)
    for token in walk.forced_tokens():
        walk.advance(token)
    line, word = generator.tokenizer.token_id("Ċ"), generator.tokenizer.token_id("y")
    assert line is not None
    for _ in range(lines):
        assert {line, word} <= allowed_tokens(generator, walk)
        assert walk.forced_tokens() == []
        walk.advance(line)
    assert (line in allowed_tokens(generator, walk)) == (lines < 2)
    assert word is not None
    walk.advance(word)
    assert line not in allowed_tokens(generator, walk)
    assert text_of(generator, walk.forced_tokens()) == "es"


def test_a_closing_tag_that_has_begun_is_not_forced_again(guides: GuideCompiler, generator: Model) -> None:
    guide = guides.compile(generator, None, Thinking("", "</think>", 2))
    assert guide is not None
    walk = guide.new_state()
    for token in map(generator.tokenizer.token_id, "</"):
        assert token is not None
        walk.advance(token)
    assert text_of(generator, walk.forced_tokens()) == "think>"


def test_a_tag_is_found_for_any_split_into_tokens(guides: GuideCompiler, generator: Model) -> None:
    guide = guides.compile(generator, choice("yes"), Thinking("", "</think>"))
    assert guide is not None
    for cut in (["<", "/", "t", "h", "i", "n", "k", ">"], ["a", "<", "<", "/", "t", "h", "i", "n", "k", ">"]):
        walk = guide.new_state()
        for piece in cut:
            token = generator.tokenizer.token_id(piece)
            assert token is not None
            words = np.zeros(-(-generator.vocab_size // 32), np.int32)
            assert walk.fill_mask(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            assert bits[token]
            assert not bits[list(generator.stop_tokens)].any()
            walk.advance(token)
        assert all(
            text_of(generator, [token]).strip() in ("y", "ye", "yes", "") for token in allowed_tokens(generator, walk)
        )


def test_no_token_spans_a_tag_before_required_text(tiny_generator: Path) -> None:
    words = ["<unk>", "</s>", ">\n", ">", "</think", "</think>", "</think>{", "a", "yes"]
    backend = Backend(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = model(
        tiny_generator,
        "m",
        "generate",
        tokenizer=Tokenizer(Vocabulary(backend)),
        vocab_size=9,
        stop_tokens=frozenset({1}),
    )
    guides = GuideCompiler()
    guide = guides.compile(known, choice("yes"), Thinking("", "</think>"))
    assert guide is not None
    walk, bits = guide.new_state(), np.zeros(1, np.int32)
    assert walk.fill_mask(bits)
    assert np.unpackbits(bits.view(np.uint8), bitorder="little").tolist()[:9] == [1, 0, 1, 1, 1, 1, 0, 1, 1]
    walk.advance(4)
    assert walk.fill_mask(bits)
    assert np.unpackbits(bits.view(np.uint8), bitorder="little").tolist()[:9] == [1, 0, 0, 1, 1, 1, 0, 1, 1]
    guides.close()


def test_a_model_may_answer_without_reasoning(guides: GuideCompiler, generator: Model) -> None:
    guide = guides.compile(generator, choice("yes", "<no>"), Thinking("<think>", "</think>", 3))
    assert guide is not None
    seen = set()
    for seed in range(40):
        tokens, whole = random_walk(generator, guide, seed)
        assert whole
        text = b"".join(map(generator.tokenizer.piece_bytes, tokens)).decode(errors="replace")
        found = re.fullmatch("(?s)(<think>.*</think>\n{0,2})?(yes|<no>)", text)
        assert found
        seen.add(bool(found[1]))
    assert seen == {True, False}


def test_reasoning_without_budget_or_grammar_needs_no_guide(guides: GuideCompiler, generator: Model) -> None:
    assert guides.compile(generator, None, Thinking("<think>", "</think>")) is None
    guide = guides.compile(generator, None, Thinking("<think>", "</think>", 3))
    assert guide is not None
    walk = guide.new_state()
    assert not walk.fill_mask(np.zeros(100, np.int32))
    for token in generator.tokenizer.encode("<think>a b c", special=False).ids:
        assert not walk.is_finished
        walk.advance(token)
    assert text_of(generator, walk.forced_tokens()) == "</think>"
