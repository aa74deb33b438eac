"""How GGUF files have byte-pair merges split text, by the value of `tokenizer.ggml.pre`.

The names are those of llama.cpp (src/llama-vocab.cpp); the patterns are those of the models' own tokenizers, which
llama.cpp rewrites for its matcher. `tests/support/gguf_splits.json` has the splits of llama.cpp itself.
"""

from difflib import get_close_matches

from .vocabulary import CASED, GPT2_SPLIT, QWEN2_SPLIT, ROBERTA_SPLIT, WORDS, SplitRules

MAX_COMPARED_NAME = 64  # characters of an unknown name that is compared with the known ones
CLOSE_NAMES = 5

_ONE_DIGIT, _THREE_DIGITS = (CASED.replace("DIGITS", digits) for digits in (r"\p{N}", r"\p{N}{1,3}"))
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAMEL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_LETTER_OR_MARK = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
)
_WORD_OR_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_PUNCTUATED = _WORD_OR_PUNCTUATION + r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_KOREAN_OR_PUNCTUATION = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _HAN_AND_KANA
)
_SENTENCE_PARTS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Groups of three from the end of a number.
_GROUPED_NUMBERS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_NOT_HAN = r"&&[^\p{Han}]]"
_UPPER, _LOWER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]" + _NOT_HAN, r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]" + _NOT_HAN
_WITHOUT_HAN = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)
_HALVED_SPACES = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
_LATIN = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)

_SINGLE_DIGITS = SplitRules((r"\p{N}", WORDS))
_LLAMA3 = SplitRules((_THREE_DIGITS,), whole=True, bos=True)
_GPT4O = SplitRules((_CAMEL.replace("DIGITS", r"\p{N}{1,3}").replace("ENDING", _ENDING),))
_CAMEL_DIGIT = _CAMEL.replace("DIGITS", r"\p{N}")
_DEEPSEEK3 = SplitRules((r"\p{N}{1,3}", _HAN_AND_KANA, _PUNCTUATED))
_BLOOM = SplitRules((_SENTENCE_PARTS,))
_BAILING = SplitRules((_ONE_DIGIT.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),))
_LINES = SplitRules((r"[^\n]+|\n+",), spelled_space=True)

SPLITS: dict[str, SplitRules] = {
    "default": SplitRules((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "modern-bert"), GPT2_SPLIT),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), GPT2_SPLIT),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "granite-docling"), GPT2_SPLIT),
    **dict.fromkeys(("roberta-bpe", "jina-v1-en", "jina-v2-code"), ROBERTA_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), SplitRules((_THREE_DIGITS,))),
    **dict.fromkeys(("qwen2", "megrez", "f2llmv2"), QWEN2_SPLIT),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "kormo"), SplitRules((_ONE_DIGIT,))),
    **dict.fromkeys(("grok-2", "solar-open"), SplitRules((_ONE_DIGIT,))),
    "qwen35": SplitRules((_LETTER_OR_MARK,), nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "granite-embed-multi-97m": SplitRules(_GPT4O.patterns, whole=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), SplitRules((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))),
    "tekken": SplitRules((_CAMEL_DIGIT.replace("ENDING", ""),), whole=True, bos=True),
    "falcon": SplitRules((r"[\p{P}\$\+<=>\^~\|`]+", WORDS, "[0-9][0-9][0-9]")),
    "deepseek-llm": SplitRules(
        (
            "[\r\n]",
            _LATIN,
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": SplitRules(
        (
            r"\p{N}{1,3}",
            _HAN_AND_KANA,
            _WORD_OR_PUNCTUATION + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": SplitRules((_KOREAN_OR_PUNCTUATION, _CAMEL_DIGIT.replace("ENDING", _ENDING)), whole=True),
    "afmoe": SplitRules((_GROUPED_NUMBERS, _ASIAN, _PUNCTUATED)),
    "superbpe": SplitRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "kimi-k2": SplitRules((_WITHOUT_HAN,)),
    "jais-2": SplitRules((_THREE_DIGITS.replace(r"|\s+(?!\S)|\s+", _HALVED_SPACES),)),
    "minicpm5": SplitRules((r"\p{N}{1,3}", CASED.replace("DIGITS", r"\p{N}+")), whole=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": SplitRules((_ONE_DIGIT.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)),
    "ufakzeka": SplitRules((_ONE_DIGIT.removeprefix(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"),)),
    "laguna": SplitRules((r"[^\n]+|\n+", _ONE_DIGIT)),
    "exaone-moe": SplitRules(
        (
            _ONE_DIGIT.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
            .replace(r"[\r\n]*", r"[\r\n/]?")
            .replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
        )
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": SplitRules((_SENTENCE_PARTS, r"\p{N}")),
    "chameleon": SplitRules(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            WORDS,
        ),
        bos=True,
    ),
    "gemma4": SplitRules(_LINES.patterns, bos=True, spelled_space=True),
    "granite-embed-multi-311m": SplitRules(_LINES.patterns, bos=True, spelled_space=True),
    "sarvam-moe": _LINES,
}


def close_names(name: str) -> list[str]:
    """The known names that are most like an unknown one, or all if none is."""
    if len(name) > MAX_COMPARED_NAME:
        return sorted(SPLITS)
    return get_close_matches(name, SPLITS, CLOSE_NAMES) or sorted(SPLITS)
