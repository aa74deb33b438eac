"""The packed size of a network is known from its configuration."""

import pytest

from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.native.step_memory import weight_bytes
from tests.models.native.test_step import ENCODERS, GENERATORS, head, network, pytestmark

__all__ = ["pytestmark"]


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", [*GENERATORS, *(f"encoder: {name}" for name in ENCODERS)])
def test_the_estimate_is_not_below_the_packed_size(name: str, precision: Precision) -> None:
    encoder = ENCODERS.get(name.removeprefix("encoder: ")) if name.startswith("encoder: ") else None
    config = encoder or GENERATORS[name]
    executor = NativeExecutor(network(config), None if encoder else head(config), precision=precision)
    predicted = weight_bytes(config, precision, generates=not encoder, tied=False, bits={})
    assert executor.weight_bytes <= predicted <= 1.2 * executor.weight_bytes
