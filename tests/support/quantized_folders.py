"""Quantised checkpoint folders: weights are rounded and packed as each format is documented.

Every packer takes a matrix [N, K], and gives the tensors of a module by their last names, and the floats that they
stand for.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyhead.models.checkpoint.quantized.bitsandbytes import VALUES
from tests.support import checkpoints

Json = dict[str, Any]
Packed = tuple[dict[str, Tensor], Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Recipe:
    """A format: its quantization_config, the packer, and the kind under which a matrix is known."""

    config: Json
    pack: Callable[[Tensor], Packed]
    kind: str


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[N, ceil(K * bits / 32)] int32 of codes [N, K] from 0 on: a string of bits for each row, the lowest first."""
    count, inputs = codes.shape
    words = torch.zeros(count, -(-inputs * bits // 32), dtype=torch.int64)
    for place in range(inputs * bits):
        words[:, place // 32] |= (codes[:, place // bits].long() >> place % bits & 1) << place % 32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def round_groups(weights: Tensor, bits: int, width: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from 0 on, and scales (in half precision) and zero points [N, G] of weights [N, K]."""
    groups, top = weights.unflatten(1, (-1, width)), (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (top // 2)).half().float()
        zeros = torch.full_like(scales, top // 2 + 1)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half().float()
        zeros = (-low / scales).round().clamp(1, top)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, top)
    return codes.flatten(1).long(), scales, zeros.long()


def spread(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(width, 1)


def gptq(bits: int, width: int, version: int = 1, reordered: bool = False) -> Recipe:
    def pack(weights: Tensor) -> Packed:
        inputs = weights.size(1)
        size = width if width > 0 else inputs
        order = (
            torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if reordered else torch.arange(inputs)
        )
        codes, scales, zeros = round_groups(weights[:, order], bits, size, symmetric=False)
        groups = (torch.arange(inputs) // size)[order.argsort()]
        codes = codes[:, order.argsort()]
        floats = (codes - zeros[:, groups]) * scales[:, groups]
        tensors = {
            "qweight": pack_bits(codes, bits).t(),
            "qzeros": pack_bits((zeros - int(version == 1)).t(), bits),
            "scales": scales.t().half(),
            "g_idx": groups.int(),
        }
        return tensors, floats

    config = {"quant_method": "gptq", "bits": bits, "group_size": width, "desc_act": reordered, "sym": False}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    small = "int4 in small groups" if reordered else "int4 with zero points"
    return Recipe(config, pack, small if bits <= 4 else "int8")


def awq(width: int, version: str = "gemm") -> Recipe:
    def pack(weights: Tensor) -> Packed:
        codes, scales, zeros = round_groups(weights, 4, width, symmetric=False)
        floats = (codes - spread(zeros, width)) * spread(scales, width)
        if version == "gemv":
            padded = -(-zeros.size(1) // 32) * 32 if width == 32 else -(-zeros.size(1) // 8) * 8
            wide = [torch.nn.functional.pad(each, (0, padded - each.size(1))) for each in (zeros, scales)]
            return {"qweight": pack_bits(codes, 4), "qzeros": pack_bits(wide[0], 4), "scales": wide[1].half()}, floats
        mixed = [each.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1) for each in (codes, zeros)]
        tensors = {"qweight": pack_bits(mixed[0], 4), "qzeros": pack_bits(mixed[1], 4), "scales": scales.t().half()}
        return tensors, floats

    config = {"quant_method": "awq", "bits": 4, "group_size": width, "version": version, "zero_point": True}
    return Recipe(config, pack, "int4 with zero points")


def fp8(block: tuple[int, int] | None, exponents: bool = False) -> Recipe:
    def pack(weights: Tensor) -> Packed:
        outputs, inputs = weights.shape
        height, width = block or (outputs, inputs)
        rows, columns = torch.arange(outputs) // height, torch.arange(inputs) // width
        scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for row in range(len(scales)):
            for column in range(scales.size(1)):
                scales[row, column] = weights[rows == row][:, columns == column].abs().amax() / 448
        if exponents:
            scales = torch.exp2(scales.log2().ceil())
        wide = scales[rows][:, columns]
        codes = (weights / wide).to(torch.float8_e4m3fn)
        stored = (scales.log2() + 127).to(torch.uint8) if exponents else scales if block else scales[0, 0].clone()
        return {"weight": codes, "weight_scale_inv": stored}, codes.float() * wide

    config: Json = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": list(block)} if block else {}
    return Recipe(config | ({"scale_fmt": "ue8m0"} if exponents else {}), pack, "FP8")


def compressed(format: str, weights: Json, pack: Callable[[Tensor], Packed], kind: str) -> Recipe:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return Recipe(config | {"ignore": ["lm_head"]}, pack, kind)


def packed_integers(bits: int, width: int, symmetric: bool) -> Recipe:
    def pack(weights: Tensor) -> Packed:
        codes, scales, zeros = round_groups(weights, bits, width, symmetric)
        tensors = {"weight_packed": pack_bits(codes, bits), "weight_scale": scales.half()}
        tensors["weight_shape"] = torch.tensor(weights.shape)
        if not symmetric:
            tensors["weight_zero_point"] = pack_bits(zeros.t(), bits).t()
        return tensors, (codes - spread(zeros, width)) * spread(scales, width)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": width}
    small = "int4" if symmetric else "int4 with zero points"
    return compressed("pack-quantized", weights, pack, small if bits <= 4 else "int8")


def plain_integers(symmetric: bool) -> Recipe:
    def pack(weights: Tensor) -> Packed:
        codes, scales, zeros = round_groups(weights, 8, weights.size(1), symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, (codes - zeros) * scales

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return compressed("int-quantized", weights, pack, "int8")


def plain_floats() -> Recipe:
    def pack(weights: Tensor) -> Packed:
        scales = weights.abs().amax(1, keepdim=True) / 448
        codes = (weights / scales).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales.bfloat16(), "input_scale": torch.ones(1)}, (
            codes.float() * scales.bfloat16().float()
        )

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return compressed("float-quantized", weights, pack, "FP8")


def nearest_codes(numbers: Tensor, values: Tensor) -> Tensor:
    return (numbers[..., None] - values).abs().argmin(-1)


def small_floats(width: int) -> Recipe:
    """NVFP4 with groups of 16, MXFP4 with groups of 32."""

    def pack(weights: Tensor) -> Packed:
        groups = weights.unflatten(1, (-1, width))
        most = groups.abs().amax(-1)
        whole = 448 * 6 / weights.abs().amax()
        if width == 16:
            stored = (most / 6 * whole).to(torch.float8_e4m3fn)
            scales = stored.float() / whole
        else:
            scales = torch.exp2((most / 6).log2().ceil())
            stored = (scales.log2() + 127).to(torch.uint8)
        codes = nearest_codes(groups / scales[..., None].clamp(min=1e-30), FP4)
        floats = (FP4[codes] * scales[..., None]).flatten(1)
        flat = codes.flatten(1).to(torch.uint8)
        tensors = {"weight_packed": flat[:, ::2] | flat[:, 1::2] << 4, "weight_scale": stored}
        return (tensors | {"weight_global_scale": whole.view(1)} if width == 16 else tensors), floats

    strategy = "tensor_group" if width == 16 else "group"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": width}
    name = "nvfp4" if width == 16 else "mxfp4"
    return compressed(f"{name}-pack-quantized", weights, pack, name.upper())


def blockwise(format: str, nested: bool, block: int = 64) -> Recipe:
    """bitsandbytes' four bits."""
    values = torch.tensor(VALUES[format])

    def pack(weights: Tensor) -> Packed:
        flat = weights.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
        scales = blocks.abs().amax(1)
        state: Json = {"quant_type": format, "blocksize": block, "dtype": "float32", "shape": list(weights.shape)}
        tensors = {"weight.quant_map": values.clone()}
        if nested:
            offset = float(scales.mean())
            outer = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256).abs().amax(1)
            table = torch.linspace(-1, 1, 256)
            wide = outer.repeat_interleave(256)[: len(scales)]
            codes = nearest_codes((scales - offset) / wide, table)
            scales = table[codes] * wide + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table.clone()}
        tensors["weight.absmax"] = codes.to(torch.uint8) if nested else scales
        chosen = nearest_codes(blocks / scales[:, None], values)
        floats = (values[chosen] * scales[:, None]).flatten()[: len(flat)].view(weights.shape)
        bytes = chosen.flatten()[: len(flat)].to(torch.uint8)
        bytes = torch.nn.functional.pad(bytes, (0, len(bytes) % 2))
        tensors["weight"] = (bytes[::2] << 4 | bytes[1::2])[:, None]
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors | {f"weight.quant_state.bitsandbytes__{format}": text}, floats

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": format}
    return Recipe(config, pack, format.upper())


def rows_of_bytes() -> Recipe:
    """bitsandbytes' eight bits."""

    def pack(weights: Tensor) -> Packed:
        most = weights.abs().amax(1)
        codes = (weights * (127 / most[:, None])).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes * most[:, None] * 7.874015718698502e-3

    return Recipe({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack, "int8")


def torchao_integers() -> Recipe:
    def pack(weights: Tensor) -> Packed:
        codes, scales, zeros = round_groups(weights, 4, 32, symmetric=False)
        tensors = {
            "_weight_qdata": (codes - 8).to(torch.int8),
            "_weight_scale": scales,
            "_weight_zero_point": (zeros - 8).to(torch.int8),
        }
        return tensors, (codes - spread(zeros, 32)) * spread(scales, 32)

    return Recipe({"quant_method": "torchao"}, pack, "int4 with zero points")


RECIPES = {
    "gptq": gptq(4, 32),
    "gptq, v2": gptq(4, 32, version=2),
    "gptq, one group": gptq(4, -1),
    "gptq, 8 bits": gptq(8, 64),
    "gptq, 3 bits": gptq(3, 32),
    "gptq, 2 bits": gptq(2, 32),
    "gptq, reordered": gptq(4, 32, reordered=True),
    "awq": awq(32),
    "awq, gemv": awq(32, "gemv"),
    "fp8": fp8(None),
    "fp8, blocks": fp8((48, 48)),
    "fp8, exponents": fp8((32, 32), exponents=True),
    "packed": packed_integers(4, 32, symmetric=True),
    "packed, zero points": packed_integers(4, 32, symmetric=False),
    "packed, 8 bits": packed_integers(8, 32, symmetric=False),
    "int8": plain_integers(symmetric=True),
    "int8, zero points": plain_integers(symmetric=False),
    "float8": plain_floats(),
    "nvfp4": small_floats(16),
    "mxfp4": small_floats(32),
    "nf4": blockwise("nf4", nested=False),
    "nf4, nested": blockwise("nf4", nested=True),
    "fp4": blockwise("fp4", nested=False),
    "bytes": rows_of_bytes(),
    "torchao": torchao_integers(),
}


def write_folders(source: Path, recipe: Recipe, out: Path) -> tuple[Path, Path]:
    """Two copies of a folder: its linear layers in a format, and as the floats that those stand for."""
    tensors, floats, metadata = load_file(source / "model.safetensors"), dict[str, Tensor](), dict[str, str]()
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith("_proj") or leaf != "weight":
            stored[name] = floats[name] = tensor
            continue
        parts, floats[name] = recipe.pack(tensor.float())
        stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
        if recipe.config["quant_method"] == "torchao":
            block = {"block_size": [1, 32], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
            metadata[name] = json.dumps(
                {
                    "_type": "IntxUnpackedToInt8Tensor",
                    "_data": block,
                    "_tensor_data_names": ["qdata", "scale", "zero_point"],
                }
            )
    config = json.loads((source / "config.json").read_text())
    for folder, kept, fields in (
        (out / "quantised", stored, {"quantization_config": recipe.config}),
        (out / "floats", {name: each.float().contiguous() for name, each in floats.items()}, {}),
    ):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"} | metadata)
        checkpoints.write_json(folder / "config.json", config | fields)
    return out / "quantised", out / "floats"
