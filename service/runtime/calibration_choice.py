"""The calibration of a served model's decisions: the file that the setting `calibrations` names, or the one that lies
beside the model.

A named file that cannot be applied breaks the load. One that only lies there is ignored with a warning, so that new
weights in the same place are served; their answers name no calibration.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.published_rerankers import split_task
from polyhead.models.checkpoint.source_policy import SourcePolicy
from polyhead.models.core.errors import CheckpointError

from ..config.settings import Settings
from ..core.calibration import NO_CALIBRATION, Calibration
from ..decisions.calibration_file import calibration_path, read_calibration_file
from ..decisions.question import PROMPT_VERSION
from .self_test import fingerprint_weights, weight_hashes

NONE = "none"  # the value of the setting that applies no calibration
log = logging.getLogger("polyhead.calibration")


@dataclass(frozen=True)
class WeightsInUse:
    """A described model as it will be computed. `source` is as the settings or an administrator have it."""

    name: str
    source: str
    description: Description
    precision: str


def choose_calibration(
    weights: WeightsInUse, settings: Settings, policy: SourcePolicy, check: Callable[[], None]
) -> Calibration:
    """The calibration of these weights. If there is a file, all weights are hashed once (FileHashes), and `check` is
    called meanwhile. Raises CheckpointError for a file that the settings name.
    """
    named = settings.calibrations.get(weights.name, "")
    if named == NONE:
        return NO_CALIBRATION
    if named:
        return read_matching(Path(named).expanduser(), weights, settings, check)
    path = find_neighbour(weights.source, policy)
    if path is None or not path.exists():
        return NO_CALIBRATION
    try:
        return read_matching(path, weights, settings, check)
    except CheckpointError as error:
        log.warning("%s is served without a calibration: %s", weights.name, error)
        return NO_CALIBRATION


def find_neighbour(source: str, policy: SourcePolicy) -> Path | None:
    """Where a calibration lies beside a source: beside the adapter that is merged into a base; None for a model on the
    hub, which has no folder of its own here.
    """
    source, _ = split_task(source, policy.exists)
    if "+" in source and not policy.exists(source):
        source = source.rpartition("+")[2]
    return calibration_path(policy.locate(source)) if policy.exists(source) else None


def read_matching(path: Path, weights: WeightsInUse, settings: Settings, check: Callable[[], None]) -> Calibration:
    """The calibration in a file. Raises CheckpointError if it cannot be read, or is for other weights or another
    precision.
    """
    try:
        found = read_calibration_file(path)
    except FileNotFoundError:
        raise CheckpointError("there is no such file of a calibration", file=str(path)) from None
    again = "run polyhead calibrate again"
    if found.precision != weights.precision:
        message = (
            f"is for the precision {found.precision}, and {weights.name} is computed in {weights.precision}; {again}"
        )
        raise CheckpointError(message, file=str(path))
    if found.weights != identify_weights(weights.description, settings, check):
        raise CheckpointError(f"is for other weights than those of {weights.name}; {again}", file=str(path))
    return found.as_calibration()


def identify_weights(description: Description, settings: Settings, check: Callable[[], None]) -> str:
    """A SHA-256 of all that answers depend on: the weights, the network, the tokenizer, labels, the chat template, and
    how questions are written.
    """
    hashes = weight_hashes(settings)
    weights = fingerprint_weights(description, lambda path: hashes.hash_file(path, check))
    chat = description.chat.parts if description.chat else ()
    content = weights, description.head.labels, chat, PROMPT_VERSION
    return hashlib.sha256(repr(content).encode()).hexdigest()
