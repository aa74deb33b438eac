"""Reads the vocabulary of a checkpoint folder.

The vocabulary is the first that exists of tokenizer.json, vocab.txt, prophetnet.tokenizer, source.spm + vocab.json,
vocab.json + merges.txt and a SentencePiece model. The small files (tokenizer_config.json, special_tokens_map.json,
added_tokens.json) list which of its tokens are special and what their roles are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from ..core import files
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import list_files
from ..core.json_files import LARGE_JSON, VOCABULARY_JSON, parse_json, read_json_bytes
from . import sentencepiece, sentencepiece_folder
from .added_tokens import check_added_contents, check_added_tokens
from .merges import check_merges
from .vocabulary import (
    GPT2_SPLIT,
    QWEN2_SPLIT,
    Vocabulary,
    WordPieceOptions,
    add_boundary_tokens,
    byte_level_merges,
    run_build,
    word_end_merges,
    word_piece_backend,
)

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token", "x_sep_token")
MAX_LINES = 1 << 20  # of a vocabulary or of merges; published ones have up to 515,000
_MORE = ("additional_special_tokens", "extra_special_tokens")
_CONVERT = (
    "save it with a tokenizer.json first: transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)
# The default roles of tokens.
_BERT = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_PROPHETNET = {**_BERT, "cls_token": "[SEP]", "x_sep_token": "[X_SEP]"}  # no token is before a text
_ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_QWEN2 = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_GPT = {"unk_token": "<unk>"}
_MARIAN = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

# The classes of transformers that make BERT's normalizer themselves, and the networks that have one of them where no
# class is named. The networks of the third list are read by the file alone.
_BERT_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in (
        *("Bert", "ConvBert", "DistilBert", "Electra", "LayoutLM", "Lxmert", "MobileBert", "MPNet", "Splinter"),
        "SqueezeBert",
    )
)
_BERT_TYPES = frozenset(
    ("bert", "distilbert", "electra", "ernie", "megatron-bert", "mobilebert", "mpnet", "nomic_bert", "squeezebert")
)
_OTHER_ENDS = frozenset(("MPNetTokenizer", "SplinterTokenizer"))  # their texts begin and end in other ways
_FILE_TYPES = frozenset(("modernbert", "modernbert-decoder"))

# The classes of transformers that split bytes as GPT-2 does, with a space before the text only if
# tokenizer_config.json asks for it, and the networks that have one of them where no class is named. A Blenderbot has
# the space if it is not forbidden. The networks of the last list are read by the file alone, whatever they name.
_BYTE_LEVEL_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in (
        *("Bart", "Blenderbot", "CodeGen", "Deberta", "GPT2", "GPTNeoX", "LED", "Longformer", "Luke", "Mvp"),
        "Roberta",
    )
)
_BYTE_LEVEL_TYPES = frozenset(
    (
        *("bart", "blenderbot", "codegen", "data2vec-text", "dbrx", "deberta", "falcon_mamba", "gpt2", "gpt_neo"),
        *("gpt_neox", "gptj", "ibert", "led", "lilt", "longformer", "luke", "mamba", "mamba2", "mpt", "mra", "mvp"),
        *("olmo", "olmoe", "opt", "phi", "roberta", "roberta-prelayernorm", "rwkv", "starcoder2", "xlstm"),
    )
)
_BYTE_LEVEL_FILE_TYPES = _FILE_TYPES | frozenset(
    (
        *("arctic", "ernie4_5", "ernie4_5_moe", "internlm2", "internlm3", "jamba", "minicpm3", "minimax_m2", "molmo"),
        *("nemotron", "phi3", "phimoe", "qwen2", "qwen3_5", "qwen3_5_moe"),
    )
)


@dataclass(frozen=True)
class _Settings:
    """The contents of the small files: tokens by role, further special tokens, ids of added tokens, and all other
    fields."""

    roles: dict[str, AddedToken]
    more: list[AddedToken]
    added: dict[int, AddedToken] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)

    def piece(self, role: str) -> str:
        return str(self.roles[role].content) if role in self.roles else ""

    def with_defaults(self, defaults: Mapping[str, str]) -> "_Settings":
        """The settings with tokens from `defaults` for missing roles."""
        tokens = {role: AddedToken(piece, normalized=False, special=True) for role, piece in defaults.items()}
        return replace(self, roles={**tokens, **self.roles})


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary in `folder`. CheckpointError names the file that is missing, unreadable or invalid."""
    settings = _read_settings(folder)
    if settings.other.get("split_special_tokens"):
        message = "split_special_tokens is true: special tokens that a text spells are always read as such here"
        raise UnsupportedError(message, file=str(folder / "tokenizer_config.json"))
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder, settings)
    elif (folder / "vocab.txt").is_file():
        settings = settings.with_defaults(_BERT)
        backend = _read_vocab_txt(folder / "vocab.txt", settings)
    elif (folder / "prophetnet.tokenizer").is_file():
        settings = settings.with_defaults(_PROPHETNET)
        backend = _read_vocab_txt(folder / "prophetnet.tokenizer", settings)
        add_boundary_tokens(backend, "", settings.piece("sep_token"))
    elif (folder / "source.spm").is_file():
        settings = settings.with_defaults(_MARIAN)
        backend = _read_source_spm(folder, settings)
    elif (folder / "vocab.json").is_file():
        merge, defaults = _tokenizer_class(folder, settings)
        settings = settings.with_defaults(defaults)
        backend = _read_vocab_json(folder, settings, merge)
    elif model := sentencepiece_folder.find_model(folder):
        settings, backend = _read_sentencepiece(folder, model, settings)
    else:
        raise _no_tokenizer(folder)
    present = {role: piece for role in _ROLES if backend.token_to_id(piece := settings.piece(role)) is not None}
    named = {name: present.get(f"{name}_token", "") for name in ("bos", "eos", "pad", "unk", "mask")}
    return Vocabulary(backend=backend, **named)


def _no_tokenizer(folder: Path) -> CheckpointError:
    if found := list_files(folder, {".tiktoken"}):
        message = f"has only a vocabulary of tiktoken ({found[0]}), which does not say how texts are split"
        return UnsupportedError(f"{message}; put the tokenizer.json of the same model beside it", file=str(folder))
    if (folder / "tekken.json").is_file():
        message = "has only a tekken.json, which is not read; put the tokenizer.json of the same model beside it"
        return UnsupportedError(message, file=str(folder))
    known = f"no tokenizer.json, no vocab.txt, no vocab.json with merges.txt and no {sentencepiece_folder.FILES[0]}"
    step = "save the tokenizer beside the weights (in transformers: tokenizer.save_pretrained(folder))"
    return CheckpointError(f"has {known}; {step}", file=str(folder))


def _read_settings(folder: Path) -> _Settings:
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    where = str(folder / "tokenizer_config.json")
    roles = {role: _parse_token(named[role], where) for role in _ROLES if named.get(role) is not None}
    more: list[AddedToken] = []
    for key in _MORE:
        values = named.get(key) or []
        if not isinstance(values, list | dict):
            raise CheckpointError(f"{key} is {show_value(values)} where a list of tokens belongs", file=where)
        more.extend(_parse_token(value, where) for value in (values.values() if isinstance(values, dict) else values))
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise CheckpointError(f"added_tokens_decoder is {show_value(listed)} where an object belongs", file=where)
    added = {_check_id(key, where): _parse_token(value, where, special=False) for key, value in listed.items()}
    for piece, index in _read_json(folder / "added_tokens.json").items():
        name = str(folder / "added_tokens.json")
        added.setdefault(_check_id(index, name), AddedToken(piece, normalized=False, special=False))
    return _Settings(roles=roles, more=more, added=added, other=config)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(read_json_bytes(path, LARGE_JSON), lenient=True)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"is not JSON: {problem}", file=str(path)) from problem
    if not isinstance(value, dict):
        raise CheckpointError(f"holds a {type(value).__name__} where an object belongs", file=str(path))
    return value


def _check_id(value: Any, file: str) -> int:
    if not (type(value) is int and value >= 0) and not (isinstance(value, str) and value.isdecimal()):
        raise CheckpointError(f"gives {show_value(value)} for the id of an added token", file=file)
    return int(value)


def _parse_token(value: Any, file: str, *, special: bool = True) -> AddedToken:
    """A token written as a string, or as an object with its flags."""
    flags: dict[str, Any] = value if isinstance(value, dict) else {"content": value}
    content = flags.get("content")
    if not isinstance(content, str):
        raise CheckpointError(
            f"gives {show_value(value)} for a special token; a string or an object belongs", file=file
        )
    return AddedToken(
        content,
        single_word=bool(flags.get("single_word")),
        lstrip=bool(flags.get("lstrip")),
        rstrip=bool(flags.get("rstrip")),
        normalized=bool(flags.get("normalized")),
        special=bool(flags.get("special", special)),
    )


def _read_tokenizer_json(folder: Path, settings: _Settings) -> Tokenizer:
    path = folder / "tokenizer.json"
    text = _check_utf8(path, lambda: read_json_bytes(path, VOCABULARY_JSON).decode())
    check_merges(text, str(path))
    check_added_tokens(text, str(path))
    backend = run_build(lambda: Tokenizer.from_str(text), str(path))
    # The file's settings for truncation and padding are ignored.  A text that is too long is an error that gives
    # both lengths, and nothing is padded.
    backend.no_truncation()
    backend.no_padding()
    if isinstance(backend.model, models.BPE):
        # Merges that are left out at random are for training (Provilkov et al. 2020). Here the same text always has the
        # same tokens, and a probability near 1 takes the square of the text's length.
        backend.model.dropout = None
    if isinstance(backend.model, models.WordPiece) and (name := _bert_class(folder, settings)):
        _rebuild_word_pieces(backend, name, settings, folder)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and (name := _byte_level_class(folder, settings)):
        _set_prefix_space(backend, name, settings, folder)
    _add_tokens(backend, settings, folder)
    _apply_boundary_settings(backend, settings)
    return backend


def _rebuild_word_pieces(backend: Tokenizer, name: str, settings: _Settings, folder: Path) -> None:
    """Make all of tokenizer.json but the vocabulary and the added tokens again, as BERT's tokenizers do."""
    options = _word_piece_options(settings.with_defaults(_BERT), str(folder / "tokenizer_config.json"))
    pieces = backend.get_vocab(with_added_tokens=False)
    if name in _OTHER_ENDS:
        if backend.post_processor is None:
            raise UnsupportedError(f"has no post_processor, which a {name} needs", file=str(folder / "tokenizer.json"))
        options = replace(options, first=options.unknown, separator=options.unknown)  # those of the file stay
    made = run_build(lambda: word_piece_backend(pieces, options), str(folder / "tokenizer.json"))
    backend.model, backend.normalizer, backend.pre_tokenizer = made.model, made.normalizer, made.pre_tokenizer
    backend.decoder = made.decoder
    if name not in _OTHER_ENDS:
        backend.post_processor = made.post_processor


def _set_prefix_space(backend: Tokenizer, name: str, settings: _Settings, folder: Path) -> None:
    """Put a space before every text, or none, as tokenizer_config.json says: these classes follow it, whatever
    tokenizer.json has."""
    prefix = settings.other.get("add_prefix_space")
    prefix = name == "BlenderbotTokenizer" if prefix is None else prefix
    if not isinstance(prefix, bool):
        message = f"add_prefix_space is {show_value(prefix)}, which should be true or false"
        raise CheckpointError(message, file=str(folder / "tokenizer_config.json"))
    backend.pre_tokenizer.add_prefix_space = prefix
    if isinstance(backend.post_processor, processors.RobertaProcessing):  # it trims offsets
        backend.post_processor.add_prefix_space = prefix


def _apply_boundary_settings(backend: Tokenizer, settings: _Settings) -> None:
    """Apply tokenizer_config.json's settings on whether a text begins with bos and ends with eos."""
    configured = {end: settings.other.get(f"add_{end}_token") for end in ("bos", "eos")}
    ids = backend.encode("", add_special_tokens=True).ids
    pieces = {end: settings.piece(f"{end}_token") for end in configured}
    done = {end: backend.token_to_id(pieces[end]) in ids[: 1 if end == "bos" else None] for end in configured}
    if any(configured[end] is not None and configured[end] != done[end] for end in configured if pieces[end]):
        needed = {end: done[end] if configured[end] is None else configured[end] for end in configured}
        add_boundary_tokens(backend, *(pieces[end] if needed[end] else "" for end in ("bos", "eos")))


def _word_piece_options(settings: _Settings, file: str) -> WordPieceOptions:
    """How BERT's tokenizers normalize text, and their tokens, by tokenizer_config.json, which is `file`."""
    for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        value = settings.other.get(key, True)
        if not isinstance(value, bool) and not (value is None and key == "strip_accents"):
            raise CheckpointError(f"{key} is {show_value(value)}, which should be true or false", file=file)
    return WordPieceOptions(
        lowercase=settings.other.get("do_lower_case", True),
        strip_accents=settings.other.get("strip_accents"),
        chinese=settings.other.get("tokenize_chinese_chars", True),
        unknown=settings.piece("unk_token"),
        first=settings.piece("cls_token"),
        separator=settings.piece("sep_token"),
    )


def _bert_class(folder: Path, settings: _Settings) -> str:
    """The one of BERT's tokenizers as which transformers reads the folder: it takes the vocabulary of tokenizer.json
    and follows tokenizer_config.json in all else. Empty for other tokenizers."""
    name, kind = _named_class(folder, settings)
    if name is None:
        return ("MPNetTokenizer" if kind == "mpnet" else "BertTokenizer") if kind in _BERT_TYPES else ""
    return name if name in _BERT_CLASSES and kind not in _FILE_TYPES else ""


def _byte_level_class(folder: Path, settings: _Settings) -> str:
    """The one of GPT-2's and RoBERTa's tokenizers as which transformers reads the folder. Empty for others."""
    name, kind = _named_class(folder, settings)
    if name is None:
        return ("BlenderbotTokenizer" if kind == "blenderbot" else "GPT2Tokenizer") if kind in _BYTE_LEVEL_TYPES else ""
    return name if name in _BYTE_LEVEL_CLASSES and kind not in _BYTE_LEVEL_FILE_TYPES else ""


def _named_class(folder: Path, settings: _Settings) -> tuple[str | None, str]:
    """The class of transformers that a folder names, without Fast, and the type of its network. None: it names none."""
    config = _read_json(folder / "config.json")
    name = settings.other.get("tokenizer_class") or config.get("tokenizer_class")
    plain = name.removesuffix("Fast") if isinstance(name, str) else None if name is None else ""
    return plain, str(config.get("model_type"))


def _read_vocab_txt(path: Path, settings: _Settings) -> Tokenizer:
    """BERT's vocabulary, a piece a line."""
    folder = path.parent
    pieces = {line.rstrip("\r"): index for index, line in enumerate(_read_text(path).removesuffix("\n").split("\n"))}
    words = _word_piece_options(settings, str(folder / "tokenizer_config.json"))
    backend = run_build(lambda: word_piece_backend(pieces, words), str(path))
    _add_tokens(backend, settings, folder)
    return backend


def _read_source_spm(folder: Path, settings: _Settings) -> Tokenizer:
    """Marian's vocabulary: the model that splits sources, and the ids of both sides' pieces.

    Decoding needs no model, since pieces contain their text. A source may begin with the target language, as ">>de<<".
    """
    path, pieces = str(folder / "vocab.json"), _read_json(folder / "vocab.json")
    if settings.other.get("separate_vocabs") or (folder / "target_vocab.json").is_file():
        raise UnsupportedError("has another vocabulary for each side, and only one for both is read", file=path)
    if not all(isinstance(index, int) for index in pieces.values()) or settings.piece("unk_token") not in pieces:
        raise CheckpointError(
            f"has no number for each piece, and one for {show_value(settings.piece('unk_token'))}", file=path
        )
    model = sentencepiece.read_unigram(folder / "source.spm")
    backend = run_build(lambda: sentencepiece.build_unigram_backend(model, pieces, settings.piece("unk_token")), path)
    _add_tokens(backend, settings, folder)
    codes = sorted(piece for piece in pieces if piece.startswith(">>") and piece.endswith("<<"))
    check_added_contents(codes, path)
    backend.add_tokens([AddedToken(code, normalized=False, special=False) for code in codes])
    add_boundary_tokens(backend, "", settings.piece("eos_token"))
    return backend


def _read_sentencepiece(folder: Path, model: Path, settings: _Settings) -> tuple[_Settings, Tokenizer]:
    """The settings with the roles of the tokenizer's class, and the tokenizer of a SentencePiece model."""
    config = _read_json(folder / "config.json")
    kind = sentencepiece_folder.find_class(model, settings.other, config)
    given = settings.other
    if "extra_ids" not in given and str(config.get("model_type", "")).startswith(("mt5", "umt5")):
        given = {**given, "extra_ids": 0}
    settings = settings.with_defaults(kind.roles)
    roles = {role: settings.piece(role) for role in settings.roles}

    def build() -> Tokenizer:
        backend = sentencepiece_folder.read_sentencepiece(model, kind, given)
        sentencepiece_folder.mark_special(backend, roles)
        return backend

    backend = run_build(build, str(model))
    _add_tokens(backend, settings, folder)
    run_build(lambda: sentencepiece_folder.add_ends(backend, kind, given, roles), str(model))
    return settings, backend


def _gpt2_backend(pieces: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: _Settings) -> Tokenizer:
    """Byte-level merges, split as GPT-2 does, with a space before the text if the configuration sets one."""
    return byte_level_merges(pieces, merges, GPT2_SPLIT, prefix_space=bool(settings.other.get("add_prefix_space")))


def _qwen2_backend(pieces: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: _Settings) -> Tokenizer:  # noqa: ARG001
    """Byte-level merges, split as Qwen2 does."""
    return byte_level_merges(pieces, merges, QWEN2_SPLIT)


def _gpt_backend(pieces: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: _Settings) -> Tokenizer:
    """Merges over words, as GPT has them."""
    return word_end_merges(pieces, merges, unknown=settings.piece("unk_token"))


_BuildBackend = Callable[[Mapping[str, int], Sequence[tuple[str, str]], _Settings], Tokenizer]
# How vocab.json + merges.txt are read, by the class that tokenizer_config.json names.
_CLASSES: dict[str, tuple[_BuildBackend, dict[str, str]]] = {
    "OpenAIGPTTokenizer": (_gpt_backend, _GPT),
    "GPT2Tokenizer": (_gpt2_backend, _GPT2),
    "RobertaTokenizer": (_gpt2_backend, _ROBERTA),
    "BartTokenizer": (_gpt2_backend, _ROBERTA),
    "Qwen2Tokenizer": (_qwen2_backend, _QWEN2),
}


def _tokenizer_class(folder: Path, settings: _Settings) -> tuple[_BuildBackend, dict[str, str]]:
    given = settings.other.get("tokenizer_class") or "GPT2Tokenizer"
    name = (given if isinstance(given, str) else show_value(given)).removesuffix("Fast")
    if name not in _CLASSES:
        path = str(folder / "vocab.json")
        raise UnsupportedError(f"is the vocabulary of a {name}, which is not read here; {_CONVERT}", file=path)
    return _CLASSES[name]


def _read_vocab_json(folder: Path, settings: _Settings, merge: _BuildBackend) -> Tokenizer:
    path = str(folder / "vocab.json")
    pieces, merges = _read_json(folder / "vocab.json"), _read_merges(folder / "merges.txt")
    backend = run_build(lambda: merge(pieces, merges, settings), path)
    _add_tokens(backend, settings, folder)
    if "cls_token" in settings.roles:
        space = bool(settings.other.get("add_prefix_space")) and merge is _gpt2_backend
        sep, cls = (_boundary_piece(backend, settings.piece(role), path) for role in ("sep_token", "cls_token"))
        backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=space)
    else:
        settings_of_ends = (("bos_token", "add_bos_token"), ("eos_token", "add_eos_token"))
        add_boundary_tokens(
            backend,
            *(settings.piece(role) if settings.other.get(configured) else "" for role, configured in settings_of_ends),
        )
    return backend


def _boundary_piece(backend: Tokenizer, piece: str, file: str) -> tuple[str, int]:
    if (index := backend.token_to_id(piece)) is None:
        raise CheckpointError(f"has no {show_value(piece)}, which is added to every text", file=file)
    return piece, index


def _read_merges(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise CheckpointError("is missing; vocab.json needs it beside it", file=str(path))
    merges = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"has {line[:40]!r} in line {number}, which is not two pieces", file=str(path))
        merges.append((left, right))
    return merges


def _add_tokens(backend: Tokenizer, settings: _Settings, folder: Path) -> None:
    """Add the tokens of the small files as added or special tokens, unless they are already."""
    listed = [token for _, token in sorted(settings.added.items(), key=lambda item: item[0])]
    named = [*settings.roles.values(), *settings.more]
    check_added_contents((token.content for token in (*listed, *named)), str(folder))
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    # The library makes its automaton again in each call, so all tokens are added in one.
    backend.add_tokens([token for token in listed if token.content not in known])
    for index, token in settings.added.items():
        if backend.token_to_id(token.content) != index:
            message = f"the added token {show_value(token.content)} has id {index} in the small files, "
            raise CheckpointError(f"{message}{backend.token_to_id(token.content)} in the vocabulary", file=str(folder))
    backend.add_special_tokens(
        [token for token in named if not known.get(token.content) and backend.token_to_id(token.content) is not None]
    )


def _read_text(path: Path) -> str:
    """A vocabulary or merges, one a line. CheckpointError for too many lines, which take a multiple of their bytes."""
    text = _check_utf8(path, lambda: files.read_text(path, files.MAX_VOCABULARY_BYTES))
    if (lines := text.count("\n")) > MAX_LINES:
        raise CheckpointError(f"has {lines} lines, and {MAX_LINES} are the most", file=str(path))
    return text


def _check_utf8(path: Path, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"is not UTF-8 text: {problem}", file=str(path)) from problem
