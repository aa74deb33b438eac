"""How GGUF files have text split, compared with llama.cpp.

gguf_splits.json has the lengths of the pieces into which llama.cpp (build 11549) splits some texts under every name,
found with a vocabulary that has each substring of the texts as a piece and every way to merge it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from polyhead.models.core.errors import UnsupportedError
from polyhead.models.tokenizer.gguf_splits import SPLITS, close_names
from polyhead.models.tokenizer.gguf_vocabulary import read_gguf_vocabulary

RECORDED = json.loads((Path(__file__).parents[2] / "support/gguf_splits.json").read_text("utf-8"))
LLAMACPP = {name: each["lengths"] for each in RECORDED["splits"] for name in each["names"]}
MARKS, CAMEL, NUMERALS = "e\u0301a\u0308 o", "camelCaseHTTPServer", "₂²③Ⅳ٣४"
HINDI, WIDE = "हिन्दी में", "\u00a0nbsp\u3000wide"
# Here llama.cpp parts letters from their marks, ignores case inside of a word, knows digits of ASCII alone, or takes a
# wide space for none of the characters around it. The patterns in the models' own tokenizer.json files do not.
DIFFERENT = {
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"), (MARKS, HINDI)),
    "kimi-k2": (MARKS, HINDI, CAMEL),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (CAMEL, NUMERALS)),
    "youtu": (CAMEL,),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), (WIDE,)),
}


def split_lengths(name: str) -> list[list[int]]:
    """The lengths of the pieces of each text, before merges."""
    spelled = SPLITS[name].spelled_space
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if spelled else pre_tokenizers.ByteLevel.alphabet()
    fields: dict[str, Any] = {"model": "gpt2", "pre": name, "tokens": [*pieces, "<s>"], "merges": []}
    fields |= {"bos_token_id": 256, "eos_token_id": 256, "unknown_token_id": 256}
    backend: Any = read_gguf_vocabulary({f"tokenizer.ggml.{key}": value for key, value in fields.items()}).backend
    texts = [backend.normalizer.normalize_str(text) if spelled else text for text in RECORDED["texts"]]
    return [[len(piece) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] for text in texts]


def test_every_known_name_is_compared() -> None:
    assert SPLITS.keys() == LLAMACPP.keys()
    assert len(SPLITS) > 80


@pytest.mark.parametrize("names", [tuple(each["names"]) for each in RECORDED["splits"]], ids=lambda names: names[0])
def test_text_is_split_as_llamacpp_splits_it(names: tuple[str, ...]) -> None:
    for name in names:
        found = zip(RECORDED["texts"], split_lengths(name), LLAMACPP[name], strict=True)
        different = {text for text, ours, theirs in found if ours != theirs}
        expected = set(DIFFERENT.get(name, ()))
        assert different == expected, name


def test_the_error_for_an_unknown_name_lists_close_ones() -> None:
    fields = {"model": "gpt2", "pre": "llama-bpee", "tokens": ["a"], "merges": []}
    with pytest.raises(UnsupportedError, match=r"'llama-bpee' \(tokenizer\.ggml\.pre\).*llama-bpe, "):
        read_gguf_vocabulary({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert close_names("qwen-2")[0] == "qwen2"
    assert close_names("\u00e4" * 3) == sorted(SPLITS) == close_names("x" * 10**6)
