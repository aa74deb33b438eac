"""The torch executor: values that are not finite stay with their sequence, steps without output rows, and turns."""

from dataclasses import replace

import pytest
import torch
import transformers as tf

from polyhead.models.architectures import FAMILIES
from polyhead.models.architectures.bart import seq2seq_config
from polyhead.models.architectures.led import seq2seq_config as led_config
from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.network.encoder_decoder import SharedTextTransformer
from polyhead.models.network.lora import LowRank, adaptable_shapes
from polyhead.models.network.static_network import StaticNetwork
from polyhead.models.network.transformer import Transformer
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


SIZE = dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64)
CONFIGS = {
    "bert": tf.BertConfig(**SIZE),
    "deberta-v2": tf.DebertaV2Config(**SIZE, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0,
                                     share_att_key=True, position_biased_input=False, position_buckets=8,
                                     norm_rel_ebd="layer_norm"),
    "mpnet": tf.MPNetConfig(**SIZE),
}  # fmt: skip
TEXTS = StepInput([5, 6, 7, 8, 9], [0, 1, 2, 0, 1], [0, 3, 5], [[], []], [0, 4])


def encoder(name: str) -> Transformer:
    torch.manual_seed(0)
    if name == "bart":
        sides = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
        bart = tf.BartConfig(**sides, vocab_size=97, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48)
        return SharedTextTransformer(seq2seq_config(bart.to_dict(), 2)).eval()
    return Transformer(FAMILIES[name].config(CONFIGS[name].to_dict())).eval()


@pytest.mark.parametrize(("name", "pieces"), [("bert", 4), ("deberta-v2", 4), ("mpnet", 4), ("bart", 6)])
def test_turns_change_no_result(name: str, pieces: int) -> None:
    """Each layer is a turn or several, and other steps may be computed between them; so are the layers of a decoder
    that reads the same text, and what its two layers read of the encoder's states."""
    executor = TorchExecutor(encoder(name))
    expected = executor.step(TEXTS).clone()
    other = StepInput([11, 12], [0, 1], [0, 2], [[]], [0])
    turns = []
    for result in executor.step_in_turns(TEXTS, 0.0):
        turns.append(result)
        assert executor.step(other).isfinite().all()
    *unfinished, found = turns
    assert set(unfinished) == {None}
    assert len(unfinished) >= pieces
    assert found is not None
    assert torch.equal(found, expected)
    [whole] = executor.step_in_turns(TEXTS, 3600.0)
    assert whole is not None
    assert torch.equal(whole, expected)


def test_a_step_without_layers_is_one_turn() -> None:
    config = replace(encoder("bert").config, depth=0)
    executor = TorchExecutor(StaticNetwork(config, 97, None, weighted=False))  # type: ignore[arg-type]
    [found] = executor.step_in_turns(TEXTS, 0.0)
    assert found is not None
    assert torch.equal(found, executor.step(TEXTS))


def test_the_adapter_of_an_interrupted_step_may_be_detached() -> None:
    network = encoder("bert")
    executor = TorchExecutor(network)
    shapes = adaptable_shapes(network.config).items()
    number = executor.attach({name: LowRank(torch.randn(4, ins), torch.randn(outs, 4)) for name, (ins, outs) in shapes})
    rows = replace(TEXTS, adapters=[number, 0])
    expected = executor.step(rows).clone()
    assert not torch.equal(expected, executor.step(TEXTS))
    turns = executor.step_in_turns(rows, 0.0)
    assert next(turns) is None
    executor.detach(number)
    [*_, found] = turns
    assert found is not None
    assert torch.equal(found, expected)


def test_a_text_is_not_longer_than_the_decoder_that_reads_it_too() -> None:
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
    led = tf.LEDConfig(**sizes, vocab_size=97, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, attention_window=[4],
                       max_encoder_position_embeddings=64, max_decoder_position_embeddings=16)  # fmt: skip
    executor = TorchExecutor(SharedTextTransformer(led_config(led.to_dict(), 2)).eval())
    assert executor.step(StepInput([5] * 16, list(range(16)), [0, 16], [[]], [0])).isfinite().all()
    with pytest.raises(StepInputError, match="positions"):
        executor.step(StepInput([5] * 17, list(range(17)), [0, 17], [[]], [0]))
