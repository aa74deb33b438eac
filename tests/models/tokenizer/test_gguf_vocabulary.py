"""Unigram vocabularies in GGUF files, compared with SentencePiece."""

import io
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer, gguf_vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Ein schneller brauner Fuchs springt.",
    "Numbers 12 345 and 6789, (brackets) and 'quotes'.",
    "日本語のテキスト と 中文",
    "naïve café ﬁne Ⅳ",
    "hello hello world world the the",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and   inner  spaces ",
    "tab\tnew\nline",
    "ﬀ ½ ＡＢ e\u0301",
    "unknown ☃☃ character ☃",
    "<extra>the<extra> fox",
    "\u3000wide\u00a0space",
]


def train(**options: Any) -> tuple[Any, dict[str, Any]]:
    """A SentencePiece model, and its fields as llama.cpp's converter writes them."""
    settings = {"vocab_size": 120, "hard_vocab_limit": False, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    out, more = io.BytesIO(), settings | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=out,
        model_type="unigram",
        user_defined_symbols=["<extra>"],
        minloglevel=2,
        num_threads=1,
        **more,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    fields: dict[str, Any] = {
        "model": "t5",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
        "padding_token_id": 0,
        "eos_token_id": 1,
        "unknown_token_id": 2,
    }
    processor = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    return processor, {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "identity"},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
        {"remove_extra_whitespaces": False},
        {"byte_fallback": True, "vocab_size": 400},
    ],
    ids=str,
)
def test_unigram_pieces_equal_sentencepiece(options: dict[str, Any]) -> None:
    processor, fields = train(**options)
    ours = Tokenizer.from_gguf(fields)
    for text in TEXTS:
        expected = processor.encode(text)
        # A user-defined piece is matched before the text is normalized; what follows it begins with a space of its own.
        if "<extra>" not in text:
            assert ours.encode(text).ids == [*expected, 1], text
            assert ours.decode(expected, skip_special=False) == processor.decode(expected).replace(" ⁇ ", "<unk>"), text
    assert ours.encode("a<extra>b").pieces.count("<extra>") == 1
    assert (ours.eos_id, ours.pad_id, ours.bos_id) == (1, 0, None)


def test_flags_set_the_tokens_around_a_text_and_between_a_pair() -> None:
    _, fields = train(bos_id=3)
    roles = {"bos_token_id": 3, "seperator_token_id": 1, "add_bos_token": True, "add_sep_token": True}
    ours = Tokenizer.from_gguf(fields | {f"tokenizer.ggml.{key}": value for key, value in roles.items()})
    assert ours.encode("fox").special == [True, *[False] * (len(ours.encode("fox")) - 2), True]
    [pair] = ours.encode_batch([("a", "b")])
    ids = pair.ids
    assert (ids[0], ids[-1], ids.count(1)) == (3, 1, 3)
    without = Tokenizer.from_gguf(fields | {"tokenizer.ggml.add_eos_token": False})
    assert not any(without.encode("fox").special)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1.0]}, "scores has 1 values"),
        ({"precompiled_charsmap": [1, 2, 999]}, "precompiled_charsmap has 3 values; bytes belong there"),
        ({"precompiled_charsmap": [255, 255, 255, 255, 0]}, "no usable vocabulary"),
        ({"precompiled_charsmap": "text"}, "precompiled_charsmap is 'text', a str"),
        ({"unknown_token_id": 10**6}, "unknown_token_id is 1000000, outside"),
        ({"add_sep_token": 1}, "add_sep_token is 1, a int"),
    ],
)
def test_damaged_fields_are_named(change: dict[str, Any], message: str) -> None:
    _, fields = train()
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(fields | {f"tokenizer.ggml.{key}": value for key, value in change.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.5] * 1000}, r"tokenizer\.ggml\.scores has 1000 values for \d+ tokens"),
        ({"token_type": [1] * 1000}, r"tokenizer\.ggml\.token_type has 1000 values for \d+ tokens"),
        ({"tokens": None}, r"tokenizer\.ggml\.scores has \d+ values for 0 tokens"),
        ({"tokens": ["a"] * 2000, "scores": None, "token_type": None}, "tokens has 2000 values; 1500 are the most"),
        (
            {"precompiled_charsmap": [1] * 300_000},
            "precompiled_charsmap has 300000 values; bytes belong there, 250000 at most",
        ),
        ({"pre": [0.5] * 9}, r"tokenizer\.ggml\.pre has a list of 9 values, where one belongs"),
        ({"add_bos_token": [True] * 9}, "add_bos_token has a list of 9 values, where one belongs"),
        ({"bos_token_id": []}, "bos_token_id has a list of 0 values, where one belongs"),
    ],
)
def test_lists_are_bounded_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    """The lengths alone are looked at: no value is, which would take as long as the list."""
    _, fields = train()
    assert Tokenizer.select_gguf_fields(fields) == fields
    monkeypatch.setattr(gguf_vocabulary, "MAX_TOKENS", 1500)
    monkeypatch.setattr(gguf_vocabulary, "MAX_CHARSMAP_BYTES", 250_000)
    monkeypatch.setattr(gguf_vocabulary, "_count_characters", None)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.select_gguf_fields(fields | {f"tokenizer.ggml.{key}": value for key, value in change.items()})


def test_the_map_of_characters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fields = train()
    monkeypatch.setattr(gguf_vocabulary, "MAX_CHARSMAP_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"precompiled_charsmap has \d+ values; bytes belong there, 100 at most"):
        Tokenizer.from_gguf(fields)


@pytest.mark.parametrize("kind", ["rwkv", "plamo2"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"of kind '{kind}'.*known: bert, gemma4, gpt2, llama, t5"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a"]})
