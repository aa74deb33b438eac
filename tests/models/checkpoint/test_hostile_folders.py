"""Malicious checkpoints: each is refused quickly, with a message and little memory, and none of their code is run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from polyhead.models.checkpoint import load
from tests.support import checkpoints, hostile
from tests.support.hostile import FILES, FOLDERS, GENERATORS, Outcome

SECONDS = 5.0
MEBIBYTES = 512.0
PATIENCE = 600.0  # seconds for all cases
ALL = [*FOLDERS, *GENERATORS, *(f"gguf: {name}" for name in FILES)]


def write_cases(place: Path, classifier: Path, generator: Path) -> Iterator[tuple[str, str]]:
    """Name and path of every case."""
    for base, table in ((classifier, FOLDERS), (generator, GENERATORS)):
        for number, (name, make_hostile) in enumerate(table.items()):
            folder = place / f"{base.name}-{number}" / "model"
            shutil.copytree(base, folder)
            make_hostile(folder)
            yield name, str(folder)
    for number, (name, content) in enumerate(FILES.items()):
        path = place / f"{number}.gguf"
        size, begin = content if isinstance(content, tuple) else (len(content), content)
        hostile.sparse(path, size, begin)
        yield f"gguf: {name}", str(path)


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, tiny_classifier: Path, tiny_generator: Path
) -> Iterator[Mapping[str, Outcome]]:
    """The outcome of each case. One child process loads them one after the other, within PATIENCE seconds."""
    place = tmp_path_factory.mktemp("hostile")
    cases = list(write_cases(place, tiny_classifier, tiny_generator))
    (place / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, hostile.__file__, str(place / "cases.json")]
    with (place / "errors.txt").open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=PATIENCE, check=False, text=True)
    found = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), f"after {found[-1:]}: {(place / 'errors.txt').read_text()[-2000:]}"
    assert not list(place.rglob("*.canary"))
    yield {each.name: each for each in found}
    shutil.rmtree(place)


@pytest.mark.parametrize("name", ALL)
def test_it_is_refused_with_a_message_in_little_time_and_memory(outcomes: Mapping[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.kind == "ModelError", outcome
    assert len(outcome.said) < 3000
    assert hostile.SECRET not in outcome.said
    assert not outcome.touched
    assert outcome.seconds < SECONDS
    assert outcome.mebibytes < MEBIBYTES


def test_links_of_a_hub_cache_are_followed(tiny_classifier: Path, tmp_path: Path) -> None:
    """models--org--name/snapshots/revision/file -> ../../blobs/hash"""
    store = tmp_path / "models--org--name"
    snapshot, blobs = store / "snapshots" / "0123abcd", store / "blobs"
    shutil.copytree(tiny_classifier, snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert load(str(snapshot)).labels == checkpoints.LABELS


def test_links_inside_a_folder_are_followed(tiny_classifier: Path, tmp_path: Path) -> None:
    """As in a Kubernetes volume. The folder itself, which the operator names, may also be a link."""
    shutil.copytree(tiny_classifier, tmp_path / "model" / "..data")
    for file in (tmp_path / "model" / "..data").iterdir():
        (tmp_path / "model" / file.name).symlink_to(os.path.join("..data", file.name))
    (tmp_path / "current").symlink_to("model")
    assert load(str(tmp_path / "current")).labels == checkpoints.LABELS


def test_stop_tokens_outside_the_vocabulary_are_ignored(tiny_generator: Path, tmp_path: Path) -> None:
    """A stop token without a logit would fail the whole step, with the requests of all clients."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_generator, folder)
    wanted = load(str(tiny_generator)).stop_tokens
    hostile.describe(folder, "generation_config.json", eos_token_id=[2, -3, True, 2**63 + 5, 1 << 40, 2.0, "3"])
    assert load(str(folder)).stop_tokens == wanted | {2}
