"""The metric of each task on labelled rows, for `polyhead heads`.

A metric reads a row into a sample, reduces the network's states to what it needs, and sums figures over the sample's
units.  The sums are per sample, so two runs of a network can be compared text by text.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.explain.explain_types import InputTokens
from polyhead.models.explain.head_scores import final_product, pooled_vectors
from polyhead.models.network.heads import Pooler, SequenceHead
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Encoding

from ..core.text_limits import truncate_rows
from ..text.answer_spans import ScoredWindow, SpanOptions, find_answers
from .labelled_files import LabelledRow

ACCURACY, CROSS_ENTROPY, SPEARMAN = "accuracy", "cross-entropy", "Spearman"
MASKED_SHARE = 0.15  # of a text's tokens, as in pretraining (Devlin et al. 2019)
LOGIT_ROWS = 256  # rows whose logits over the vocabulary exist at a time
ARTICLES = frozenset(("a", "an", "the"))
REMOVE_PUNCTUATION = str.maketrans("", "", string.punctuation)
Figures = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """A labelled row as the network reads it.

    `texts` are computed each on its own.  The outputs at `rows` are judged against `targets`.
    """

    texts: tuple[InputTokens, ...]
    targets: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    score: float = 0.0  # of two texts: their similarity as people rate it
    window: Encoding | None = None  # the encoding of a question and its context
    context: str = ""
    answer: str = ""


class TaskMetric(Protocol):
    """The figures of a task; `names` are theirs."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def read_sample(self, row: LabelledRow) -> Sample | None:
        """Read a row; None if nothing in it can be judged.  Raises ModelError if a field is missing or wrong."""

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:
        """Reduce one text's [T, W] states to what the figures need."""

    def sample_sums(self, sample: Sample, reduced: Sequence[Tensor]) -> tuple[float, ...]:
        """Return the figures of a sample, summed over its units."""

    def unit_count(self, sample: Sample) -> int:
        """Return the number of a sample's units: texts, words or tokens."""

    def figures(self, samples: Sequence[Sample], sums: Figures) -> Figures:
        """Return [N, F] numbers whose means are the figures, from the [N, F] sums of samples."""


@dataclass
class TokenMetric:
    """Predicting the right one among all labels or tokens: the base of most metrics."""

    loaded: Checkpoint
    names: ClassVar[tuple[str, ...]] = (ACCURACY, CROSS_ENTROPY)

    def encode(self, text: str | tuple[str, str]) -> Encoding:
        """Encode a text, truncated on the right."""
        encoding, limit = self.loaded.tokenizer.encode_batch([text])[0], self.loaded.max_tokens
        if len(encoding) <= limit:
            return encoding
        return encoding.select_rows(truncate_rows(encoding.special, limit, side="right", pair=isinstance(text, tuple)))

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:
        rows, targets = list(sample.rows), torch.tensor(sample.targets)
        hits = loss = 0.0
        for at in range(0, len(rows), LOGIT_ROWS):
            raw, expected = head_scores(self.loaded, states, rows[at : at + LOGIT_ROWS]), targets[at : at + LOGIT_ROWS]
            loss += F.cross_entropy(raw, expected, reduction="sum").item()
            hits += (raw.argmax(-1) == expected).sum().item()
        return torch.tensor([hits, loss], dtype=torch.float64)

    def sample_sums(self, sample: Sample, reduced: Sequence[Tensor]) -> tuple[float, ...]:  # noqa: ARG002
        return tuple(reduced[0].tolist())

    def unit_count(self, sample: Sample) -> int:
        return len(sample.rows)

    def figures(self, samples: Sequence[Sample], sums: Figures) -> Figures:  # noqa: ARG002
        return sums


class TagMetric(TokenMetric):
    """Tags of words, predicted at the first token of each (Devlin et al. 2019)."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        words, tags = row.texts("tokens"), row.choices("tags", self.loaded.labels)
        if len(tags) != len(words):
            raise row.field_error("tags", f"there are {len(tags)} for {len(words)} tokens")
        encoding = self.encode(" ".join(words))
        begins = {start: at for at, (start, end) in reversed(list(enumerate(encoding.offsets))) if end > start}
        starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
        found = [(begins[start], tag) for start, tag in zip(starts, tags, strict=True) if start in begins]
        if not found:
            return None
        rows, targets = zip(*found, strict=True)
        return Sample((to_text(encoding),), targets, rows)


class MaskedTokenMetric(TokenMetric):
    """Masked tokens, of which the same are masked in every run."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        encoding, mask = self.encode(row.text("text")), self.loaded.tokenizer.mask_id
        known = [at for at, special in enumerate(encoding.special) if not special and encoding.ids[at] != mask]
        if mask is None or not known:
            return None
        rows = sorted(Random(row.line).sample(known, max(1, round(MASKED_SHARE * len(known)))))
        ids = [mask if at in rows else id for at, id in enumerate(encoding.ids)]
        text = InputTokens(tuple(ids), tuple(encoding.segments))
        return Sample((text,), tuple(encoding.ids[at] for at in rows), tuple(rows))


class NextTokenMetric(TokenMetric):
    """The next token at each place of a text."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        ids = tuple(self.encode(row.text("text")).ids)
        return Sample((InputTokens(ids[:-1]),), ids[1:], tuple(range(len(ids) - 1))) if len(ids) > 1 else None


class TranslationMetric(TokenMetric):
    """The next token of a translation, given those before it."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        source, target = (tuple(self.encode(row.text(name)).ids) for name in ("text", "translation"))
        decoder_input = (cast(Seq2Seq, self.loaded.head).start_token, *target[:-1])
        return Sample((InputTokens(decoder_input, source=source),), target, tuple(range(len(target))))


class LabelMetric(TokenMetric):
    """The label of a text.  For a pair that is read in both orders, scores are added."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        first = self.loaded.prompts.get("", "") + row.text("text")
        pair = row.has_field("text_pair") or self.loaded.both_orders or self.loaded.task == "rank"
        texts: list[str | tuple[str, str]] = [(row.text("text"), row.text("text_pair")) if pair else first]
        if self.loaded.both_orders:
            texts.append((row.text("text_pair"), row.text("text")))
        return Sample(tuple(to_text(self.encode(text)) for text in texts), self.read_labels(row))

    def read_labels(self, row: LabelledRow) -> tuple[int, ...]:
        return (row.choice("label", self.loaded.labels),)

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:  # noqa: ARG002
        return head_scores(self.loaded, states, [0])[0]

    def sample_sums(self, sample: Sample, reduced: Sequence[Tensor]) -> tuple[float, ...]:
        raw = torch.stack(list(reduced)).sum(0)
        loss = F.cross_entropy(raw, torch.tensor(sample.targets[0])).item()
        return float(raw.argmax().item() == sample.targets[0]), loss

    def unit_count(self, sample: Sample) -> int:  # noqa: ARG002
        return 1


class MultiLabelMetric(LabelMetric):
    """Labels of which each is present or not; right only if all of them are."""

    def read_labels(self, row: LabelledRow) -> tuple[int, ...]:
        if len(self.loaded.labels) == 1:
            return (0,) if row.choice("label", ("0", "1")) else ()
        return tuple(row.choices("label", self.loaded.labels))

    def sample_sums(self, sample: Sample, reduced: Sequence[Tensor]) -> tuple[float, ...]:
        raw = reduced[0]
        expected = torch.zeros_like(raw)
        expected[list(sample.targets)] = 1
        loss = F.binary_cross_entropy_with_logits(raw, expected, reduction="sum").item()
        return float(torch.equal(raw > 0, expected > 0)), loss


class SpanMetric(TokenMetric):
    """The answer to a question in its context; right if its words are the same (Rajpurkar et al. 2016)."""

    names = ("exact match", CROSS_ENTROPY)

    def read_sample(self, row: LabelledRow) -> Sample | None:
        context, answer = row.text("context"), row.text("answer")
        start = int(row.number("start")) if row.has_field("start") else context.find(answer)
        if start < 0 or context[start : start + len(answer)] != answer:
            raise row.field_error("answer", f"is not in the context{f' at {start}' if row.has_field('start') else ''}")
        window = self.encode((row.text("question"), context))
        within = [at for at, text in enumerate(window.texts) if text == 1]
        spans = ((at, *window.offsets[at]) for at in within)
        found = [at for at, begins, ends in spans if begins < start + len(answer) and ends > start]
        if not found or window.offsets[found[-1]][1] < start + len(answer):
            return None
        targets = (found[0], found[-1])
        return Sample((to_text(window),), targets, (0, *within), window=window, context=context, answer=answer)

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:  # noqa: ARG002
        return head_scores(self.loaded, states, list(range(len(states))))

    def sample_sums(self, sample: Sample, reduced: Sequence[Tensor]) -> tuple[float, ...]:
        assert sample.window is not None
        rows = list(sample.rows)
        targets = torch.tensor([rows.index(row) for row in sample.targets])
        loss = F.cross_entropy(reduced[0][rows].T, targets, reduction="sum").item()
        spans = find_answers(SpanOptions(), sample.context, [ScoredWindow(sample.window, reduced[0].numpy())])
        return float(bool(spans) and answer_words(spans[0].text) == answer_words(sample.answer)), loss

    def unit_count(self, sample: Sample) -> int:  # noqa: ARG002
        return 1


class SimilarityMetric(TokenMetric):
    """The rank correlation of cosines with the similarity that people rate."""

    names = (SPEARMAN,)

    def read_sample(self, row: LabelledRow) -> Sample | None:
        if not (row.has_field("text_pair") and row.has_field("score")):
            raise row.field_error("score", "vectors have no labels: the fields text, text_pair and score are needed")
        prompt = self.loaded.prompts.get("", "")
        texts = (to_text(self.encode(prompt + row.text(name))) for name in ("text", "text_pair"))
        return Sample(tuple(texts), score=row.number("score"))

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:  # noqa: ARG002
        return pooled_vectors(cast(Pooler, self.loaded.head), states[None])[0]

    def sample_sums(self, sample: Sample, reduced: Sequence[Tensor]) -> tuple[float, ...]:  # noqa: ARG002
        return (F.cosine_similarity(reduced[0], reduced[1], dim=0).item(),)

    def unit_count(self, sample: Sample) -> int:  # noqa: ARG002
        return 1

    def figures(self, samples: Sequence[Sample], sums: Figures) -> Figures:
        """Return the correlation, as terms of pairs whose mean it is.

        Errors of differences then come out right as well (the infinitesimal jackknife, Efron 1982; ranks are taken as
        given).
        """
        predicted, rated = (
            standardised_ranks(sums[:, 0]),
            standardised_ranks(np.array([sample.score for sample in samples])),
        )
        products = predicted * rated
        correlation = products.mean()
        return np.asarray(correlation + products - correlation * (predicted**2 + rated**2) / 2)[:, None]


TASK_METRICS: Mapping[str, Callable[[Checkpoint], TaskMetric]] = {
    "classify": LabelMetric,
    "embed": SimilarityMetric,
    "fill": MaskedTokenMetric,
    "generate": NextTokenMetric,
    "rank": MultiLabelMetric,
    "span": SpanMetric,
    "tag": TagMetric,
    "translate": TranslationMetric,
}


def choose_metric(loaded: Checkpoint) -> TaskMetric:
    """Return the metric of a model.  Raises UnsupportedError for a classifier whose scores are no labels."""
    if loaded.task not in TASK_METRICS:
        message = f"the accuracy of heads is measured for models that {', '.join(TASK_METRICS)}, not {loaded.task}"
        raise UnsupportedError(message, file=loaded.source)
    closing = loaded.head.score_activation if isinstance(loaded.head, SequenceHead) else "softmax"
    if loaded.task == "classify" and closing == "none":
        message = "its scores are numbers, not labels; a classifier with labels is needed"
        raise UnsupportedError(message, file=loaded.source)
    return MultiLabelMetric(loaded) if closing == "sigmoid" else TASK_METRICS[loaded.task](loaded)


def head_scores(loaded: Checkpoint, states: Tensor, rows: list[int]) -> Tensor:
    """Return the raw scores [R, C] of some rows of one text's [T, W] states."""
    some, matrix, bias = final_product(loaded.head, states[None], rows)
    return F.linear(some[0], matrix, bias).float().cpu()


def to_text(encoding: Encoding) -> InputTokens:
    return InputTokens(tuple(encoding.ids), tuple(encoding.segments) if any(encoding.segments) else ())


def answer_words(answer: str) -> list[str]:
    """Return the answer's words, without case, punctuation and articles."""
    return [word for word in answer.lower().translate(REMOVE_PUNCTUATION).split() if word not in ARTICLES]


def standardised_ranks(values: Figures) -> Figures:
    """Return ranks with mean 0 and deviation 1; equal values get their mean rank.  All 0 if all values are equal."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return np.asarray((ranks - ranks.mean()) / (ranks.std() or 1.0))
