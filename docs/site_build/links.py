"""Links of Markdown pages: where they lead, and how they are written in the site.

Pages are written for readers of the repository. In the site a link to a file outside docs/ leads to the repository,
or is plain text where the address of the repository is not known.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Files outside docs/ that are pages of the site.
OUTER_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "training/recipes/README.md": "recipes.md",
    "service/runtime/quickstart/sentiment/README.md": "sentiment.md",
}
# Pages that only the site has, written by site_build, and the module that writes each.
GENERATED_PAGES = {
    "reference/api.md": "api_page",
    "reference/settings.md": "settings_page",
    "reference/commands.md": "commands_page",
}
FENCE = re.compile(r"^\s*(```|~~~)")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\]|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$")
REMOTE = re.compile(r"^(https?:|mailto:)")


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines outside fenced blocks."""
    inside = False
    for number, line in enumerate(text.splitlines()):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {slug(found[1]) for _, line in prose_lines(text) if (found := HEADING.match(line))}


def resolve(page: str, target: str) -> str:
    """The path in the repository that a link of `page` (a path in the repository) leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))


def broken_links(page: str, root: Path = ROOT) -> list[str]:
    """Links of a page to files or headings that do not exist; `page` is a path in the repository."""
    text = (root / page).read_text("utf-8")
    found = []
    for number, line in prose_lines(text):
        for link in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = link["target"]
            if REMOTE.match(target) or is_generated(page, target):
                continue
            path, _, anchor = target.partition("#")
            file = root / (resolve(page, target) if path else page)
            if not file.exists() or (
                anchor and file.suffix == ".md" and anchor not in anchors(file.read_text("utf-8"))
            ):
                found.append(f"{page}:{number + 1}: {target}")
    return found


def is_generated(page: str, target: str) -> bool:
    return resolve(page, target).removeprefix("docs/") in GENERATED_PAGES


def source_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    outer = {site: path for path, site in OUTER_PAGES.items()}
    return outer.get(page, f"docs/{page}")


def page_of(path: str) -> str | None:
    """The place in the site of a path in the repository; None if it is not part of the site."""
    if path == "README.md":
        return "index.md"
    if path in OUTER_PAGES:
        return OUTER_PAGES[path] if (ROOT / path).exists() else None
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewrite_links(page: str, text: str, repository: str) -> str:
    """The text of a page of the site with links as the site has them. `repository` is the address of the files, or
    empty. A link that leads nowhere is left as it is, for mkdocs to find."""
    source = source_of(page)

    def rewrite(link: re.Match[str]) -> str:
        target = link["target"]
        if REMOTE.match(target) or target.startswith("#"):
            return link[0]
        path, anchor = resolve(source, target), target.partition("#")[1:]
        if (place := page_of(path)) is not None:
            relative = os.path.relpath(place, posixpath.dirname(page) or ".")
            return f"{link['image']}[{link['text']}]({relative}{''.join(anchor)})"
        if not (ROOT / path).exists():
            return link[0]
        return f"[{link['text']}]({repository}/{path})" if repository else link["text"]

    lines = text.splitlines()
    for number, line in prose_lines(text):
        lines[number] = LINK.sub(rewrite, line)
    return "\n".join(lines) + "\n"
