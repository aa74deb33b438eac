"""The lists of families follow from the tables, and name every architecture of the installed transformers."""

import json
import re
from typing import Any

import pytest
from transformers.models.auto import modeling_auto
from typer.testing import CliRunner

from polyhead.models.architectures import FAMILIES
from polyhead.models.architectures.published_architectures import (
    NETWORK_PARTS,
    NO_TABLE,
    OTHER_NEEDS,
    PUBLISHED_ARCHITECTURES,
    explain_model_type,
    missing_reason,
)
from polyhead.service.cli import families
from polyhead.service.cli import main as cli
from tests.support.places import ROOT

MAPPINGS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION")


def polyhead(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["families", *arguments])


def test_every_family_and_head_is_listed() -> None:
    said = polyhead().stdout
    for name, family in FAMILIES.items():
        assert name in said
        assert all(head in said for head in family.heads)
    listed = json.loads(polyhead("--json").stdout)
    assert [row["family"] for row in listed] == list(FAMILIES)
    for row in listed:
        heads = {name: task for task, names in row["heads"].items() for name in names}
        assert heads == {name: spec.task for name, spec in FAMILIES[row["family"]].heads.items()}


def test_every_architecture_of_transformers_is_listed() -> None:
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in MAPPINGS]
    named = {name for mapping in mappings for name in mapping}
    assert named == PUBLISHED_ARCHITECTURES.keys()
    classes = {
        each
        for mapping in mappings
        for value in mapping.values()
        for each in (value if isinstance(value, tuple | list) else (value,))
    }
    assert {each.class_name for each in PUBLISHED_ARCHITECTURES.values()} <= classes


def test_a_part_of_a_loaded_family_is_not_missing() -> None:
    assert missing_reason("jamba", ["llama"]) == (
        "it needs experts (an MLP is chosen for each token) and state-space layers in which each channel has steps of "
        "its own (Mamba), which no executor computes"
    )
    assert "experts" not in missing_reason("jamba", ["mixtral"])
    assert missing_reason("deepseek_v3", ["mixtral", "minicpm3"]) == NO_TABLE
    assert missing_reason("qwen4_exp", ["gemma3"]) == OTHER_NEEDS["vision"]
    used = {part for each in PUBLISHED_ARCHITECTURES.values() for part in each.missing}
    assert used == {*NETWORK_PARTS, *OTHER_NEEDS}


def test_all_architectures_have_a_mark_or_a_reason() -> None:
    rows = json.loads(polyhead("--all", "--json").stdout)
    assert {row["model_type"] for row in rows if row["is_loaded"]} == set(FAMILIES)
    assert all(bool(row["reason"]) != row["is_loaded"] for row in rows)
    said = polyhead("--all").stdout
    assert f"{len(FAMILIES)} of {len(rows)} are loaded" in said
    assert all(row["model_type"] in said for row in rows)


def test_the_page_is_the_output_of_the_command() -> None:
    assert (ROOT / "docs/families.md").read_text("utf-8") == families.as_markdown(), (
        "polyhead families --markdown > docs/families.md"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jamba", "it needs experts .* and state-space layers .* computes"),
        ("lama", "no architecture of transformers .* has this name; close to it are llama"),
        ("zzz", "has this name$"),
        (["bert"], "it should be the name of an architecture"),
    ],
)
def test_the_reason_of_an_unknown_model_type(name: object, expected: str) -> None:
    assert re.search(expected, explain_model_type(name, ["llama", "bert"]))
