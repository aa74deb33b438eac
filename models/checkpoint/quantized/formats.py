"""The formats of quantised checkpoint folders: a table from `quant_method` to the module that reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..tensor_files import TensorEntry
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, torchao
from .config_fields import Json, dict_or_empty, read_name

Entries = Mapping[str, TensorEntry]
CombineEntries = Callable[[Entries], dict[str, TensorEntry]]


@dataclass(frozen=True)
class QuantizedFormat:
    """`read_config` makes a scheme of the configuration, or raises UnsupportedError. `combine_entries` combines the
    tensors of each quantised matrix into one entry."""

    read_config: Callable[[Path, Json], Any]
    combine_entries: Callable[[Any, Entries], dict[str, TensorEntry]]


FORMATS: Mapping[str, QuantizedFormat] = {
    "compressed-tensors": QuantizedFormat(compressed_tensors.read_config, compressed_tensors.combine_entries),
    "gptq": QuantizedFormat(gptq.read_config, gptq.combine_entries),
    "awq": QuantizedFormat(awq.read_config, awq.combine_entries),
    "fp8": QuantizedFormat(fp8.read_config, fp8.combine_entries),
    "fbgemm_fp8": QuantizedFormat(fp8.read_config, fp8.combine_entries),
    "mxfp4": QuantizedFormat(mxfp4.read_config, mxfp4.combine_entries),
    "bitsandbytes": QuantizedFormat(bitsandbytes.read_config, bitsandbytes.combine_entries),
    "torchao": QuantizedFormat(torchao.read_config, torchao.combine_entries),
}


def read_quantization(file: Path, config: Any) -> CombineEntries:
    """How the entries of a folder with this quantization_config are combined. UnsupportedError names the field that is
    not supported."""
    fields = dict_or_empty(config)
    method = fields.get("quant_method")
    if method is None and (fields.get("load_in_8bit") or fields.get("load_in_4bit")):
        method = "bitsandbytes"  # which did not write its name at first
    format = FORMATS[read_name(file, "quant_method", method, tuple(FORMATS))]
    return partial(format.combine_entries, format.read_config(file, fields))
