"""Tokenizers: equal to the reference implementation, exact in streams, with clear errors for damaged files."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers import models as backends

from polyhead.models.core.errors import CheckpointError, EncodingError, UnsupportedError
from polyhead.models.tokenizer import MAX_MEAN_GROWTH, Encoding, Tokenizer, gguf_vocabulary, patterns
from polyhead.models.tokenizer.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from polyhead.models.tokenizer.token_text import TokenSpelling, byte_alphabet
from polyhead.models.tokenizer.vocabulary import Vocabulary, WordPieceOptions, word_piece_backend
from tests.support import checkpoints

CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog. It's 2024, we'll see; they're 12345 years old!",
    "def f(x):\n    return x + 1  # a comment\n\n\n\tif x == 10:\r\n\t\tpass\n",
    "Ünïcode: naïve café, 你好世界 привет мир, emoji 😀👩‍👩‍👧 and 'quotes' HTTPServer camelCase",
    "hello hello world world 111 222 1234 12 34 56   spaces    and\ttabs\n\n newlines \n",
] * 3
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "x",
    " leading and trailing ",
    "1234567 1,234.5 ½ ٣٤",
    "e\u0301 a\u0308 \u1100\u1161",
    "\x00\x01\u200b\ufeff\ufffd",
    "😀" * 5,
    "don't DON'T we'LL\u00a0nbsp",
    "a" * 300,
    "<|start|>user\nhi<|end|>",
]
SPECIALS = ["<|start|>", "<|end|>", "<unk>"]
anything = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


def trained(split: pre_tokenizers.PreTokenizer, merges: int = 300) -> Backend:
    """A small byte-level vocabulary."""
    backend = Backend(backends.BPE())
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIALS) + merges,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def merges_of(backend: Backend) -> list[str]:
    return [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def byte_level_fields(backend: Backend, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    pieces = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": pieces,
        "token_type": [CONTROL if piece in SPECIALS else NORMAL for piece in pieces],
        "merges": merges_of(backend),
        "bos_token_id": 0,
        "eos_token_id": 1,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def sentencepiece_fields(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback. Scores decrease in the order in which pieces were learned."""
    backend = Backend(backends.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = sorted({c for text in CORPUS[:2] for c in text if c.isprintable()})
    trainer = trainers.BpeTrainer(
        vocab_size=260, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    backend.train_from_iterator([text.replace("\n", " ") for text in CORPUS[:2]], trainer)
    pieces = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    pieces = [piece for piece in pieces if piece not in "\u2581"] + ["\u2581"]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "  ", "<tool>"]
    fields = {
        "model": "llama",
        "tokens": head + pieces,
        "scores": [0.0] * len(head) + [-float(rank) for rank in range(len(pieces))],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[6] * 256, USER_DEFINED, USER_DEFINED, *[NORMAL] * len(pieces)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def word_pieces() -> list[str]:
    letters = sorted({c.lower() for text in CORPUS for c in text if not c.isspace()})
    words = [
        "hello",
        "world",
        "the",
        "quick",
        "##ick",
        "##ing",
        "'",
        "don",
        "t",
        "##ox",
        "##mps",
        "cafe",
        "na",
        "##ive",
    ]
    marked = ["##" + letter for letter in letters if letter.isalnum()]
    head = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return list(dict.fromkeys([*head, *letters, *marked, *words]))


def word_piece_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in word_pieces()), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
    return folder


def word_piece_tokenizer() -> Tokenizer:
    pieces = [
        piece[2:] if piece.startswith("##") else piece if piece.startswith("[") and len(piece) > 1 else "\u2581" + piece
        for piece in word_pieces()
    ]
    roles = {"cls": 3, "seperator": 4, "padding": 0, "mask": 5, "unknown": 2}
    fields: dict[str, Any] = {f"tokenizer.ggml.{role}_token_id": index for role, index in roles.items()}
    fields["tokenizer.ggml.model"], fields["tokenizer.ggml.tokens"] = "bert", pieces
    fields["tokenizer.ggml.token_type"] = [
        CONTROL if index in roles.values() else NORMAL for index in range(len(pieces))
    ]
    return Tokenizer.from_gguf(fields)


def from_json(backend: Backend, folder: Path, **config: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def metaspace() -> Backend:
    """Unigram pieces with the Metaspace decoder, as in XLM-RoBERTa."""
    pieces = [("<unk>", 0.0), ("\u2581", -2.0), ("\u2581he", -1.0), ("llo", -1.0), ("\u2581\u2581", -3.0), ("é", -4.0)]
    backend = Backend(backends.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def undecorated() -> Backend:
    return Backend(backends.WordLevel({"a": 0, "bc": 1, "é": 2, "<unk>": 3}, unk_token="<unk>"))


BYTE_LEVEL = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
STREAMED: dict[str, Callable[[Path], Tokenizer]] = {
    "byte level": lambda folder: Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL)),
    "sentencepiece": lambda folder: Tokenizer.from_gguf(sentencepiece_fields()),
    "sentencepiece, no prefix": lambda folder: Tokenizer.from_gguf(sentencepiece_fields(add_space_prefix=False)),
    "word pieces": lambda folder: word_piece_tokenizer(),
    "metaspace": lambda folder: from_json(metaspace(), folder),
    "no decoder": lambda folder: from_json(undecorated(), folder),
}


# Streamed decoding


@pytest.mark.parametrize("kind", STREAMED)
def test_a_stream_equals_decoding_at_once(kind: str, tmp_path: Path) -> None:
    tokenizer = STREAMED[kind](tmp_path)
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30)

    @settings(max_examples=300, deadline=None)
    @given(ids, st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        stream = tokenizer.stream(skip_special=skip)
        parts = [stream.push(token) for token in ids]
        last = stream.flush()
        assert "".join(parts) + last == tokenizer.decode(ids, skip_special=skip)
        reference = tokenizer._backend.decode(ids, skip_special_tokens=skip)
        # For invalid UTF-8, the library also drops the valid characters beside it.
        if "\ufffd" not in reference or "sentencepiece" not in kind:
            assert "".join(parts) + last == reference

    check()


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece, no prefix"])
def test_streams_give_complete_characters_only(kind: str, tmp_path: Path) -> None:
    tokenizer = STREAMED[kind](tmp_path)

    @settings(max_examples=200, deadline=None)
    @given(anything)
    def check(text: str) -> None:
        text = text.replace("\ufffd", "").replace("\u2581", "").replace("<", "")  # a spelled <unk> begins a new word
        ids = tokenizer.encode(text, special=False).ids
        stream = tokenizer.stream(skip_special=False)
        parts = [stream.push(token) for token in ids]
        assert stream.flush() == ""
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)

    check()


def test_an_incomplete_character_is_held_back_and_flushed() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    stream = tokenizer.stream()
    ids = [3 + byte for byte in "é".encode()]
    assert [stream.push(token) for token in [*ids, ids[0]]] == ["", "é", ""]
    assert stream.flush() == "\ufffd"


def test_the_first_space_is_dropped_once_only() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    hello, world = (tokenizer.encode(word, special=False).ids for word in ("the", "quick"))
    stream = tokenizer.stream()
    assert "".join(map(stream.push, [*hello, *world, *world])) == "the quick quick"
    assert tokenizer.decode([1, *hello, *world, 2]) == "the quick"


def test_a_stream_takes_the_same_time_for_every_token() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL))
    stream = tokenizer.stream()
    started = time.thread_time()
    for _ in range(100_000):
        stream.push(300)
    assert time.thread_time() - started < 3  # decoding all tokens again for every token would take hours


def test_ids_outside_of_the_vocabulary_decode_to_nothing() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL))
    beyond = tokenizer.vocab_size + 5
    assert tokenizer.decode([beyond, -1]) == ""
    assert (tokenizer.piece(beyond), tokenizer.piece_bytes(beyond), tokenizer.piece_bytes(-1)) == ("", b"", b"")


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece, no prefix"])
def test_piece_bytes_are_the_bytes_of_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = STREAMED[kind](tmp_path)
    for text in CORPUS:
        ids = tokenizer.encode(text, special=False).ids
        assert b"".join(map(tokenizer.piece_bytes, ids)) == text.encode()


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


# Encoding


def test_lone_surrogates_are_named() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL))
    with pytest.raises(EncodingError, match=r"U\+D83D.*position 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(EncodingError, match=r"text 1 of the batch.*U\+DE00.*position 0"):
        tokenizer.encode_batch(["ok", ("ok", "\ude00")])


def test_a_text_that_would_become_much_longer_is_refused() -> None:
    """Each such letter is within the bound of what a tokenizer may do, a text of them is not."""
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.normalizer = normalizers.Replace("\u0436", "b " * 30)
    tokenizer = Tokenizer(Vocabulary(backend))
    assert tokenizer.growth > MAX_MEAN_GROWTH
    assert len(tokenizer.encode("a" * 1000 + "\u0436")) > 1000
    for text in ("\u0436" * 1000, ("a", "\u0436" * 1000)):
        with pytest.raises(EncodingError, match=r"may make \d+ characters of the 100[01] of a text; \d+ are the most"):
            tokenizer.encode_batch(["a", text])
    with pytest.raises(EncodingError, match="are the most"):
        tokenizer.encode_words([["a", "\u0436" * 500, "\u0436" * 500]])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_any_string_encodes_or_is_refused(text: str) -> None:
    tokenizer = SHARED
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(EncodingError):
            tokenizer.encode(text)
    else:
        assert tokenizer.decode(tokenizer.encode(text, untrusted=True).ids) == text


SHARED = Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL))


def test_offsets_are_code_points_of_the_text() -> None:
    text = "😀 hello 你好"
    encoding = SHARED.encode(text)
    at = encoding.pieces.index("Ġhello") if "Ġhello" in encoding.pieces else None
    assert at is not None
    assert text[slice(*encoding.offsets[at])] == " hello"
    assert max(end for _, end in encoding.offsets) == len(text)


def test_control_tokens_in_trusted_and_untrusted_text() -> None:
    text = "<|start|>hi<|end|>"
    assert SHARED.encode(text, special=False).ids[0] == 0
    assert SHARED.encode(text, special=False).ids[-1] == 1
    untrusted = SHARED.encode(text, special=False, untrusted=True)
    assert not any(map(SHARED.is_special, untrusted.ids))
    assert SHARED.decode(untrusted.ids) == text
    assert fields_of(SHARED.encode_batch([text], special=False, untrusted=True)[0]) == fields_of(untrusted)
    assert SHARED.encode(text, special=False).ids[0] == 0  # the flag does not affect later calls


def test_threads_share_a_tokenizer() -> None:
    alone = [fields_of(SHARED.encode(text)) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda text: fields_of(SHARED.encode(text)), TEXTS)) == alone
            marked = list(pool.map(lambda text: SHARED.encode(text, untrusted=True).ids, TEXTS))
            assert marked[-1] != alone[-1][0]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The library's method for a single text holds the GIL until it returns; encode must not use it."""
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    watcher = threading.Thread(target=tick)
    watcher.start()
    for _ in range(20):  # repeated, since other processes may use the cores
        began = time.perf_counter()
        assert len(SHARED.encode("Ünïcode: naïve café, 12345. " * 20_000)) > 20_000
        tenth = (time.perf_counter() - began) / 10
        if between := [tick for tick in ticks if began + tenth < tick < began + 9 * tenth]:
            break
    done.set()
    watcher.join()
    assert between


def test_without_offsets_all_other_fields_are_equal() -> None:
    for text in [*TEXTS, ("hello world", "the fox")]:
        [full], [fast] = (SHARED.encode_batch([text], offsets=offsets) for offsets in (True, False))
        assert len(full) == len(full.ids)
        assert (fast.ids, fast.segments, fast.special) == (full.ids, full.segments, full.special)


# Equal to the reference: folders


def fields_of(encoding: Encoding) -> tuple[list[Any], ...]:
    return encoding.ids, encoding.segments, encoding.offsets, encoding.special, encoding.pieces


def equal(ours: Tokenizer, reference: Any, texts: list[Any] = TEXTS) -> None:
    for text in texts:
        one = ours.encode(text) if isinstance(text, str) else ours.encode_batch([text])[0]
        pair = (text,) if isinstance(text, str) else text
        other = reference(
            *pair, return_offsets_mapping=True, return_token_type_ids=True, return_special_tokens_mask=True
        )
        assert one.ids == other["input_ids"], text
        assert one.segments == other["token_type_ids"], text
        assert one.offsets == [tuple(each) for each in other["offset_mapping"]], text
        assert one.special == [bool(each) for each in other["special_tokens_mask"]], text
        for skip in (True, False):
            expected = reference.decode(one.ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(one.ids, skip_special=skip) == expected, text
    assert [each.ids for each in ours.encode_batch(texts)] == [
        (ours.encode(text) if isinstance(text, str) else ours.encode_batch([text])[0]).ids for text in texts
    ]


PAIRS = [("hello world", "the fox"), ("", "x"), ("a b", " ")]


@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_vocab_txt_equals_the_reference(config: dict[str, Any], tmp_path: Path) -> None:
    folder = word_piece_folder(tmp_path, **config)
    vocab = {piece: index for index, piece in enumerate(word_pieces())}
    ours = Tokenizer.from_folder(folder)
    equal(ours, transformers.BertTokenizer(vocab=vocab, **config), [*TEXTS, *PAIRS])
    assert (ours.pad_id, ours.vocab_size) == (0, len(vocab))


@pytest.mark.parametrize("saved", [False, True])
def test_a_vocabulary_of_prophetnet_equals_the_reference(saved: bool, tmp_path: Path) -> None:
    """As published, with no other file, and as transformers saves it."""
    pieces = [*word_pieces(), "[X_SEP]"]
    (tmp_path / "prophetnet.tokenizer").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    reference = transformers.ProphetNetTokenizer(str(tmp_path / "prophetnet.tokenizer"))
    if saved:
        reference.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    texts = [*TEXTS, *PAIRS, "the fox [X_SEP] [CLS] hello[SEP]"]
    for text, encoding in zip(texts, ours.encode_batch(texts), strict=True):
        assert encoding.ids == reference(*((text,) if isinstance(text, str) else text)).input_ids, text
    assert ours.decode(ours.encode("the fox [X_SEP] jumps").ids, skip_special=True) == "the fox jumps"


NORMALIZER_TEXTS = ["Hello WORLD caf\u00e9", "\u65e5\u672c \u8a9e", "na\u00efve Fox \u65e5", "the hello\u200bworld"]
NORMALIZERS: list[dict[str, Any]] = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True},
    {"strip_accents": False},
    {"tokenize_chinese_chars": False},
]


@pytest.mark.parametrize("changes", NORMALIZERS, ids=str)
@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("BertTokenizer", kind) for kind in ("bert", "nomic_bert", "modernbert")),
        *((name, "bert") for name in ("BertTokenizerFast", "ElectraTokenizer", "TokenizersBackend", None)),
        *((name, "distilbert") for name in ("DistilBertTokenizerFast", "PreTrainedTokenizerFast", None)),
    ],
)
def test_the_settings_of_bert_are_stronger_than_its_tokenizer_json(
    name: str | None, kind: str, cased: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Where transformers makes the normalizer itself, tokenizer.json does not decide how texts are normalized."""
    pieces = {piece: index for index, piece in enumerate(word_pieces())}
    word_piece_backend(pieces, WordPieceOptions(lowercase=not cased, chinese=not cased)).save(
        str(tmp_path / "tokenizer.json")
    )
    named = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
    named |= {"tokenizer_class": name} if name else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **changes}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text).ids for text in NORMALIZER_TEXTS] == theirs(NORMALIZER_TEXTS)["input_ids"]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": None},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
        {"post_processor": None},
        {"max_input_chars_per_word": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("lower", [True, False])
def test_bert_takes_only_the_vocabulary_of_its_tokenizer_json(
    changes: dict[str, Any], lower: bool, tmp_path: Path
) -> None:
    pieces = {piece: index for index, piece in enumerate(word_pieces())}
    made = json.loads(word_piece_backend(pieces, WordPieceOptions()).to_str())
    inner = {key: value for key, value in changes.items() if key.startswith("max")}
    made |= {key: value for key, value in changes.items() if key not in inner}
    made["model"] |= inner
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text).ids for text in NORMALIZER_TEXTS] == theirs(NORMALIZER_TEXTS)["input_ids"]


@pytest.mark.parametrize("value", [None, "false", 1])
@pytest.mark.parametrize("key", ["do_lower_case", "tokenize_chinese_chars"])
def test_a_setting_of_bert_that_is_no_truth_value_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    folder = word_piece_folder(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {key} is .*, which should be true or false"):
        Tokenizer.from_folder(folder)


def byte_level_folder(folder: Path, name: str | None, kind: str, spaced: bool, **config: Any) -> Path:
    """A folder whose tokenizer.json has a space before every text if `spaced`."""
    checkpoints.roberta_bpe().save_pretrained(folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["pre_tokenizer"]["add_prefix_space"] = made["post_processor"]["add_prefix_space"] = spaced
    (folder / "tokenizer.json").write_text(json.dumps(made))
    kept = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in kept.items() if key not in ("tokenizer_class", "add_prefix_space")}
    kept |= {"tokenizer_class": name} if name else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kept, **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


@pytest.mark.parametrize("configured", [None, False, True])
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RobertaTokenizer", "roberta"),
        ("RobertaTokenizerFast", "xlm-roberta"),
        ("BartTokenizerFast", "bart"),
        ("LongformerTokenizerFast", "longformer"),
        ("BlenderbotTokenizer", "blenderbot"),
        ("GPT2TokenizerFast", "gpt2"),
        ("DebertaTokenizer", "deberta"),
        ("PreTrainedTokenizerFast", "roberta"),
        ("GPT2Tokenizer", "nemotron"),
        (None, "roberta"),
        (None, "gpt2"),
        (None, "opt"),
        (None, "falcon"),
        (None, "modernbert"),
    ],
)
def test_a_space_before_the_text_is_that_of_transformers(
    name: str | None, kind: str, spaced: bool, configured: bool | None, tmp_path: Path
) -> None:
    """Where transformers makes the split into bytes itself, tokenizer.json does not decide on the space."""
    config = {} if configured is None else {"add_prefix_space": configured}
    folder = byte_level_folder(tmp_path, name, kind, spaced, **config)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in ("film good", " film", "a <mask> b", "", "don't  do\nthat"):
        wanted = theirs(text, return_offsets_mapping=True)
        assert ours.encode(text).ids == wanted["input_ids"]
        if type(theirs).__name__ == "RobertaTokenizer":  # which makes what trims offsets too
            assert ours.encode(text).offsets == wanted["offset_mapping"]


@pytest.mark.parametrize("kind", ["gpt_neox", "olmo", "mpt"])
@pytest.mark.parametrize("configured", [False, True])
def test_a_space_before_the_text_of_gpt_neox(kind: str, configured: bool, tmp_path: Path) -> None:
    for name in (None, "GPTNeoXTokenizerFast"):
        folder = byte_level_folder(tmp_path, name, kind, not configured, add_prefix_space=configured)
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
        assert ours.encode("film good", special=False).ids == theirs("film good", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("value", ["true", 1, []])
def test_a_space_before_the_text_that_is_no_truth_value_is_refused(value: Any, tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, "RobertaTokenizer", "roberta", False, add_prefix_space=value)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: add_prefix_space is .*, which should be true"):
        Tokenizer.from_folder(folder)


def test_special_tokens_that_are_read_as_text_are_refused(tmp_path: Path) -> None:
    folder = word_piece_folder(tmp_path, split_special_tokens=True)
    with pytest.raises(UnsupportedError, match=r"tokenizer_config\.json: split_special_tokens is true"):
        Tokenizer.from_folder(folder)


def test_tokenizer_json_equals_the_reference_and_is_never_cut_or_padded(tmp_path: Path) -> None:
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>",
        pair="<|start|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|start|>", 0), ("<|end|>", 1)],
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    ours = from_json(backend, tmp_path, bos_token="<|start|>", eos_token={"content": "<|end|>"})
    plain = Backend.from_str(backend.to_str())
    plain.no_truncation()
    plain.no_padding()
    equal(ours, transformers.PreTrainedTokenizerFast(tokenizer_object=plain), [*TEXTS, *PAIRS])
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.bos_token) == (0, 1, None, "<|start|>")


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer"])
def test_vocab_json_equals_the_reference(name: str, tmp_path: Path) -> None:
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    vocab = dict(backend.get_vocab())
    for piece in ("<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>"):
        vocab[piece] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges_of(backend)) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name + "Fast"}))
    merges = [tuple(merge.split(" ")) for merge in merges_of(backend)]
    reference = getattr(transformers, name)(vocab=vocab, merges=merges)
    equal(Tokenizer.from_folder(tmp_path), reference, [*TEXTS, *PAIRS])


def closed_words() -> Backend:
    """A BPE vocabulary whose words end in </w>, as in GPT."""
    backend = Backend(backends.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS[:2], trainer)
    return backend


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
def test_end_of_word_suffixes_equal_the_reference(file: str, tmp_path: Path) -> None:
    backend = closed_words()
    merges = [tuple(merge.split(" ")) for merge in merges_of(backend)]
    reference = transformers.OpenAIGPTTokenizer(vocab=backend.get_vocab(), merges=merges)
    if file == "vocab.json":
        (tmp_path / "vocab.json").write_text(json.dumps(backend.get_vocab()))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges_of(backend)) + "\n")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "OpenAIGPTTokenizer"}')
    else:
        reference.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    equal(ours, reference, [*TEXTS, *PAIRS])
    assert ours.decode(ours.encode("Hello, world").ids) == "hello , world"


def test_the_space_after_a_word_is_streamed_with_the_next_token(tmp_path: Path) -> None:
    tokenizer = from_json(closed_words(), tmp_path)
    ids = tokenizer.encode("hello lazy dog").ids
    stream = tokenizer.stream()
    parts = [stream.push(id) for id in ids]
    assert (parts[0], stream.flush()) == ("hello", "")
    assert not any(part.endswith(" ") for part in parts)
    assert "".join(parts) == "hello lazy dog"
    assert stream.push(10**6) == ""
    assert tokenizer.piece_bytes(ids[0]) == b"hello "


@given(st.lists(st.integers(0, 5), max_size=6))
def test_streams_with_end_of_word_suffixes_equal_the_library(ids: list[int]) -> None:
    pieces = ["<unk>", "a", "b</w>", "</w>", "c</w>d", "</w>e</w></w>"]
    backend = Backend(backends.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    spelling = TokenSpelling(backend)
    stream = spelling.stream()
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == spelling.decode_text(ids) == backend.decode(ids)


def test_the_config_says_whether_bos_and_eos_are_added(tmp_path: Path) -> None:
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert from_json(backend, tmp_path, **names).encode("x").special == [False]
    both = from_json(backend, tmp_path, **names, add_bos_token=True, add_eos_token=True)
    assert both.encode("x").special == [True, False, True]
    assert both.encode("x", special=False).special == [False]
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair=None, special_tokens=[("<|start|>", 0)]
    )
    assert from_json(backend, tmp_path, **names).encode("x").special == [True, False]
    assert from_json(backend, tmp_path, **names, add_bos_token=False).encode("x").special == [False]


def test_added_tokens_of_other_files_are_read(tmp_path: Path) -> None:
    folder = word_piece_folder(tmp_path)
    count = len(word_pieces())
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": count, "[X]": count + 1}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["[X]"]}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hello<new>[X]", special=False).ids[-2:] == [count, count + 1]
    assert (tokenizer.is_special(count), tokenizer.is_special(count + 1)) == (False, True)
    assert (tokenizer.vocab_size, tokenizer.token_id("<new>"), tokenizer.token_id("no")) == (count + 2, count, None)


# Equal to the reference: GGUF


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": split_by(LLAMA3),
    "qwen2": split_by(LLAMA3.replace("{1,3}", "")),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_gguf_splits_text_as_the_original_does(pre: str) -> None:
    # Trained without any split, so that merges cross every position where text must be split.
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), merges=600)
    ours = Tokenizer.from_gguf(byte_level_fields(backend, pre))
    unsplit = [backend.encode(text).ids for text in CORPUS]
    backend.pre_tokenizer = ORIGINALS[pre]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre == "llama-bpe":
        backend.model = backends.BPE(
            backend.get_vocab(), [tuple(merge.split(" ")) for merge in merges_of(backend)], ignore_merges=True
        )
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIALS])
    assert unsplit != [backend.encode(text).ids for text in CORPUS]
    for text in TEXTS:
        expected = backend.encode(text)
        assert ours.encode(text, special=False).ids == expected.ids, text
        assert ours.encode(text, special=False).offsets == expected.offsets, text


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["12345", " 6"]),
        ("smollm", ["1", "2", "3", "4", "5", " ", "6"]),
        ("llama-bpe", ["123", "45", " ", "6"]),
        ("qwen2", ["1", "2", "3", "4", "5", " ", "6"]),
        ("deepseek-v3", ["123", "45", " ", "6"]),
        ("tekken", ["1", "2", "3", "4", "5", " ", "6"]),
        ("gpt-4o", ["123", "45", " ", "6"]),
        ("deepseek-coder", ["1", "2", "3", "4", "5", " ", "6"]),
    ],
)
def test_gguf_cuts_numbers(pre: str, cut: list[str]) -> None:
    pieces = [*pre_tokenizers.ByteLevel.alphabet(), "12", "123", "45", "12345", "Ġ6"]
    merges = ["1 2", "12 3", "4 5", "123 45", "Ġ 6"]
    fields = {"model": "gpt2", "pre": pre, "tokens": pieces, "merges": merges}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345 6").ids] == cut


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_sentencepiece_equals_the_reference(prefix: bool) -> None:
    fields = sentencepiece_fields(add_space_prefix=prefix)
    pieces, scores, types = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    ranks = {piece: scores[i] for i, piece in enumerate(pieces) if types[i] == NORMAL}
    merges = transformers.tokenization_utils_base.generate_merges({p: i for i, p in enumerate(pieces)}, ranks)
    reference = transformers.LlamaTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, add_prefix_space=prefix
    )
    reference.add_tokens([AddedToken(piece, normalized=False) for piece in ("  ", "<tool>")])
    ours = Tokenizer.from_gguf(fields)
    compared = 0
    # For a text that starts with a space, or continues after an added token, this reference omits the space that
    # SentencePiece inserts.
    for text in (text for text in TEXTS if not (prefix and (text[:1].isspace() or "  " in text))):
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special=False).ids == expected, text
        assert ours.decode(expected, skip_special=False) == reference.decode(expected), text
        compared += 1
    assert compared > 7
    assert ours.encode("x").ids[0] == 1
    assert ours.encode("a<tool>").pieces[-1] == "<tool>"


def pieces_within_pieces(longest: int) -> dict[str, Any]:
    """A vocabulary in which each piece can be split at every position into two pieces."""
    pieces = ["<unk>", "<s>", "</s>", *("a" * size for size in range(1, longest + 1))]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * longest]
    fields = {"model": "llama", "tokens": pieces, "scores": [0.0] * len(pieces), "token_type": types}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_gguf_pieces_with_too_many_cuts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tokenizer.from_gguf(pieces_within_pieces(100)).encode("a" * 100, special=False).ids
    message = r"has 170\d{6} characters, where each piece is cut in two at every place; 134217728 are the most without"
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(pieces_within_pieces(800))
    monkeypatch.setattr(gguf_vocabulary, "MAX_DERIVED_MERGES", 100 * 99 // 2)
    assert Tokenizer.from_gguf(pieces_within_pieces(100)).vocab_size == 103
    with pytest.raises(CheckpointError, match="more than 4950 pieces made of two others, which are the most without"):
        Tokenizer.from_gguf(pieces_within_pieces(101))


def test_the_total_length_of_all_pieces_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Tokenizer.from_gguf(pieces_within_pieces(100)).text_size
    assert size == 100 * 101 // 2 + len("<unk><s></s>")
    monkeypatch.setattr(patterns, "MAX_VOCABULARY_TEXT", size)
    Tokenizer.from_gguf(pieces_within_pieces(100))
    monkeypatch.setattr(patterns, "MAX_VOCABULARY_TEXT", size - 1)
    with pytest.raises(CheckpointError, match=f"its 103 tokens become {size} characters of text; {size - 1} are"):
        Tokenizer.from_gguf(pieces_within_pieces(100))


def test_gguf_sentencepiece_inserts_its_space_after_control_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    assert tokenizer.encode(" x", special=False).pieces[0].startswith("\u2581")
    assert tokenizer.decode(tokenizer.encode(" x").ids) == " x"
    assert tokenizer.encode("the").offsets[-1] == (0, 3)


def test_gguf_word_pieces_equal_the_folder(tmp_path: Path) -> None:
    ours, folder = word_piece_tokenizer(), Tokenizer.from_folder(word_piece_folder(tmp_path))
    for text in TEXTS:
        assert fields_of(ours.encode(text)) == fields_of(folder.encode(text))
    assert list(map(fields_of, ours.encode_batch(PAIRS))) == list(map(fields_of, folder.encode_batch(PAIRS)))
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (3, 4, 0)


@pytest.mark.parametrize(
    ("pre", "more", "special"),
    [
        ("gpt-2", {}, [False]),
        ("gpt-2", {"add_bos_token": True}, [True, False]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [True, False, True]),
        ("llama-bpe", {}, [True, False]),
        ("llama-bpe", {"add_bos_token": False}, [False]),
        ("roberta-bpe", {}, [True, False, True]),
    ],
)
def test_gguf_flags_set_the_special_tokens_around_a_text(pre: str, more: dict[str, Any], special: list[bool]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL, pre, **more))
    assert tokenizer.encode("x").special == special
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.bos_id, tokenizer.eos_id) == (
        "<|start|>",
        "<|end|>",
        0,
        1,
    )
    if pre == "roberta-bpe":
        assert tokenizer.encode_batch([("x", "x")])[0].special == [True, False, True, True, False, True]


def test_a_large_vocabulary_is_built_fast() -> None:
    alphabet = list(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet][:49_000]
    fields = {"model": "gpt2", "pre": "smollm", "tokens": alphabet + [a + b for a, b in pairs]}
    fields["merges"] = [f"{a} {b}" for a, b in pairs]  # type: ignore[assignment]
    started = time.thread_time()
    Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert time.thread_time() - started < 1


# Damaged files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, "'rwkv'.*bert, gemma4, gpt2, llama, t5"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "nosuch"}, "'nosuch'.*gpt-2.*qwen2.*smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' twice, as 0 and as 1"),
        ({"tokens": [1, 2]}, "tokens holds 1"),
        ({"token_type": [1]}, "token_type has 1 values for"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "'ab', which is not two pieces"),
        ({"merges": ["nosuch piece"]}, "no usable vocabulary"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000, outside"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x', a str"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is set, but .*bos_token_id is missing"),
    ],
)
def test_gguf_errors_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(byte_level_fields(BYTE_LEVEL, **change))


def test_gguf_scores_must_be_one_for_each_piece() -> None:
    with pytest.raises(CheckpointError, match=r"scores has 1 values"):
        Tokenizer.from_gguf(sentencepiece_fields(scores=[1.0]))


FILES: list[tuple[dict[str, bytes], str]] = [
    ({}, "no tokenizer.json, no vocab.txt"),
    ({"tokenizer.json": b"{"}, "tokenizer.json: is no usable vocabulary"),
    ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json: is not UTF-8"),
    ({"tokenizer.json": b'{"model": {"type": "Nope"}}'}, "tokenizer.json: is no usable vocabulary"),
    ({"vocab.txt": b"a\nb\n"}, r"vocab.txt: .*'\[UNK\]'"),
    ({"vocab.txt": b"\xff"}, "vocab.txt: is not UTF-8"),
    ({"vocab.txt": b"[UNK]\n[CLS]\n[SEP]", "tokenizer_config.json": b"[]"}, "tokenizer_config.json: .*list"),
    ({"vocab.txt": b"[UNK]\n[CLS]\n[SEP]", "tokenizer_config.json": b"{"}, "tokenizer_config.json: is not JSON"),
    (
        {"vocab.txt": b"[UNK]\n[CLS]\n[SEP]", "special_tokens_map.json": b'{"bos_token": 1}'},
        "gives 1 for a special token",
    ),
    ({"vocab.txt": b"[UNK]\n[CLS]\n[SEP]", "added_tokens.json": b'{"x": 7}'}, "'x' has id 7.*3 in the vocabulary"),
    ({"vocab.txt": b"[UNK]\n[CLS]\n[SEP]", "added_tokens.json": b'{"x": "y"}'}, "added_tokens.json: .*'y' for the id"),
    ({"vocab.json": b'{"a": 0}'}, "merges.txt: is missing"),
    ({"vocab.json": b'{"a": 0}', "merges.txt": b"a b c\n"}, "merges.txt: .*'a b c' in line 1"),
    ({"vocab.json": b'{"a": 0}', "merges.txt": b"a b\n"}, "vocab.json: is no usable vocabulary"),
    ({"vocab.json": b'{"a": "x"}', "merges.txt": b""}, "vocab.json: is no usable vocabulary"),
]


@pytest.mark.parametrize(("files", "message"), FILES)
def test_folder_errors_name_the_file(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_tokenizer_class_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    with pytest.raises(UnsupportedError, match=r"CLIPTokenizer.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


BPE = decoders.BPEDecoder


@pytest.mark.parametrize("decoder", [decoders.CTC(), BPE(suffix=""), decoders.Sequence([BPE(), decoders.Fuse()])])
def test_a_decoder_that_looks_ahead_is_refused(decoder: decoders.Decoder, tmp_path: Path) -> None:
    backend = undecorated()
    backend.decoder = decoder
    with pytest.raises(UnsupportedError, match=r"(CTC|BPEDecoder).*known decoders"):
        from_json(backend, tmp_path)


# What a vocabulary's model costs for each character


@pytest.mark.parametrize("prefix", ["##", ""])
def test_a_word_that_word_pieces_split_is_bounded(prefix: str, tmp_path: Path) -> None:
    made = backends.WordPiece({"[UNK]": 0}, unk_token="[UNK]", continuing_subword_prefix=prefix)
    for most in (100, patterns.MAX_WORD_LENGTH):
        made.max_input_chars_per_word = most
        assert from_json(Backend(made), tmp_path).vocab_size == 1
    made.max_input_chars_per_word = 10**9
    message = "max_input_chars_per_word of its model is 1000000000; 256 are the most, 100 are usual"
    with pytest.raises(CheckpointError, match=message):
        from_json(Backend(made), tmp_path)


def test_a_bert_has_the_usual_bound_whatever_its_file_says(tmp_path: Path) -> None:
    words = {piece: index for index, piece in enumerate(("[UNK]", "[CLS]", "[SEP]", "a", "##a"))}
    backend = Backend(backends.WordPiece(words, unk_token="[UNK]", max_input_chars_per_word=10**9))
    made = from_json(backend, tmp_path, tokenizer_class="BertTokenizer")
    assert [len(made.encode("a" * length, special=False)) for length in (100, 101)] == [100, 1]


def beginnings(longest: int, letter: str = "\u0436") -> list[tuple[str, float]]:
    return [("<unk>", 0.0), *((letter * length, -1.0) for length in range(1, longest + 1))]


def test_unigram_pieces_that_begin_with_each_other_are_bounded(tmp_path: Path) -> None:
    """Each is spelled at every place of a text. Pieces that begin alike and are no beginnings of each other are not."""
    many = [(f"{'b' * 150}{number:04}", -1.0) for number in range(1000)]
    made = from_json(Backend(backends.Unigram([*beginnings(128), *many], unk_id=0)), tmp_path)
    assert made.vocab_size == 1129
    assert from_json(Backend(backends.Unigram(beginnings(180), unk_id=0)), tmp_path).vocab_size == 181
    for pieces in (beginnings(190), [*many, *beginnings(4096)[::-7], ("<unk>", 0.0)]):
        with pytest.raises(CheckpointError, match=r"pieces of .* characters that begin with each other"):
            from_json(Backend(backends.Unigram(pieces, unk_id=len(pieces) - 1)), tmp_path)
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.model"] = "t5"
    fields["tokenizer.ggml.tokens"] += [piece for piece, _ in beginnings(1000)[1:]]
    size = len(fields["tokenizer.ggml.tokens"])
    fields |= {"tokenizer.ggml.scores": [-1.0] * size, "tokenizer.ggml.token_type": [NORMAL] * size}
    with pytest.raises(CheckpointError, match="that begin with each other"):
        Tokenizer.from_gguf(fields)


def test_merges_are_never_left_out_at_random(tmp_path: Path) -> None:
    vocabulary = {"a" * 2**power: power for power in range(5)}
    merges = [("a" * 2**power, "a" * 2**power) for power in range(4)]
    made = from_json(Backend(backends.BPE(vocabulary, merges, dropout=0.9)), tmp_path)
    assert made.encode("a" * 64).ids == [4] * 4
    assert Tokenizer.from_parts(*made.parts).encode("a" * 64).ids == [4] * 4
