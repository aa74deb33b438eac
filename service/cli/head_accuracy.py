"""What a labelled row is to a model, and how right it is about it: `measure(loaded)`.

Knows checkpoints and their scores, no files and nothing of what is done to a network meanwhile.  The one idea: a task
is two functions, from a row to what the network reads, and from the states it makes of that to figures, which are sums
over what was counted; so that whoever changes the network can compare text by text.
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
MASKED_SHARE = 0.15  # of the tokens of a text, as when such networks learn (Devlin et al. 2019)
LOGIT_ROWS = 256  # of which logits over a vocabulary exist at a time
ARTICLES = frozenset(("a", "an", "the"))
REMOVE_PUNCTUATION = str.maketrans("", "", string.punctuation)
Figures = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """`texts` are read each on its own; of each, `rows` are judged, and `right` is what they should say."""

    texts: tuple[InputTokens, ...]
    targets: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    score: float = 0.0  # of two texts: how alike people find them
    window: Encoding | None = None  # of a question and its context
    context: str = ""
    answer: str = ""


class TaskMetric(Protocol):
    """`names` of its figures.  `sample` is None for a row of which nothing could be judged."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def read_sample(self, row: LabelledRow) -> Sample | None:
        """ModelError if a field is missing, or not as it should be."""

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:
        """What is kept of one text's [T, W] states."""

    def sample_sums(self, sample: Sample, seen: Sequence[Tensor]) -> tuple[float, ...]:
        """The figures of a sample, summed over what is counted."""

    def unit_count(self, sample: Sample) -> int:
        """What a sample's figures are sums over: texts, words or tokens."""

    def figures(self, samples: Sequence[Sample], told: Figures) -> Figures:
        """[N, F] numbers of which the figures are the means, of [N, F] that were told."""


@dataclass
class TokenMetric:
    """Of a token, or of a whole text, the likeliest of all there is to say of it."""

    loaded: Checkpoint
    names: ClassVar[tuple[str, ...]] = (ACCURACY, CROSS_ENTROPY)

    def encode(self, text: str | tuple[str, str]) -> Encoding:
        """The end of what is too long is left out."""
        encoding, limit = self.loaded.tokenizer.encode_batch([text])[0], self.loaded.max_tokens
        if len(encoding) <= limit:
            return encoding
        return encoding.select_rows(truncate_rows(encoding.special, limit, side="right", pair=isinstance(text, tuple)))

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:
        rows, right = list(sample.rows), torch.tensor(sample.targets)
        hits = loss = 0.0
        for at in range(0, len(rows), LOGIT_ROWS):
            raw, wanted = head_scores(self.loaded, states, rows[at : at + LOGIT_ROWS]), right[at : at + LOGIT_ROWS]
            loss += F.cross_entropy(raw, wanted, reduction="sum").item()
            hits += (raw.argmax(-1) == wanted).sum().item()
        return torch.tensor([hits, loss], dtype=torch.float64)

    def sample_sums(self, sample: Sample, seen: Sequence[Tensor]) -> tuple[float, ...]:  # noqa: ARG002
        return tuple(seen[0].tolist())

    def unit_count(self, sample: Sample) -> int:
        return len(sample.rows)

    def figures(self, samples: Sequence[Sample], told: Figures) -> Figures:  # noqa: ARG002
        return told


class TagMetric(TokenMetric):
    """A word's tag is what is said of its first token (Devlin et al. 2019)."""

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
        rows, right = zip(*found, strict=True)
        return Sample((to_text(encoding),), right, rows)


class MaskedTokenMetric(TokenMetric):
    """Some of a text's tokens are hidden, always the same; what stood there?"""

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
    """What comes behind each token of a text."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        ids = tuple(self.encode(row.text("text")).ids)
        return Sample((InputTokens(ids[:-1]),), ids[1:], tuple(range(len(ids) - 1))) if len(ids) > 1 else None


class TranslationMetric(TokenMetric):
    """What comes behind each token of a translation, where those before it are given."""

    def read_sample(self, row: LabelledRow) -> Sample | None:
        source, target = (tuple(self.encode(row.text(name)).ids) for name in ("text", "translation"))
        given = (cast(Seq2Seq, self.loaded.head).start_token, *target[:-1])
        return Sample((InputTokens(given, source=source),), target, tuple(range(len(target))))


class LabelMetric(TokenMetric):
    """A text's label; of a pair that is read in both orders, scores are added."""

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

    def sample_sums(self, sample: Sample, seen: Sequence[Tensor]) -> tuple[float, ...]:
        raw = torch.stack(list(seen)).sum(0)
        loss = F.cross_entropy(raw, torch.tensor(sample.targets[0])).item()
        return float(raw.argmax().item() == sample.targets[0]), loss

    def unit_count(self, sample: Sample) -> int:  # noqa: ARG002
        return 1


class MultiLabelMetric(LabelMetric):
    """Each label is there or is not; right is who says so of all of them."""

    def read_labels(self, row: LabelledRow) -> tuple[int, ...]:
        if len(self.loaded.labels) == 1:
            return (0,) if row.choice("label", ("0", "1")) else ()
        return tuple(row.choices("label", self.loaded.labels))

    def sample_sums(self, sample: Sample, seen: Sequence[Tensor]) -> tuple[float, ...]:
        raw = seen[0]
        right = torch.zeros_like(raw)
        right[list(sample.targets)] = 1
        loss = F.binary_cross_entropy_with_logits(raw, right, reduction="sum").item()
        return float(torch.equal(raw > 0, right > 0)), loss


class SpanMetric(TokenMetric):
    """Where the answer to a question stands: in the same words as the right one (Rajpurkar et al. 2016)."""

    names = ("exact match", CROSS_ENTROPY)

    def read_sample(self, row: LabelledRow) -> Sample | None:
        context, answer = row.text("context"), row.text("answer")
        start = int(row.number("start")) if row.has_field("start") else context.find(answer)
        if start < 0 or context[start : start + len(answer)] != answer:
            raise row.field_error(
                "answer", f"does not stand in the context{f' at {start}' if row.has_field('start') else ''}"
            )
        window = self.encode((row.text("question"), context))
        within = [at for at, text in enumerate(window.texts) if text == 1]
        spans = ((at, *window.offsets[at]) for at in within)
        found = [at for at, begins, ends in spans if begins < start + len(answer) and ends > start]
        if not found or window.offsets[found[-1]][1] < start + len(answer):
            return None
        right = (found[0], found[-1])
        return Sample((to_text(window),), right, (0, *within), window=window, context=context, answer=answer)

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:  # noqa: ARG002
        return head_scores(self.loaded, states, list(range(len(states))))

    def sample_sums(self, sample: Sample, seen: Sequence[Tensor]) -> tuple[float, ...]:
        assert sample.window is not None
        rows = list(sample.rows)
        right = torch.tensor([rows.index(row) for row in sample.targets])
        loss = F.cross_entropy(seen[0][rows].T, right, reduction="sum").item()
        found = find_answers(SpanOptions(), sample.context, [ScoredWindow(sample.window, seen[0].numpy())])
        return float(bool(found) and answer_words(found[0].text) == answer_words(sample.answer)), loss

    def unit_count(self, sample: Sample) -> int:  # noqa: ARG002
        return 1


class SimilarityMetric(TokenMetric):
    """Whether what people find more alike is closer: the correlation of ranks."""

    names = (SPEARMAN,)

    def read_sample(self, row: LabelledRow) -> Sample | None:
        if not (row.has_field("text_pair") and row.has_field("score")):
            raise row.field_error(
                "score", "vectors are right about nothing by themselves: text, text_pair, score are wanted"
            )
        prompt = self.loaded.prompts.get("", "")
        texts = (to_text(self.encode(prompt + row.text(name))) for name in ("text", "text_pair"))
        return Sample(tuple(texts), score=row.number("score"))

    def reduce_states(self, sample: Sample, states: Tensor) -> Tensor:  # noqa: ARG002
        return pooled_vectors(cast(Pooler, self.loaded.head), states[None])[0]

    def sample_sums(self, sample: Sample, seen: Sequence[Tensor]) -> tuple[float, ...]:  # noqa: ARG002
        return (F.cosine_similarity(seen[0], seen[1], dim=0).item(),)

    def unit_count(self, sample: Sample) -> int:  # noqa: ARG002
        return 1

    def figures(self, samples: Sequence[Sample], told: Figures) -> Figures:
        """The correlation and, of each pair, what it adds to it: the means are right, and so are errors of differences
        (the infinitesimal jackknife, Efron 1982; ranks are taken as given)."""
        ours, theirs = (
            standardised_ranks(told[:, 0]),
            standardised_ranks(np.array([sample.score for sample in samples])),
        )
        together = ours * theirs
        whole = together.mean()
        return np.asarray(whole + together - whole * (ours**2 + theirs**2) / 2)[:, None]


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
    """UnsupportedError for a classifier whose scores say no label."""
    closing = loaded.head.score_activation if isinstance(loaded.head, SequenceHead) else "softmax"
    if loaded.task == "classify" and closing == "none":
        message = "its scores are numbers, of which none is the right label; a classifier with labels is wanted"
        raise UnsupportedError(message, file=loaded.source)
    return MultiLabelMetric(loaded) if closing == "sigmoid" else TASK_METRICS[loaded.task](loaded)


def head_scores(loaded: Checkpoint, states: Tensor, rows: list[int]) -> Tensor:
    """[R, C] raw scores of some rows of one text's [T, W] states."""
    some, matrix, bias = final_product(loaded.head, states[None], rows)
    return F.linear(some[0], matrix, bias).float().cpu()


def to_text(encoding: Encoding) -> InputTokens:
    return InputTokens(tuple(encoding.ids), tuple(encoding.segments) if any(encoding.segments) else ())


def answer_words(answer: str) -> list[str]:
    """Its words, without case, punctuation and articles."""
    return [word for word in answer.lower().translate(REMOVE_PUNCTUATION).split() if word not in ARTICLES]


def standardised_ranks(values: Figures) -> Figures:
    """Their ranks, those of equals the mean of theirs, with mean 0 and deviation 1; all 0 where all are equal."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return np.asarray((ranks - ranks.mean()) / (ranks.std() or 1.0))
