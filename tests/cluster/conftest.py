"""Fixtures of tests on real clusters: `make cluster`. They need the extra `ray`, and minutes."""

from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from nodes import Cluster


@pytest.fixture(autouse=True)
def no_remote_connection_and_no_unpickling() -> None:
    """Overrides the check: Ray pickles messages between its own processes, and asks its cloud for the machine's
    identity."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield made
    finally:
        made.close()
