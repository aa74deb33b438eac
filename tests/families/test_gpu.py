"""Every family on a GPU equals its reference on the CPU: packed or over the cache, with its head.

Skipped where torch finds no GPU.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.models.checkpoint import load
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.cuda_graphs import PagedAttention
from polyhead.models.executors.seq2seq_executor import Seq2SeqExecutor
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.varlen import find_kernel, is_supported
from tests.families import test_decoders as decoders
from tests.families import test_encoder_decoders as sides
from tests.families import test_encoders as encoders
from tests.families import test_experts as experts
from tests.families.conformance import head_output, reference_output, save_reference

GPU = torch.device("cuda")
CLOSE = 1e-4  # of the largest number; a GPU sums in another order

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float = CLOSE) -> None:
    assert found.shape == expected.shape
    assert float((found.cpu() - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", decoders.ROWS)
def test_a_decoder_over_the_cache(name: str, tmp_path: Path) -> None:
    row = decoders.ROWS[name]
    theirs = decoders.save_reference(row.kind, row.make_config(), tmp_path)
    ours, expected = load(str(tmp_path), device=GPU), decoders.reference_logits(theirs)
    executor = TorchExecutor(ours.network, ours.head, block_count=40, block_size=4, state_count=40)
    assert_close(decoders.chunked_logits(executor), expected)


@pytest.mark.parametrize("name", decoders.ROWS)
def test_a_decoder_in_bfloat16(name: str, tmp_path: Path) -> None:
    """By the kernel that reads blocks in place and by recorded steps, where they support the network: about as close to
    float32 as bfloat16 on the CPU is."""
    row = decoders.ROWS[name]
    theirs = decoders.save_reference(row.kind, row.make_config(), tmp_path)
    expected, found = decoders.reference_logits(theirs), []
    for device in (GPU, torch.device("cpu")):
        ours = load(str(tmp_path), dtype=torch.bfloat16, device=device)
        kernel = find_kernel(device, torch.bfloat16) if is_supported(ours.config) else None
        in_place = PagedAttention(kernel, 4) if kernel else None
        executor = TorchExecutor(
            ours.network, ours.head, block_count=40, block_size=4, state_count=40, in_place=in_place
        )
        found.append(decoders.chunked_logits(executor).cpu())
    there, here = (float((logits - expected).square().mean().sqrt()) for logits in found)
    assert there <= 2 * here


@pytest.mark.parametrize("name", encoders.ROWS)
def test_an_encoder_with_its_head(name: str, tmp_path: Path) -> None:
    row = encoders.ROWS[name]
    theirs = save_reference(row, tmp_path)
    ours = load(str(tmp_path), device=GPU)
    expected = reference_output(load(str(tmp_path)), theirs.eval(), row.texts)
    assert_close(head_output(ours, TorchExecutor(ours.network), row.texts), expected)


@pytest.mark.parametrize("name", experts.ROWS)
def test_a_mixture_of_experts(name: str, tmp_path: Path) -> None:
    theirs, _ = experts.build(name, tmp_path)
    ours, tokens = load(str(tmp_path), device=GPU), experts.SEQUENCES[0]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    executor = TorchExecutor(ours.network, ours.head, block_count=8, block_size=4)
    assert_close(experts.chunked_logits(executor, tokens), expected)


@pytest.mark.parametrize("name", sides.ROWS)
@torch.inference_mode()
def test_an_encoder_decoder(name: str, tmp_path: Path) -> None:
    """Logits, and answers of the executor that a server runs, token by token."""
    theirs = sides.save_reference(sides.ROWS[name], tmp_path)
    ours, pairs = load(str(tmp_path), device=GPU), list(zip(sides.SOURCES, sides.TARGETS, strict=True))
    found = ours.head(RaggedBatch.of(sides.SOURCES, device=GPU), RaggedBatch.of(sides.TARGETS, device=GPU))
    expected = torch.cat([theirs(torch.tensor([s]), decoder_input_ids=torch.tensor([t])).logits[0] for s, t in pairs])
    assert_close(found, expected)
    network: Any = ours.head
    executor = Seq2SeqExecutor(network, GPU, vocabulary=ours.config.vocab_size, block_count=40, block_size=4)
    tables = [[4 * n + block for block in range(4)] for n in range(len(pairs))]
    rows = StepInput(
        [token for target in sides.TARGETS for token in target],
        [place for target in sides.TARGETS for place in range(len(target))],
        [*accumulate(map(len, sides.TARGETS), initial=0)],
        tables,
        list(range(sum(map(len, sides.TARGETS)))),
        sources=[tuple(source) for source in sides.SOURCES],
    )
    assert_close(executor.step(rows), expected)
