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
    `pair` are the defaults for what is added around a text: a first token; RoBERTa's separators.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    pair: bool = False
    nfc: bool = False


# The patterns are published by the makers of the vocabularies, in their tokenizer.json or merge tables.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CAMEL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LETTER_OR_MARK = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

GPT2_SPLIT = SplitRules((_WORDS,))
ROBERTA_SPLIT = SplitRules((_WORDS,), pair=True)
QWEN2_SPLIT = SplitRules((_CASED.replace("DIGITS", r"\p{N}"),), nfc=True)
_SINGLE_DIGITS = SplitRules((r"\p{N}", _WORDS))
_THREE_DIGITS = (_CASED.replace("DIGITS", r"\p{N}{1,3}"),)
_LLAMA3 = SplitRules(_THREE_DIGITS, whole=True, bos=True)
_GPT4O = SplitRules((_CAMEL.replace("DIGITS", r"\p{N}{1,3}").replace("ENDING", _ENDING),))
_DEEPSEEK3 = SplitRules((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _PUNCTUATED))

# The split rules by the value of `tokenizer.ggml.pre` in a GGUF file.
SPLITS: dict[str, SplitRules] = {
    "default": SplitRules((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "modern-bert"), GPT2_SPLIT),
    **dict.fromkeys(("roberta-bpe", "jina-v1-en", "jina-v2-code"), ROBERTA_SPLIT),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), GPT2_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), SplitRules(_THREE_DIGITS)),
    **dict.fromkeys(("qwen2", "megrez"), QWEN2_SPLIT),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan"), SplitRules(QWEN2_SPLIT.patterns)),
    "qwen35": SplitRules((_LETTER_OR_MARK,), nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": SplitRules((_CAMEL.replace("DIGITS", r"\p{N}").replace("ENDING", ""),), whole=True, bos=True),
    "falcon": SplitRules((r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]")),
    "deepseek-coder": SplitRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}


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
    ends_in_words = split.patterns[-1] == _WORDS  # which the library has built in
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
