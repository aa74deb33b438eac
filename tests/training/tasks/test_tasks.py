"""Data and tasks of finetuning: mails, articles, tagged words, passages for a query, answers in a text."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import BertForTokenClassification

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.network.heads import TokenHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.runtime import quickstart
from polyhead.training.data import brown, questions, spam, wiki
from polyhead.training.data.examples import Corpus, Example, Split, group_names, split_by_source
from polyhead.training.loop.errors import RecipeError
from polyhead.training.loop.lora_training import LoraConfig
from polyhead.training.loop.schedule import TrainingPlan
from polyhead.training.networks.base_model import BaseModelSpec
from polyhead.training.recipes.recipe import FinetuneData, FinetuneRecipe, read_recipe
from polyhead.training.tasks import pair_task as pairs
from polyhead.training.tasks import span_task as spans
from polyhead.training.tasks.label_task import LabelItem, LabelTask
from polyhead.training.tasks.pair_task import MEASURED_PASSAGES, PairItem, PairTask
from polyhead.training.tasks.sources import TASK_SOURCES
from polyhead.training.tasks.span_task import SpanTask
from polyhead.training.tasks.tag_task import TagTask, build_item
from polyhead.training.tasks.task import score_batch
from polyhead.training.tasks.text_reader import EncodedText, TextReader
from tests.support import recipes

ALL = sorted(recipes.RECIPES.glob("*.toml"))
RECIPES = [path for path in ALL if "[lora]" in path.read_text()]
TARGETS = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down")
PLAIN = b"""From fork-admin@example.com  Thu Aug 22 12:36:23 2002
Received: from secret.example.com (secret.example.com [10.0.0.1])
From: Ann <ann@example.com>
Subject: Re: [ILUG]  =?iso-8859-1?q?Caf=E9?= tonight
Content-Type: text/plain; charset=nobody-knows
Content-Transfer-Encoding: quoted-printable

At eight,=
 bring Zo=EB.

Bye
"""
PAGE = b"""From x@example.com  Thu Aug 22 12:36:23 2002
Subject: EARN
Content-Type: multipart/alternative; boundary="b"

--b
Content-Type: text/plain

\x20
--b
Content-Type: text/html; charset=utf-8

<html><style>p { color: red }</style><p>Earn <b>1000</b> &euro;</p><!-- hidden --></html>
--b--
"""
BARE = b"From x\nTo: y\n\nCall now\xa0please\n"


# ---- data


def test_mails_are_read_as_visible_text(tmp_path: Path) -> None:
    folder = tmp_path / "spam-1"
    folder.mkdir()
    for name, content in (("00001.a", PLAIN), ("00002.b", PAGE), ("00003.c", BARE)):
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "00001.a.json").write_text("{}")
    assert spam.read_group(folder) == [
        Example("Re: Café tonight At eight, bring Zoë. Bye", 1, "spam-1", "00001.a", ("café tonight",)),
        Example("EARN Earn 1000 €", 1, "spam-1", "00002.b", ("earn",)),
        Example("Call now please", 1, "spam-1", "00003.c"),
    ]


def test_articles_are_read_for_topics_and_for_queries(tmp_path: Path) -> None:
    articles = {
        "Auk": {"extract": "Auks are birds.", "description": "Family of birds", "topic": "Biology"},
        "Loon": {"extract": "Loons swim.", "description": "Family of birds", "topic": "Biology"},
        "Zero": {"extract": "Zero is a number.", "description": "", "topic": "Mathematics"},
        "Play": {"extract": "A play is acted.", "description": "Work for actors", "topic": wiki.NO_TOPIC},
    }
    path = tmp_path / wiki.ARTICLES
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(articles))
    topics, leads = wiki.topics(tmp_path), wiki.leads(tmp_path)
    assert topics.labels == ("Biology", "Mathematics")
    assert [(example.source, example.label) for example in topics.examples] == [("Auk", 0), ("Loon", 0), ("Zero", 1)]
    assert [(example.text, example.label) for example in leads.examples] == [
        ("Auks are birds.", "Family of birds"),
        ("Loons swim.", "Family of birds"),
        ("A play is acted.", "Work for actors"),
    ]
    auk, loon, play = group_names(leads.examples)
    assert auk == loon != play


def articles(folder: Path, **each: tuple[str, str, str]) -> Path:
    """A data folder with the given articles: title to lead, description and topic."""
    path = folder / wiki.ARTICLES
    path.parent.mkdir(parents=True)
    names = ("extract", "description", "topic")
    path.write_text(json.dumps({title: dict(zip(names, scores, strict=True)) for title, scores in each.items()}))
    return folder


def test_each_entailed_hypothesis_is_also_a_negative_of_another_lead(tmp_path: Path) -> None:
    """Each description is a hypothesis for its own article and for another one of the same topic."""
    folder = articles(
        tmp_path,
        Auk=("Auks are a family of sea birds. They swim.", "Family of birds (Alcidae)", "Biology"),
        Loon=("Loons swim in lakes of every size.", "Family of birds (Alcidae)", "Biology"),
        Elm=("An elm is of a genus of trees. St. X's is tall. So.", "Genus of trees", "Biology"),
        Ann=("Ann, an aunt of A. B. Smith, rules.", "English queen", "Biology"),
        Zero=("Zero means nothing at all.", "Number", "Mathematics"),
        Nil=("Nil.", "", "Mathematics"),
        Long=("Much " * 90 + "is said.", "Long family", "Biology"),
    )
    corpus = wiki.entailment(folder)
    assert {example.text[0] for example in corpus.examples} == {
        "Auks are a family of sea birds.",
        "An elm is of a genus of trees.",
        "Ann, an aunt of A. B. Smith, rules.",
    }
    own = {"Auk": "a family of birds.", "Elm": "a genus of trees.", "Ann": "an English queen."}
    for label, name in enumerate(corpus.labels):
        scores = [(each.source, each.text[1].partition(" is ")[2]) for each in corpus.examples if each.label == label]
        assert sorted(text for _, text in scores) == sorted(own.values())
        assert all((own[title] == text) == (name == "entailed") for title, text in scores)
    assert corpus.left_out == 4


def test_negative_hypotheses_are_of_the_same_part(tmp_path: Path) -> None:
    leads = {f"T{n}": (f"w{n} x{n} y{n} is here.", f"a{n} b{n} c{n}", "ab"[n % 2]) for n in range(400)}
    corpus = wiki.entailment(articles(tmp_path, **leads))
    split = split_by_source(corpus, 0.2, 0.2)
    own = {example.text[1].partition(" is ")[2]: part for part, some in vars(split).items() for example in some}
    strays = sum(own[e.text[1].partition(" is ")[2]] != part for part, some in vars(split).items() for e in some)
    assert strays <= 2 * 6  # each topic has three borders between parts, and one description may cross each
    assert all(vars(split).values())


def test_questions_are_generated_only_where_a_rule_is_certain() -> None:
    def found(title: str, topic: str, lead: str) -> list[tuple[str, str, str]]:
        some = questions.generate_questions(title, topic, lead)
        return [(each.kind, each.text, lead[slice(*each.answer)]) for each in some]

    assert found(
        "Ann Lee (queen)", "People", "Ann B. Lee was a Welsh queen and poet, who ruled. She was the last."
    ) == [
        ("what", "Who was Ann Lee?", "a Welsh queen and poet"),
        ("origin", "Where was Ann Lee from?", "Welsh"),
    ]
    assert found("Lyon", "Geography", "Lyon, also known as Lyons, is a large city in the U.S. state of New York.") == [
        ("what", "What is Lyon?", "a large city in the U.S. state of New York"),
        ("where", "Where is Lyon?", "New York"),
        ("name", "What is Lyon also called?", "Lyons"),
    ]
    assert found("Rome", "Geography", "Rome is the capital and largest city of Italy.")[-1] == (
        "capital",
        "What is Rome the capital of?",
        "Italy",
    )
    assert found("Ring", "Mathematics", "In ring theory, a ring is a set used to add.") == [
        ("what", "What is Ring?", "a set"),
        ("field", "In which field is Ring?", "ring theory"),
    ]
    assert found("Jaws", "Arts", "Jaws is a film directed by Steven Spielberg, with a shark.")[1:] == [
        ("maker", "By whom was Jaws made?", "Steven Spielberg")
    ]
    for unsure in ("It is a city.", "Lyon, which is old, was not.", "A river that Lyon calls its own is a river."):
        assert found("Lyon", "Geography", unsure) == []
    assert found("Doll", "Arts", "A play was written by Norwegian playwright Ibsen.") == []


def test_questions_of_one_article_are_one_group(tmp_path: Path) -> None:
    folder = articles(
        tmp_path,
        Ann=("Ann was a Welsh queen.", "Queen", "People"),
        Bea=("Bea was a Dutch queen.", "Queen", "People"),
        Cat=("Nobody knows.", "Pet", "Biology"),
    )
    corpus = questions.corpus(folder)
    assert len(corpus.examples) == 4
    assert len(set(group_names(corpus.examples, corpus.group_similar))) == 1
    assert corpus.left_out == 1


def test_tagged_words_are_read(tmp_path: Path) -> None:
    text = "\n\tThe/at Fulton/np-tl said/vbd ``/`` 1/2/cd-hl ''/'' --/-- ./.-hl\n\n\n\tJ'/fw-ppl can't/md* --/---hl\n"
    corpus = brown.parse_documents({"ca01": ("news", text)})
    assert [example.text for example in corpus.examples] == ['The Fulton said " 1/2 " -- .', "J' can't --"]
    tags = [[corpus.labels[tag] for tag in example.label] for example in corpus.examples]
    assert tags == [["AT", "NP", "VBD", "``", "CD", "''", "--", "."], ["PPL", "MD*", "--"]]
    assert {(example.domain, example.source) for example in corpus.examples} == {("news", "ca01")}


def test_documents_are_not_joined_by_the_sentences_they_share() -> None:
    """Otherwise all of Brown's documents would be one group. Each document stays in one part."""
    documents = {f"c{number}": ("news", "He/pps said/vbd\nNo/rb\n" * 3) for number in range(200)}
    corpus = brown.parse_documents(documents)
    split = split_by_source(corpus, 0.2, 0.2)
    parts = [{example.source for example in part} for part in (split.train, split.validation, split.held_out)]
    assert sum(map(len, parts)) == 200
    assert all(parts)
    assert len(set(group_names(replace(corpus, group_similar=True).examples))) == 1


def test_a_text_is_truncated_only_if_the_recipe_permits_it(tiny_embedder: Path) -> None:
    tokenizer = load(str(tiny_embedder)).tokenizer
    closing = tokenizer.encode("").ids[-1]
    whole, cut = TextReader(tokenizer, 8, may_truncate=True)(["the fox", "the fox and the lazy dog and the fox"])
    assert not whole.is_truncated
    assert cut.is_truncated
    assert len(cut.tokens) == len(cut.segments) == len(cut.offsets) == 8
    assert cut.tokens[-1] == closing != cut.tokens[-2]
    [pair] = TextReader(tokenizer, 9, may_truncate=True)([("a fox", "the lazy dog and the brown fox")])
    assert pair.tokens.count(closing) == 2
    assert pair.segments == [0] * (pair.tokens.index(closing) + 1) + [1] * (8 - pair.tokens.index(closing))
    with pytest.raises(RecipeError, match=r"data\.most_tokens: \d+ tokens, at most 8.*'the fox and"):
        TextReader(tokenizer, 8, may_truncate=False)(["the fox and the lazy dog and the fox"])


# ---- labels


def test_every_label_has_its_precision_and_recall() -> None:
    read = EncodedText([2, 3], [0, 0], [(0, 0), (0, 0)], is_truncated=True)
    items = [LabelItem(read, label, domain) for label, domain in ((1, "a"), (1, "a"), (1, "b"), (0, "b"))]
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    figures = LabelTask(("HAM", "SPAM", "NEITHER")).figures(items, scores)
    assert figures == {
        "accuracy": 0.25,
        "a": 0.5,
        "b": 0.0,
        "precision of HAM": 0.0,
        "precision of SPAM": 0.5,
        "recall of HAM": 0.0,
        "recall of SPAM": pytest.approx(1 / 3),
    }
    assert LabelTask(("HAM", "SPAM")).truncated_count(items) == 4


# ---- tags


def tiny_recipe(architecture: str, source: str, **plan: float) -> FinetuneRecipe:
    return FinetuneRecipe(
        architecture=architecture,
        seed=3,
        threads=1,
        trunk=BaseModelSpec(name="tiny", folder=Path()),
        data=FinetuneData(source=source, batch=16),
        lora=LoraConfig(rank=4, alpha=8, targets=TARGETS),
        plan=TrainingPlan(**{"epochs": 8, "rate": 1e-2, **plan}),  # type: ignore[arg-type]
    )


def tagged_sentences(count: int, seed: int) -> list[Example[tuple[int, ...]]]:
    """Words of several tokens that are nouns after "the", else verbs, so a tag depends on the word before."""
    draw = random.Random(seed)
    examples = []
    for number in range(count):
        text: list[str] = []
        tags: list[int] = []
        for _ in range(draw.randint(2, 5)):
            word = draw.choice(["jumps", "overloved", "filmshot", "do-good"])
            if draw.random() < 0.5:
                text, tags = [*text, "the"], [*tags, 0]
            text, tags = [*text, word], [*tags, 1 if text[-1:] == ["the"] else 2]
        examples.append(Example(" ".join(text), tuple(tags), ("film", "dog")[number % 2], str(number)))
    return examples


@pytest.fixture(scope="module")
def tagger(tiny_embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Checkpoint]:
    split = Split(tagged_sentences(900, 0), tagged_sentences(10, 1), tagged_sentences(80, 2))
    chosen = tiny_recipe("BertForTokenClassification", "brown")
    corpus = Corpus([], ("DET", "NOUN", "VERB"))
    result = recipes.finetuned(chosen, tiny_embedder, split, corpus, tmp_path_factory.mktemp("tags"))
    return result, load(f"{tiny_embedder}+{result['adapter']}")


def test_a_tiny_network_learns_tags_from_their_neighbours(tagger: tuple[dict[str, Any], Checkpoint]) -> None:
    result, _ = tagger
    assert set(result["held_out"]) == {"loss", "accuracy", "film", "dog"}
    assert result["held_out"]["accuracy"] > 0.92
    assert 0.4 < result["baselines"]["commonest tag of the word"] < 0.8
    assert result["baselines"]["words not learned"] == 0


def test_a_written_tagger_answers_for_every_token(tagger: tuple[dict[str, Any], Checkpoint]) -> None:
    _, served = tagger
    assert served.task == "tag"
    assert served.labels == ("DET", "NOUN", "VERB")
    text = "the filmshot do-good"
    encoding = served.tokenizer.encode(text)
    batch = RaggedBatch.of([encoding.ids])
    with torch.no_grad():
        scores = served.head.postprocess(served.head(served.network(batch), batch.starts))
    assert scores.shape == (len(encoding), 3)
    first = [encoding.offsets.index(span) for span in encoding.offsets if span[1] > 0 and span[0] in (0, 4, 13)]
    assert [served.labels[int(scores[row].argmax())] for row in first] == ["DET", "NOUN", "VERB"]


def test_peft_reads_the_same_tags(tagger: tuple[dict[str, Any], Checkpoint], tiny_embedder: Path) -> None:
    result, served = tagger
    base = BertForTokenClassification.from_pretrained(tiny_embedder, num_labels=3)
    theirs = PeftModel.from_pretrained(base, result["adapter"]).eval()
    ids = served.tokenizer.encode("the filmshot do-good").ids
    batch = RaggedBatch.of([ids])
    with torch.no_grad():
        mine = served.head(served.network(batch), batch.starts)
        reference = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(mine, reference, rtol=0, atol=1e-4)


def test_a_word_is_tagged_at_its_first_token_and_skipped_words_count(tiny_embedder: Path) -> None:
    read = TextReader(load(str(tiny_embedder)).tokenizer, 10, may_truncate=True)
    example = Example("overloved \u200b do-good fox filmshot filmshot", (1, 2, 3, 4, 5, 6), "film", "1")
    [text] = read([example.text])
    item = build_item(example, text)
    assert item.is_truncated
    starts = [text.offsets[row][0] for row in item.rows]
    assert starts == [0, 12, *(start for start in (20, 24, 33) if start in starts)]
    assert item.words[:2] == ["overloved", "do-good"]
    assert item.tags[:2] == [1, 3]
    assert item.skipped_words == 6 - len(item.tags) > 1
    tag_task = TagTask()
    right = torch.nn.functional.one_hot(torch.tensor(item.tags), 7).float()
    assert tag_task.figures([item], right)["accuracy"] == len(item.tags) / 6
    packed = tag_task.pack([item, item], read, learning=True)
    assert packed.rows == [*item.rows, *(row + len(item.tokens) for row in item.rows)]
    assert packed.targets == item.tags * 2


def test_of_tokens_with_a_common_character_the_first_is_tagged() -> None:
    text = EncodedText([2, 7, 8, 9, 3], [0] * 5, [(0, 0), (0, 1), (0, 1), (2, 4), (0, 0)], is_truncated=False)
    assert build_item(Example("\N{GRINNING FACE} go", (5, 6), "film", "1"), text).rows == [1, 3]


# ---- passages


def passages(count: int) -> list[Example[str]]:
    names = ["fox", "dog", "film", "money"]
    return [
        Example(f"w{n} is a {names[n % 4]}, quick and w{n + 1}", f"w{n} {names[n % 4]}", "ab"[n % 2], f"t{n}")
        for n in range(count)
    ]


def test_distractors_alternate_between_hard_and_easy() -> None:
    examples = [*passages(60), Example("another w7 fox", "w7 money", "a", "twin")]
    rows = pairs.list_distractors(examples)
    assert rows == pairs.list_distractors(examples)
    for row, others in enumerate(rows):
        assert len(set(others)) == len(others) == MEASURED_PASSAGES - 1
        assert row not in others
        assert all(examples[other].label != examples[row].label for other in others)
    same_label = [n for n, example in enumerate(examples) if example.label == "w7 money"]
    assert not {60} & set(rows[same_label[0]])
    # Besides text n itself, only text n - 1 contains w{n}: it is the hardest distractor.
    assert all(rows[n][0] == n - 1 for n in range(1, 60) if n not in (7, 8))
    same_domain = [
        sum(examples[other].domain == examples[row].domain for other in others) for row, others in enumerate(rows)
    ]
    assert min(same_domain) >= 10
    with pytest.raises(RecipeError, match="40 passages are too few to rank one among 20 others"):
        PairTask().items(examples[:40], lambda texts: [EncodedText([], [], [], is_truncated=False) for _ in texts])  # type: ignore[arg-type]


def test_ties_lower_the_rank() -> None:
    items = [PairItem("q", ("a", "b", "c", "d"), is_truncated=False)] * 3
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0], [1.0, 1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    figures = PairTask().figures(items, scores)
    assert figures == {
        "MRR": pytest.approx((1 + 1 / 3 + 1 / 4) / 3),
        "recall@1": pytest.approx(1 / 3),
        "recall@5": 1.0,
    }


def test_the_baseline_of_a_ranker_is_vector_similarity() -> None:
    places = {"near": (1.0, 0.0), "far": (0.0, 1.0), "q": (0.9, 0.1), "r": (0.1, 0.9)}
    items = [PairItem("q", ("near", "far"), is_truncated=False), PairItem("r", ("near", "far"), is_truncated=False)]
    found = PairTask().baselines([], items, lambda texts: torch.tensor([places[text] for text in texts]))
    assert found == {"embeddings MRR": 0.75, "embeddings recall@1": 0.5, "embeddings recall@5": 1, "by lot MRR": 0.75}


def test_a_ranker_is_trained_evaluated_and_loaded(tiny_embedder: Path, tmp_path: Path) -> None:
    examples = passages(240)
    split = Split(examples[:150], examples[150:195], examples[195:])
    chosen = tiny_recipe("BertForSequenceClassification", "leads", epochs=1)
    result = recipes.finetuned(chosen, tiny_embedder, split, Corpus([], ("RELEVANCE",)), tmp_path)
    assert {"MRR", "recall@1", "recall@5", "loss"} == set(result["held_out"])
    baseline = result["baselines"]
    assert baseline["by lot MRR"] == pytest.approx(sum(1 / rank for rank in range(1, 21)) / 20)
    assert 0 <= baseline["embeddings recall@1"] <= baseline["embeddings MRR"] <= 1
    served = load(f"{tiny_embedder}+{result['adapter']}")
    assert served.task == "rank"
    items = PairTask().items(split.held_out, TextReader(served.tokenizer, 256, may_truncate=False))
    packed = PairTask().pack(items[:1], TextReader(served.tokenizer, 256, may_truncate=False), learning=False)
    batch = RaggedBatch.of(packed.sequences, packed.segments)
    with torch.no_grad():
        raw = served.head(served.network(batch), batch.starts)
        seen = score_batch(served.network, served.head, packed)
        closed = served.head.postprocess(raw)
    assert closed.shape == (MEASURED_PASSAGES, 1)
    torch.testing.assert_close(seen, raw.T)  # query and passage are different segments, as in serving
    assert ((closed > 0) & (closed < 1)).all()


# ---- answer spans


def span_item(asked: str, text: str, answer: str, tokenizer: Tokenizer, limit: int = 64) -> spans.SpanItem:
    begins = text.index(answer)
    [read] = TextReader(tokenizer, limit, may_truncate=True)([(asked, text)])
    return spans.build_item(Example((asked, text), (begins, begins + len(answer)), "what", "1"), read)


def test_an_answer_covers_the_tokens_that_it_overlaps(tiny_embedder: Path) -> None:
    words = load(str(tiny_embedder)).tokenizer
    item = span_item("the fox", "a quick filmshot, overloved dog", "filmshot", words)
    assert item.answer_text(*item.targets) == "filmshot"
    assert item.rows[0] == 0
    assert [item.answer_text(at, at) for at in (1, 2)] == ["a", "quick"]
    assert all(item.encoded.segments[row] for row in item.rows[1:])
    shorter = span_item("the fox", "a quick filmshot, overloved dog", "overloved dog", words, limit=10)
    assert shorter.encoded.is_truncated
    assert shorter.targets == (0, 0)
    with pytest.raises(RecipeError, match=r"no token of the second text is read.*'the fox the fox"):
        span_item("the fox " * 9, "a dog", "dog", words, limit=8)


def test_span_scores_are_over_the_tokens_of_each_text(tiny_embedder: Path) -> None:
    """The scores equal those of each text alone."""
    loaded = load(str(tiny_embedder))
    torch.manual_seed(0)
    head, span_task = TokenHead(loaded.config, 2, "none"), SpanTask()
    items = [
        span_item("a fox", text, "dog", loaded.tokenizer) for text in ("the dog", "a quick brown dog jumps", "dog")
    ]
    read = TextReader(loaded.tokenizer, 64, may_truncate=False)
    with torch.no_grad():
        together = score_batch(loaded.network, head, span_task.pack(items, read, learning=True))
        for at, item in enumerate(items):
            batch = RaggedBatch.of([item.encoded.tokens], [item.encoded.segments])
            alone = head(loaded.network(batch), batch.starts)[item.rows].T
            torch.testing.assert_close(together[2 * at : 2 * at + 2, : len(item.rows)], alone, rtol=1e-4, atol=1e-4)
            assert together[2 * at : 2 * at + 2, len(item.rows) :].eq(-torch.inf).all()
    assert span_task.pack(items, read, learning=True).targets == [place for item in items for place in item.targets]


def test_a_span_does_not_end_before_it_begins() -> None:
    begins, ends = torch.full((50,), -9.0), torch.full((50,), -9.0)
    begins[0] = ends[0] = 99  # row 0 means no answer, which is never predicted
    begins[40], ends[3], ends[41], begins[5] = 5, 9, 4, 3
    assert spans.best_span(begins, ends) == (40, 41)
    begins[40] = -torch.inf  # 5 to 41 would be too long
    ends[20] = 1
    assert spans.best_span(begins, ends) == (5, 20)
    begins[3] = 1
    assert spans.best_span(begins, ends) == (3, 3)


def test_answers_are_compared_as_squad_does(tiny_embedder: Path) -> None:
    words = load(str(tiny_embedder)).tokenizer
    items = [span_item("a fox", "the quick brown dog jumps", answer, words) for answer in ("quick brown dog", "jumps")]
    figures = spans.squad_figures(items, ["The quick, brown DOG!", "dog jumps"])
    assert figures == {"exact": 0.5, "F1": pytest.approx((1 + 2 / 3) / 2), "what": 0.5}
    assert spans.squad_figures(items, ["a", "fox"]) == {"exact": 0, "F1": 0, "what": 0}
    found = SpanTask().baselines([items[1], items[1]], items, lambda _: torch.empty(0))
    assert found["usual place exact"] == 0.5
    assert found["whole text F1"] == pytest.approx((2 * 3 / (3 + 4) + 2 / (1 + 4)) / 2)


# ---- recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_read(path: Path) -> None:
    read = read_recipe(path)
    assert read.data.source in TASK_SOURCES
    assert read.trunk.package == quickstart.ENCODER.package


def test_every_source_is_used_by_a_recipe() -> None:
    learned = {read_recipe(path).data.source for path in ALL if "[trunk]" in path.read_text()}
    assert learned == set(TASK_SOURCES)


def test_an_architecture_without_the_head_is_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    split = Split(tagged_sentences(4, 0), tagged_sentences(4, 1), tagged_sentences(4, 2))
    with pytest.raises(RecipeError, match=r"'BertForSequenceCl.*can tag; there are: BertForTokenClassification"):
        recipes.finetuned(
            tiny_recipe("BertForSequenceClassification", "brown"),
            tiny_embedder,
            split,
            Corpus([], ("A",)),
            tmp_path,
        )


def test_more_tokens_than_the_base_model_supports_are_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    chosen = tiny_recipe("BertForTokenClassification", "brown")
    wrong = FinetuneRecipe(**{**vars(chosen), "data": FinetuneData(source="brown", most_tokens=257)})
    with pytest.raises(RecipeError, match=r"data\.most_tokens: 257 is more than the trunk reads, 256"):
        recipes.finetuned(wrong, tiny_embedder, Split(*[tagged_sentences(4, 0)] * 3), Corpus([], ("A",)), tmp_path)
