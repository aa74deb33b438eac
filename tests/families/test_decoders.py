"""Decoder families equal their reference: packed, over the cache, greedily, as GGUF, natively."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf
from torch import Tensor

from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.executors.contract import Executor, StateUse, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.executors.workspace import block_bytes
from polyhead.models.explain.explain_types import InputTokens
from polyhead.models.explain.instrumented_network import InstrumentedNetwork
from polyhead.models.invariant import make_invariant
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.parallel.share import split_problem
from tests.families import classic_decoders, modern_decoders, recurrent_decoders
from tests.families.classic_decoders import Row
from tests.models.executors.test_stale_slots import fill
from tests.support import gguf_files
from tests.support.checkpoints import byte_level_bpe
from tests.support.edits import edited, with_tensors
from tests.support.loading import pack_by_parts

ROWS = {**classic_decoders.ROWS, **modern_decoders.ROWS, **recurrent_decoders.ROWS}
HEADS = {**classic_decoders.HEADS, **modern_decoders.HEADS, **recurrent_decoders.HEADS}
REFUSED = [*classic_decoders.REFUSED, *modern_decoders.REFUSED, *recurrent_decoders.REFUSED]
SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40]]
CHUNKS = [{0: 4}, {0: 1, 1: 2}, {0: 2, 1: 1, 2: 3, 3: 1}, {0: 1, 2: 1}, {0: 1, 2: 1}]
PROMPTS, PROMPT_LENGTH, ANSWER = 20, 5, 40
LABELS = 3
RELATIVE, TIE = 1e-5, 1e-4
ROUNDED = 0.08  # of the standard deviation of logits, with weights of 8 bits


@dataclass(frozen=True)
class Case:
    row: Row
    theirs: Any
    folder: Path
    ours: Checkpoint
    expected: Tensor  # the reference's logits


@cache
def tokenizer() -> tf.PreTrainedTokenizerFast:
    return byte_level_bpe()


@torch.no_grad()
def save_reference(kind: Any, config: Any, folder: Path) -> Any:
    """The reference with random weights, norms around 1, saved with a tokenizer."""
    torch.manual_seed(0)
    theirs = kind(config).eval()
    for name, parameter in theirs.named_parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)
    for name, buffer in theirs.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.normal_(1.0, 0.2)
    theirs.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes the reference of a row, its folder and what is loaded from it, once."""
    cases: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in cases:
            row, folder = ROWS[name], tmp_path_factory.mktemp("decoders") / name
            theirs = save_reference(row.kind, row.make_config(), folder)
            cases[name] = Case(row, theirs, folder, load(str(folder)), reference_logits(theirs))
        return cases[name]

    return make


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= RELATIVE * max(1.0, float(expected.abs().max()))


@torch.no_grad()
def reference_logits(theirs: Any) -> Tensor:
    return torch.cat([theirs(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])


@torch.no_grad()
def packed_logits(ours: Checkpoint) -> Tensor:
    logits: Tensor = ours.head(ours.network(RaggedBatch.of(SEQUENCES)))
    return logits


@pytest.mark.parametrize("name", ROWS)
def test_packed_sequences_equal_the_reference(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    assert float(case.expected.std()) > 0.1, "the logits of the reference differ"
    assert_close(packed_logits(case.ours), case.expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "glm4", "olmo2", "lfm2"])
def test_proportional_rotations_equal_the_reference(name: str, tmp_path: Path) -> None:
    """Half of the angles are 0, and no feature is left out of the rotation."""
    row = ROWS[name]
    config = row.make_config()
    config.rope_parameters = {**config.rope_parameters, "rope_type": "proportional", "partial_rotary_factor": 0.5}
    theirs = save_reference(row.kind, config, tmp_path)
    assert_close(packed_logits(load(str(tmp_path))), reference_logits(theirs))


def test_another_original_context_beside_rotations_by_layer_is_refused(
    case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    """The reference reads it only inside of them, and beside the rotation of other families."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    fields = dict(rope_parameters=None, rope_scaling=yarn)
    load(str(edited(case_of("gemma3").folder, tmp_path / "inside", **fields)))
    load(str(edited(case_of("gemma3").folder, tmp_path / "both", **fields, original_max_position_embeddings=16)))
    folder = edited(case_of("gemma3").folder, tmp_path / "beside", **fields, original_max_position_embeddings=8)
    with pytest.raises(UnsupportedError, match="original_max_position_embeddings is beside rope_scaling; gemma3"):
        load(str(folder))


@pytest.mark.parametrize("name", ["gpt_neox", "persimmon", "llama"])
def test_a_window_that_the_reference_ignores_is_ignored(
    case_of: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    case = case_of(name)
    folder = edited(case.folder, tmp_path / "windowed", sliding_window=3)
    assert_close(packed_logits(load(str(folder))), case.expected)


@pytest.mark.parametrize("name", ["phi", "cohere", "stablelm-parallel"])
def test_a_second_norm_of_a_layer_that_has_one_is_left_out(
    case_of: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    """As a file may have it that was made with another configuration; the reference ignores it."""

    def add(tensors: dict[str, Tensor]) -> None:
        norms = [each for each in tensors if ".input_layernorm." in each]
        assert norms
        tensors |= {each.replace("input", "post_attention"): torch.randn_like(tensors[each]) for each in norms}

    case = case_of(name)
    folder = with_tensors(case.folder, tmp_path / "more", add)
    assert_close(packed_logits(load(str(folder))), case.expected)


def chunked_logits(executor: Executor) -> Tensor:
    """The logits of all tokens, computed in chunks of several sequences, with keys in scattered blocks and states in
    alternating slots."""
    free = list(range(1, 40))
    tables = [[free.pop() for _ in range(-(-len(sequence) // executor.block_size))] for sequence in SEQUENCES]
    done, collected = [0] * len(SEQUENCES), [list[Tensor]() for _ in SEQUENCES]
    for chunks in CHUNKS:
        rows = StepInput([], [], [0], [], [])
        for n, count in chunks.items():
            span = range(done[n], done[n] + count)
            rows.tokens.extend(SEQUENCES[n][position] for position in span)
            rows.positions.extend(span)
            rows.starts.append(len(rows.tokens))
            rows.block_tables.append(tables[n])
            done[n] += count
        rows.output_rows.extend(range(len(rows.tokens)))
        if executor.state_count:
            before = {n: done[n] - count for n, count in chunks.items()}
            rows = replace(rows, states=[StateUse(slot(n, before[n]), slot(n, done[n])) for n in chunks])
        if chunks is CHUNKS[0]:  # as a step is that computes the middle of a prompt alone
            assert not len(executor.step(replace(rows, output_rows=[])))
        logits = executor.step(rows)
        for index, n in enumerate(chunks):
            collected[n].append(logits[rows.starts[index] : rows.starts[index + 1]].clone())
    assert done == [len(sequence) for sequence in SEQUENCES]
    return torch.cat([torch.cat(parts) for parts in collected])


def slot(sequence: int, tokens: int) -> int:
    """Where the state of a sequence after so many tokens is."""
    return 10 * sequence + tokens if tokens else -1


@pytest.mark.parametrize("name", ROWS)
def test_chunks_over_the_cache_equal_the_reference(case_of: Callable[[str], Case], name: str) -> None:
    """In blocks of one and of four tokens, which take turns: the cache is the same for all families."""
    case, size = case_of(name), (1, 4)[[*ROWS].index(name) % 2]
    executor = TorchExecutor(case.ours.network, case.ours.head, block_count=40, block_size=size, state_count=40)
    fill(executor, math.inf)
    assert_close(chunked_logits(executor), case.expected)


@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
@pytest.mark.parametrize("name", ROWS)
def test_the_compiled_step_equals_the_reference_or_refuses(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    if refusal := unsupported_reason(case.ours.config):
        pytest.skip(refusal)
    executor = pack_by_parts(case.folder, block_count=40, state_count=40, precision="float32")
    assert_close(chunked_logits(executor), case.expected)


@pytest.mark.thorough
@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
@pytest.mark.parametrize("name", ROWS)
def test_weights_of_8_bits_stay_close(case_of: Callable[[str], Case], name: str) -> None:
    """Random weights are not stored exactly, so each product has an error of about a hundredth."""
    case = case_of(name)
    if refusal := unsupported_reason(case.ours.config):
        pytest.skip(refusal)
    executor = NativeExecutor(case.ours.network, case.ours.head, block_count=40, state_count=40, precision="int8")
    expected = case.expected
    error = float((chunked_logits(executor) - expected).square().mean().sqrt())
    assert 0 < error <= ROUNDED * float(expected.std())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("apertus", "its activation has learned slopes"), ("modernbert-decoder-biased", "its head has a dense layer")],
)
@torch.inference_mode()
def test_torch_computes_what_the_compiled_step_refuses_and_in_batches_to_the_bit(
    name: str, reason: str, tmp_path: Path
) -> None:
    """`make_invariant` changes the network, so it is a fresh one."""
    row = ROWS[name]
    save_reference(row.kind, row.make_config(), tmp_path)
    ours = load(str(tmp_path))
    assert reason in unsupported_reason(ours.config)
    make_invariant(ours.network, ours.head)
    alone = [ours.head(ours.network(RaggedBatch.of([sequence]))) for sequence in SEQUENCES]
    assert torch.equal(packed_logits(ours), torch.cat(alone))


def test_a_head_with_a_dense_layer_is_not_split(case_of: Callable[[str], Case]) -> None:
    config = case_of("modernbert-decoder").ours.config
    assert "its head has a dense layer" in split_problem(config, 2)
    assert not split_problem(replace(config, logit_dense=""), 2)


def test_a_network_whose_layers_differ_is_not_split_and_has_a_cache_of_their_sizes(
    case_of: Callable[[str], Case],
) -> None:
    """Of two windowed layers and two others, with 2 key heads of 8 and of 16 features; the last two read their keys."""
    config = case_of("gemma4").ours.config
    assert "its layers differ in their heads" in split_problem(config, 2)
    assert block_bytes(config, 4, torch.float32) == 4 * 4 * 2 * (2 * 2 * 8 + 2 * 2 * 16)


def test_gradients_through_layers_that_read_earlier_ones_are_refused(case_of: Callable[[str], Case]) -> None:
    ours = load(str(case_of("gemma4").folder))
    network, text = InstrumentedNetwork(ours.network, ours.head), InputTokens(tuple(SEQUENCES[1]))
    with pytest.raises(UnsupportedError, match="no gradients are computed; ask for attention or occlusion"):
        next(network.segments([text], network.embeddings(text)[None]))


def greedy_answers(executor: TorchExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """The most likely tokens after prompts of one length."""
    length, size = len(prompts[0]), executor.block_size
    count = -(-(length + ANSWER) // size)
    tables = [list(range(n * count, (n + 1) * count)) for n in range(len(prompts))]
    given, first, answers = prompts, 0, [list[int]() for _ in prompts]
    for _ in range(ANSWER):
        new = len(given[0])
        rows = StepInput(
            [token for tokens in given for token in tokens],
            list(range(first, first + new)) * len(given),
            list(range(0, new * len(given) + 1, new)),
            tables,
            [new * (n + 1) - 1 for n in range(len(given))],
        )
        if executor.state_count:
            odd = first % 2
            states = [StateUse(2 * n + odd if first else -1, 2 * n + 1 - odd) for n in range(len(given))]
            rows = replace(rows, states=states)
        chosen = executor.step(rows).argmax(dim=-1).tolist()
        given, first = [[token] for token in chosen], first + new
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
    return answers


@torch.no_grad()
def assert_same_or_tied(theirs: Any, prompt: list[int], ours: list[int], expected: list[int]) -> None:
    """The first different token is as likely as the reference's, up to rounding."""
    place = next((n for n, pair in enumerate(zip(ours, expected, strict=True)) if len(set(pair)) > 1), None)
    if place is not None:
        logits = theirs(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
        assert float(logits[expected[place]] - logits[ours[place]]) < TIE


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROWS)
def test_greedy_answers_equal_those_of_generate(case_of: Callable[[str], Case], name: str) -> None:
    case, choice = case_of(name), torch.Generator().manual_seed(1)
    executor = TorchExecutor(
        case.ours.network, case.ours.head, block_count=PROMPTS * 12, block_size=4, state_count=2 * PROMPTS
    )
    prompts = torch.randint(3, case.ours.config.vocab_size, (PROMPTS, PROMPT_LENGTH), generator=choice)
    made = case.theirs.generate(
        prompts, do_sample=False, max_new_tokens=ANSWER, eos_token_id=-1, pad_token_id=0,
        attention_mask=torch.ones_like(prompts),
    )  # fmt: skip
    given, answers = prompts.tolist(), made[:, PROMPT_LENGTH:].tolist()
    for prompt, ours, expected in zip(given, greedy_answers(executor, given), answers, strict=True):
        assert_same_or_tied(case.theirs, prompt, ours, expected)
    assert len({tuple(answer) for answer in answers}) > PROMPTS // 2, "the answers depend on the prompts"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.gguf])
def test_a_gguf_file_equals_the_folder(case_of: Callable[[str], Case], tmp_path: Path, name: str) -> None:
    case = case_of(name)
    assert case.row.gguf is not None
    form, config = case.row.gguf, case.theirs.config
    dialect = next(arch for arch, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == form.architecture)
    names, tensors = gguf.get_tensor_name_map(dialect, config.num_hidden_layers), {}
    for theirs, tensor in case.theirs.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # BLOOM's converter drops the prefix; the output layer of GPT-NeoX has another name in published files.
        spelled = (theirs, theirs.removeprefix("transformer."), theirs.replace("lm_head", "embed_out"))
        found = (names.get_name(each, try_suffixes=(".weight", ".bias")) for each in spelled)
        ours = next(name for name in found if name)
        tensors[ours] = form.convert(config, theirs, tensor).contiguous()
    metadata = {**form.fields(config), **gguf_files.byte_level_metadata(tokenizer())}
    file = gguf_files.write(tmp_path / "model.gguf", form.architecture, metadata, tensors)
    loaded = load(str(file))
    assert_close(packed_logits(loaded), packed_logits(case.ours))


@pytest.mark.parametrize(("name", "head"), [(name, head) for name, heads in HEADS.items() for head in heads])
@torch.no_grad()
def test_other_heads_equal_the_reference(tmp_path: Path, name: str, head: str) -> None:
    row = ROWS[name]
    kind = getattr(tf, row.kind.__name__.removesuffix("ForCausalLM") + head)
    labels = 2 if "Question" in head else LABELS
    theirs = save_reference(kind, row.make_config(num_labels=labels, pad_token_id=0), tmp_path)
    ours = load(str(tmp_path))
    batch: Any = RaggedBatch.of(SEQUENCES)
    states = ours.network(batch)
    if ours.task == "embed":
        expected = torch.cat([theirs(torch.tensor([each])).last_hidden_state[0] for each in SEQUENCES])
        assert_close(states, expected)
        return
    answers = [theirs(torch.tensor([sequence])) for sequence in SEQUENCES]
    if ours.task == "span":
        expected = torch.cat([torch.stack((each.start_logits[0], each.end_logits[0]), -1) for each in answers])
    else:
        expected = torch.cat([each.logits.flatten(0, -2) for each in answers])
    head_module: Any = ours.head
    assert_close(head_module(states, batch.starts), expected)


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_what_is_not_known_is_refused_by_name(
    case_of: Callable[[str], Case], tmp_path: Path, name: str, changes: dict[str, Any], sentence: str
) -> None:
    folder = edited(case_of(name).folder, tmp_path / "changed", **changes)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load(str(folder))
    assert str(folder) in str(raised.value)


def test_a_base_model_saved_without_the_prefix_is_read(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """As BLOOM and OPT are published."""
    for name in ("bloom", "opt", "gpt_neox"):
        theirs = case_of(name).theirs
        weights = {
            key.removeprefix(f"{theirs.base_model_prefix}."): value.clone()
            for key, value in theirs.state_dict().items()
            if not (key == "lm_head.weight" and theirs.config.tie_word_embeddings)
        }
        folder = tmp_path / name
        theirs.save_pretrained(folder, state_dict=weights)
        tokenizer().save_pretrained(folder)
        assert describe_source(str(folder)).family == theirs.config.model_type
        assert_close(packed_logits(load(str(folder))), packed_logits(case_of(name).ours))


def test_gpt_sw3_is_gpt2_under_another_name(tmp_path: Path) -> None:
    config = tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=384)
    theirs = save_reference(tf.GPT2LMHeadModel, config, tmp_path / "saved")
    ours = load(str(edited(tmp_path / "saved", tmp_path / "renamed", model_type="gpt-sw3")))
    assert ours.family == "gpt-sw3"
    assert_close(packed_logits(ours), reference_logits(theirs))
