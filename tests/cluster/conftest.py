"""Real clusters: `make cluster`.  They need the extra ray, and minutes."""

from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from nodes import Cluster


@pytest.fixture(autouse=True)
def nothing_goes_out_and_nothing_is_unpickled() -> None:
    """Not here: Ray pickles what its own processes tell each other, and asks its cloud who it is."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield made
    finally:
        made.close()
