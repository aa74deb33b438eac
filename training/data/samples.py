"""A few generated texts of each form, for smoke runs without downloads.

Each text is its own source, so all parts of a split get some.
"""

from itertools import product

from .examples import Corpus, Example

ENGLISH = (("The lamp", "The door", "A window", "The heater", "Each sensor"), ("is on", "is off", "is open", "is new"))
GERMAN = (
    ("Die Lampe", "Die Tür", "Ein Fenster", "Die Heizung", "Jeder Sensor"),
    ("ist an", "ist aus", "ist offen", "ist neu"),
)
TIMES = (("here", "hier"), ("today", "heute"), ("at night", "nachts"), ("again", "wieder"), ("now", "jetzt"))
ENGLISH_TIMES = tuple(when for when, _ in TIMES)


def translated_sentences() -> Corpus[str]:
    """Return a hundred sentences in two languages."""
    translations = zip(product(*ENGLISH), product(*GERMAN), strict=True)
    examples = [
        Example(f"{' '.join(english)} {when}.", f"{' '.join(german)} {wann}.", "en-de", f"{' '.join(english)} {when}")
        for (english, german), (when, wann) in product(translations, TIMES)
    ]
    return Corpus(examples, (), group_similar=False)


def documents() -> Corpus[None]:
    """Return forty documents of a few sentences, of different lengths."""
    lines = [f"{' '.join(ours)} {when}." for ours, (when, _) in product(product(*ENGLISH), TIMES)]
    texts = ["\n".join(lines[at : at + 2 + at % 7]) for at in range(40)]
    return Corpus([Example(text, None, "sample", str(at)) for at, text in enumerate(texts)], (), group_similar=False)


def labelled_sentences() -> Corpus[int]:
    """Return sentences labelled with their state, one of four."""
    states = ENGLISH[1]
    examples = [
        Example(f"{thing} {state} {when}.", states.index(state), "sample", f"{thing} {state} {when}")
        for thing, state, when in product(*ENGLISH, ENGLISH_TIMES)
    ]
    return Corpus(examples, states, group_similar=False)


def tagged_sentences() -> Corpus[tuple[int, ...]]:
    """Return sentences with a part of speech for each word."""
    labels = ("article", "noun", "verb", "state", "when")
    examples = [
        Example(
            f"{thing} {state} {when}", (0, 1, 2, 3, *(4 for _ in when.split())), "sample", f"{thing} {state} {when}"
        )
        for thing, state, when in product(*ENGLISH, ENGLISH_TIMES)
    ]
    return Corpus(examples, labels, group_similar=False)


def described_sentences() -> Corpus[str]:
    """Return sentences about rooms with their descriptions, enough of them to rank."""
    rooms = ("kitchen", "hall")
    examples = [
        Example(
            f"{thing} in the {room} {state} {when}.", f"{room}: {thing} {state} {when}", "sample", f"{room} {number}"
        )
        for room in rooms
        for number, (thing, state, when) in enumerate(product(*ENGLISH, ENGLISH_TIMES))
    ]
    return Corpus(examples, ("RELEVANCE",), group_similar=False)


def entailment_pairs() -> Corpus[int]:
    """Return pairs of a sentence and one that may follow from it."""
    things, states = ENGLISH
    examples = [
        Example(
            (f"{thing} {state} {when}.", f"{thing} {claimed}."),
            int(claimed != state),
            "sample",
            f"{thing} {state} {when}",
        )
        for thing, (at, state), when in product(things, enumerate(states), ENGLISH_TIMES)
        for claimed in (state, states[at - 1])
    ]
    return Corpus(examples, ("entailed", "not entailed"), group_similar=False)


def span_questions() -> Corpus[tuple[int, int]]:
    """Return questions about sentences, answered by the state or the time."""
    examples = []
    for thing, state, when in product(*ENGLISH, ENGLISH_TIMES):
        text, begins = f"{thing} {state} {when}.", len(thing) + len(" is ")
        whole = (begins, begins + len(state) - len("is "))
        for kind, answer in (("how", whole), ("when", (whole[1] + 1, len(text) - 1))):
            examples.append(Example((f"{kind} {thing}?", text), answer, kind, text, (text,)))
    return Corpus(examples, (), group_similar=False)
