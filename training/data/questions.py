"""Questions about Wikipedia articles, generated from templates, with their answers in the article's lead.

A rule asks a question only where its answer is certain, so a lead may have several questions or none.  Rules read the
first sentence; the model reads the whole lead.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .examples import Corpus, Example, group_names
from .wiki import PARENTHESES, fetch_articles, first_sentence, leads

WORD = r"[A-Z](?:[\w'’–-]+|\.)"
NAME = rf"{WORD}(?: (?:(?:of|the|and|de|la) )*{WORD})*"
STOP = (
    r"(?=,|;|:| \(| (?:that|which|who|whose|whom|where|when|in which|typically|often|usually|used|known|located"
    r"|situated|consisting)\b|\.?$)"
)
DEFINITION = re.compile(rf"(?P<subject>.+?) (?P<verb>is|was|are|were) (?P<answer>(?:an?|the|one of the) .+?){STOP}")
RELATIVE = re.compile(r"\b(?:that|which|who|whose|where|when)\b")
ORIGIN = re.compile(rf"an? (?P<answer>{NAME})(?= [a-z])")
PLACE = re.compile(rf"\b(?:in|on|of) (?P<answer>(?:the )?(?:[a-z-]+ )?{NAME})(?=$| (?:and|with|near|between)\b)")
END = r"(?=[,.;:]|$| (?:in|and|as|with|who|which)\b)"  # end of a name
MAX_ANSWER_CHARACTERS = 100  # characters of an answer, at most


@dataclass(frozen=True)
class QuestionTemplate:
    """A template of a question about a "{title}", and the pattern of its answer in a sentence."""

    question: str
    pattern: re.Pattern[str]


TEMPLATES = {
    "field": QuestionTemplate("In which field is {title}?", re.compile(r"In (?P<answer>[a-z]+(?: [a-z]+){0,2}),")),
    "name": QuestionTemplate(
        "What is {title} also called?",
        re.compile(r"\balso (?:known as|called) (?P<answer>(?:the )?[^,.;:()]+?)(?=,| (?:is|was|are|were|or|and)\b)"),
    ),
    "capital": QuestionTemplate(
        "What is {title} the capital of?",
        re.compile(rf" is the capital(?:,? and [a-z ]+ city,?)? of (?:the )?(?P<answer>{NAME}){END}"),
    ),
    "maker": QuestionTemplate(
        "By whom was {title} made?",
        re.compile(rf" (?:written|directed|composed|painted|created) by (?:the )?(?:[a-z]+ )?(?P<answer>{NAME}){END}"),
    ),
}


@dataclass(frozen=True)
class Question:
    """A question of a kind, with its answer's code points in the lead, [from, to)."""

    kind: str
    text: str
    answer: tuple[int, int]


def corpus(downloads: Path) -> Corpus[tuple[int, int]]:
    """Build pairs of a question and a lead, labelled with the answer's place.  Leads without a question are left out.

    Questions about one article, or about articles in nearly the same words or with the same description, are one group.
    """
    articles = fetch_articles(downloads)
    described_leads = [*leads(downloads).examples]
    group = dict(zip((each.source for each in described_leads), group_names(described_leads), strict=True))
    examples = [
        Example((question.text, article["extract"]), question.answer, question.kind, title, (group.get(title, title),))
        for title, article in articles.items()
        for question in generate_questions(title, article["topic"], article["extract"])
    ]
    left_out = len(articles) - len({example.source for example in examples})
    return Corpus(examples, (), group_similar=False, left_out=left_out)


def generate_questions(title: str, topic: str, lead: str) -> Iterator[Question]:
    """Yield all questions whose answer is certain."""
    sentence, name = first_sentence(lead), PARENTHESES.sub("", title)
    found = DEFINITION.match(sentence)
    if found and is_about(name, found["subject"]) and len(found["answer"]) <= MAX_ANSWER_CHARACTERS:
        start, end = found.span("answer")
        yield Question("what", f"{'Who' if topic == 'People' else 'What'} {found['verb']} {name}?", (start, end))
        if topic == "People" and (origin := ORIGIN.match(sentence, start, end)):
            yield Question("origin", f"Where was {name} from?", origin.span("answer"))
        if topic == "Geography" and (place := PLACE.search(sentence, start, end)):
            yield Question("where", f"Where is {name}?", place.span("answer"))
    for kind, template in TEMPLATES.items():
        if (found := template.pattern.search(sentence)) and len(found["answer"]) <= MAX_ANSWER_CHARACTERS:
            yield Question(kind, template.question.format(title=name), found.span("answer"))


def is_about(name: str, subject: str) -> bool:
    """Whether a sentence's beginning is the article's subject: it has a word of the title and no relative clause."""
    subject_words = {word.lower() for word in re.findall(r"\w+", subject)}
    return not RELATIVE.search(subject) and any(word.lower() in subject_words for word in re.findall(r"\w{3,}", name))
