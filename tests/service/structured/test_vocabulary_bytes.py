"""The limits of llguidance for vocabularies, and the errors beyond them."""

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.vocabulary import Vocabulary
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.grammar import Grammar, Thinking
from polyhead.service.core.model import Model
from polyhead.service.structured import guide_compiler
from polyhead.service.structured.guide_compiler import GuideCompiler
from polyhead.service.structured.vocabulary_bytes import MAX_TOKEN_BYTES, MAX_TREE_NODES, VocabularyBytes
from tests.support.scripted import model

AB = Grammar("regex", "[ ab]+", "regex")


class PanicException(BaseException):
    """The class that a panic of a Rust library has in Python."""


def with_pieces(folder: Path, pieces: list[str]) -> Model:
    """A model whose vocabulary has them too."""
    known = {piece: number for number, piece in enumerate(["<s>", "</s>", "<end>", "a", "b", *pieces])}
    backend = Backend(models.BPE(vocab=known, merges=[]))
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    tokenizer = Tokenizer(Vocabulary(backend))
    return model(folder, "talker", "generate", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)


def random_pieces(count: int, length: int) -> list[str]:
    """Pieces with different beginnings, so that each of their bytes is a node of a tree. Each becomes a byte longer:
    a vocabulary without a decoder has a space before it."""
    random = Random(0)
    return ["".join(random.choices("0123456789cdefghijklmnop", k=length - 1)) for _ in range(count)]


def test_a_token_may_have_as_many_bytes_as_the_library_takes(tiny_generator: Path) -> None:
    guides = GuideCompiler()
    assert guides.compile(with_pieces(tiny_generator, ["x" * (MAX_TOKEN_BYTES - 2)]), AB, None) is not None
    sizes = f"{MAX_TOKEN_BYTES} bytes, at most {MAX_TOKEN_BYTES - 1} are taken"
    wrong = f"regex: the vocabulary of talker has token 5 of {sizes}"
    with pytest.raises(BadRequest, match=wrong) as raised:
        guides.compile(with_pieces(tiny_generator, ["x" * (MAX_TOKEN_BYTES - 1)]), AB, None)
    assert raised.value.param == "regex"
    guides.close()


def test_all_tokens_may_have_as_many_bytes_as_the_library_takes(tiny_generator: Path) -> None:
    count = MAX_TREE_NODES // MAX_TOKEN_BYTES - 2
    talker = with_pieces(tiny_generator, random_pieces(count, MAX_TOKEN_BYTES - 1))
    assert sum(map(len, VocabularyBytes(talker).token_bytes)) > MAX_TREE_NODES * 0.99
    guides = GuideCompiler()
    for thinking, grammar, field in ((None, AB, "regex"), (Thinking("", "</think>", 6), None, "thinking_budget")):
        wrong = f"{field}: the vocabulary of talker has more than .* bytes in all its .* tokens"
        with pytest.raises(BadRequest, match=wrong) as raised:
            guides.compile(
                with_pieces(tiny_generator, random_pieces(count + 8, MAX_TOKEN_BYTES - 1)), grammar, thinking
            )
        assert raised.value.param == field
    guides.close()


def test_an_unsupported_vocabulary_is_detected_once(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the library panics: each request would repeat the long computation."""
    made = list[Model]()

    def panic(model: Model) -> VocabularyBytes:
        made.append(model)
        raise PanicException("assertion failed: size < 1")

    monkeypatch.setattr(guide_compiler, "VocabularyBytes", panic)
    guides, talker = GuideCompiler(), with_pieces(tiny_generator, [])
    guides.prepare(talker)
    for _ in range(3):
        with pytest.raises(BadRequest, match=r"regex: .*PanicException.*assertion failed"):
            guides.compile(talker, AB, None)
        assert guides.find_cached(talker, AB, None) is None
    assert made == [talker]
    guides.close()
