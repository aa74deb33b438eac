"""Recurrent encoder-decoders a second time: one sequence, one step, one line for each formula, as in the papers.

Reads the weights of a network by name and shares no code with it."""

import torch
from torch import Tensor

from polyhead.models.recurrent import RecurrentConfig

Weights = dict[str, Tensor]


def gates(own: Weights, layer: str, x: Tensor, h: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each gate the terms of the input and of the previous state."""
    read = own[f"weight_ih_{layer}"] @ x + own[f"bias_ih_{layer}"]
    kept = own[f"weight_hh_{layer}"] @ h + own[f"bias_hh_{layer}"]
    return list(zip(read.split(len(h)), kept.split(len(h)), strict=True))


def cell(kind: str, own: Weights, layer: str, x: Tensor, memory: list[Tensor]) -> list[Tensor]:
    """One step of one layer: Cho et al. 2014 in torch's form, or Hochreiter and Schmidhuber 1997 with forget gates."""
    found = gates(own, layer, x, memory[0])
    if kind == "gru":
        (reset, reset_kept), (update, update_kept), (new, new_kept) = found
        z = (update + update_kept).sigmoid()
        return [(1 - z) * (new + (reset + reset_kept).sigmoid() * new_kept).tanh() + z * memory[0]]
    into, forget, new, out = (read + kept for read, kept in found)
    c = forget.sigmoid() * memory[1] + into.sigmoid() * new.tanh()
    return [out.sigmoid() * c.tanh(), c]


def encoded(config: RecurrentConfig, own: Weights, x: Tensor) -> tuple[Tensor, list[list[list[Tensor]]]]:
    """[K, W] to [K, H] annotations, and the last states of each layer and direction."""
    last = []
    for layer in range(config.depth):
        read, ends = [], []
        for suffix in ("", "_reverse") if config.bidirectional else ("",):
            backwards = bool(suffix) or config.reversed_source
            memory = [torch.zeros(config.hidden // config.directions).to(x)] * config.state_tensors
            states: list[Tensor] = []
            for row in reversed(x) if backwards else x:
                memory = cell(config.cell, own, f"l{layer}{suffix}", row, memory)
                states.append(memory[0])
            read.append(torch.stack(states[::-1] if backwards else states))
            ends.append(memory)
        x = torch.cat(read, dim=-1)
        last.append(ends)
    return x, last


def scored(config: RecurrentConfig, own: Weights, query: Tensor, annotation: Tensor) -> Tensor:
    if config.score == "dot":
        return query.dot(annotation)
    if config.score == "general":
        return query.dot(own["looking.score.match.weight"] @ annotation)
    score = {name.removeprefix("looking.score."): tensor for name, tensor in own.items()}
    return score["out.weight"][0].dot((score["of_query.weight"] @ query + score["of_key.weight"] @ annotation).tanh())


def looked(config: RecurrentConfig, own: Weights, query: Tensor, annotations: Tensor, time: int) -> Tensor:
    """Weights [K] of the tokens of a source."""
    count, width = len(annotations), config.window
    centre = torch.tensor(float(time)).to(query)
    if config.reach == "local-p":
        inner = (own["looking.reach.inner.weight"] @ query).tanh()
        centre = count * own["looking.reach.out.weight"][0].dot(inner).sigmoid()
    near = [s for s in range(count) if config.reach == "global" or abs(s - centre) <= width]
    weights = torch.zeros(count).to(query)
    if near:
        among = torch.stack([scored(config, own, query, annotations[s]) for s in near]).exp()
        for s, share in zip(near, among / among.sum(), strict=True):
            bent = torch.exp(-((s - centre) ** 2) / (2 * (width / 2) ** 2)) if config.reach == "local-p" else 1.0
            weights[s] = share * bent
    return weights


def formulas(network: torch.nn.Module, source: list[int], target: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [Q, V] after each token of one target, and the attention weights of each step."""
    config: RecurrentConfig = network.config
    whole = dict(network.state_dict())
    own = {name.removeprefix("decoder."): tensor for name, tensor in whole.items() if name.startswith("decoder.")}
    cells = {name.removeprefix("layers."): tensor for name, tensor in own.items()}
    reader = {name.removeprefix("encoder.layers."): tensor for name, tensor in whole.items()}
    annotations, last = encoded(config, reader, whole["tokens.weight"][source])
    memory = [[torch.cat(parts) for parts in zip(*ends, strict=True)] for ends in last]
    if config.attention == "bahdanau":
        bridge, bias = own["bridge.weight"], own["bridge.bias"]
        memory = [[(bridge @ part + bias).tanh() for part in ends[-1]] for ends in last]
    made = torch.zeros(config.width).to(annotations)
    logits, weights = [], []
    for time, token in enumerate(target):
        x = whole["tokens.weight"][token]
        if config.attention == "bahdanau":
            weights.append(looked(config, own, memory[-1][0], annotations, time))
        into = {"none": [], "bahdanau": [weights[-1] @ annotations] if weights else []}.get(config.attention, [])
        row = torch.cat([x, *into, *([made] if config.input_feeding else [])])
        for layer in range(config.depth):
            memory[layer] = cell(config.cell, cells, f"l{layer}", row, memory[layer])
            row = memory[layer][0]
        if config.attention == "none":
            made = own["narrow.weight"] @ row
        elif config.attention == "bahdanau":
            both = own["maxout.weight"] @ torch.cat([row, x, *into]) + own["maxout.bias"]
            made = torch.stack([torch.max(both[2 * i], both[2 * i + 1]) for i in range(config.width)])
        else:
            weights.append(looked(config, own, row, annotations, time))
            made = (own["combine.weight"] @ torch.cat([weights[-1] @ annotations, row])).tanh()
        logits.append(whole["output.weight"] @ made + whole["output.bias"])
    return torch.stack(logits), weights
