"""The torch executor: values that are not finite stay with their sequence, and steps without output rows."""

import torch

from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from tests.models.architectures.test_families import build


def test_a_block_that_held_nan_is_clean_for_the_next_sequence() -> None:
    """NaN stays with the sequence that computed it, also when its block is given to another sequence."""
    _, ours, head = build("llama")
    executor = TorchExecutor(ours, head, block_count=4, block_size=4)
    fresh = executor.step(StepInput([5, 6], [0, 1], [0, 2], [[2]], [1]))
    with torch.no_grad():
        kept = ours.tokens.weight[7].clone()
        ours.tokens.weight[7] = float("nan")
    assert not executor.nonfinite_blocks
    assert executor.step(StepInput([7] * 4, [0, 1, 2, 3], [0, 4], [[2]], [3])).isnan().any()
    assert executor.nonfinite_blocks == {2}
    assert (
        executor.step(StepInput([5], [4], [0, 1], [[2, 3]], [0])).isnan().any()
    )  # it reads the NaN of its own earlier tokens
    assert executor.nonfinite_blocks == {2, 3}
    with torch.no_grad():
        ours.tokens.weight[7] = kept
    assert torch.equal(executor.step(StepInput([5, 6], [0, 1], [0, 2], [[2]], [1])), fresh)
    assert executor.nonfinite_blocks == {3}, "until another sequence starts the block again"


def test_blocks_of_a_chunk_that_is_not_finite_are_reported_at_once() -> None:
    """In the middle of a prompt, before any logits are requested. Blocks of other sequences are not reported."""
    _, ours, head = build("llama")
    executor = TorchExecutor(ours, head, block_count=8, block_size=4)
    with torch.no_grad():
        ours.tokens.weight[7] = float("inf")
    bad, good = [5, 6, 5, 6, 5, 7, 5, 6], [8, 9, 8, 9]
    positions = [*range(8), *range(4)]
    executor.step(StepInput([*bad, *good], positions, [0, 8, 12], [[1, 4], [6]], []))
    assert 4 in executor.nonfinite_blocks
    assert 6 not in executor.nonfinite_blocks


def test_nan_does_not_reach_other_sequences() -> None:
    """A long sequence of NaN beside a short one, whose block table is padded to its length."""
    _, ours, head = build("llama")
    executor = TorchExecutor(ours, head, block_count=8, block_size=4)
    alone = executor.step(StepInput([5, 6], [0, 1], [0, 2], [[6]], [1]))
    with torch.no_grad():
        ours.tokens.weight[7] = float("nan")
    for order in ([0, 1], [1, 0]):
        members = [([7] * 12, [0, 1, 2]), ([5, 6], [3])]
        rows = StepInput([], [], [0], [], [])
        for n in order:
            tokens, table = members[n]
            rows.tokens.extend(tokens)
            rows.positions.extend(range(len(tokens)))
            rows.starts.append(len(rows.tokens))
            rows.block_tables.append(table)
            rows.output_rows.append(len(rows.tokens) - 1)
        logits = executor.step(rows)
        assert logits[order.index(0)].isnan().any()
        assert torch.allclose(logits[order.index(1)], alone[0], atol=1e-5)


def test_a_step_without_output_rows_returns_no_logits() -> None:
    """The step of a chunk that does not complete its prompt."""
    _, ours, head = build("llama")
    executor = TorchExecutor(ours, head, block_count=2, block_size=4)
    assert executor.step(StepInput([5, 6], [0, 1], [0, 2], [[1]], [])).shape == (0, 97)
