"""Patterns over module names match as PEFT's regular expressions do, in bounded time."""

import re

import pytest

from polyhead.models.checkpoint.module_patterns import UnsupportedPattern, matches

MODULES = (
    "q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.v_proj",
    "model.layers.2.mlp.down_proj",
    "bert.encoder.layer.0.attention.self.query",
    "xq_proj",
)
PATTERNS = (
    *("q_proj", r"self_attn\.q_proj", "layers.1.self_attn.q_proj", r"model\.layers\.\d+\.self_attn\.(q|v)_proj"),
    *(".*proj", ".+proj", r"layers\.(1|2)\..*", "^q_proj", "^model.*q_proj$", "q_proj$|down_proj", "(?:q|q_proj)"),
    *(r"\d+.*", r"layers\.[0-9]+\..*_proj", "", "layer.0", "a|ab|.*query", r"(model|bert).*\d+.*(key|query)"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_simple_patterns_match_as_in_peft(pattern: str) -> None:
    """https://github.com/huggingface/peft: get_pattern_key."""
    wanted = [bool(re.fullmatch(rf"(.*\.)?({pattern})", module)) for module in MODULES]
    assert [matches(pattern, module) for module in MODULES] == wanted


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "a*", "a{3}", "[ab]", "(a", "a)", "(a(b))", r"(\1)", "(a|b)*", "a$b", "x" * 201]
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        matches(pattern, "a")


@pytest.mark.parametrize("pattern", [".*a" * 60 + "b", "(a|aa)" * 30 + "b", r"\d+" * 60 + "b", ".*" * 90 + "b"])
def test_matching_takes_bounded_time(pattern: str) -> None:
    """Backtracking would take exponential time in the length of the name."""
    for module in (".a" * 256, "a" * 512, "1" * 512):
        assert not matches(pattern, module)


def test_steps_are_counted_before_they_are_taken() -> None:
    spent = list[int]()
    assert not matches(".*b.*c", "a.a.a", spent.append)
    assert spent == [3, 6]  # of the three suffixes, all positions
    assert matches("^a", "a", spent.append)
    assert spent == [3, 6, 1]
