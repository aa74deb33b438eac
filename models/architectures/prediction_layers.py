"""Layers that predict further tokens in training (multi-token prediction, DeepSeek-V3, arXiv:2412.19437). They follow
the network's own layers in the files and are not read."""

from dataclasses import replace
from logging import getLogger

from ..core.errors import UnsupportedError, show_value
from .family import MAX_LAYERS, Family, Json

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")  # the names that configurations have for their number
MAX_PREDICTION_LAYERS = 64  # published networks have one to three
log = getLogger(__name__)


def drop_prediction_layers(family: Family, hf: Json) -> Family:
    """The family without the layers after the last one of the network. UnsupportedError for a number that is none."""
    counts = [hf[name] for name in COUNTS if hf.get(name) is not None]
    depth = hf["num_hidden_layers"]
    if not counts or counts[0] == 0:
        return family
    if type(counts[0]) is not int or not 0 < counts[0] <= MAX_PREDICTION_LAYERS:
        message = (
            f"{COUNTS[0]} is {show_value(counts[0])}, which should be a whole number up to {MAX_PREDICTION_LAYERS}"
        )
        raise UnsupportedError(message)
    if type(depth) is not int or not 0 < depth <= MAX_LAYERS:
        return family  # refused when the configuration is read
    numbers = range(depth, depth + counts[0])
    log.info(
        "model_type %s: tensors of layers from %d on predict further tokens in training; they are not read",
        family.name,
        depth,
    )
    return replace(family, drop=rf"{family.drop}|^layers\.({'|'.join(map(str, numbers))})\.")
