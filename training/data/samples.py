"""A few made-up texts of each shape, for runs of seconds in which nothing is fetched: a try of the way alone.

Every text is of its own source, so they fall to all parts of a split.
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
    """A hundred sentences in two languages."""
    spoken = zip(product(*ENGLISH), product(*GERMAN), strict=True)
    examples = [
        Example(f"{' '.join(ours)} {when}.", f"{' '.join(theirs)} {wann}.", "en-de", f"{' '.join(ours)} {when}")
        for (ours, theirs), (when, wann) in product(spoken, TIMES)
    ]
    return Corpus(examples, (), group_similar=False)


def documents() -> Corpus[None]:
    """Forty documents of a few sentences, no two as long."""
    lines = [f"{' '.join(ours)} {when}." for ours, (when, _) in product(product(*ENGLISH), TIMES)]
    texts = ["\n".join(lines[at : at + 2 + at % 7]) for at in range(40)]
    return Corpus([Example(text, None, "sample", str(at)) for at, text in enumerate(texts)], (), group_similar=False)


def labelled_sentences() -> Corpus[int]:
    """Each sentence with what it says, one of four."""
    states = ENGLISH[1]
    examples = [
        Example(f"{thing} {state} {when}.", states.index(state), "sample", f"{thing} {state} {when}")
        for thing, state, when in product(*ENGLISH, ENGLISH_TIMES)
    ]
    return Corpus(examples, states, group_similar=False)


def tagged_sentences() -> Corpus[tuple[int, ...]]:
    """Each sentence as words with a part of speech each."""
    labels = ("article", "noun", "verb", "state", "when")
    examples = [
        Example(
            f"{thing} {state} {when}", (0, 1, 2, 3, *(4 for _ in when.split())), "sample", f"{thing} {state} {when}"
        )
        for thing, state, when in product(*ENGLISH, ENGLISH_TIMES)
    ]
    return Corpus(examples, labels, group_similar=False)


def described_sentences() -> Corpus[str]:
    """Sentences of several rooms, and what each is described by: enough to rank among."""
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
    """Pairs of a sentence and what may follow from it: that a thing is in the same state at all."""
    things, states = ENGLISH
    examples = [
        Example(
            (f"{thing} {state} {when}.", f"{thing} {said}."), int(said != state), "sample", f"{thing} {state} {when}"
        )
        for thing, (at, state), when in product(things, enumerate(states), ENGLISH_TIMES)
        for said in (state, states[at - 1])
    ]
    return Corpus(examples, ("entailed", "not entailed"), group_similar=False)


def span_questions() -> Corpus[tuple[int, int]]:
    """Questions about sentences, of which the answer is the state or the time."""
    examples = []
    for thing, state, when in product(*ENGLISH, ENGLISH_TIMES):
        text, begins = f"{thing} {state} {when}.", len(thing) + len(" is ")
        whole = (begins, begins + len(state) - len("is "))
        for kind, answer in (("how", whole), ("when", (whole[1] + 1, len(text) - 1))):
            examples.append(Example((f"{kind} {thing}?", text), answer, kind, text, (text,)))
    return Corpus(examples, (), group_similar=False)
