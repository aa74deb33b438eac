"""The objective of encoders: masked tokens, and whether one text follows another (Devlin et al. 2019,
arXiv:1810.04805).

15 % of a pair's tokens are predicted, or more with little compute (Wettig et al. 2023, arXiv:2202.08005).  Of these, 80
% are masked, 10 % replaced by random tokens, 10 % unchanged.  A second text that does not follow is taken from another
pair of the batch, so the batch's number of tokens does not depend on chance.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from polyhead.models.network.heads import MaskHead, SequenceHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Example
from ..data.prose import split_sentences
from .objective import LossPart

HIDDEN_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
SPECIAL_TOKENS = 3  # [CLS] first [SEP] second [SEP]


@dataclass(frozen=True)
class TextPair:
    """Token ids of two texts, the second of which follows the first."""

    first: list[int]
    second: list[int]


@dataclass(frozen=True)
class MaskedPair:
    """A masked sequence; `rows` are predicted, and `targets` are their original tokens."""

    tokens: list[int]
    segments: list[int]
    rows: list[int]
    targets: list[int]


@dataclass(frozen=True, kw_only=True)
class MaskedObjective:
    """Masked-token and next-text prediction over sequences of `limit` tokens.  Without `next_head`, masked tokens
    only.
    """

    network: Transformer
    head: MaskHead
    next_head: SequenceHead | None
    tokenizer: Tokenizer
    limit: int
    hidden_share: float = HIDDEN_SHARE

    def modules(self) -> list[nn.Module]:
        return [self.network, self.head, *([self.next_head] if self.next_head is not None else [])]

    def items(self, examples: Sequence[Example[Any]]) -> list[TextPair]:
        """Return pairs of consecutive sentences, as many on each side as there is room for."""
        found = []
        for example in examples:
            texts = self.tokenizer.encode_batch(
                split_sentences(example.text), special=False, untrusted=True, offsets=False
            )
            found += pair_sentences([text.ids for text in texts if len(text)], self.limit - SPECIAL_TOKENS)
        return found

    @torch.no_grad()
    def initialise_bias(self, items: Sequence[TextPair]) -> None:
        """Set the output bias to the log frequencies of tokens, so that no steps are spent on learning them."""
        tokens = torch.tensor([token for item in items for side in (item.first, item.second) for token in side])
        counts = torch.bincount(tokens, minlength=self.tokenizer.vocab_size) + 1
        self.head.output.bias.copy_((counts / counts.sum()).log())

    def size(self, item: TextPair) -> int:
        return len(item.first) + len(item.second) + SPECIAL_TOKENS

    def counts(self, items: Sequence[TextPair]) -> tuple[int, ...]:
        hidden = sum(self.hidden_count(item.first) + self.hidden_count(item.second) for item in items)
        return (hidden, len(items)) if self.next_head is not None else (hidden,)

    def loss_parts(self, items: Sequence[TextPair], rng: random.Random) -> dict[str, LossPart]:
        """Return the losses of masked tokens and, with `next_head`, of the second text."""
        batch_pairs, is_swapped = swap_seconds(items, rng) if self.next_head is not None else (list(items), [])
        masked = [self.mask_pair(pair, rng) for pair in batch_pairs]
        device = self.network.tokens.weight.device
        batch = RaggedBatch.of([each.tokens for each in masked], [each.segments for each in masked], device)
        states = self.network(batch)
        rows = [start + row for start, each in zip(batch.starts, masked, strict=False) for row in each.rows]
        targets = [token for each in masked for token in each.targets]
        hidden, last = self.head.hidden_states(states[torch.tensor(rows, device=device)]), self.head.output
        parts = {"hidden": LossPart(hidden, (last.weight, last.bias), torch.tensor(targets, device=device))}
        if self.next_head is not None:
            pooled, last = self.next_head.hidden_states(states, batch.starts), self.next_head.out
            parts["follows"] = LossPart(pooled, (last.weight, last.bias), torch.tensor(is_swapped, device=device))
        return parts

    def mask_pair(self, pair: TextPair, rng: random.Random) -> MaskedPair:
        find = self.tokenizer.token_id
        cls, sep, mask = find("[CLS]"), find("[SEP]"), self.tokenizer.mask_id
        assert cls is not None
        assert sep is not None
        assert mask is not None
        tokens = [cls, *pair.first, sep, *pair.second, sep]
        segments = [0] * (len(pair.first) + 2) + [1] * (len(pair.second) + 1)
        first, second = range(1, len(pair.first) + 1), range(len(pair.first) + 2, len(tokens) - 1)
        rows = [row for text in (first, second) for row in sorted(rng.sample(text, self.hidden_count(text)))]
        targets = [tokens[row] for row in rows]
        for row in rows:
            chance = rng.random()
            if chance < MASK_SHARE:
                tokens[row] = mask
            elif chance < MASK_SHARE + RANDOM_SHARE:
                tokens[row] = rng.randrange(mask + 1, self.tokenizer.vocab_size)  # after the special tokens
        return MaskedPair(tokens, segments, rows, targets)

    def hidden_count(self, text: Sequence[int]) -> int:
        """Return how many tokens of a text are predicted; it depends on this text only."""
        return round(self.hidden_share * len(text))

    def figures(self, means: Mapping[str, float], accuracies: Mapping[str, float]) -> dict[str, float]:
        """Return loss and accuracy of masked tokens, and accuracy of next-text prediction."""
        figures = {"loss": sum(means.values()), "masked accuracy": accuracies["hidden"], "masked loss": means["hidden"]}
        return figures | ({"next accuracy": accuracies["follows"]} if "follows" in accuracies else {})


def pair_sentences(texts: Sequence[list[int]], room: int) -> list[TextPair]:
    """Return pairs of consecutive sentences with at most half of `room` on each side, so any first text fits any
    second.

    A longer sentence is cut.  A side without a partner is cut in two.
    """
    half = room // 2
    sides: list[list[list[int]]] = []
    for piece in (text[at : at + half] for text in texts for at in range(0, len(text), half)):
        if not sides or sum(map(len, sides[-1])) + len(piece) > half:
            sides.append([])
        sides[-1].append(piece)
    both = zip(sides[::2], sides[1::2], strict=False)
    found = [TextPair([*chain(*first)], [*chain(*second)]) for first, second in both]
    if len(sides) % 2:
        found.append(halve_text(sides[-1]))
    return [pair for pair in found if pair.first and pair.second]


def halve_text(texts: list[list[int]]) -> TextPair:
    """Cut texts at the end of the sentence nearest to the middle; a single one in its middle."""
    if len(texts) == 1:
        middle = len(texts[0]) // 2
        return TextPair(texts[0][:middle], texts[0][middle:])
    half = sum(map(len, texts)) / 2
    cut = min(range(1, len(texts)), key=lambda at: abs(sum(map(len, texts[:at])) - half))
    return TextPair([*chain(*texts[:cut])], [*chain(*texts[cut:])])


def swap_seconds(items: Sequence[TextPair], rng: random.Random) -> tuple[list[TextPair], list[int]]:
    """Exchange the second texts of about half of the pairs; returns 1 for those and 0 for the others.

    The second texts are rotated, so none returns to its own pair.  A single pair is left unchanged.
    """
    moved = [row for row in range(len(items)) if rng.random() < 0.5]
    if len(moved) < 2:
        moved = []
    rng.shuffle(moved)
    swapped, is_swapped = list(items), [0] * len(items)
    for row, other in zip(moved, moved[1:] + moved[:1], strict=True):
        swapped[row], is_swapped[row] = TextPair(items[row].first, items[other].second), 1
    return swapped, is_swapped
