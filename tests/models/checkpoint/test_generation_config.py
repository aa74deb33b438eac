"""Limits of the default decoding rules in a checkpoint, which every request has to prepare."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.checkpoint.generation_config import (
    MAX_BANNED_TOKENS,
    MAX_FORCED_TOKENS,
    MAX_LISTED_TOKENS,
    read_decoding_config,
    read_start_token,
)
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.seq2seq.decoding import DecodingConfig

WORDS = 8192
DECODER = ModelConfig(
    vocab_size=WORDS,
    width=8,
    depth=1,
    heads=2,
    kv_heads=2,
    head_width=4,
    mlp_width=8,
    max_positions=64,
    causal=True,
)


def read(folder: Path, **fields: Any) -> DecodingConfig:
    fields = {"decoder_start_token_id": 0, "eos_token_id": 1, **fields}
    (folder / "generation_config.json").write_text(json.dumps(fields), "utf-8")
    return read_decoding_config(folder, {}, DECODER)


def test_banned_tokens_are_deduplicated(tmp_path: Path) -> None:
    found = read(tmp_path, bad_words_ids=[[7], [1], [7]], suppress_tokens=[5] * 50_000 + [7, 9])
    assert found.banned_tokens == (7, 5, 9)


def test_banned_tokens_are_limited(tmp_path: Path) -> None:
    tokens = list(range(2, 2 + MAX_BANNED_TOKENS))
    assert read(tmp_path, suppress_tokens=tokens).banned_tokens == tuple(tokens)
    for fields in (
        {"suppress_tokens": [*tokens, WORDS - 1]},
        {"bad_words_ids": [[token] for token in (*tokens, WORDS - 1)]},
        {"bad_words_ids": [[WORDS - 1]], "suppress_tokens": tokens},
    ):
        with pytest.raises(CheckpointError, match="suppress_tokens have more than 4096 different tokens"):
            read(tmp_path, **fields)


def test_banned_tokens_are_compared_with_the_vocabulary_before_they_are_hashed(tmp_path: Path) -> None:
    """Numbers above the vocabulary can be chosen so that all collide in a table of Python."""
    colliding = [WORDS + (number << 20) for number in range(MAX_BANNED_TOKENS + 1)]
    for fields in ({"suppress_tokens": colliding}, {"bad_words_ids": [[token] for token in colliding]}):
        with pytest.raises(
            CheckpointError, match=rf"_(tokens|ids) names tokens \[{WORDS}, .*; the network has the tokens 0 to"
        ):
            read(tmp_path, **fields)


def test_banned_tokens_that_a_file_lists_are_counted_with_repeats(tmp_path: Path) -> None:
    assert read(tmp_path, suppress_tokens=[5] * MAX_LISTED_TOKENS).banned_tokens == (5,)
    with pytest.raises(CheckpointError, match="suppress_tokens have 65537 tokens; 65536 are the most"):
        read(tmp_path, bad_words_ids=[[5]], suppress_tokens=[5] * MAX_LISTED_TOKENS)


@pytest.mark.parametrize("key", ["forced_bos_token_id", "forced_eos_token_id"])
def test_forced_tokens_are_limited(tmp_path: Path, key: str) -> None:
    read(tmp_path, **{key: [5] * MAX_FORCED_TOKENS})
    with pytest.raises(CheckpointError, match=f"{key} has 65 tokens; 64 are the most"):
        read(tmp_path, **{key: [5] * (MAX_FORCED_TOKENS + 1)})


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([WORDS, -1], rf"suppress_tokens names tokens \[-1, {WORDS}\]; the network has the tokens 0 to {WORDS - 1}"),
        (list(range(WORDS, WORDS + 4000)), r"suppress_tokens names tokens \[8192, 8193, .*\.\.\.; the network"),
        (["5"] * 100_000, r"\['5', '5', .*\.\.\. is no token id and no list of them"),
    ],
)
def test_messages_name_the_tokens_and_stay_short(tmp_path: Path, tokens: list[Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as raised:
        read(tmp_path, suppress_tokens=tokens)
    assert len(str(raised.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"eos_token_id": [1, WORDS]}, rf"eos_token_id names tokens \[{WORDS}\]; the network has the tokens 0 to"),
        ({"forced_bos_token_id": -1}, r"forced_bos_token_id names tokens \[-1\]; the network"),
        ({"forced_eos_token_id": [5, 2**40]}, r"forced_eos_token_id names tokens \[1099511627776\]; the"),
        ({"bad_words_ids": [[WORDS]]}, rf"bad_words_ids names tokens \[{WORDS}\]; the network"),
        ({"num_beams": 10**6}, "num_beams is 1000000, which should be a whole number from 1 to 64"),
        ({"num_beams": 0}, "num_beams is 0, which"),
        ({"num_beams": 2.9}, "num_beams is 2.9, which"),
        ({"num_beams": "3"}, "num_beams is '3', which"),
        ({"num_beams": True}, "num_beams is True, which"),
        ({"temperature": "nan"}, "temperature is 'nan', which should be a number from 0 to 100"),
        ({"temperature": -1}, "temperature is -1, which"),
        ({"temperature": 1e6}, "temperature is 1000000.0, which"),
        ({"top_p": "nan"}, "top_p is 'nan', which should be a number from 0 to 1"),
        ({"top_p": 1.5}, "top_p is 1.5, which"),
        ({"top_k": -7}, "top_k is -7, which should be a whole number from 0 to"),
        ({"no_repeat_ngram_size": -3}, "no_repeat_ngram_size is -3, which"),
        ({"no_repeat_ngram_size": [1] * 10**5}, r"no_repeat_ngram_size is \[1, 1, .*, which should be a whole number"),
        ({"length_penalty": "-inf"}, "length_penalty is '-inf', which should be a number"),
        ({"max_length": "9" * 5000}, "max_length is '999.*, which should be a whole number from 1 on"),
        ({"max_new_tokens": -9}, "max_new_tokens is -9, which"),
        ({"min_length": 1e300}, "min_length is 1e.300, which"),
        ({"do_sample": "yes"}, "do_sample is 'yes', which should be true or false"),
        ({"renormalize_logits": 1}, "renormalize_logits is 1, which should be true or false"),
        ({"early_stopping": 1}, "early_stopping 1 is not true, false or never"),
    ],
)
def test_rules_without_sense_are_refused(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as raised:
        read(tmp_path, **fields)
    assert raised.value.file == str(tmp_path / "generation_config.json")
    assert len(str(raised.value)) < 400 + len(str(tmp_path))


def test_rules_at_the_ends_of_their_ranges_are_followed(tmp_path: Path) -> None:
    found = read(tmp_path, num_beams=64, length_penalty=-1e308, max_length=1e30, no_repeat_ngram_size=3.0, top_k=None)
    assert (found.beams, found.length_penalty, found.max_tokens, found.no_repeat_ngram) == (64, -1e308, 64, 3)
    found = read(tmp_path, do_sample=True, temperature=0, top_p=0, top_k=0, early_stopping="never")
    assert (found.sample, found.temperature, found.top_p, found.top_k) == (True, 0.0, 0.0, 0)
    assert found.never_stop_early


@pytest.mark.parametrize(
    ("fields", "config", "file", "problem"),
    [
        (
            {"decoder_start_token_id": True},
            {},
            "generation_config.json",
            "decoder_start_token_id is True, which should",
        ),
        ({"decoder_start_token_id": WORDS}, {}, "generation_config.json", rf"decoder_start_token_id names .*{WORDS}"),
        ({"bos_token_id": -2}, {}, "generation_config.json", r"bos_token_id names tokens \[-2\]; the network has"),
        ({}, {"decoder_start_token_id": 10**9}, "config.json", r"decoder_start_token_id names tokens \[1000000000\]"),
        ({}, {}, "generation_config.json", "decoder_start_token_id is missing"),
    ],
)
def test_a_start_token_that_the_network_does_not_have_is_refused(
    tmp_path: Path, fields: dict[str, Any], config: dict[str, Any], file: str, problem: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields), "utf-8")
    with pytest.raises(CheckpointError, match=problem) as raised:
        read_start_token(tmp_path, config).check(WORDS)
    assert raised.value.file == str(tmp_path / file)
