"""The weights of characters bound what the library makes of them."""

import random
import struct
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sentencepiece
from tokenizers import PreTokenizedString, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import sentencepiece as unigram
from polyhead.models.tokenizer import text_growth
from polyhead.models.tokenizer.patterns import check_growth, part_steps, read_expressions
from polyhead.models.tokenizer.text_growth import CharacterWeights, read_charsmap

LIGATURE = "\ufdfa"  # 18 characters in NFKC
LETTERS = [
    "a",
    "A",
    " ",
    "  ",
    "\u00e9",
    "e\u0301",
    "\u0301",
    LIGATURE,
    "\u0644",
    "\u4e2d",
    "\u2581",
    "\u0130",
    "\uac00",
]
LETTERS += [
    "\u1100",
    "\u1161",
    "\ufb01",
    "\u1faf",
    "\u00a0",
    "\U0001d1c0",
    "\U0001f642",
    "\u0390",
    "\u0345",
    "\ufaff",
    "\u200b",
]
TEXTS = 6
EXPRESSIONS = ("a*", " {2,}", r"\p{L}", "[a-z]+", r"\s+", "(?<=a)", "..", r"\b")


def charsmap(key: str, text: str) -> bytes:
    """A charsmap that replaces one ASCII character."""
    label, base, units = ord(key), 256, [0] * 512
    units[0] = base << 10
    units[base ^ label] = 1 << 10 | 1 << 8 | label  # a leaf, at the offset 1
    units[base ^ label ^ 1] = 1 << 31
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + text.encode() + b"\0"


def backend(
    steps: Sequence[normalizers.Normalizer] = (),
    cuts: Sequence[pre_tokenizers.PreTokenizer] = (),
    spelled: Sequence[decoders.Decoder] = (),
) -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.normalizer = normalizers.Sequence(list(steps))
    made.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    made.decoder = decoders.Sequence(list(spelled))
    return made


@pytest.fixture(scope="module")
def published_map(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The charsmap of most SentencePiece models: NFKC with changes."""
    path = tmp_path_factory.mktemp("map") / "spiece"
    texts = ["the cat sat on the mat", "a dog ran", "hello world"] * 30
    settings: dict[str, Any] = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(path), **settings)
    return unigram.read_unigram(path.with_suffix(".model")).map


def weights_of(made: Tokenizer) -> CharacterWeights:
    weights, expressions = CharacterWeights(), read_expressions(made)
    for part in ("pre_tokenizer", "normalizer"):
        for step in reversed(part_steps(made, part)):
            weights.read_step(step, lambda text: expressions[text].least)
    return weights


def made_characters(made: Tokenizer, text: str) -> int:
    """The characters of a text after all steps; 0 if the library panics, as it does on some of these."""
    try:
        cut = PreTokenizedString(made.normalizer.normalize_str(text))
        made.pre_tokenizer.pre_tokenize(cut)
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        return 0
    return sum(len(piece) for piece, _, _ in cut.get_splits())


Make = Callable[[random.Random, bytes], Any]
STEPS: list[Make] = [
    lambda chance, _: normalizers.Replace(spell(chance, 0, 2), spell(chance, 0, 3)),
    lambda chance, _: normalizers.Replace(Regex(chance.choice(EXPRESSIONS)), spell(chance, 0, 3)),
    lambda chance, _: normalizers.Prepend(spell(chance, 1, 3)),
    lambda _, mapped: normalizers.Precompiled(mapped),
    lambda chance, _: normalizers.BertNormalizer(strip_accents=chance.choice((None, False, True))),
    *(
        lambda _, __, name=name: getattr(normalizers, name)()  # type: ignore[misc]
        for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "ByteLevel", "StripAccents", "Strip")
    ),
]
CUTS: list[Make] = [
    lambda chance, _: pre_tokenizers.ByteLevel(add_prefix_space=chance.random() < 0.5),
    lambda chance, _: pre_tokenizers.Metaspace(prepend_scheme=chance.choice(("always", "first", "never"))),
    lambda _, __: pre_tokenizers.WhitespaceSplit(),
    lambda _, __: pre_tokenizers.Split(Regex("."), "isolated"),
]


def spell(chance: random.Random, least: int, most: int) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randint(least, most)))


@pytest.mark.parametrize("seed", range(20))
def test_no_text_becomes_longer_than_its_weight(published_map: bytes, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(10):
        steps = [chance.choice(STEPS)(chance, published_map) for _ in range(chance.randint(1, 3))]
        cuts = [chance.choice(CUTS)(chance, published_map) for _ in range(chance.randint(0, 2))]
        made = backend(steps, cuts)
        weights = weights_of(made)
        if weights.most > 1000:
            continue
        for _ in range(TEXTS):
            text = spell(chance, 1, 8)
            assert made_characters(made, text) <= weights.of(text), (text, steps, cuts)


@pytest.mark.parametrize("name", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "Nmt"])
def test_the_tables_cover_every_character_of_the_library(name: str) -> None:
    """Its Unicode version may be another than that of Python."""
    made = backend([getattr(normalizers, name)()])
    weights = weights_of(made)
    for start in (*range(0, 0xD800, 256), *range(0xE000, 0x34000, 256), *range(0xE0000, 0xE0200, 256)):
        text = " ".join(map(chr, range(start, start + 256)))
        assert len(made.normalizer.normalize_str(text)) <= weights.of(text)


BOMBS: dict[str, Tokenizer] = {
    "NFKC": backend([normalizers.NFKC(), normalizers.Replace("\u0644", LIGATURE)] * 4),
    "NFKD": backend([normalizers.NFKD(), normalizers.Replace("\u0644", LIGATURE)] * 4),
    "NFC": backend([normalizers.NFC(), normalizers.Replace("\u00e9", "e\u0301" * 3)] * 6),
    "NFD": backend([normalizers.NFD(), normalizers.Replace("\u0301", "\u0390" * 2)] * 9),
    "Lowercase": backend([normalizers.Lowercase(), normalizers.Replace("\u0307", "\u0130" * 2)] * 12),
    "BertNormalizer": backend([normalizers.BertNormalizer(), normalizers.Replace(" ", "\u4e2d")] * 6),
    "Nmt": backend([normalizers.Nmt(), normalizers.Replace(" ", "\u200b" * 2)] * 9),
    "Prepend": backend([normalizers.Prepend("x" * 200)] * 2),
    "ByteLevel": backend([normalizers.ByteLevel()] * 5),
    "pieces of ByteLevel": backend((), [pre_tokenizers.ByteLevel()] * 5),
    "Metaspace": backend([normalizers.Replace("a", " " * 300)], [pre_tokenizers.Metaspace()]),
    "a charsmap": backend([normalizers.Precompiled(charsmap("a", "b" * 20)), normalizers.Replace("b", "a" * 20)]),
    "an expression": backend([normalizers.Replace(Regex("a"), "a" * 7)] * 3),
    "an expression that matches nothing": backend([normalizers.Replace(Regex("a*"), "a" * 3)] * 3),
    "an expression that keeps what it matched": backend([normalizers.Replace(Regex("\u2603\\K"), "\u2603")] * 10),
    "three letters that are one": backend([normalizers.Replace(Regex("(?i:ffi)"), "\ufb03" * 3)] * 9),
    "several letters": backend([normalizers.Replace("ab", "ab" * 3)] * 6),
    "a decoder": backend((), (), [decoders.Replace("a", "aa")] * 9),
    "many tables": backend([normalizers.NFC()] * 30),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_grows_from_step_to_step_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"more than 256 characters of one|more than 24 steps"):
        check_growth(BOMBS[name])


def test_published_tokenizers_are_within_the_bound(published_map: bytes) -> None:
    mapped, spaces = normalizers.Precompiled(published_map), normalizers.Replace(Regex(" {2,}"), " ")
    bytes_, marked = pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Metaspace()
    prefixed = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    folded = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    grown = {
        "BERT": (backend([normalizers.BertNormalizer()], [pre_tokenizers.BertPreTokenizer()]), 6),
        "GPT-2": (backend((), [bytes_]), 5),
        "Qwen": (backend([normalizers.NFC()], [pre_tokenizers.ByteLevel(add_prefix_space=False)]), 16),
        "Llama": (backend(prefixed), 2),
        "Gemma": (backend(prefixed[1:], [pre_tokenizers.Split(" ", "merged_with_previous")]), 1),
        "XLM-R, T5": (backend([mapped, spaces], [pre_tokenizers.WhitespaceSplit(), marked]), 33),
        "DeBERTa": (backend([normalizers.Strip(), mapped, spaces], [marked]), 33),
        "ALBERT": (backend([*quotes, *folded, mapped, spaces], [pre_tokenizers.WhitespaceSplit(), marked]), 33),
        "CLIP": (backend([normalizers.NFC(), spaces, normalizers.Lowercase()], [bytes_]), 20),
        "NFKC and bytes": (backend([normalizers.NFKC()], [bytes_]), 90),
    }
    assert {name: check_growth(made).most for name, (made, _) in grown.items()} == {
        name: growth for name, (_, growth) in grown.items()
    }


def test_every_step_of_the_library_is_known() -> None:
    """A new one may make texts longer."""
    read = {*text_growth.FORMS, *text_growth.LOCAL_STEPS, "Replace", "Prepend", "ByteLevel", "Metaspace", "WordPiece"}
    read |= {"Precompiled", "Lowercase", "BertNormalizer", "Nmt", "Sequence"}
    others = {"Normalizer", "PreTokenizer", "Decoder", "DecodeStream", "NORMALIZERS"}
    found = {name for room in (normalizers, pre_tokenizers, decoders) for name in dir(room) if name[0].isupper()}
    assert found - others <= read
    with pytest.raises(CheckpointError, match="the step 'New', which is not known here"):
        CharacterWeights().read_step({"type": "New"}, len)


def test_a_charsmap_is_read(published_map: bytes) -> None:
    pairs = dict(read_charsmap(published_map))
    assert pairs[LIGATURE.encode()] == unicodedata.normalize("NFKC", LIGATURE)
    assert dict(read_charsmap(charsmap("q", "ab"))) == {b"q": "ab"}
    assert normalizers.Precompiled(charsmap("q", "ab")).normalize_str("qu") == "abu"


def test_a_charsmap_whose_index_goes_in_circles_is_refused() -> None:
    units = [label << 10 | label for label in range(256)]  # each unit is a child of each
    with pytest.raises(CheckpointError, match="replaces more than 262144 texts"):
        list(read_charsmap(struct.pack(f"<I{len(units)}I", 4 * len(units), *units)))
