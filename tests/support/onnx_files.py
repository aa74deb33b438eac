"""ONNX files: exported by torch from a network, and messages of protocol buffers put together by hand."""

from pathlib import Path
from unittest import mock
from warnings import catch_warnings, simplefilter

import torch
from torch.onnx._internal.torchscript_exporter import onnx_proto_utils
from transformers import PreTrainedModel

INPUTS = ("input_ids", "attention_mask")


def export(network: PreTrainedModel, file: Path) -> Path:
    """Export a network as optimum does. The part of torch that needs the package onnx has nothing to do here: it adds
    functions that a graph may define.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = torch.tensor([[2, 9, 8, 3]])
    forward = network.forward
    network.forward = lambda ids, mask: forward(input_ids=ids, attention_mask=mask, return_dict=False)[0]
    try:
        with mock.patch.object(onnx_proto_utils, "_add_onnxscript_fn", lambda data, _: data), catch_warnings():
            simplefilter("ignore")  # this exporter is deprecated, and is the one that published graphs were made with
            torch.onnx.export(
                network,
                (tokens, torch.ones_like(tokens)),
                str(file),
                input_names=list(INPUTS),
                dynamic_axes={name: {0: "batch", 1: "sequence"} for name in INPUTS},
                opset_version=14,
                dynamo=False,
            )
    finally:
        del network.forward
    return file


def varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def number(field: int, value: int) -> bytes:
    """A field that is a number."""
    return varint(field << 3) + varint(value)


def part(field: int, content: bytes | str) -> bytes:
    """A field that is a message, a text or bytes."""
    raw = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def tensor(name: str, shape: tuple[int, ...], raw: bytes, kind: int = 1) -> bytes:
    """A tensor of a graph; `kind` 1 is float32."""
    return part(5, b"".join(number(1, size) for size in shape) + number(2, kind) + part(8, name) + part(9, raw))


def outside_tensor(name: str, shape: tuple[int, ...], **place: str) -> bytes:
    """A float32 tensor whose numbers are in another file."""
    pairs = b"".join(part(13, part(1, key) + part(2, value)) for key, value in place.items())
    return part(5, b"".join(number(1, size) for size in shape) + number(2, 1) + part(8, name) + pairs + number(14, 1))


def node(kind: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...] = ("out",)) -> bytes:
    """A node of a graph."""
    names = b"".join(part(1, each) for each in inputs) + b"".join(part(2, each) for each in outputs)
    return part(1, names + part(3, name) + part(4, kind))


def model(*parts: bytes) -> bytes:
    """A model with one graph."""
    return number(1, 8) + part(2, "pytorch") + part(7, b"".join(parts))
