"""Reads the default decoding rules (models.seq2seq.decoding.DecodingConfig) of an encoder-decoder from
generation_config.json, or from config.json if that file is missing, as transformers does. A field that would change an
answer is either followed or refused by name."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from logging import getLogger
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..network.model_config import ModelConfig
from ..seq2seq.decoding import DecodingConfig
from .folder_files import MAX_STOP_TOKENS, JsonObject, parse_config, read_json

FILE = "generation_config.json"
SUPPORTED_FIELDS = frozenset((
    "bad_words_ids", "bos_token_id", "decoder_start_token_id", "do_sample", "early_stopping", "eos_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "min_new_tokens", "no_repeat_ngram_size", "num_beams", "renormalize_logits", "suppress_tokens", "temperature",
    "top_k", "top_p",
))  # fmt: skip
NEUTRAL_VALUES: Mapping[str, Any] = {
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_p": None,
    "num_request_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}  # fields that would change answers, and the values with which they do not; None: only if not set
IGNORED_FIELDS = re.compile(
    "_from_model_config|assistant_|cache_|compile_|continuous_batching|disable_compile|is_assistant|low_memory|max_cache|"
    "max_matching|num_assistant|output_|pad_token_id|prefill_|prompt_lookup|remove_invalid_values|return_dict|speculation|"
    "target_lookbehind|transformers_version|use_"
)  # prefixes of fields that do not change the output
DEFAULT_TOP_K = 50  # transformers' default
MAX_BANNED_TOKENS = 4096  # different ones, as many as a request may ban; published models have about a hundred
MAX_LISTED_TOKENS = 1 << 16  # banned ones that a file lists, repeats included; each is compared with the others
MAX_FORCED_TOKENS = 64  # first or last tokens of an answer; published models have one
MAX_BEAMS = 64  # as many as a request may ask for
MAX_COUNT = 2**31 - 1  # of what is counted in a step
# Fields that are whole numbers, with the least and the largest one; a longest answer is cut to the network's positions.
COUNT_RANGES: Mapping[str, tuple[float, float]] = {
    "max_length": (1, math.inf),
    "max_new_tokens": (1, math.inf),
    "min_length": (0, MAX_COUNT),
    "min_new_tokens": (0, MAX_COUNT),
    "no_repeat_ngram_size": (0, MAX_COUNT),
    "num_beams": (1, MAX_BEAMS),
    "top_k": (0, MAX_COUNT),
}
REAL_RANGES: Mapping[str, tuple[float, float]] = {
    "length_penalty": (-sys.float_info.max, sys.float_info.max),
    "temperature": (0, 100),  # as of requests
    "top_p": (0, 1),
}
SWITCHES = ("do_sample", "renormalize_logits")
MAX_SHOWN = 100  # characters of a value in a message
log = getLogger(__name__)


@dataclass(frozen=True)
class StartToken:
    """The token before the first generated one, and the field and the file that name it."""

    token: int
    field: str
    file: Path

    def check(self, vocab_size: int) -> None:
        """CheckpointError unless the network has the token."""
        parse_config(str(self.file), lambda: check_token_range(self.field, (self.token,), vocab_size))


def read_start_token(folder: Path, config: JsonObject) -> StartToken:
    fields, file = read_generation_fields(folder, config)
    for key in ("decoder_start_token_id", "bos_token_id"):
        for each, named in ((fields, file), (config, folder / "config.json")):
            if type(token := each.get(key)) is int:
                return StartToken(token, key, named)
            if isinstance(token, bool):
                raise CheckpointError(f"{key} is {token}, which should be the id of a token", file=str(named))
    message = "decoder_start_token_id is missing: the token before the first generated one"
    raise CheckpointError(message, file=str(file))


def read_decoding_config(folder: Path, config: JsonObject, decoder: ModelConfig) -> DecodingConfig:
    """The default decoding rules. CheckpointError or UnsupportedError names the field that cannot be followed."""
    fields, file = read_generation_fields(folder, config)
    check_fields(fields, file)
    return parse_config(str(file), lambda: build_decoding_config(fields, read_eos_tokens(fields, config), decoder))


def read_generation_fields(folder: Path, config: JsonObject) -> tuple[JsonObject, Path]:
    """The fields of the generation configuration, and the file they are from."""
    if (folder / FILE).is_file():
        return read_json(folder / FILE), folder / FILE
    known = {*SUPPORTED_FIELDS, *NEUTRAL_VALUES}
    return {key: value for key, value in config.items() if key in known}, folder / "config.json"


def check_fields(fields: JsonObject, file: Path) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        if fields.get(key) not in (None, neutral, []):
            raise UnsupportedError(
                f"{key} {show_value(fields[key])} would change the output and is not supported; remove it, or use "
                "another file",
                file=str(file),
            )
    known = {*SUPPORTED_FIELDS, *NEUTRAL_VALUES}
    unknown = [key for key in fields if key not in known and not IGNORED_FIELDS.match(key)]
    if unknown:
        log.warning("%s: its fields %s are not known, and are ignored", file, show_value(unknown))


def read_eos_tokens(fields: JsonObject, config: JsonObject) -> frozenset[int]:
    ends = token_ids(fields.get("eos_token_id", config.get("eos_token_id")))
    if len(ends) > MAX_STOP_TOKENS:
        raise CheckpointError(f"eos_token_id has {len(ends)} tokens; {MAX_STOP_TOKENS} are the most")
    return frozenset(ends)


def build_decoding_config(fields: JsonObject, stops: frozenset[int], decoder: ModelConfig) -> DecodingConfig:
    """The decoding rules from the fields. `max_length` and `min_length` in the file include the start token;
    `max_new_tokens` and `min_new_tokens` do not."""
    given = {key: value for key, value in fields.items() if value is not None}
    check_kinds(given)
    check_token_range("eos_token_id", stops, decoder.vocab_size)
    longest = given.get("max_new_tokens", given.get("max_length", decoder.max_positions + 1) - 1)
    early = given.get("early_stopping", False)
    if early != "never" and not isinstance(early, bool):
        raise UnsupportedError(f"early_stopping {show_value(early)} is not true, false or never")
    sampled, beams = given.get("do_sample", False), int(given.get("num_beams", 1))
    if sampled and beams > 1:
        raise UnsupportedError("do_sample with num_beams: sampled beams are not supported; set one of them")
    return DecodingConfig(
        stop_tokens=stops,
        max_tokens=max(min(int(longest), decoder.max_positions), 1),
        min_tokens=max(int(given.get("min_length", 0)) - 1, int(given.get("min_new_tokens", 0)), 0),
        forced_first=read_forced_tokens(given, "forced_bos_token_id", decoder.vocab_size),
        forced_last=read_forced_tokens(given, "forced_eos_token_id", decoder.vocab_size),
        banned_tokens=read_banned_tokens(given, stops, decoder.vocab_size),
        no_repeat_ngram=int(given.get("no_repeat_ngram_size", 0)),
        renormalize=given.get("renormalize_logits", False),
        beams=beams,
        length_penalty=float(given.get("length_penalty", 1.0)),
        early_stopping=early is True,
        never_stop_early=early == "never",
        sample=sampled,
        temperature=float(given.get("temperature", 1.0)),
        top_k=int(given.get("top_k", DEFAULT_TOP_K)),
        top_p=float(given.get("top_p", 1.0)),
    )


def check_kinds(given: JsonObject) -> None:
    """ValueError for a field that is no number in its range, or no boolean where one belongs."""
    for key, (least, most) in (*COUNT_RANGES.items(), *REAL_RANGES.items()):
        value, kind = given.get(key, least), "a whole number" if key in COUNT_RANGES else "a number"
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or not least <= value <= most or (key in COUNT_RANGES and value != int(value)):
            bounds = f"from {least} on" if most == math.inf else f"from {least} to {most}"
            raise ValueError(f"{key} is {show_value(value, MAX_SHOWN)}, which should be {kind} {bounds}")
    for key in SWITCHES:
        if not isinstance(given.get(key, False), bool):
            raise ValueError(f"{key} is {show_value(given[key], MAX_SHOWN)}, which should be true or false")


def token_ids(ids: object) -> tuple[int, ...]:
    """A tuple of token ids from one id, a list of ids or None."""
    if ids is None:
        return ()
    found = ids if isinstance(ids, list) else [ids]
    if not all(type(each) is int for each in found):
        raise ValueError(f"{show_value(ids, MAX_SHOWN)} is no token id and no list of them")
    return tuple(found)


def read_forced_tokens(given: JsonObject, key: str, vocab_size: int) -> tuple[int, ...]:
    tokens = token_ids(given.get(key))
    if len(tokens) > MAX_FORCED_TOKENS:
        raise CheckpointError(f"{key} has {len(tokens)} tokens; {MAX_FORCED_TOKENS} are the most")
    check_token_range(key, tokens, vocab_size)
    return tokens


def read_banned_tokens(given: JsonObject, stops: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    """Tokens that are never generated, each once; an end token cannot be banned as a bad word. Every request prepares
    them, so at most MAX_BANNED_TOKENS are allowed.

    A file may hold numbers that a table of Python places badly: each then takes as long as all before it, and other
    threads wait for one call that makes a table of all. So numbers are counted and compared with the vocabulary before
    the first is put into a table, and the table ends with the first number that is too many.
    """
    words, suppressed = given.get("bad_words_ids", []), token_ids(given.get("suppress_tokens"))
    if not isinstance(words, list):
        raise ValueError(f"bad_words_ids is a {type(words).__name__} where a list of lists belongs")
    if (listed := len(words) + len(suppressed)) > MAX_LISTED_TOKENS:
        raise CheckpointError(
            f"bad_words_ids and suppress_tokens have {listed} tokens; {MAX_LISTED_TOKENS} are the most"
        )
    bad_words = [token_ids(word) for word in words]
    if any(len(word) != 1 for word in bad_words):
        raise UnsupportedError("bad_words_ids of several tokens are not known here, only of one token each")
    tokens = [*(token for (token,) in bad_words if token not in stops), *suppressed]
    check_token_range("bad_words_ids", tokens[: len(tokens) - len(suppressed)], vocab_size)
    check_token_range("suppress_tokens", suppressed, vocab_size)
    found = dict[int, None]()
    for token in tokens:
        found[token] = None
        if len(found) > MAX_BANNED_TOKENS:
            raise CheckpointError(
                f"bad_words_ids and suppress_tokens have more than {MAX_BANNED_TOKENS} different tokens"
            )
    return tuple(found)


def check_token_range(key: str, tokens: Iterable[int], vocab_size: int) -> None:
    """CheckpointError that names tokens of a field which the network does not have."""
    if outside := list(islice((token for token in tokens if not 0 <= token < vocab_size), MAX_SHOWN)):
        named = show_value(sorted(outside), MAX_SHOWN)
        raise CheckpointError(f"{key} names tokens {named}; the network has the tokens 0 to {vocab_size - 1}")
