"""The executor of a checkpoint: the compiled CPU step or torch, by the settings and by what this machine has.

The functions that build something are called on the thread that will compute with it.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

from torch import nn

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.executors.contract import Executor
from polyhead.models.executors.cuda_graphs import PagedAttention
from polyhead.models.executors.seq2seq_executor import Seq2SeqExecutor
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_head_invariant, make_invariant
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import PackHooks, Precision
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.sequence_spans import Kernel
from polyhead.models.network.varlen import is_supported
from polyhead.models.seq2seq.protocol import Seq2Seq

from ..config.settings import Settings
from ..engine.native_sampling import CompiledSampler
from ..engine.sampler import Sampler, TorchSampler
from .placement import Placement

MAX_TORCH_TOKENS = 512  # of which a layer of the base size takes one core 0.1 to 0.2 s
NARROW_ATTENTION = 2  # times that a multiplication of attention takes longer than one of 8 bits: keys have 14


def make_deterministic(
    loaded: Checkpoint, settings: Settings, placement: Placement, yield_turn: Callable[[], None] = lambda: None
) -> None:
    """Replace the operations whose result depends on the rest of the batch, as far as the settings ask for it. Called
    before the executor is built.

    Networks for the compiled step are already batch-invariant, except for their head. `yield_turn` is called between
    two parts of long work. Raises UnsupportedError for encoder-decoders with the setting `deterministic`.
    """
    if loaded.decoding and settings.deterministic:
        message = "deterministic: networks that read one text and write another are not held to the bit; serve it apart"
        raise UnsupportedError(message, file=loaded.source)
    if placement.instructions:
        if not isinstance(loaded.head, LanguageHead):
            loaded.load_weights(loaded.head)
            copy_shared_parameters(loaded.head)
            make_head_invariant(loaded.head, yield_turn=yield_turn)  # the rest is by construction
    elif settings.deterministic:
        make_invariant(loaded.network, loaded.head, yield_turn, choose_kernel(placement, loaded.decoder_config))


def copy_shared_parameters(head: nn.Module) -> None:
    """Give `head` its own copies of the parameters that it shares with the network, whose own are freed once they are
    packed.
    """
    for module in head.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.data))


def choose_kernel(placement: Placement, config: ModelConfig) -> Kernel | None:
    """Return the kernel that attends to cache blocks in place, if there is one and it supports this network."""
    return placement.kernel if is_supported(config) and not config.hides_rows else None


def executor_name(placement: Placement, config: ModelConfig) -> str:
    """Return the executor's name for the model's description: native-INSTRUCTIONS, torch-triton or torch."""
    if placement.instructions:
        return f"native-{placement.instructions}"
    return "torch-triton" if choose_kernel(placement, config) else "torch"


def encoder_step_tokens(settings: Settings, placement: Placement, config: ModelConfig) -> int:
    """Return how many tokens an encoder reads in one step, at most. Torch cannot interrupt a layer, which takes long on
    a CPU.
    """
    has_long_layers = placement.device.type == "cpu" and not placement.instructions and not config.static
    return min(settings.encoder_step_tokens, MAX_TORCH_TOKENS) if has_long_layers else settings.encoder_step_tokens


def context_cost(placement: Placement, config: ModelConfig) -> float:
    """Return how long a token's attention to one token before it takes, in times of the token's other products.
    Windowed layers do not count, since their attention is bounded. 0 on a GPU, where a step of few tokens takes as long
    as one of hundreds.
    """
    if placement.device.type == "cuda":
        return 0.0
    attended = products = 0
    for layer in range(config.depth):
        sizes = config.of_layer(layer)
        inner = sizes.heads * sizes.head_width
        if config.mixer(layer) == "attention":
            products += config.width * 2 * (inner + sizes.kv_heads * sizes.head_width)
            attended += 0 if config.is_windowed(layer) else 2 * inner
        products += (3 if config.gated_mlp else 2) * config.width * sizes.active_mlp_width
    slower = NARROW_ATTENTION if placement.instructions and placement.precision != "float32" else 1
    return slower * attended / products


class CacheSize(NamedTuple):
    """What a generator's executor keeps between steps, none of it for an encoder: blocks of keys and values, slots for
    the states of recurrent layers, if there are such layers, and blocks of windowed layers, if these have their own.
    """

    blocks: int = 0
    states: int = 0
    window_blocks: int = 0


NO_CACHE, NO_HOOKS = CacheSize(), PackHooks()


def build_executor(
    loaded: Checkpoint,
    settings: Settings,
    placement: Placement,
    cache: CacheSize = NO_CACHE,
    hooks: PackHooks = NO_HOOKS,
) -> Executor:
    """Build the executor of a loaded checkpoint.

    The compiled step packs its own weights, one part of the network after the other; `hooks.load_part` is a context
    manager that has the unpacked weights of a part in memory.
    """
    if loaded.decoding:
        network = cast(Seq2Seq, loaded.head)
        sizes = {
            "vocabulary": loaded.decoder_config.vocab_size,
            "block_count": cache.blocks,
            "block_size": placement.block_size,
        }
        return Seq2SeqExecutor(network, placement.device, **sizes)
    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    if not placement.instructions:
        kernel = choose_kernel(placement, loaded.decoder_config)
        paged = PagedAttention(kernel, settings.max_running if cache.blocks else 0) if kernel else None
        sizes = {
            "block_count": cache.blocks,
            "block_size": placement.block_size if cache.blocks else 0,
            "state_count": cache.states,
            "window_blocks": cache.window_blocks,
        }
        return TorchExecutor(loaded.network, head, **sizes, in_place=paged)
    return NativeExecutor(
        loaded.network,
        head,
        precision=cast(Precision, placement.precision),
        block_count=cache.blocks,
        state_count=cache.states,
        window_blocks=cache.window_blocks,
        threads=placement.threads,
        instructions=placement.instructions,
        load_part=hooks.load_part,
        yield_turn=hooks.yield_turn,
    )


def sampling_instructions(placement: Placement) -> str:
    """Return the instruction set of the compiled sampler; empty if torch samples."""
    return next(iter(runnable_targets()), "") if placement.device.type == "cpu" else ""


def build_sampler(placement: Placement) -> Sampler:
    """Build the sampler of a generator: the compiled one on a CPU, if it can run there, else torch's."""
    instructions = sampling_instructions(placement)
    return CompiledSampler(instructions, placement.threads) if instructions else TorchSampler()
