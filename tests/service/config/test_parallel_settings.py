"""Settings of replicas: their values, the settings of each deployment, and the number of replicas."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from polyhead.service.cli import main as cli
from polyhead.service.config import flags
from polyhead.service.config.settings import Settings, SettingsError, read_settings
from polyhead.service.fleet.autoscaling import QUEUED_TOKENS_STAT, QueuedTokensPolicy
from polyhead.service.fleet.deployment_settings import split_settings, with_threads

MODELS = {"chat": "c", "chat:tone": "t", "a": "1", "a:x": "2", "b": "3"}


def test_a_deployment_has_a_model_with_its_adapters_or_a_pool() -> None:
    settings = Settings(
        models=MODELS,
        pools={"small": ["a", "b"]},
        drafts={"chat": "d"},
        weights={"a": 2, "chat": 3},
        calibrations={"chat:tone": "t.json", "b": "none"},
        replicas="2",
    )
    divided = split_settings(settings)
    assert {name: dict(own.models) for name, own in divided.items()} == {
        "chat": {"chat": "c", "chat:tone": "t"},
        "small": {"a": "1", "a:x": "2", "b": "3"},
    }
    assert (divided["chat"].drafts, divided["chat"].weights, divided["chat"].pools) == ({"chat": "d"}, {"chat": 3}, {})
    assert (divided["small"].drafts, divided["small"].weights) == ({}, {"a": 2})
    assert [divided[name].calibrations for name in ("chat", "small")] == [{"chat:tone": "t.json"}, {"b": "none"}]
    assert divided["small"].pools == {"small": ["a", "b"]}


@pytest.mark.parametrize(("cpus", "threads", "given"), [(0.5, 1, 0), (2.5, 2, 0), (4, 3, 3)])
def test_a_replica_has_threads_for_its_reserved_cores(cpus: float, threads: int, given: int) -> None:
    assert with_threads(Settings(replica_cpus=cpus, threads=given)).threads == threads


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"replicas": "0"}, "must be 1 at least"),
        ({"replicas": "3-2"}, "from the less to the more, and 3 is more than 2"),
        ({"replicas": "many"}, "a number, or two as in 1-8"),
        ({"replica_ports": "9100-"}, "a number, or two"),
        ({"pools": {"small": ["a", "zz"]}, "models": MODELS}, "no model is called 'zz'"),
        ({"pools": {"chat": ["a"]}, "models": MODELS}, "'chat' is a model, a pool cannot have its name"),
        ({"pools": "small", "models": MODELS}, "not of the form name=model"),
        ({"pools": {"small": []}, "models": MODELS}, "must name one at least"),
        ({"pools": {"x y": ["a"]}, "models": MODELS}, "'x y' is no name"),
        ({"pools": {"one": ["a"], "two": ["b", "a"]}, "models": MODELS}, "'a' is in one already"),
        ({"pools": {"small": ["a:x"]}, "models": MODELS}, "'a:x' is an adapter"),
    ],
)
def test_invalid_combinations_are_rejected(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read_settings(asked)


def test_numbers_and_ranges() -> None:
    assert read_settings({"pools": "small=a+b, other=chat", "models": MODELS}).pools == {
        "small": ["a", "b"],
        "other": ["chat"],
    }
    assert read_settings({"replicas": "3"}).replica_bounds == (3, 3)
    assert read_settings({"replicas": "1-8"}).replica_bounds == (1, 8)
    assert list(read_settings({"replica_ports": "9100-9102"}).replica_port_range) == [9100, 9101, 9102]
    assert list(read_settings({}).replica_port_range) == [0]


def test_a_boolean_flag_needs_no_value() -> None:
    assert flags.parse_flags(["--ray", "chat=x"]) == {"ray": "true", "models": ["chat=x"]}
    assert flags.parse_flags(["chat=x", "--ray"])["ray"] == "true"
    assert flags.parse_flags(["--ray", "false", "--port", "1"]) == {"ray": "false", "port": "1"}


def test_without_ray_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "polyhead.service.fleet.ray_app", raising=False)
    with pytest.raises(BaseException) as raised:  # noqa: PT011  # the command line may end in any way
        cli.choose_server(Settings(ray=True))
    assert "polyhead[ray]" in str(raised.value) + capsys.readouterr().err
    with pytest.raises(SettingsError, match="--ray serves replicas"):
        cli.choose_server(Settings(replicas="2"))


def asked(queued: dict[str, float], now: int = 2) -> Any:
    metrics = {QUEUED_TOKENS_STAT: queued} if queued else {}
    return SimpleNamespace(
        aggregated_metrics=metrics,
        target_num_replicas=now,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
    )


@pytest.mark.parametrize(
    ("queued", "replicas"),
    [({}, 2), ({"a": 0, "b": 0}, 1), ({"a": 1000, "b": 1}, 2), ({"a": 3000, "b": 2500}, 5), ({"a": 1e6}, 5)],
)
def test_replicas_share_the_queued_tokens(queued: dict[str, float], replicas: int) -> None:
    assert QueuedTokensPolicy(target=1000)(asked(queued))[0] == replicas
