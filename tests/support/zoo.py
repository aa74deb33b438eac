"""Tiny networks with the outliers of real ones.

A random network has numbers of one magnitude everywhere, and whatever rounds them loses little.  A trained network has
key biases of 200, a first token a hundred times as large as the others, and neurons of 300 beside neurons of 1.
RECIPES lists such networks.  Content flows beside every outlier: attention looks at what tokens are, the distribution
of the next token depends on the context, and its mean entropy is ENTROPY, so that a divergence says what rounding has
cost.

Every recipe names the GGUF architecture it can be written as (`gguf_file`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor, nn

from polyhead.models.network.attention import attend
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.scoring import Scoring
from polyhead.models.network.transformer import PreBlock, SandwichBlock, Transformer
from tests.support import checkpoints, gguf_files

ENTROPY = 3.5  # nats: mean of the next token's distribution
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
QWEN3 = replace(DECODER, query_key_norm="shared")
GEMMA = replace(
    DECODER,
    norm_order="sandwich",
    activation="gelu_tanh",
    query_key_norm="shared",
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
    depth=2,
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
    bounds: Mapping[str, float] = field(default_factory=dict)  # of files in some formats, where it is another


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
    net(RaggedBatch.of(texts(net.config)))
    hook.remove()
    return found[0]


@torch.no_grad()
def weights_of_first(net: Transformer, layer: int) -> Tensor:
    """[Q, H] which part of its weight each row of the last of `texts` gives to the first token, without its own row."""
    found: list[Tensor] = []
    attention = blocks(net)[layer].attention

    def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        first = torch.zeros_like(value)
        first[:, :, 0, 0] = 1
        found.append(attend(query, key, first, mask, scoring).unflatten(-1, (-1, query.size(3)))[0, 1:, :, 0])
        return attend(query, key, value, mask, scoring)

    attention.mix = mix
    net(RaggedBatch.of(texts(net.config)[-1:]))
    attention.mix = attend
    return found[0]


def first_rows() -> list[int]:
    """The rows of first tokens in `texts`."""
    return [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]


@torch.no_grad()
def fill(net: Transformer, embeddings: float) -> None:
    """Random weights: attention tells tokens apart, and what it adds outweighs the embeddings, which are spread by
    `embeddings`."""
    spread = {"query": 1.0, "key": 1.0, "value": 1.0, "output": 1.2, "gate": 0.6, "up": 1.0, "down": 1.0}
    for name, parameter in net.named_parameters():
        part = name.split(".")[-2]
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif part in spread:
            nn.init.normal_(parameter, std=spread[part] * parameter.size(1) ** -0.5)
        elif "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
        else:
            nn.init.normal_(parameter, std=embeddings)
    if net.config.causal:
        reserve(net)


@torch.no_grad()
def reserve(net: Transformer) -> None:
    """Give the features of RESERVED their purpose."""
    tokens = net.tokens.weight
    tokens[FIRST_TOKEN] *= 0.05
    for table in net.modules():
        if isinstance(table, nn.Embedding):  # of tokens and of positions
            table.weight[:, RESERVED] = 0
    tokens[:, LEVEL] = 0.5
    tokens[FIRST_TOKEN, FIRST] = 2
    tokens[DELIMITERS, STOP] = 1
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
    logits = head(net(RaggedBatch.of(texts(net.config))))
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
    for norm in (net.final_norm, *(block.mlp_norm for block in blocks(net))):
        if isinstance(norm, nn.RMSNorm | nn.LayerNorm):
            norm.weight[[SINK, BESIDE]] = 0.02


@torch.no_grad()
def swell_hidden(net: Transformer, size: float) -> None:
    """At delimiters two neurons of each layer reach +-size, by what else the token is.  They write a fifth of that to
    the residual, which later norms weigh less."""
    for block in blocks(net):
        mlp = block.mlp
        for neuron in (40, 41):
            rest = mlp.up.weight[neuron].clone()
            (mlp.gate or mlp.up).weight[neuron] = 0
            stop = inputs_of(net, mlp.up)[:, STOP]
            rows = stop > stop.max() / 3
            if mlp.gate is not None:
                mlp.gate.weight[neuron, STOP] = 3.0
            mlp.up.weight[neuron] = rest
            hidden = inputs_of(net, mlp.down)[rows, neuron]
            scale = size / float(hidden.abs().amax())
            mlp.up.weight[neuron] *= scale
            mlp.down.weight[:, neuron] = 0
            mlp.down.weight[SINK if neuron == 40 else BESIDE, neuron] = 0.2
    later = [norm for block in blocks(net)[1:] for norm in (block.attention_norm, block.mlp_norm)]
    for norm in (*later, net.final_norm):
        cast(nn.RMSNorm, norm).weight[[SINK, BESIDE]] = 0.1


@torch.no_grad()
def scale_residual(net: Transformer, large: Sequence[int], small: Sequence[int]) -> None:
    """Some features of the residual are near 30 in every token and norms weigh them 0.01; of others every part writes a
    third, and norms make up for it."""
    net.tokens.weight[:, list(large)] += 30
    net.tokens.weight[:, list(small)] *= 0.3
    for block in blocks(net):
        for linear in (block.attention.output, block.mlp.down):
            linear.weight[list(small)] *= 0.3
        for norm, linear in ((block.attention_norm, block.attention.query), (block.mlp_norm, block.mlp.up)):
            norm.weight[list(small)] *= 3.3
            norm.weight[list(large)] = 0
            norm.weight /= inputs_of(net, linear).square().mean().sqrt()
            norm.weight[list(large)] = 0.01
    cast(nn.RMSNorm, net.final_norm).weight[list(small)] *= 3.3
    cast(nn.RMSNorm, net.final_norm).weight[list(large)] = 0.001


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
        at = [20, 25]
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
    """Norms behind the parts write 8 times as much to some features as to others, which later norms make up for."""
    for block in blocks(net):
        assert isinstance(block, SandwichBlock)
        for norm in (block.attention_post_norm, block.mlp_post_norm):
            norm.weight *= 0.4
            norm.weight[RESERVED] = 0
            norm.weight[[30, 50]] *= 8
    for block in blocks(net):
        for norm in (block.attention_norm, block.mlp_norm, net.final_norm):
            norm.weight[[30, 50]] = 0.15


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


SINKS = partial(attend_first, heads=(0, 1), score=8.0, gain=3.0)

# Of Q5_1 and Q4_1.  A weight that was 0 is not 0 there if others of its block are large, and 300 at the first token
# meets it: its value is no longer small, and what rounds it shows in all that look there.
UNEVEN = {"Q5_1": 0.015}

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
        bounds=UNEVEN | {"Q4_1": 0.01},
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
        bounds=UNEVEN,
    ),
    "mixed norm weights": Recipe(
        "Features of the residual that are 30 in every token, which norms weigh 0.01; others have weights up to 50.",
        "llama",
        DECODER,
        (partial(scale_residual, large=(10, 60, 100), small=range(64, 80)),),
    ),
    "query and key norms": Recipe(
        "The norm of keys weighs two features 30 times, that of queries makes up for it (Qwen3).",
        "qwen3",
        QWEN3,
        (partial(scale_query_key_norms, size=30.0),),
        tied=True,
    ),
    "sandwich norms": Recipe(
        "Norms on both sides of every part, those behind write 8 times as much to two features (Gemma 3).",
        "gemma3",
        GEMMA,
        (vary_post_norms, partial(scale_query_key_norms, size=30.0)),
        tied=True,
    ),
    "rows of all magnitudes": Recipe(
        "Rows of what writes to the residual, and of `up`, lie between 1e-4 and 10.",
        "llama",
        DECODER,
        (partial(scale_rows, low=1e-4, high=10.0),),
    ),
    "outlier columns": Recipe(
        "Two columns of every matrix weigh 6 times as much as the others, their inputs that much less.",
        "llama",
        DECODER,
        (partial(swell_columns, size=6.0),),
        bounds={"Q5_1": 0.0075},  # five bits above a least weight, rounded to eight of both signs
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
        (partial(offset_norms, features=(20, 25), weight=0.5, bias=-8.0),),
        bound=0.0025,  # of states scaled feature by feature: an error of 7 percent
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
    fill(net, 0.25 if recipe.tied else 0.35)
    for change in recipe.changes:
        change(net)
    if not recipe.config.causal:
        return Grown(net, None)
    head = LanguageHead(recipe.config, net.tokens if recipe.tied else None)
    if not recipe.tied:
        nn.init.normal_(head.output.weight, std=recipe.config.width**-0.5)
    soften(net, head)
    return Grown(net, head)


@torch.no_grad()
def round_to_four_bits(of: Grown) -> None:
    """The matrices, as files of Q4_0 have them.  A tied output matrix is parted from the embeddings."""
    if of.head:
        of.head.output.weight = nn.Parameter(of.head.output.weight.clone())
    for linear in (*of.network.modules(), *(of.head.modules() if of.head else ())):
        if isinstance(linear, nn.Linear):
            raw = quantize(linear.weight.numpy(), GGMLQuantizationType.Q4_0)
            linear.weight.copy_(torch.from_numpy(dequantize(raw, GGMLQuantizationType.Q4_0)))


def kinds_of(name: str) -> tuple[str, ...]:
    """The formats of GGUF a network is written in; those with K have blocks of 256."""
    recipe = RECIPES[name]
    return () if not recipe.files else KINDS + K_KINDS if recipe.config.width % 256 == 0 else KINDS


NAMES = (
    (r"^tokens\.", "token_embd."),
    (r"^segments\.", "token_types."),
    (r"^position\.table\.", "position_embd."),
    (r"^embedding_norm\.", "token_embd_norm."),
    (r"^final_norm\.", "output_norm."),
    (r"^blocks\.", "blk."),
    (r"\.attention\.query\.", ".attn_q."),
    (r"\.attention\.key\.", ".attn_k."),
    (r"\.attention\.value\.", ".attn_v."),
    (r"\.attention\.output\.", ".attn_output."),
    (r"\.attention\.query_norm\.", ".attn_q_norm."),
    (r"\.attention\.key_norm\.", ".attn_k_norm."),
    (r"\.attention_post_norm\.", ".post_attention_norm."),
    (r"\.mlp_post_norm\.", ".post_ffw_norm."),
    (r"\.mlp\.", ".ffn_"),
)
NORMS = {"pre": ("attn_norm", "ffn_norm"), "post": ("attn_output_norm", "layer_output_norm")}


def gguf_name(name: str, config: ModelConfig) -> str:
    attention, mlp = NORMS["post" if config.norm_order == "post" else "pre"]
    for pattern, theirs in (*NAMES, (r"\.attention_norm\.", f".{attention}."), (r"\.mlp_norm\.", f".{mlp}.")):
        name = re.sub(pattern, theirs, name)
    return name


def gguf_file(path: Path, name: str, kind: str) -> Path:
    """The network as a file whose matrices are of `kind`; embeddings have 8 bits or more, as in most such files."""
    recipe, of = RECIPES[name], grown(name)
    config, tensors = recipe.config, {}
    for ours, tensor in of.network.state_dict().items():
        if recipe.architecture == "llama" and (found := re.search(r"\.attention\.(query|key)\.", ours)):
            tensor = gguf_files.permuted(tensor, config.heads if found[1] == "query" else config.kv_heads)
        tensors[gguf_name(ours, config)] = tensor.contiguous()
    if of.head and not recipe.tied:
        tensors["output.weight"] = of.head.output.weight.detach()

    def kind_of(tensor_name: str, tensor: Tensor) -> str:
        if tensor.dim() != 2 or kind == "F32":
            return "F32"
        table = tensor_name in ("token_embd.weight", "position_embd.weight", "token_types.weight")
        return "Q8_0" if table else kind

    if kind in K_QUANTIZERS:
        for tensor_name, tensor in tensors.items():
            if kind_of(tensor_name, tensor) == kind:
                tensors[tensor_name] = torch.from_numpy(K_QUANTIZERS[kind](tensor.numpy()))
    return gguf_files.write(path, recipe.architecture, metadata(recipe), tensors, kind_of)


def metadata(recipe: Recipe) -> dict[str, Any]:
    """What the file says of its shape, and a vocabulary."""
    config = recipe.config
    vocabulary = (
        gguf_files.byte_level_metadata(checkpoints.byte_level_bpe())
        if config.causal
        else gguf_files.word_piece_metadata(checkpoints.word_piece())
    )
    return {
        "block_count": config.depth,
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_width,
        "attention.value_length": config.head_width,
        f"attention.layer_norm_{'rms_' if config.norm == 'rms' else ''}epsilon": config.norm_eps,
        "attention.causal": config.causal,
        **({} if config.causal else {"pooling_type": 1}),
        "attention.sliding_window": config.window,
        "rope.freq_base": config.rope_base,
        **vocabulary,
    }


Array = NDArray[Any]


def halves_of(values: Array) -> Array:
    """[..., N] numbers as the bytes [..., 2 N] of half-precision ones."""
    return numpy.ascontiguousarray(values.astype(numpy.float16)).view(numpy.uint8)


def quantize_q6_k(weights: Array) -> Array:
    """[N, K] to blocks of 256: codes of 6 bits, 16 scales of 8 bits, and one in half precision for these."""
    groups = weights.reshape(len(weights), -1, 16, 16).astype(numpy.float32)  # [N, B, 16 scales, 16]
    scales = numpy.abs(groups).max(-1) / 31
    whole = scales.max(-1, keepdims=True) / 127
    whole = whole.astype(numpy.float16).astype(numpy.float32)
    fine = numpy.clip(numpy.ceil(divided(scales, whole)), 0, 127)
    codes = numpy.clip(numpy.rint(divided(groups, (fine * whole)[..., None])), -32, 31).astype(numpy.int32) + 32
    codes = codes.astype(numpy.uint8).reshape(*groups.shape[:2], 2, 4, 32)  # two halves of four runs
    low, high = codes & 15, codes >> 4
    lows = numpy.concatenate([low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4], -1)
    highs = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    parts = [lows, highs, fine.astype(numpy.int8).view(numpy.uint8), halves_of(whole)]
    return joined(parts, *groups.shape[:2])


def quantize_q4_k(weights: Array) -> Array:
    """[N, K] to blocks of 256: codes of 4 bits above a least weight, scales and least weights of 32 in 6 bits."""
    groups = weights.reshape(len(weights), -1, 8, 32).astype(numpy.float32)  # [N, B, 8, 32]
    least = numpy.maximum(-groups.min(-1), 0)
    scales = (groups.max(-1) + least) / 15
    both = []
    for values in (scales, least):
        whole = values.max(-1, keepdims=True) / 63
        whole = whole.astype(numpy.float16).astype(numpy.float32)
        both.append((whole, numpy.clip(numpy.rint(divided(values, whole)), 0, 63)))
    (whole, fine), (whole_least, fine_least) = both
    above = groups + (fine_least * whole_least)[..., None]
    codes = numpy.clip(numpy.rint(divided(above, (fine * whole)[..., None])), 0, 15).astype(numpy.uint8)
    s, m = fine.astype(numpy.uint8), fine_least.astype(numpy.uint8)
    packed = [
        s[..., :4] | s[..., 4:] >> 4 << 6,
        m[..., :4] | m[..., 4:] >> 4 << 6,
        s[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
    ]
    pairs = codes[..., ::2, :] | codes[..., 1::2, :] << 4
    return joined([halves_of(whole), halves_of(whole_least), *packed, pairs], *groups.shape[:2])


def divided(a: Array, b: Array) -> Array:
    """0 where `b` is."""
    return numpy.divide(a, b, out=numpy.zeros_like(a + b), where=b != 0)


def joined(parts: Sequence[Array], rows: int, count: int) -> Array:
    """Bytes of blocks side by side: [N, B * size]."""
    return numpy.concatenate([part.reshape(rows, count, -1) for part in parts], -1).reshape(rows, -1)


KINDS = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
K_QUANTIZERS: dict[str, Callable[[Array], Array]] = {"Q6_K": quantize_q6_k, "Q4_K": quantize_q4_k}
K_KINDS = tuple(K_QUANTIZERS)
