"""The kinds of vocabulary and how each splits text. Every kind becomes a `tokenizers.Tokenizer`, so that after loading
there is one encoder whatever the file format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..core.errors import CheckpointError, ModelError, show_value
from .panics import load_failure, run_library

MAX_PIECE_LENGTH = 4096  # characters of a token; published ones have a few hundred
MAX_VOCABULARY_TEXT = 1 << 25  # characters of all tokens; vocabularies of 262,144 tokens have two million
SPACE = "\u2581"  # a space in SentencePiece's pieces
WORD_END = "</w>"  # the end of a word in merges over words
MAX_SPLIT_CHARACTERS = (
    1 << 27
)  # characters of all pieces, each split at every place; 262,144 published ones have 15 million
MAX_DERIVED_MERGES = 1 << 21  # merges made of splits; 262,144 published pieces have about half a million
T = TypeVar("T")


@dataclass(frozen=True)
class Vocabulary:
    """An encoder, and the pieces for the beginning, end, padding, unknown text and mask (empty: the checkpoint names
    none)."""

    backend: Tokenizer
    bos: str = ""
    eos: str = ""
    pad: str = ""
    unk: str = ""
    mask: str = ""


@dataclass(frozen=True)
class SplitRules:
    """How byte-level text is split before merging: each pattern splits what the patterns before it left whole.

    `whole` keeps a split that is itself in the vocabulary as one token, even if the merges would split it. `bos` and
    `pair` are the defaults for what is added around a text: a first token; RoBERTa's separators. `spelled_space`:
    pieces are text in which each space is U+2581, with byte pieces for what has none, as in SentencePiece.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    pair: bool = False
    nfc: bool = False
    spelled_space: bool = False


# The patterns are published by the makers of the vocabularies, in their tokenizer.json or merge tables.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # DIGITS is a pattern of numbers

GPT2_SPLIT = SplitRules((WORDS,))
ROBERTA_SPLIT = SplitRules((WORDS,), pair=True)
QWEN2_SPLIT = SplitRules((CASED.replace("DIGITS", r"\p{N}"),), nfc=True)


def run_build(make: Callable[[], T], file: str = "") -> T:
    """The result of `make`, which builds from a checkpoint's data; CheckpointError naming `file` if the data is
    invalid."""
    try:
        return run_library(make, load_failure(file))
    except ModelError:
        raise
    except Exception as problem:  # the tokenizers library raises bare Exception, nothing narrower, for bad data
        raise CheckpointError(f"is no usable vocabulary: {problem}", file=file) from problem


def byte_level_merges(
    pieces: Mapping[str, int], merges: Sequence[tuple[str, str]], split: SplitRules, *, prefix_space: bool = False
) -> Tokenizer:
    """Byte-pair merges over UTF-8 bytes, spelled in an alphabet of 256 printable characters (GPT-2).

    `prefix_space` encodes the first word of a text like any other; it is for patterns that end in words.
    """
    backend = Tokenizer(models.BPE(vocab=dict(pieces), merges=list(merges), ignore_merges=split.whole))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    ends_in_words = split.patterns[-1] == WORDS  # which the library has built in
    patterns = split.patterns[:-1] if ends_in_words else split.patterns
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=ends_in_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts) if len(cuts) > 1 else cuts[0]
    backend.decoder = decoders.ByteLevel()
    return backend


def word_end_merges(pieces: Mapping[str, int], merges: Sequence[tuple[str, str]], *, unknown: str) -> Tokenizer:
    """Merges over the characters of lower-cased words, whose last piece ends in `</w>` (GPT; Sennrich et al. 2016)."""
    model = models.BPE(vocab=dict(pieces), merges=list(merges), unk_token=unknown, end_of_word_suffix=WORD_END)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix=WORD_END)
    return backend


def sentencepiece_merges(
    pieces: Mapping[str, int], merges: Sequence[tuple[str, str]], *, unknown: str, prefix_space: bool
) -> Tokenizer:
    """SentencePiece merges over characters; characters without a piece are spelled in bytes, `<0x0A>` (Llama, Gemma).

    `prefix_space` puts a space before every text, as SentencePiece does, and removes it in decoding.
    """
    model = models.BPE(vocab=dict(pieces), merges=list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        spaces.insert(0, normalizers.Prepend(SPACE))
        steps.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges that behave like SentencePiece, which joins the pair whose piece has the best score: every split of every
    piece, best piece first. The pieces are in the order of their ids.

    CheckpointError for pieces with more splits than any published vocabulary: a piece has as many splits as characters,
    and each is as long as the piece.
    """
    order = {piece: index for index, piece in enumerate(scores)}
    characters = sum(len(piece) ** 2 for piece in scores)
    if characters > MAX_SPLIT_CHARACTERS:
        reason = f"it has {characters} characters, where each piece is cut in two at every place"
        raise CheckpointError(f"{reason}; {MAX_SPLIT_CHARACTERS} are the most")
    merges = list[tuple[str, str]]()
    for piece in sorted(scores, key=lambda piece: (-scores[piece], order[piece])):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [cut for cut in cuts if cut[0] in order and cut[1] in order]
        merges.extend(sorted(known, key=lambda cut: (order[cut[0]], order[cut[1]])))
        if len(merges) > MAX_DERIVED_MERGES:
            raise CheckpointError(f"it has more than {MAX_DERIVED_MERGES} pieces made of two others")
    return merges


@dataclass(frozen=True)
class WordPieceOptions:
    """How WordPiece normalizes text; `strip_accents` None: as `lowercase`."""

    lowercase: bool = True
    strip_accents: bool | None = None
    chinese: bool = True  # split every Chinese character into a word of its own
    unknown: str = "[UNK]"
    first: str = "[CLS]"
    separator: str = "[SEP]"


def word_piece_backend(pieces: Mapping[str, int], options: WordPieceOptions) -> Tokenizer:
    """WordPiece: the longest pieces of each word; pieces inside a word begin with `##` (BERT)."""
    for piece in (options.unknown, options.first, options.separator):
        if piece not in pieces:
            raise ValueError(f"it has no {show_value(piece)}")
    backend = Tokenizer(models.WordPiece(vocab=dict(pieces), unk_token=options.unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.chinese,
        strip_accents=options.strip_accents,
        lowercase=options.lowercase,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.BertProcessing(
        (options.separator, pieces[options.separator]), (options.first, pieces[options.first])
    )
    return backend


def add_boundary_tokens(backend: Tokenizer, bos: str, eos: str, *, double: bool = False) -> None:
    """Add `bos` before and `eos` after every text (empty: nothing); a pair's second text gets the same.

    `double` is RoBERTa's pair instead: bos first eos eos second eos, all in one segment.
    """
    before, after = ([f"{bos}:0"] if bos else []), ([f"{eos}:0"] if eos else [])
    single = [*before, "$A:0", *after]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    if double:
        pair = [*single, *after, "$B:0", *after]
    used = [(piece, backend.token_to_id(piece)) for piece in dict.fromkeys((bos, eos)) if piece]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
