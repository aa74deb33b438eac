"""Outputs of an embedder beside the vector of a text, from files beside its folder's: those of M3 (Chen et al. 2024,
arXiv:2402.03216), which has a weight and a vector for each token.

FlagEmbedding saves the two layers as pickles, `sparse_linear.pt` and `colbert_linear.pt`. Only the same tensors in
`sparse_linear.safetensors` and `colbert_linear.safetensors` are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path

from torch import nn

from ..core.errors import CheckpointError
from ..network.embedding_head import DenseSpec, LaterTokensHead, TokenWeightHead, UnitSpec
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from ..tokenizer import Tokenizer
from .description import Form, HeadDescription
from .folder_files import FolderParts
from .tensor_files import TensorEntry, read_safetensors

LAYER_NAMES = frozenset(("weight", "bias"))
log = getLogger(__name__)


@dataclass(frozen=True)
class OutputFile:
    """`stem` is the name of the file with the layer of a form; its tensors become `weight` and `bias` at `place` in the
    head. `rows`: of its matrix; 0: as many as a state is wide, or fewer."""

    form: Form
    stem: str
    place: str
    rows: int


OUTPUT_FILES = (
    OutputFile("words", "sparse_linear", "words.out", 1),
    OutputFile("tokens", "colbert_linear", "tokens.layers.0.linear", 0),
)


def add_outputs(
    parts: FolderParts, config: ModelConfig, tokenizer: Tokenizer, head: HeadDescription
) -> HeadDescription:
    """The head with the outputs that have a file in the folder."""
    skipped = frozenset(
        id
        for id in (*tokenizer.boundary_tokens[0], *tokenizer.boundary_tokens[1], tokenizer.pad_id, tokenizer.unk_id)
        if id is not None
    )
    builders: dict[Form, Callable[[int], nn.Module]] = {
        "words": lambda _: TokenWeightHead(config.state_width, skipped),
        "tokens": lambda rows: LaterTokensHead((DenseSpec(config.state_width, rows, activation="none"), UnitSpec())),
    }
    entries, made, missing = dict(head.own_entries), dict[Form, int](), dict(head.missing_forms)
    for each in OUTPUT_FILES:
        file = parts.root / f"{each.stem}.safetensors"
        if file.is_file():
            layer = read_layer(file, each, config)
            made[each.form] = layer["weight"].shape[0]
            entries |= {f"{each.stem}/{name}": (f"head.{each.place}.{name}", entry) for name, entry in layer.items()}
        elif (parts.root / f"{each.stem}.pt").is_file():
            missing[each.form] = explain_pickle(each.stem)
            log.warning("%s: %s", parts.root, missing[each.form])
    if not made:
        return replace(head, missing_forms=missing)
    build_main = head.build

    def build(network: Transformer) -> nn.Module:
        main = build_main(network)
        for form, rows in made.items():
            main.add_module(form, builders[form](rows))
        return main

    return replace(head, build=build, own_entries=entries, more_forms=tuple(made), missing_forms=missing)


def read_layer(file: Path, output: OutputFile, config: ModelConfig) -> Mapping[str, TensorEntry]:
    """The tensors of a linear layer on states. CheckpointError unless they are those."""
    entries = read_safetensors(file)
    if entries.keys() != LAYER_NAMES:
        raise CheckpointError("it should hold the tensors weight and bias of a linear layer", file=str(file))
    shape, most = entries["weight"].shape, output.rows or config.state_width
    if len(shape) != 2 or shape[1] != config.state_width or not (output.rows or 1) <= shape[0] <= most:
        rows = str(output.rows) if output.rows else f"1 to {most}"
        message = f"its shape is {list(shape)}, which should be {rows} rows of {config.state_width}"
        raise CheckpointError(message, file=str(file), tensor="weight")
    if entries["bias"].shape != shape[:1]:
        message = f"its shape is {list(entries['bias'].shape)}, which should be {list(shape[:1])}"
        raise CheckpointError(message, file=str(file), tensor="bias")
    return entries


def explain_pickle(stem: str) -> str:
    """What to do about a layer that is only there as a pickle."""
    return (
        f"{stem}.pt is pickled and is never opened here; convert it where you trust it: "
        f"safetensors.torch.save_file(torch.load('{stem}.pt', weights_only=True), '{stem}.safetensors')"
    )
