"""Tiny networks with the outliers of real ones.

A random network has numbers of one magnitude everywhere, and whatever rounds them loses little.  A trained network has
key biases of 200, a first token a thousand times as large as the others, and neurons of 300 beside neurons of 1.  RECIPES
lists such networks.  Content flows beside every outlier: attention looks at what tokens are, the distribution of the
next token depends on the context, and its mean entropy is ENTROPY, so that a divergence says what rounding has cost.

Every recipe names the GGUF architecture it can be written as (`gguf_file`).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import checkpoints
import gguf_files
import torch
from torch import Tensor, nn

from models.attention import attend
from models.config import ModelConfig
from models.heads import LanguageHead
from models.ragged import Ragged
from models.transformer import PreBlock, SandwichBlock, Transformer

ENTROPY = 3.0  # nats: mean of the next token's distribution
FIRST_TOKEN = 0  # every text begins with it
DELIMITERS = slice(10, 30)  # tokens that the others meet now and then, as commas
# Features of the residual stream that have one purpose.  No layer writes to them by chance.
LEVEL = 0  # the same in every token
SINK = 1  # large in a text's first token alone: what attention sinks look for
BESIDE = 2  # large where SINK is
FIRST = 3  # says that a token is FIRST_TOKEN
STOP = 4  # says that a token is one of DELIMITERS
RESERVED = slice(0, 5)
LENGTHS = (2, 17, 40, 90)

DECODER = ModelConfig(
    vocab_size=384,
    width=128,
    depth=2,
    heads=4,
    kv_heads=2,
    head_width=64,
    mlp_width=256,
    max_positions=128,
    causal=True,
    position="rotary",
    rope_base=1e6,
    norm="rms",
    activation="silu",
    gated_mlp=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)
QWEN2 = replace(DECODER, qkv_bias=True)
QWEN3 = replace(DECODER, query_key_norm=True)
GEMMA = replace(
    DECODER,
    norm_order="sandwich",
    activation="gelu_tanh",
    query_key_norm=True,
    embedding_scale=128**0.5,
    window=32,
    windowed=(True, True),
    window_rope_base=1e4,
)
GPT2 = replace(
    DECODER,
    kv_heads=2,
    heads=2,
    position="learned",
    rope_base=1e4,
    norm="layer",
    activation="gelu_tanh",
    gated_mlp=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
BERT = ModelConfig(
    vocab_size=286,
    width=128,
    depth=3,
    heads=2,
    kv_heads=2,
    head_width=64,
    mlp_width=256,
    max_positions=128,
    causal=False,
    norm_order="post",
    embedding_norm=True,
    segments=2,
)

Change = Callable[[Transformer], None]


@dataclass(frozen=True)
class Recipe:
    """A network: what is special about it, its shape, the outliers it is given in order, and how far narrow arithmetic
    may be from float32: mean divergence in nats, of an encoder 1 - cosine."""

    sentence: str
    architecture: str  # of GGUF
    config: ModelConfig
    changes: tuple[Change, ...] = ()
    tied: bool = False
    bound: float = 0.005
    files: bool = True  # whether formats of GGUF can hold its weights


@dataclass(frozen=True)
class Grown:
    network: Transformer
    head: LanguageHead | None


def blocks(net: Transformer) -> list[PreBlock]:
    return [cast(PreBlock, block) for block in net.blocks]


def texts(config: ModelConfig, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random tokens behind FIRST_TOKEN; every eighth or so is a delimiter."""
    choice = torch.Generator().manual_seed(3)
    made = []
    for length in lengths:
        tokens = torch.randint(1, config.vocab_size, (length,), generator=choice)
        stops = torch.randint(DELIMITERS.start, DELIMITERS.stop, (length,), generator=choice)
        tokens = torch.where(torch.rand(length, generator=choice) < 0.125, stops, tokens)
        tokens[0] = FIRST_TOKEN
        made.append(tokens.tolist())
    return made


@torch.no_grad()
def inputs_of(net: Transformer, module: nn.Module) -> Tensor:
    """[T, K] what a module of the network is given for `texts`."""
    found: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone()))
    net(Ragged.of(texts(net.config)))
    hook.remove()
    return found[0]


@torch.no_grad()
def weights_of_first(net: Transformer, layer: int) -> Tensor:
    """[Q, H] which part of its weight each row of the last of `texts` gives to the first token, without its own row."""
    found: list[Tensor] = []
    attention = blocks(net)[layer].attention

    def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        first = torch.zeros_like(value)
        first[:, :, 0, 0] = 1
        found.append(attend(query, key, first, mask, scale).unflatten(-1, (-1, query.size(3)))[0, 1:, :, 0])
        return attend(query, key, value, mask, scale)

    attention.mix = mix
    net(Ragged.of(texts(net.config)[-1:]))
    attention.mix = attend
    return found[0]


def first_rows() -> list[int]:
    """The rows of first tokens in `texts`."""
    return [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]


@torch.no_grad()
def fill(net: Transformer) -> None:
    """Random weights with which attention tells tokens apart and outweighs the embeddings."""
    spread = {"query": 1.1, "key": 1.1, "value": 1.0, "output": 1.5, "gate": 0.6, "up": 1.0, "down": 1.5}
    for name, parameter in net.named_parameters():
        part = name.split(".")[-2]
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif part in spread:
            nn.init.normal_(parameter, std=spread[part] * parameter.size(1) ** -0.5)
        elif "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
        else:
            nn.init.normal_(parameter, std=0.5)
    tokens = net.tokens.weight
    tokens[FIRST_TOKEN] *= 0.05
    for table in (tokens, net.segments and net.segments.weight, getattr(net.position, "table", nn.Module())):
        table = table.weight if isinstance(table, nn.Embedding) else table
        if isinstance(table, Tensor):
            table[:, RESERVED] = 0
    tokens[:, LEVEL] = 2
    tokens[FIRST_TOKEN, FIRST] = 6
    tokens[DELIMITERS, STOP] = 4
    tokens /= net.config.embedding_scale
    for block in blocks(net):
        for linear in (block.attention.output, block.mlp.down):
            linear.weight[RESERVED] = 0
            if linear.bias is not None:
                linear.bias[RESERVED] = 0
        block.attention.value.weight[:, RESERVED] = 0
        if isinstance(block.attention.query_norm, nn.RMSNorm):
            block.attention.query_norm.weight *= 1.1
            block.attention.key_norm.weight *= 1.1


@torch.no_grad()
def soften(net: Transformer, head: LanguageHead) -> None:
    """Scale the final norm until the mean entropy of the next token is ENTROPY."""
    logits = head(net(Ragged.of(texts(net.config))))
    low, high = 1e-4, 1e4
    for _ in range(40):
        middle = (low * high) ** 0.5
        chances = (logits * middle).log_softmax(-1)
        if float(-(chances.exp() * chances).sum(-1).mean()) > ENTROPY:
            low = middle
        else:
            high = middle
    for parameter in net.final_norm.parameters():
        parameter *= low


def slow_features(config: ModelConfig, head: int) -> list[int]:
    """The two features of a head that rotary positions turn least: trained networks keep large numbers there."""
    start, half = head * config.head_width, config.head_width // 2
    return [start + half - 1, start + 2 * half - 1]


@torch.no_grad()
def bias_keys(net: Transformer, heads: tuple[int, ...], size: float) -> None:
    """Biases of +-size, on two features of each of some key heads in every layer."""
    for block in blocks(net):
        for head in heads:
            first, second = slow_features(net.config, head)
            block.attention.key.bias[first] = size
            block.attention.key.bias[second] = -0.7 * size


@torch.no_grad()
def attend_first(net: Transformer, heads: tuple[int, ...], score: float, gain: float, layers: tuple[int, ...]) -> None:
    """Some query heads look at the first token with most of their weight; what they see of the others counts more."""
    config = net.config
    shared = config.heads // config.kv_heads
    for block in (blocks(net)[layer] for layer in layers):
        attention = block.attention
        seen = inputs_of(net, attention.query)
        mark = SINK if float(seen[first_rows(), SINK].abs().mean()) > 1 else FIRST
        level, first = float(seen[:, LEVEL].median()), float(seen[first_rows(), mark].mean())
        size = (score * config.head_width**0.5) ** 0.5
        for head in heads:
            feature = slow_features(config, head)[0]
            key = slow_features(config, head // shared)[0]
            for linear, row, column, value in (
                (attention.query, feature, LEVEL, size / level),
                (attention.key, key, mark, size / first),
            ):
                linear.weight[row] = 0
                linear.weight[row, column] = value
            attention.output.weight[:, head * config.head_width : (head + 1) * config.head_width] *= gain


@torch.no_grad()
def mark_first(net: Transformer, size: float) -> None:
    """The embedding of the first token has a feature of `size`, which only keys look at."""
    net.tokens.weight[FIRST_TOKEN, SINK] = size
    for block in blocks(net):
        block.mlp_norm.weight[SINK] = 0.02
        block.attention.query.weight[:, SINK] = 0
        block.attention.key.weight[:, SINK] = 0
    net.final_norm.weight[SINK] = 0.02


@torch.no_grad()
def swell_first(net: Transformer, size: float) -> None:
    """A neuron of the first layer finds the first token and writes +-size to two features of its residual."""
    mlp, neuron = blocks(net)[0].mlp, 7
    given = float(inputs_of(net, mlp.up)[first_rows(), FIRST].mean())
    for linear in (mlp.gate, mlp.up):
        if linear is not None:
            linear.weight[neuron] = 0
            linear.weight[neuron, FIRST] = 17 / given if mlp.gate is not None else 300 / given
    mlp.down.weight[:, neuron] = 0
    hidden = float(inputs_of(net, mlp.down)[first_rows(), neuron].mean())
    mlp.down.weight[SINK, neuron] = size / hidden
    mlp.down.weight[BESIDE, neuron] = -0.8 * size / hidden
    for norm in (net.final_norm, *(module for block in blocks(net) for module in (block.mlp_norm,))):
        if isinstance(norm, nn.RMSNorm | nn.LayerNorm):
            norm.weight[[SINK, BESIDE]] = 0.02


@torch.no_grad()
def swell_hidden(net: Transformer, size: float) -> None:
    """At delimiters two neurons of each layer reach +-size, by what else the token is; `down` makes 1 of it."""
    for block in blocks(net):
        mlp = block.mlp
        for neuron in (40, 41):
            rest = mlp.up.weight[neuron].clone()
            (mlp.gate or mlp.up).weight[neuron] = 0
            rows = inputs_of(net, mlp.up)[:, STOP] > 1
            if mlp.gate is not None:
                mlp.gate.weight[neuron, STOP] = 5.0
            mlp.up.weight[neuron] = rest
            hidden = inputs_of(net, mlp.down)[rows, neuron]
            scale = size / float(hidden.abs().amax())
            mlp.up.weight[neuron] *= scale
            mlp.down.weight[:, neuron] *= 6 / size
            mlp.down.weight[RESERVED, neuron] = 0


@torch.no_grad()
def scale_residual(net: Transformer, features: Sequence[int], size: float, norm: float) -> None:
    """Every part writes `size` times as much to some features of the residual; norms weigh them `norm` times."""
    at = list(features)
    net.tokens.weight[:, at] *= size
    for block in blocks(net):
        for linear in (block.attention.output, block.mlp.down):
            linear.weight[at] *= size
            if linear.bias is not None:
                linear.bias[at] *= size
    for module in net.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight.numel() == net.config.width:
            module.weight[at] *= norm


@torch.no_grad()
def scale_norms(net: Transformer, size: float) -> None:
    """Norms before the parts, `size` times as large as what is multiplied with them is small."""
    for block in blocks(net):
        block.attention_norm.weight *= size
        block.mlp_norm.weight *= size
        linears = (block.attention.query, block.attention.key, block.attention.value, block.mlp.up, block.mlp.gate)
        for linear in linears:
            if linear is not None:
                linear.weight /= size


@torch.no_grad()
def scale_query_key_norms(net: Transformer, size: float) -> None:
    """The norm of keys weighs two of its features `size` times, that of queries weighs them that much less."""
    for block in blocks(net):
        at = slow_features(net.config, 0)
        block.attention.key_norm.weight[at] *= size
        block.attention.query_norm.weight[at] /= size


@torch.no_grad()
def scale_rows(net: Transformer, low: float, high: float) -> None:
    """Rows of what writes to the residual and of gates and values differ by orders of magnitude."""
    choice = torch.Generator().manual_seed(11)
    for block in blocks(net):
        for linear in (block.attention.output, block.mlp.down, block.mlp.up):
            rows = linear.weight.size(0)
            powers = torch.rand(rows, generator=choice) * (torch.tensor(high / low).log()) + torch.tensor(low).log()
            linear.weight *= powers.exp()[:, None]


@torch.no_grad()
def swell_columns(net: Transformer, size: float) -> None:
    """Some columns of every matrix weigh `size` times as much, and what is multiplied with them is that much less."""
    for block in blocks(net):
        at = [20, 77]
        block.attention.value.weight[at] /= size
        shared = net.config.heads // net.config.kv_heads
        width = net.config.head_width
        columns = [(i // width * shared + n) * width + i % width for i in at for n in range(shared)]
        block.attention.output.weight[:, columns] *= size
        block.mlp.up.weight[at] /= size
        block.mlp.down.weight[:, at] *= size
        for norm in (block.attention_norm, block.mlp_norm):
            norm.weight[at] /= size
        for linear in (block.attention.query, block.attention.key, block.attention.value, block.mlp.up, block.mlp.gate):
            if linear is not None:
                linear.weight[:, at] *= size


@torch.no_grad()
def vary_post_norms(net: Transformer) -> None:
    """Norms behind the parts write 20 times as much to some features as to others, which later norms make up for."""
    for block in blocks(net):
        assert isinstance(block, SandwichBlock)
        for norm in (block.attention_post_norm, block.mlp_post_norm):
            norm.weight[RESERVED] = 0
            norm.weight[[30, 50]] *= 20
    for block in blocks(net):
        for norm in (block.attention_norm, block.mlp_norm, net.final_norm):
            norm.weight[[30, 50]] = 0.1


@torch.no_grad()
def level_positions(net: Transformer, features: Sequence[int], size: float) -> None:
    """Some features are near `size` in every token, and three times that at the first position, as in GPT-2."""
    table = net.position.table.weight  # type: ignore[union-attr]
    at = list(features)
    table[:, at] = size
    table[0, at] = 3 * size
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight *= 4
            module.weight[at] *= 0.01


@torch.no_grad()
def offset_norms(net: Transformer, features: Sequence[int], weight: float, bias: float) -> None:
    """Every norm gives some features a large weight and a large bias, as BERT's do."""
    at = list(features)
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight[at] = weight
            module.bias[at] = bias
    for block in blocks(net):
        for linear in (block.attention.query, block.attention.key, block.attention.value, block.mlp.up):
            linear.weight[:, at] *= 0.1


@torch.no_grad()
def scale_norm_weights(net: Transformer, size: float) -> None:
    """All norms of the parts."""
    for block in blocks(net):
        block.attention_norm.weight *= size
        block.mlp_norm.weight *= size


SINKS = partial(attend_first, heads=(0, 1), score=12.0, gain=6.0)

RECIPES = {
    "plain": Recipe("No outliers, an output matrix of its own.", "llama", DECODER),
    "tied": Recipe("No outliers, an output matrix that is that of the embeddings.", "llama", DECODER, tied=True),
    "key biases": Recipe(
        "Key biases of 200 on two features of one of two key heads (Qwen2).",
        "qwen2",
        replace(QWEN2, width=256),
        (partial(bias_keys, heads=(0,), size=200.0),),
    ),
    "key biases everywhere": Recipe(
        "Key biases of 200 on two features of every key head; tied (Qwen2 of 0.5 billion).",
        "qwen2",
        QWEN2,
        (partial(bias_keys, heads=(0, 1), size=200.0),),
        tied=True,
    ),
    "massive first token": Recipe(
        "An early neuron writes 400 to the first token's residual; later heads look there (Llama, Sun et al. 2024).",
        "llama",
        replace(DECODER, depth=3),
        (partial(swell_first, size=400.0), partial(SINKS, layers=(1, 2))),
    ),
    "large neurons": Recipe(
        "At delimiters two neurons reach 300 beside others near 1.",
        "llama",
        replace(DECODER, width=256),
        (partial(swell_hidden, size=300.0),),
    ),
    "attention sinks": Recipe(
        "Half of the heads give 95 percent of their weight to the first token, and what is left counts more.",
        "llama",
        DECODER,
        (partial(mark_first, size=300.0), partial(SINKS, layers=(0, 1))),
    ),
    "mixed norm weights": Recipe(
        "The residual has features of 30 and of 0.1, which norms weigh 0.01 and 50.",
        "llama",
        DECODER,
        (
            partial(scale_residual, features=(10, 60, 100), size=30.0, norm=0.002),
            partial(scale_residual, features=range(64, 80), size=0.1, norm=10.0),
            partial(scale_norm_weights, size=5.0),
        ),
    ),
    "query and key norms": Recipe(
        "The norm of keys weighs two features 60 times, that of queries makes up for it (Qwen3).",
        "qwen3",
        QWEN3,
        (partial(scale_query_key_norms, size=60.0),),
        tied=True,
    ),
    "sandwich norms": Recipe(
        "Norms on both sides of every part, those behind write 20 times as much to two features (Gemma 3).",
        "gemma3",
        GEMMA,
        (vary_post_norms, partial(scale_query_key_norms, size=20.0)),
        tied=True,
    ),
    "rows of all magnitudes": Recipe(
        "Rows of what writes to the residual, and of `up`, lie between 1e-4 and 10.",
        "llama",
        DECODER,
        (partial(scale_rows, low=1e-4, high=10.0),),
    ),
    "outlier columns": Recipe(
        "Two columns of every matrix weigh 40 times as much as the others, their inputs that much less.",
        "llama",
        DECODER,
        (partial(swell_columns, size=40.0),),
    ),
    "tiny weights": Recipe(
        "Weights near 1e-6 behind norms of 1e5.",
        "llama",
        DECODER,
        (partial(scale_norms, size=1e5),),
        files=False,  # half-precision scales of such weights are 0
    ),
    "gpt2": Recipe(
        "LayerNorm, GELU, learned positions; three features near 10 in every token and 30 in the first.",
        "gpt2",
        GPT2,
        (partial(level_positions, features=(10, 60, 100), size=10.0),),
        tied=True,
    ),
    "bert": Recipe(
        "Norms behind the parts, which make two features ten times as large as the others.",
        "bert",
        BERT,
        (partial(offset_norms, features=(20, 90), weight=0.5, bias=-10.0),),
        bound=0.001,
    ),
}
GENERATORS = [name for name, recipe in RECIPES.items() if recipe.config.causal]
ENCODERS = [name for name, recipe in RECIPES.items() if not recipe.config.causal]


@cache
def grown(name: str) -> Grown:
    """The network of a recipe; read-only by agreement."""
    recipe = RECIPES[name]
    torch.manual_seed(5)
    net = Transformer(recipe.config).eval()
    fill(net)
    for change in recipe.changes:
        change(net)
    if not recipe.config.causal:
        return Grown(net, None)
    head = LanguageHead(recipe.config, net.tokens if recipe.tied else None)
    if not recipe.tied:
        nn.init.normal_(head.output.weight, std=recipe.config.width**-0.5)
    soften(net, head)
    return Grown(net, head)
