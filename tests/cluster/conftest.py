"""Tests on real clusters: `make cluster`.  They need the extra ray and take minutes."""

from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from tests.cluster.nodes import Cluster


@pytest.fixture(autouse=True)
def no_remote_connection_and_no_unpickling() -> None:
    """Disabled here: Ray pickles the messages between its own processes and asks for metadata of its cloud."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield cluster
    finally:
        cluster.close()
