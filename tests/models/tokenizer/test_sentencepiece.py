"""Marian folders in their published form: a SentencePiece model for each side and one vocab.json.

The models are trained here by SentencePiece itself. The reference is the tokenizer of transformers for such folders.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers
from transformers import MarianTokenizer

from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.patterns import check_growth
from polyhead.training.data import samples
from tests.models.tokenizer.test_text_growth import charsmap

PAIRS = samples.translated_sentences().examples
ODD = (
    "",
    " ",
    "  two  spaces ",
    "\ufb01ne \u2460",
    "a\tb\nc",
    "caf\u00e9 \u65e5\u672c",
    "\u200bno width",
    "e\u0301 \u2026",
    "x </s> y",
)
Model = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    def train(side: str, **options: object) -> Path:
        texts = [example.text if side == "source" else example.label for example in PAIRS] * 3
        path = tmp_path_factory.mktemp(side) / side
        settings = {"vocab_size": 90, "hard_vocab_limit": False, "minloglevel": 2} | options
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(path), **settings)
        return path.with_suffix(".model")

    return train


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pieces of both sides in one vocabulary, in another order than in the models, as in published folders."""
    path, pieces = tmp_path_factory.mktemp("marian"), set[str]()
    for side in ("source", "target"):
        model_file = model(side)
        (path / f"{side}.spm").write_bytes(model_file.read_bytes())
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        pieces |= {processor.id_to_piece(index) for index in range(processor.get_piece_size())}
    tokens = ["</s>", "<unk>", *sorted(pieces - {"</s>", "<unk>", "<s>"}), ">>de<<", "<pad>"]
    (path / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(tokens)}))
    reference(path).save_pretrained(path)
    return path


def reference(folder: Path) -> MarianTokenizer:
    return MarianTokenizer(*(str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")))


def test_sources_are_tokenised_as_by_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    texts = [*(example.text for example in PAIRS), *ODD, ">>de<< the lamp is on", ">>de<<the lamp"]
    assert [ours.encode(text).ids for text in texts] == [theirs(text)["input_ids"] for text in texts]
    assert len({len(ours.encode(text)) for text in texts}) > 5
    roles = (ours.eos_id, ours.pad_id, ours.bos_id)
    assert roles == (theirs.eos_token_id, theirs.pad_token_id, None)


def test_targets_are_decoded_as_by_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    for example in PAIRS:
        ids = theirs(text_target=example.label)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def edited(folder: Path, path: Path, name: str, content: bytes) -> Path:
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / name).write_bytes(content)
    return path


def test_unsupported_models_are_refused_by_feature(folder: Path, model: Model, tmp_path: Path) -> None:
    kinds = {
        "merges": {"model_type": "bpe"},
        "byte pieces": {"byte_fallback": True, "vocab_size": 350},
        "user-defined pieces": {"user_defined_symbols": ["lamp"]},
        "spaces after words": {"treat_whitespace_as_suffix": True},
    }
    for number, (name, options) in enumerate(kinds.items()):
        raw = model("source", **options).read_bytes()
        with pytest.raises(UnsupportedError, match=f"source.spm: is a SentencePiece model with .*{name}"):
            Tokenizer.from_folder(edited(folder, tmp_path / str(number), "source.spm", raw))


def test_a_model_without_normalisation_or_leading_space_is_read(folder: Path, model: Model, tmp_path: Path) -> None:
    raw = model("source", normalization_rule_name="identity", add_dummy_prefix=False).read_bytes()
    other = edited(folder, tmp_path / "plain", "source.spm", raw)
    ours, theirs = Tokenizer.from_folder(other), reference(other)
    texts = ["the lamp", " the  lamp ", "\ufb01ne"]
    assert [ours.encode(text).ids for text in texts] == [theirs(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("source.spm", b"no such thing", "source.spm: is no SentencePiece model: "),
        ("source.spm", b"\x0a\xff\x01", "source.spm: is no SentencePiece model: it ends within a field"),
        ("source.spm", b"\xff" * 12, "source.spm: is no SentencePiece model: a number without an end"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 2}', "vocab.json: is no usable vocabulary: its numbers are not those"),
        ("vocab.json", b'{"</s>": 0}', "vocab.json: has no number for each piece, and one for '<unk>'"),
        ("vocab.json", b'{"</s>": "0", "<unk>": 1}', "vocab.json: has no number for each piece"),
        ("target_vocab.json", b"{}", "vocab.json: has another vocabulary for each side"),
    ],
)
def test_damaged_files_are_refused_by_name(
    folder: Path, tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        Tokenizer.from_folder(edited(folder, tmp_path / "wrong", name, content))
    assert complaint in f"{raised.value.file}: {raised.value}" or complaint in str(raised.value)


def test_a_normalisation_map_with_long_replacements_is_refused() -> None:
    for length, refused in ((200, False), (300, True)):
        backend = Backend(models.BPE())
        backend.normalizer = normalizers.Precompiled(charsmap("a", "x" * length))
        if refused:
            with pytest.raises(CheckpointError, match="more than 256 characters of one"):
                check_growth(backend)
        else:
            assert check_growth(backend).most == length
