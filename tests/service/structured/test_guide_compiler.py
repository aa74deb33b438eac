"""Grammars and thoughts, walked by chance: what comes out is always what was asked for, in any kind of vocabulary."""

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

from polyhead.models.chat.chat_format import ChatFormat
from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.vocabulary import Vocabulary, sentencepiece_merges
from polyhead.service.core.errors import BadRequest, TooComplex, Unavailable
from polyhead.service.core.grammar import MAX_REGEX_CHARS, Grammar, Thinking
from polyhead.service.core.guide import Guide, GuideState
from polyhead.service.core.model import Model
from polyhead.service.structured import grammar_check as trial
from polyhead.service.structured import guide_compiler as kept
from polyhead.service.structured.compiled_guide import MAX_FORCED_TOKENS, wait_for_mask
from polyhead.service.structured.guide_compiler import GuideCompiler
from polyhead.service.text.chat_prompt import ToolDefinition, ToolOptions, build_answer_grammar
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
    """As Llama 2 has it: a space before every text, bytes for what has no piece."""
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
def talker(tiny_generator: Path) -> Model:
    """With rows of the embedding that stand for no token."""
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


def walked(
    model: Model, guide: Guide | None, seed: int, most: int = 400, *, leap: bool = True
) -> tuple[list[int], bool]:
    """The tokens of an answer drawn by chance among those that may come, and whether it came to an end."""
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
            drawn = walk.forced_tokens()[:1] if leap and len(tokens) < most else []
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
def test_whatever_is_drawn_is_what_was_asked_for(
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
        tokens, whole = walked(known, guide, seed, leap=seed % 2 == 0)
        assert not whole or right(text_of(known, tokens)), text_of(known, tokens)
        ended += whole
    assert ended >= 4


def test_forced_tokens_are_those_that_the_tokenizer_would_write(guides: GuideCompiler, talker: Model) -> None:
    guide = guides.compile(talker, schema({"const": "The quick brown fox"}), None)
    assert guide is not None
    walk = guide.new_state()
    words = np.zeros(-(-talker.vocab_size // 32), np.int32)
    forced = walk.forced_tokens()
    assert text_of(talker, forced).startswith('"The quick brown')
    assert forced == talker.tokenizer.encode('"The quick brown fox"', special=False).ids[: len(forced)]
    assert walk.fill_mask(words)
    assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == forced[:1]


def test_a_long_literal_comes_a_part_at_a_time_and_is_looked_for_once(guides: GuideCompiler, talker: Model) -> None:
    """All of it in one step would hold up everybody else's, and so would looking for it in each."""
    literal = "".join(Random(1).choice("abcdefghij") for _ in range(3000))
    guide = guides.compile(talker, schema({"const": literal}), None)
    assert guide is not None
    walk = guide.new_state()
    asked, matcher, words = [0], walk._matcher, np.zeros(-(-talker.vocab_size // 32), np.int32)  # type: ignore[attr-defined]

    def compute_ff_tokens() -> list[int]:
        asked[0] += 1
        return matcher.compute_ff_tokens()

    walk._matcher = Counting(matcher, compute_ff_tokens)  # type: ignore[attr-defined]
    tokens = list[int]()
    while not walk.is_finished:
        assert walk.fill_mask(words)
        [token, *_] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if token in talker.stop_tokens:
            break
        walk.advance(token)
        forced = walk.forced_tokens()
        assert len(forced) <= MAX_FORCED_TOKENS
        for each in forced:
            walk.advance(each)
        tokens += [token, *forced]
    assert text_of(talker, tokens) == json.dumps(literal)
    assert asked[0] <= 8


class Counting:
    """A matcher whose forced tokens are asked for by another function."""

    def __init__(self, matcher: Any, compute_ff_tokens: Any) -> None:
        self._matcher, self.compute_ff_tokens = matcher, compute_ff_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_another_token_than_the_one_that_was_foretold_is_followed(guides: GuideCompiler, talker: Model) -> None:
    """Who draws may spell a literal in other tokens, as long as nothing was told of it."""
    guide = guides.compile(talker, schema({"const": "The quick brown fox"}), None)
    assert guide is not None
    told, other = guide.new_state(), guide.new_state()
    told.advance(told.forced_tokens()[0])
    [quote] = talker.tokenizer.encode('"', special=False).ids
    other.advance(quote)
    assert text_of(talker, [quote, *other.forced_tokens()]).startswith('"The quick')


LONG = "a" * (MAX_REGEX_CHARS + 1)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"properties": {"a": {"anyOf": [{}, {"pattern": LONG}]}}}, ".properties.a.anyOf[1].pattern"),
        ({"type": "object", "patternProperties": {LONG: {}}}, ".patternProperties"),
        ({"$defs": {"x": {"pattern": LONG}}, "patternProperties": 5}, ".$defs.x.pattern"),
    ],
)
def test_a_long_pattern_in_a_schema_is_refused_by_its_place(
    guides: GuideCompiler, talker: Model, body: Any, place: str
) -> None:
    with pytest.raises(BadRequest) as error:
        guides.compile(talker, schema(body), None)
    assert error.value.message == f"{FIELD}{place}: must have at most {MAX_REGEX_CHARS} characters"
    tool = ToolDefinition("f", "", body | {"type": "object"}, "tools[0].function.parameters")
    with pytest.raises(BadRequest) as error:
        build_answer_grammar(ToolOptions((tool,), "required"), ChatFormat(), None)
    assert error.value.message == f"tools[0].function.parameters{place}: must have at most {MAX_REGEX_CHARS} characters"


def test_schemas_of_tools_that_are_too_much_together_are_refused() -> None:
    tools = tuple(ToolDefinition(f"f{n}", "", {"const": "a" * 60_000}, f"tools[{n}]") for n in range(5))
    with pytest.raises(BadRequest, match="tools: their schemas must have at most 262144 characters together, have 30"):
        build_answer_grammar(ToolOptions(tools, "required"), ChatFormat(), None)


def test_control_tokens_are_no_text_but_may_be_named(guides: GuideCompiler, talker: Model) -> None:
    start = talker.tokenizer.token_id("<|im_start|>")
    tokens, whole = walked(talker, guides.compile(talker, Grammar("lark", f'start: "a" <[{start}]> "b"', "g"), None), 0)
    assert whole
    assert start in tokens
    spelled = guides.compile(talker, choice("<|im_start|>"), None)
    assert start not in walked(talker, spelled, 0)[0]


def test_a_model_that_knows_no_end_ends_where_the_grammar_does(guides: GuideCompiler, tiny_generator: Path) -> None:
    endless = model(tiny_generator, "m", "generate", stop_tokens=frozenset())
    tokens, whole = walked(endless, guides.compile(endless, choice("yes", "no"), None), 1)
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
def test_what_cannot_be_compiled_is_refused_by_its_place(
    guides: GuideCompiler, talker: Model, grammar: Grammar, sentence: str
) -> None:
    with pytest.raises(BadRequest) as error:
        guides.compile(talker, grammar, None)
    assert error.value.message.startswith(sentence)
    assert error.value.param == grammar.field
    assert len(error.value.message) < 500
    assert "\n" not in error.value.message


def test_what_takes_too_long_is_ended_and_the_next_is_compiled(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 0.3)
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    endless = schema(
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    )
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"is too complex: it takes more than 0\.3 s of a processor to compile"):
            guides.compile(talker, endless, None)
        monkeypatch.setattr(trial, "CPU_LIMIT_S", 5.0)
        assert guides.compile(talker, choice("yes", "no"), None) is not None
        monkeypatch.setattr(trial, "CPU_LIMIT_S", 0.3)
    guides.close()


def test_a_grammar_is_not_refused_because_others_want_the_machine(
    talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the grammar may take the compiler gets no processor."""
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 0.3)
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    process = begun(guides, talker)
    process.send_signal(signal.SIGSTOP)
    later = Timer(0.6, process.send_signal, [signal.SIGCONT])
    later.start()
    assert guides.compile(talker, choice("late"), None) is not None
    guides.close()


def test_a_machine_that_is_too_busy_says_so_and_not_that_the_grammar_is_wrong(
    talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    begun(guides, talker).send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match=r"the machine is too busy to compile the answer's form: it had 0\.2 s"):
        guides.compile(talker, choice("never"), None)
    monkeypatch.setattr(trial, "TIMEOUT_S", 10.0)
    assert guides.compile(talker, choice("never"), None) is not None
    guides.close()


def begun(guides: GuideCompiler, talker: Model) -> "subprocess.Popen[bytes]":
    """The one compiler there is, which has compiled something."""
    guides.compile(talker, choice("first"), None)
    [process] = [each._process for each in guides._grammar_check._processes]
    assert process is not None
    return process


def test_a_compiler_that_was_ended_from_outside_is_started_again(
    talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "PROCESSES", 1)
    guides = GuideCompiler()
    process = begun(guides, talker)
    process.kill()
    process.wait()
    assert guides.compile(talker, choice("b"), None) is not None
    guides.close()
    [process] = [each._process for each in guides._grammar_check._processes]
    assert process is None


def test_what_all_guides_of_a_model_need_is_made_before_one_is_asked_for(
    guides: GuideCompiler, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = model(tiny_generator, "talker", "generate")
    guides.prepare(talker)
    monkeypatch.delattr(kept, "VocabularyBytes")
    assert guides.compile(talker, choice("a"), None) is not None


def test_guides_are_kept_and_the_oldest_let_go(
    guides: GuideCompiler, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MAX_CACHED_GUIDES", 2)
    talker = model(tiny_generator, "talker", "generate")
    first, second, third = choice("1"), choice("2"), choice("3")
    assert guides.find_cached(talker, first, None) is None
    found = guides.compile(talker, first, None)
    assert guides.compile(talker, Grammar("choice", first.source, "another"), None) is found
    guides.compile(talker, second, None)
    assert guides.find_cached(talker, first, None) is found
    guides.compile(talker, third, None)
    assert guides.find_cached(talker, second, None) is None
    assert guides.find_cached(talker, first, None) is found
    monkeypatch.setattr(kept, "MAX_CACHED_CHARS", 20)
    guides.compile(talker, choice("a" * 12), None)
    assert guides.find_cached(talker, first, None) is None


def test_an_unloaded_model_leaves_nothing_behind(guides: GuideCompiler, tiny_generator: Path) -> None:
    talker = model(tiny_generator, "talker", "generate")
    walk = guides.compile(talker, schema(PERSON), None).new_state()  # type: ignore[union-attr]
    gone = weakref.ref(talker.tokenizer)
    del talker
    gc.collect()
    assert gone() is None
    assert not walk.is_finished
    walk.forced_tokens()


def test_an_answer_that_becomes_too_complex_says_so(guides: GuideCompiler, talker: Model) -> None:
    guide = guides.compile(
        talker, Grammar("lark", r"start: T" + "\n" + r"T: /(?s:.*)/ & ~/(?s:.*)a.{16}b(?s:.*)/", "g"), None
    )
    with pytest.raises(TooComplex, match="the answer's form has become too complex: is too complex"):
        walked(talker, guide, 0, 4000)


# Thoughts


def test_a_thought_ends_at_its_budget_and_the_grammar_holds_after_it(guides: GuideCompiler, talker: Model) -> None:
    for seed in range(10):
        tokens, whole = walked(talker, guides.compile(talker, choice("yes", "no"), THOUGHT), seed)
        text = b"".join(map(talker.tokenizer.piece_bytes, tokens)).decode(errors="replace")
        assert whole
        assert re.search("</think>\n{0,2}(yes|no)$", text)
        assert len(talker.tokenizer.encode("</think>", special=False)) + 6 + 2 + 3 >= len(tokens)


def may_come(model: Model, walk: GuideState) -> set[int]:
    words = np.zeros(-(-model.vocab_size // 32), np.int32)
    assert walk.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("lines", [0, 1, 2])
@pytest.mark.parametrize("budget", [-1, 2])
def test_lines_may_be_left_empty_between_a_thought_and_what_is_asked_for(
    guides: GuideCompiler, talker: Model, lines: int, budget: int
) -> None:
    guide = guides.compile(talker, choice("yes"), Thinking("", "</think>", budget))
    assert guide is not None
    walk = guide.new_state()
    thought = talker.tokenizer.encode("ab" if budget >= 0 else "a</think>", special=False).ids
    for token in thought[: budget if budget >= 0 else None]:
        walk.advance(token)
    for token in walk.forced_tokens():
        walk.advance(token)
    line, word = talker.tokenizer.token_id("Ċ"), talker.tokenizer.token_id("y")
    assert line is not None
    for _ in range(lines):
        assert {line, word} <= may_come(talker, walk)
        assert walk.forced_tokens() == []
        walk.advance(line)
    assert (line in may_come(talker, walk)) == (lines < 2)
    assert word is not None
    walk.advance(word)
    assert line not in may_come(talker, walk)
    assert text_of(talker, walk.forced_tokens()) == "es"


def test_a_thought_that_has_begun_to_end_is_not_ended_twice(guides: GuideCompiler, talker: Model) -> None:
    guide = guides.compile(talker, None, Thinking("", "</think>", 2))
    assert guide is not None
    walk = guide.new_state()
    for token in map(talker.tokenizer.token_id, "</"):
        assert token is not None
        walk.advance(token)
    assert text_of(talker, walk.forced_tokens()) == "think>"


def test_a_tag_is_found_however_it_is_cut(guides: GuideCompiler, talker: Model) -> None:
    guide = guides.compile(talker, choice("yes"), Thinking("", "</think>"))
    assert guide is not None
    for cut in (["<", "/", "t", "h", "i", "n", "k", ">"], ["a", "<", "<", "/", "t", "h", "i", "n", "k", ">"]):
        walk = guide.new_state()
        for piece in cut:
            token = talker.tokenizer.token_id(piece)
            assert token is not None
            words = np.zeros(-(-talker.vocab_size // 32), np.int32)
            assert walk.fill_mask(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            assert bits[token]
            assert not bits[list(talker.stop_tokens)].any()
            walk.advance(token)
        assert all(text_of(talker, [token]).strip() in ("y", "ye", "yes", "") for token in may_come(talker, walk))


def test_no_token_reaches_over_a_tag_where_something_must_follow(tiny_generator: Path) -> None:
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


def test_a_model_may_answer_without_a_thought(guides: GuideCompiler, talker: Model) -> None:
    guide = guides.compile(talker, choice("yes", "<no>"), Thinking("<think>", "</think>", 3))
    assert guide is not None
    seen = set()
    for seed in range(40):
        tokens, whole = walked(talker, guide, seed)
        assert whole
        text = b"".join(map(talker.tokenizer.piece_bytes, tokens)).decode(errors="replace")
        found = re.fullmatch("(?s)(<think>.*</think>\n{0,2})?(yes|<no>)", text)
        assert found
        seen.add(bool(found[1]))
    assert seen == {True, False}


def test_a_thought_without_budget_or_grammar_asks_for_nothing(guides: GuideCompiler, talker: Model) -> None:
    assert guides.compile(talker, None, Thinking("<think>", "</think>")) is None
    guide = guides.compile(talker, None, Thinking("<think>", "</think>", 3))
    assert guide is not None
    walk = guide.new_state()
    assert not walk.fill_mask(np.zeros(100, np.int32))
    for token in talker.tokenizer.encode("<think>a b c", special=False).ids:
        assert not walk.is_finished
        walk.advance(token)
    assert text_of(talker, walk.forced_tokens()) == "</think>"
