"""A few made-up texts for each source, for runs of seconds in which nothing is fetched: a try of the way alone.

Every text is of its own source, so they fall to all parts of a split.
"""

from itertools import product

from training.data import Corpus, Example

ENGLISH = (("The lamp", "The door", "A window", "The heater", "Each sensor"), ("is on", "is off", "is open", "is new"))
GERMAN = (
    ("Die Lampe", "Die Tür", "Ein Fenster", "Die Heizung", "Jeder Sensor"),
    ("ist an", "ist aus", "ist offen", "ist neu"),
)
WHENS = (("here", "hier"), ("today", "heute"), ("at night", "nachts"), ("again", "wieder"), ("now", "jetzt"))


def pairs() -> Corpus[str]:
    """A hundred sentences in two languages."""
    spoken = zip(product(*ENGLISH), product(*GERMAN), strict=True)
    examples = [
        Example(f"{' '.join(ours)} {when}.", f"{' '.join(theirs)} {wann}.", "en-de", f"{' '.join(ours)} {when}")
        for (ours, theirs), (when, wann) in product(spoken, WHENS)
    ]
    return Corpus(examples, (), alike=False)


def documents() -> Corpus[None]:
    """Forty documents of a few sentences, no two as long."""
    lines = [f"{' '.join(ours)} {when}." for ours, (when, _) in product(product(*ENGLISH), WHENS)]
    texts = ["\n".join(lines[at : at + 2 + at % 7]) for at in range(40)]
    return Corpus([Example(text, None, "sample", str(at)) for at, text in enumerate(texts)], (), alike=False)
