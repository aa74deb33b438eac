"""Folders whose only vocabulary is a SentencePiece model.

The models are trained here by SentencePiece itself, which is the reference for how texts are split; the tokenizers of
transformers are the reference for ids, roles and the tokens around a text.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import (
    AlbertTokenizer,
    CamembertTokenizer,
    DebertaV2Tokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PegasusTokenizer,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.tokenizer import Tokenizer
from polyhead.training.data import samples

SENTENCES = [example.text for example in samples.translated_sentences().examples]
TEXTS = [*SENTENCES, *(text.upper() for text in SENTENCES[:20]), '1,000 cats \u00e9t\u00e9 \u65e5\u672c (a) [b]; "d"']
ODD = [
    "",
    "a",
    "\ufb01ne \u2460",
    "a\tb\nc",
    "\u200bno width",
    "e\u0301 \u2026",
    "\U0001f642 ok",
    "\u3000x",
    "a\u2581b",
]
SPACED = [" ", "  two  spaces ", " leading", "trailing "]
MERGES = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "vocab_size": 500,
}
GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3} | {
    **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
    "user_defined_symbols": ["<mask>", "\u2581\u2581", "\u2581\u2581\u2581", "\n", "<start_of_turn>"],
}
FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
BERT_ENDS = {"bos_piece": "[CLS]", "eos_piece": "[SEP]"}
# The reference, the file's name, the training options, and the settings.
KINDS: Mapping[str, tuple[Any, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama": (LlamaTokenizer, "tokenizer.model", MERGES, {"add_bos_token": True}),
    "llama, not legacy": (LlamaTokenizer, "tokenizer.model", MERGES, {"add_bos_token": True, "legacy": False}),
    "llama, both ends": (LlamaTokenizer, "tokenizer.model", MERGES, {"add_bos_token": True, "add_eos_token": True}),
    "gemma": (GemmaTokenizer, "tokenizer.model", MERGES | GEMMA, {"add_bos_token": True}),
    "t5": (T5Tokenizer, "spiece.model", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, {}),
    "t5, ten sentinels": (
        T5Tokenizer,
        "spiece.model",
        {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        {"extra_ids": 10},
    ),
    "xlm-roberta": (XLMRobertaTokenizer, "sentencepiece.bpe.model", FAIRSEQ, {}),
    "camembert": (CamembertTokenizer, "sentencepiece.bpe.model", FAIRSEQ, {}),
    "albert": (
        AlbertTokenizer,
        "spiece.model",
        BERT_ENDS | {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "control_symbols": ["[MASK]"]},
        {},
    ),
    "albert, cased": (
        AlbertTokenizer,
        "spiece.model",
        BERT_ENDS | {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "control_symbols": ["[MASK]"]},
        {"do_lower_case": False, "keep_accents": True},
    ),
    "deberta-v2": (
        DebertaV2Tokenizer,
        "spm.model",
        BERT_ENDS
        | {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "unk_piece": "[UNK]"}
        | {"normalization_rule_name": "identity"},  # transformers 5 does not read the model's normalization
        {},
    ),
    "pegasus": (PegasusTokenizer, "spiece.model", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, {}),
}
ROLES = ("bos", "eos", "pad", "unk", "mask")
Build = Callable[[str], tuple[Path, sentencepiece.SentencePieceProcessor]]


def train(path: Path, **options: Any) -> Path:
    settings = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS * 3), model_prefix=str(path), **settings)
    return path.with_suffix(".model")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    made: dict[str, tuple[Path, sentencepiece.SentencePieceProcessor]] = {}

    def make(kind: str) -> tuple[Path, sentencepiece.SentencePieceProcessor]:
        if kind not in made:
            reference, file, options, settings = KINDS[kind]
            folder = tmp_path_factory.mktemp("folder")
            model = train(tmp_path_factory.mktemp("model") / "model", **options)
            (folder / file).write_bytes(model.read_bytes())
            named = {"tokenizer_class": reference.__name__, **settings}
            (folder / "tokenizer_config.json").write_text(json.dumps(named))
            made[kind] = folder, sentencepiece.SentencePieceProcessor(model_file=str(model))
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind: str, build: Build) -> None:
    folder, _ = build(kind)
    ours, theirs = Tokenizer.from_folder(folder), KINDS[kind][0].from_pretrained(str(folder))
    unlike = {"deberta-v2": {"a\tb\nc", "\u3000x", "e\u0301 \u2026"}}.get(kind, set())
    texts = [text for text in (*TEXTS, *ODD) if text not in unlike]
    for text in texts:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    assert len({len(ours.encode(text)) for text in texts}) > 5
    if kind != "pegasus":  # whose pairs have one end in transformers
        [pair] = ours.encode_batch([(TEXTS[0], TEXTS[1])])
        assert pair.ids == theirs(TEXTS[0], TEXTS[1])["input_ids"]
    roles = {name: getattr(ours, f"{name}_id") for name in ROLES}
    expected = {name: getattr(theirs, f"{name}_token_id", None) for name in ROLES}
    named = {name for name in ROLES if roles[name] is not None}
    assert {name: roles[name] for name in named} == {name: expected[name] for name in named}
    assert {"eos", "unk"} <= named


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("albert,")])
def test_texts_are_split_as_by_sentencepiece(kind: str, build: Build) -> None:
    folder, theirs = build(kind)
    ours = Tokenizer.from_folder(folder)

    def lowered(text: str) -> str:
        return text.lower() if kind == "albert" else text

    spaced = [] if kind == "llama, not legacy" else SPACED  # there a space at the beginning counts as the model's own
    accents = {"e\u0301 \u2026", "\u65e5\u672c"} if kind == "albert" else set()
    for text in [*SENTENCES, *ODD, *spaced]:
        if text in accents:
            continue
        found = ours.encode(text, special=False)
        expected = theirs.encode(lowered(text))
        pieces = ["?" if id == ours.unk_id else piece for id, piece in zip(found.ids, found.pieces, strict=True)]
        assert pieces == ["?" if theirs.is_unknown(id) else theirs.id_to_piece(id) for id in expected], text
        if ours.unk_id not in found.ids:
            assert ours.decode(found.ids) == theirs.decode(expected)


def test_bytes_spell_unknown_characters(build: Build) -> None:
    ours = Tokenizer.from_folder(build("llama")[0])
    assert ours.decode(ours.encode("\U0001f642 \u65e5", special=False).ids) == "\U0001f642 \u65e5"
    assert ours.unk_id not in ours.encode("\U0001f642").ids


@pytest.mark.parametrize(
    ("model_type", "kind"), [("xlm-roberta", "xlm-roberta"), ("deberta-v2", "deberta-v2"), ("mistral", "llama")]
)
def test_the_class_follows_from_the_model_type(model_type: str, kind: str, build: Build, tmp_path: Path) -> None:
    folder, _ = build(kind)
    file = KINDS[kind][1]
    (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert Tokenizer.from_folder(tmp_path).encode(TEXTS[0]).ids == Tokenizer.from_folder(folder).encode(TEXTS[0]).ids


def test_a_control_piece_in_an_untrusted_text_is_text(build: Build) -> None:
    ours = Tokenizer.from_folder(build("llama")[0])
    assert ours.eos_id in ours.encode("a </s> b").ids
    assert ours.eos_id not in ours.encode("a </s> b", untrusted=True).ids


def message(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


UNK = message(1, message(1, b"<unk>") + b"\x18\x02")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x", "is no SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", r"vocabulary of tiktoken \(lines of base64\).*tokenizer\.json"),
        (UNK + message(2, b"\x18\x03"), "words or characters for pieces"),
        (UNK + UNK, "the piece '<unk>' twice"),
        (message(1, message(1, b"a" * 100) + b"\x15\x00\x00\xc0\x7f"), "has the score nan"),
        (message(1, message(1, b"a")), "no piece for unknown text"),
        (message(5, message(2, b"abc")), "a denormalizer"),
    ],
)
def test_models_that_are_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*{expected}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokenizer_class": "NllbTokenizer"}, r"of a NllbTokenizer, whose ids are not known here; known are LlamaTok"),
        ({"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9}, "extra_ids is 1000000000"),
        ({"tokenizer_class": "PegasusTokenizer", "offset": "x"}, "offset is 'x'"),
        ({"tokenizer_class": "AlbertTokenizer"}, r"no cls_token '\[CLS\]'"),
        ({"tokenizer_class": "DebertaV2Tokenizer", "split_by_punct": True}, "split_by_punct is not supported"),
    ],
)
def test_settings_that_are_refused(settings: Mapping[str, Any], expected: str, build: Build, tmp_path: Path) -> None:
    folder, _ = build("llama")
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*{expected}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen.tiktoken", "only a vocabulary of tiktoken"), ("tekken.json", "only a tekken.json")]
)
def test_other_vocabularies_are_refused_by_name(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"IQ== 0\n")
    with pytest.raises(UnsupportedError, match=expected):
        Tokenizer.from_folder(tmp_path)
