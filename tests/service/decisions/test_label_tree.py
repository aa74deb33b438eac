"""Labels, and the tree of their tokens."""

import itertools
import math
import random

import pytest

from polyhead.service.decisions.label_tree import LabelTree, Path, choose_labels


def test_labels_are_different_and_begin_no_other() -> None:
    for kind, count in (("choice", 1), ("choice", 26), ("choice", 27), ("choice", 255), ("score", 10), ("score", 40)):
        labels = [label for [label] in choose_labels(kind, count)]
        assert len(set(labels)) == count
        assert not any(b.startswith(a) for a, b in itertools.permutations(labels, 2))
    assert choose_labels("score", 3) == (("0",), ("1",), ("2",))
    assert [each[0] for each in choose_labels("predicate", 2)] == ["Yes", "No"]


def test_labels_of_one_token_need_one_read() -> None:
    tree = LabelTree.build([[(5,), (6,)], [(7,)]])
    assert tree.reads == {(): (5, 6, 7)}
    logprobs = {5: math.log(0.2), 6: math.log(0.1), 7: math.log(0.4)}
    assert [math.exp(each) for each in tree.label_logprobs({(): logprobs})] == pytest.approx([0.3, 0.4])
    assert tree.is_first_token(6)
    assert not tree.is_first_token(8)


def test_the_probability_of_a_label_is_the_product_along_its_tokens() -> None:
    """Against a random language over four tokens: all texts of three tokens have together the probability 1."""
    choice, tokens = random.Random(3), range(4)
    paths: list[Path] = list(itertools.product(tokens, repeat=3))
    tree = LabelTree.build([[path] for path in paths])
    assert len(tree.reads) == 1 + 4 + 16
    shares = {node: [choice.random() for _ in tokens] for node in tree.reads}
    logprobs = {
        node: {token: math.log(each / sum(some)) for token, each in zip(tokens, some, strict=True)}
        for node, some in shares.items()
    }
    found = [math.exp(each) for each in tree.label_logprobs(logprobs)]
    assert sum(found) == pytest.approx(1)
    first = paths[27]
    product = math.prod(math.exp(logprobs[first[:length]][first[length]]) for length in range(3))
    assert found[27] == pytest.approx(product)


@pytest.mark.parametrize("labels", [[[(1,)], [(1,)]], [[(1,)], [(1, 2)]], [[(1, 2)], [(1,)]]])
def test_labels_that_cannot_be_told_apart_are_refused(labels: list[list[Path]]) -> None:
    with pytest.raises(ValueError, match="those of another"):
        LabelTree.build(labels)
