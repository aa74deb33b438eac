"""The vocabulary in the metadata of a GGUF file. `tokenizer.ggml.model` names its kind, the other keys are its data,
and missing values have llama.cpp's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from ..core.errors import CheckpointError, UnsupportedError, show_value
from .added_tokens import check_added_contents
from .gguf_splits import SPLITS, close_names
from .sentencepiece import UnigramRules, build_unigram
from .vocabulary import (
    MAX_PIECE_LENGTH,
    SPACE,
    SplitRules,
    Vocabulary,
    WordPieceOptions,
    add_boundary_tokens,
    byte_level_merges,
    run_build,
    sentencepiece_merges,
    word_piece_backend,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type
MAX_SPLIT_CHARACTERS = (
    1 << 27
)  # characters of all pieces, each split at every place; 262,144 published ones have 15 million
MAX_CHARSMAP_BYTES = 1 << 22  # bytes of tokenizer.ggml.precompiled_charsmap; published ones have 320,000
MAX_DERIVED_MERGES = 1 << 21  # merges made of splits; 262,144 published pieces have about half a million
_ROLES = (
    "bos",
    "eos",
    "unknown",
    "padding",
    "seperator",
    "cls",
    "mask",
    "eot",
    "eom",
)  # the format spells it "seperator"


_TEXT_LISTS = frozenset(("tokens", "merges"))
_TOKEN_NUMBERS = frozenset(("scores", "token_type"))  # one for each token
_LISTS = _TEXT_LISTS | _TOKEN_NUMBERS | {"precompiled_charsmap"}
READ_FIELDS = frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "model"),
        *("normalizer.lowercase", "normalizer.strip_accents", "pre", "remove_extra_whitespaces"),
        *_LISTS,
        *(f"{role}_token_id" for role in _ROLES),
    )
)
MAX_FIELD_CHARACTERS = 1 << 25  # characters of all fields; 262,144 tokens and their merges have ten million
MAX_TOKENS = 1 << 20  # of a vocabulary; published ones have 262,144


def select_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a GGUF file's metadata that `read_gguf_vocabulary` reads.

    CheckpointError if they have more values, or their strings are longer, than those of any vocabulary. They are copied
    several times, with each control character as six, for the child process that tries the vocabulary first.
    """
    fields = {name: value for name, value in metadata.items() if name in READ_FIELDS}
    _check_counts(_Fields(fields))
    sizes = {name: _count_characters(value) for name, value in fields.items()}
    if (characters := sum(sizes.values())) > MAX_FIELD_CHARACTERS:
        longest = max(sizes, key=sizes.__getitem__)
        message = f"the metadata field {longest} has {sizes[longest]} of {characters} characters under tokenizer.ggml"
        raise CheckpointError(f"{message}; {MAX_FIELD_CHARACTERS} are the most")
    return fields


def _check_counts(fields: "_Fields") -> None:
    """CheckpointError for a list where one value belongs, and for more values than tokens have.

    The lengths are looked at, not the values: that is done at once, however long a list is."""
    count = fields.count("tokens")
    if count > MAX_TOKENS:
        raise CheckpointError(f"the metadata field tokenizer.ggml.tokens has {count} values; {MAX_TOKENS} are the most")
    for name in sorted(_TOKEN_NUMBERS):
        if fields.count(name) not in (-1, count):
            fields.raise_count(name, max(count, 0))
    if (size := fields.count("precompiled_charsmap")) > MAX_CHARSMAP_BYTES:
        raise CheckpointError(_charsmap_error(size))
    fields.check_single_values()


def _charsmap_error(size: int) -> str:
    message = f"tokenizer.ggml.precompiled_charsmap has {size} values; bytes belong there"
    return f"{message}, {MAX_CHARSMAP_BYTES} at most"


def _count_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(len(item) for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else 0


class _Fields:
    """The metadata under `tokenizer.ggml.`; each value is checked when it is read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def has(self, name: str) -> bool:
        return self._fields.get(f"tokenizer.ggml.{name}") is not None

    def read(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._fields.get(f"tokenizer.ggml.{name}")
        value = default if value is None else value
        if not isinstance(value, kind):
            reason = "is missing" if value is None else f"is {show_value(value)}, a {type(value).__name__}"
            raise CheckpointError(f"the metadata field tokenizer.ggml.{name} {reason}")
        return value

    def array(self, name: str, kind: type | tuple[type, ...], count: int = -1) -> list[Any]:
        values = list(self.read(name, (list, tuple)))
        wrong = next((value for value in values if not isinstance(value, kind)), None)
        if wrong is not None:
            raise CheckpointError(f"the metadata field tokenizer.ggml.{name} holds {show_value(wrong)}")
        if count >= 0 and len(values) != count:
            self.raise_count(name, count)
        return values

    def count(self, name: str) -> int:
        """The length of a list; -1 if the field is missing or no list."""
        value = self._fields.get(f"tokenizer.ggml.{name}")
        return len(value) if isinstance(value, list | tuple) else -1

    def raise_count(self, name: str, tokens: int) -> NoReturn:
        message = f"the metadata field tokenizer.ggml.{name} has {self.count(name)} values for {tokens} tokens"
        raise CheckpointError(message)

    def check_single_values(self) -> None:
        """CheckpointError for a list in a field that has one value."""
        for key in self._fields:
            name = key.removeprefix("tokenizer.ggml.")
            if name not in _LISTS and self.count(name) >= 0:
                message = f"the metadata field {key} has a list of {self.count(name)} values, where one belongs"
                raise CheckpointError(message)


@dataclass(frozen=True)
class _Data:
    """The fields that all kinds have: V pieces, the type of each token, and the pieces with a role."""

    fields: _Fields
    pieces: list[str]  # [V]
    types: list[int]  # [V]
    roles: dict[str, str]

    def piece_ids(self) -> dict[str, int]:
        return {piece: index for index, piece in enumerate(self.pieces)}

    def select_pieces(self, *types: int) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind in types and piece]

    def boundary_piece(self, role: str, *, default: bool) -> str:
        """The piece with the given role that is added to every text; empty: none."""
        piece, name = self.roles.get(role, ""), f"add_{role}_token"
        if self.fields.has(name) and self.fields.read(name, bool) and not piece:
            raise CheckpointError(f"tokenizer.ggml.{name} is set, but tokenizer.ggml.{role}_token_id is missing")
        return piece if self.fields.read(name, bool, default) else ""

    def build_vocabulary(self, backend: Tokenizer, bos: str, eos: str) -> Vocabulary:
        """The vocabulary with its added tokens. Control tokens are matched whole and are no text; user-defined ones are
        matched whole and are text."""
        control = dict.fromkeys([*self.select_pieces(UNKNOWN, CONTROL), *self.roles.values()])
        defined = [piece for piece in self.select_pieces(USER_DEFINED) if piece not in control]
        check_added_contents((*control, *defined))
        backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
        backend.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in defined])
        return Vocabulary(backend=backend, bos=bos, eos=eos, pad=self.roles.get("padding", ""))


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in a GGUF file's metadata.

    CheckpointError names the field that is missing, unknown or inconsistent with the others.
    """
    fields = _Fields(metadata)
    kind = fields.read("model", str)
    if kind not in _KINDS:
        raise UnsupportedError(
            f"the vocabulary is of kind {show_value(kind)} (tokenizer.ggml.model); known: {', '.join(sorted(_KINDS))}. "
            "Load the model from its safetensors folder, with its tokenizer.json, instead"
        )
    pieces = _pieces(fields)
    types = fields.array("token_type", int, len(pieces)) if fields.has("token_type") else [NORMAL] * len(pieces)
    return _KINDS[kind](_Data(fields, pieces, types, _roles(fields, pieces)))


def _pieces(fields: _Fields) -> list[str]:
    pieces: list[str] = fields.array("tokens", str)
    longest = max(pieces, key=len, default="")
    if len(longest) > MAX_PIECE_LENGTH:  # before merges are made of its splits
        message = f"tokenizer.ggml.tokens has a piece of {len(longest)} characters, {longest[:40]!r}..."
        raise CheckpointError(f"{message}; {MAX_PIECE_LENGTH} are the most")
    if len(set(pieces)) != len(pieces):
        seen: dict[str, int] = {}
        first, second = next((seen[p], i) for i, p in enumerate(pieces) if seen.setdefault(p, i) != i)
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {show_value(pieces[first])} twice, as {first} and as {second}"
        )
    return pieces


def _roles(fields: _Fields, pieces: list[str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for role in _ROLES:
        name = f"{role}_token_id"
        if fields.has(name):
            index = fields.read(name, int)
            if not 0 <= index < len(pieces):
                raise CheckpointError(f"tokenizer.ggml.{name} is {index}, outside of the {len(pieces)} tokens")
            roles[role] = pieces[index]
    return roles


def _from_gpt2(data: _Data) -> Vocabulary:
    name = data.fields.read("pre", str, "default") or "default"
    if name not in SPLITS:
        message = f"the text is to be split as {show_value(name)} (tokenizer.ggml.pre), which is not known"
        raise UnsupportedError(f"{message}; close to it or known: {', '.join(close_names(name))}")
    return _from_merges(data, SPLITS[name])


def _from_merges(data: _Data, split: SplitRules) -> Vocabulary:
    merges, unknown = _merges(data.fields), data.roles.get("unknown", "")
    if split.spelled_space:
        backend = run_build(lambda: sentencepiece_merges(data.piece_ids(), merges, unknown=unknown, prefix_space=False))
        cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.patterns]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    else:
        backend = run_build(lambda: byte_level_merges(data.piece_ids(), merges, split))
    pair = data.fields.read("add_sep_token", bool, split.pair)
    before = data.boundary_piece("bos", default=split.bos or split.pair)
    after = data.boundary_piece("eos", default=split.pair)
    add_boundary_tokens(backend, before, after, double=pair)
    return data.build_vocabulary(backend, data.roles.get("bos", ""), data.roles.get("eos", ""))


def _from_gemma4(data: _Data) -> Vocabulary:
    """Merges over text with spelled spaces; the kind implies how text is split."""
    return _from_merges(data, SPLITS["gemma4"])


def _from_t5(data: _Data) -> Vocabulary:
    """Unigram pieces of SentencePiece. Pieces that are no text have the least score of the others, so that the penalty
    of unknown characters is measured from the same score as in SentencePiece."""
    usual = {"padding": 0, "eos": 1, "unknown": 2}
    pieces = {role: data.pieces[index] for role, index in usual.items() if index < len(data.pieces)}
    data = replace(data, roles={**pieces, **data.roles})
    if "unknown" not in data.roles:
        raise CheckpointError("tokenizer.ggml.unknown_token_id is missing, which this kind of vocabulary needs")
    scores = data.fields.array("scores", (int, float), len(data.pieces))
    least = min((score for score, kind in zip(scores, data.types, strict=True) if kind == NORMAL), default=0.0)
    charsmap = data.fields.array("precompiled_charsmap", int) if data.fields.has("precompiled_charsmap") else []
    if len(charsmap) > MAX_CHARSMAP_BYTES or any(not -128 <= byte < 256 for byte in charsmap):
        raise CheckpointError(_charsmap_error(len(charsmap)))
    rules = UnigramRules(
        charsmap=bytes(byte & 255 for byte in charsmap),
        space_first=data.fields.read("add_space_prefix", bool, False),
        one_space=data.fields.read("remove_extra_whitespaces", bool, False),
    )
    scored = [
        (piece, 0.0 if kind == USER_DEFINED else float(score) if kind == NORMAL else least)
        for piece, score, kind in zip(data.pieces, scores, data.types, strict=True)
    ]
    backend = run_build(lambda: build_unigram(scored, data.pieces.index(data.roles["unknown"]), rules))
    before, after = data.boundary_piece("bos", default=False), data.boundary_piece("eos", default=True)
    add_boundary_tokens(backend, before, after, double=data.fields.read("add_sep_token", bool, False))
    return data.build_vocabulary(backend, data.roles.get("bos", ""), data.roles.get("eos", ""))


def _from_llama(data: _Data) -> Vocabulary:
    usual = dict(zip(("unknown", "bos", "eos"), data.pieces, strict=False))
    data = replace(data, roles={**usual, **data.roles})
    merges = _merges(data.fields) if data.fields.has("merges") else _merges_from_scores(data)
    space = data.fields.read("add_space_prefix", bool, True)
    unknown = data.roles.get("unknown", "")
    backend = run_build(lambda: sentencepiece_merges(data.piece_ids(), merges, unknown=unknown, prefix_space=space))
    add_boundary_tokens(backend, data.boundary_piece("bos", default=True), data.boundary_piece("eos", default=False))
    return data.build_vocabulary(backend, data.roles.get("bos", ""), data.roles.get("eos", ""))


def _merges(fields: _Fields) -> list[tuple[str, str]]:
    merges = []
    for line in fields.array("merges", str):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"tokenizer.ggml.merges has {line[:40]!r}, which is not two pieces")
        merges.append((left, right))
    return merges


def _merges_from_scores(data: _Data) -> list[tuple[str, str]]:
    """Merges that behave like SentencePiece, which joins the pair whose piece has the best score: every split of every
    piece, best piece first.

    CheckpointError for pieces with more splits than any published vocabulary: a piece has as many splits as characters,
    and each is as long as the piece.
    """
    scores = data.fields.array("scores", (int, float), len(data.pieces))
    normal = {piece: index for index, piece in enumerate(data.pieces) if data.types[index] == NORMAL}
    characters = sum(len(piece) ** 2 for piece in normal)
    if characters > MAX_SPLIT_CHARACTERS:
        reason = f"tokenizer.ggml.tokens has {characters} characters, where each piece is cut in two at every place"
        raise CheckpointError(f"{reason}; {MAX_SPLIT_CHARACTERS} are the most without tokenizer.ggml.merges")
    merges = list[tuple[str, str]]()
    for piece in sorted(normal, key=lambda piece: (-scores[normal[piece]], normal[piece])):
        cuts = ((normal.get(piece[:at]), normal.get(piece[at:])) for at in range(1, len(piece)))
        known = sorted((left, right) for left, right in cuts if left is not None and right is not None)
        merges.extend((data.pieces[left], data.pieces[right]) for left, right in known)
        if len(merges) > MAX_DERIVED_MERGES:
            reason = f"tokenizer.ggml.tokens has more than {MAX_DERIVED_MERGES} pieces made of two others"
            raise CheckpointError(f"{reason}, which are the most without tokenizer.ggml.merges")
    return merges


def _from_bert(data: _Data) -> Vocabulary:
    spelled = [_as_word_piece(piece, kind) for piece, kind in zip(data.pieces, data.types, strict=True)]
    data = replace(data, pieces=spelled)
    accents = "normalizer.strip_accents"
    words = WordPieceOptions(
        lowercase=data.fields.read("normalizer.lowercase", bool, True),
        strip_accents=data.fields.read(accents, bool) if data.fields.has(accents) else None,
        unknown=data.roles.get("unknown", "[UNK]"),
        first=data.roles.get("cls", data.roles.get("bos", "[CLS]")),
        separator=data.roles.get("seperator", "[SEP]"),
    )
    backend = run_build(lambda: word_piece_backend(data.piece_ids(), words))
    return data.build_vocabulary(backend, words.first, data.roles.get("eos", words.separator))


def _as_word_piece(piece: str, kind: int) -> str:
    """GGUF marks the start of a word; WordPiece marks pieces inside of one."""
    if piece.startswith(SPACE):
        return piece[1:]
    return piece if kind in (UNKNOWN, CONTROL) or (piece[:1], piece[-1:]) == ("[", "]") else f"##{piece}"


_KINDS = {
    "gpt2": _from_gpt2,
    "gemma4": _from_gemma4,
    "llama": _from_llama,
    "bert": _from_bert,
    "t5": _from_t5,
}
