"""README, the pages of docs/ and the other pages of the site: links, sizes, figures, and commands that exist."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from benchmarks.chart import CHART, draw, read_figures
from docs.site_build import api_page, commands_page, settings_page
from docs.site_build.command_blocks import blocks, runnable
from docs.site_build.links import GENERATED_PAGES, OUTER_PAGES, broken_links
from polyhead.service.cli.main import app
from polyhead.service.config import flags
from polyhead.service.config.settings import Settings
from tests.support.places import ROOT

README = (ROOT / "README.md").read_text("utf-8")
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
LEFT_OUT = {"docs/moved.md", "docs/renamed_tests.md"}  # tables of history; git has it
OUTER = [path for path in OUTER_PAGES if (ROOT / path).exists()]
DOCS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - LEFT_OUT
PAGES = ["README.md", *OUTER, *sorted(DOCS)]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
LANGUAGES = {"console", "python", "sh", "text", "json", "yaml"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    assert not broken_links(page)


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("# One `two`\n\n[x](b.md) [x](#one-two) [x](#three)\n\n```\n[x](c.md)\n```\n")
    assert broken_links("docs/a.md", tmp_path) == ["docs/a.md:3: b.md", "docs/a.md:3: #three"]


def test_readme_can_be_read_in_minutes() -> None:
    assert 6_000 <= len(README.encode()) <= 8_192
    assert max(map(len, README.splitlines())) <= 320


def test_readme_has_the_number_of_families() -> None:
    [stated] = re.findall(r"\b(\d+) \[families\]", README)
    listed = (ROOT / "docs/families.md").read_text("utf-8")
    assert int(stated) == len(re.findall(r"^\| `", listed, re.MULTILINE))


def test_the_chart_has_the_figures_of_the_log() -> None:
    figures = read_figures((ROOT / "docs/log.md").read_text("utf-8"))
    assert CHART.read_text("utf-8") == draw(figures), "draw it again: python -m benchmarks.chart"
    assert figures["decode, 1 sequence"] == (283, 109, 160)  # read by a person


def test_every_page_is_in_the_navigation_once() -> None:
    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [leaf for each in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(each)]

    listed = leaves(SITE["nav"])
    outer = {OUTER_PAGES[path] for path in OUTER}
    assert sorted(listed) == sorted({path.removeprefix("docs/") for path in DOCS} | outer | GENERATED_PAGES.keys())
    assert {
        f"docs/{name}" for name in SITE["exclude_docs"].split() if name.endswith("d.md") or "tests" in name
    } == LEFT_OUT


def test_the_site_loads_nothing_from_other_servers() -> None:
    assert SITE["theme"]["font"] is False
    assert "extra_javascript" not in SITE


GUIDES = ["README.md", "docs/get-started.md", "docs/decisions-api.md", *sorted(p for p in PAGES if "guides/" in p)]


@pytest.mark.parametrize("page", GUIDES)
def test_blocks_say_what_they_are_and_their_commands_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    commands = {
        name.removeprefix("polyhead ").split()[0]
        for name, _ in commands_page.commands("polyhead", typer.main.get_command(app))
    }
    for language, block, line in blocks(text):
        assert language in LANGUAGES, f"{page}:{line}: a block without a language, or of {language}"
        if language == "python":
            ast.parse(block)
        if language in ("sh", "console"):
            for words in re.findall(r"(?:^|\s)polyhead ([a-z-]+)", block):
                assert words in commands, f"{page}:{line}: polyhead {words}"
            for target in re.findall(r"(?:^|\s)make ([a-z-]+)", block):
                assert target in TARGETS, f"{page}:{line}: make {target}"
            for arguments in re.findall(r"^(?:\$ )?polyhead serve (.+)$", block, re.MULTILINE):
                words = re.sub(r"\$\([^)]*\)", "value", arguments.partition(" #")[0])
                flags.parse_flags(shlex.split(words))
    for command in runnable(text):
        assert command.kind == "python" or command.text.split()[0] in ("curl", "polyhead", "python")


def test_the_page_of_the_api_has_every_route_and_nested_fields() -> None:
    api = api_page.describe_api()
    page = api_page.as_markdown(api)
    for path, operations in api["paths"].items():
        for method in operations:
            assert f"### `{method.upper()} {path}`" in page
    assert "| `messages[].content` |" in page
    assert "| `questions.NAME.criteria` |" in page
    assert "`POST /admin/models`" in page


def test_the_page_of_settings_has_every_setting_with_its_default() -> None:
    page = settings_page.as_markdown()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(Settings.model_fields)
    assert "| `port` | integer, 0 to 65,535 | `8000` | Port to listen on" in page


def test_the_page_of_commands_has_every_option() -> None:
    page = commands_page.as_markdown()
    for name in ("## `polyhead serve`", "## `polyhead bench machine`", "`--max-tokens`", "`--smoke`"):
        assert name in page
