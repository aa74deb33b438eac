"""Hooks of mkdocs: adds the pages that lie outside docs/ or are written from the code, and rewrites links."""

import importlib
from typing import Any

import markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from docs.site_build.links import GENERATED_PAGES, OUTER_PAGES, ROOT, rewrite_links


class TwoSpaces(markdown.Extension):
    """Lists nest by two spaces, as on GitHub; the library's default is four."""

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802 - the name is the library's
        md.tab_length = 2


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(TwoSpaces())  # type: ignore[arg-type]
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # anchors as on GitHub
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in OUTER_PAGES.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, content=without_front_matter((ROOT / path).read_text("utf-8"))))
    for page, module in GENERATED_PAGES.items():
        written = importlib.import_module(f"docs.site_build.{module}").as_markdown()
        files.append(File.generated(config, page, content=written))
    return files


def without_front_matter(text: str) -> str:
    return text.split("---\n", 2)[2] if text.startswith("---\n") else text


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    if page.file.src_uri in GENERATED_PAGES:
        return text
    repository = f"{config.repo_url.rstrip('/')}/blob/main" if config.repo_url else ""
    return rewrite_links(page.file.src_uri, text, repository)
