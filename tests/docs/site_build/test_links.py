"""Links as the site has them."""

import pytest

from docs.site_build.links import rewrite_links

REPOSITORY = "https://github.com/org/name/blob/main"


@pytest.mark.parametrize(
    ("page", "link", "known", "unknown"),
    [
        ("guides/chat.md", "[a](../explain.md#x)", "[a](../explain.md#x)", "[a](../explain.md#x)"),
        ("contributing.md", "[a](docs/glossary.md)", "[a](glossary.md)", "[a](glossary.md)"),
        ("recipes.md", "[a](../../docs/systems.md#measured)", "[a](systems.md#measured)", "[a](systems.md#measured)"),
        ("architecture.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)", "[a](contributing.md)"),
        ("architecture.md", "[a](../service/cli/main.py)", f"[a]({REPOSITORY}/service/cli/main.py)", "a"),
        ("operations.md", "[a](../README.md)", "[a](index.md)", "[a](index.md)"),
        ("architecture.md", "[a](missing.md)", "[a](missing.md)", "[a](missing.md)"),
        (
            "architecture.md",
            "[a](#b) [c](https://example.com)",
            "[a](#b) [c](https://example.com)",
            "[a](#b) [c](https://example.com)",
        ),
    ],
)
def test_links_are_rewritten(page: str, link: str, known: str, unknown: str) -> None:
    assert rewrite_links(page, link, REPOSITORY) == f"{known}\n"
    assert rewrite_links(page, link, "") == f"{unknown}\n"


def test_code_is_left_alone() -> None:
    text = "```\n[a](../service/cli/main.py)\n```\n"
    assert rewrite_links("architecture.md", text, "") == text
