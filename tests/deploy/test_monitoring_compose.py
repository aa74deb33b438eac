"""compose.yaml: each named file exists, and each service is confined, pinned, limited and bound to this machine."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from polyhead.service.config.settings import ENVIRONMENT_PREFIX, Settings
from polyhead.service.server.process import EXIT_SECONDS
from tests.support.prometheus import DEPLOYED, ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
VOLUMES = [(name, *volume.split(":")) for name, service in SERVICES.items() for volume in service["volumes"]]
MOUNTED = {(name, inside): ROOT / source for name, source, inside, *_ in VOLUMES if source.startswith("./")}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "user", "network_mode", "pid", "cap_add", "devices"} & service.keys()
    assert service["deploy"]["resources"]["limits"].keys() == {"memory", "cpus", "pids"}
    assert service["restart"] == "unless-stopped"
    assert all("size=" in mount for mount in service["tmpfs"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_bound_to_this_machine_and_has_a_health_check(name: str) -> None:
    [(address, outside, inside)] = [port.split(":") for port in SERVICES[name]["ports"]]
    assert address == "127.0.0.1"
    assert outside == inside
    if name == "polyhead":  # the image's own check, which follows the port and TLS
        assert "test" not in SERVICES[name]["healthcheck"]
        assert re.search(r"^HEALTHCHECK ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    else:
        assert f"http://127.0.0.1:{inside}/" in SERVICES[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned(name: str) -> None:
    """Pinned by version, and by digest unless the image is built here."""
    digest = "" if "build" in SERVICES[name] else r"@sha256:[0-9a-f]{64}"
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+" + digest, SERVICES[name]["image"])


def test_the_image_has_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert SERVICES["polyhead"]["image"] == f"polyhead:{version}"
    assert SERVICES["polyhead"]["build"]["args"]["VERSION"] == version


def test_volumes_are_named_or_exist() -> None:
    named = {source for _, source, *_ in VOLUMES if not source.startswith("./")}
    assert named == COMPOSE["volumes"].keys()
    for source in MOUNTED.values():
        assert source.exists(), source
    assert all(mode == ["ro"] for _, source, _, *mode in VOLUMES if source.startswith("./"))


def test_a_service_depends_only_on_services_with_a_health_check() -> None:
    waits = [wait for service in SERVICES.values() for wait in service.get("depends_on", {}).items()]
    assert waits
    for name, condition in waits:
        assert condition == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[name]


def test_the_services_have_each_others_addresses() -> None:
    config = yaml.safe_load(MOUNTED["prometheus", "/etc/prometheus/prometheus.yml"].read_text("utf-8"))
    [job] = [job for job in config["scrape_configs"] if job["job_name"] == "polyhead"]
    assert job["static_configs"] == [{"targets": ["polyhead:8000"]}]
    assert config["rule_files"] == ["rules/*.yml"]
    assert MOUNTED["prometheus", "/etc/prometheus/rules"] == DEPLOYED / "rules"
    provisioning = MOUNTED["grafana", "/etc/grafana/provisioning"]
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text("utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"].startswith(config["global"]["scrape_interval"])
    [provider] = yaml.safe_load((provisioning / "dashboards/polyhead.yml").read_text("utf-8"))["providers"]
    [dashboard] = MOUNTED["grafana", provider["options"]["path"]].glob("*.json")
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.name}"


def test_no_password_is_in_the_file() -> None:
    """Without a password, compose fails with a message."""
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert SERVICES["polyhead"]["environment"]["POLYHEAD_API_KEY"] == "${POLYHEAD_API_KEY:-}"


def test_the_server_s_environment_has_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SERVICES["polyhead"]["environment"]:
        assert name.removeprefix(ENVIRONMENT_PREFIX).lower() in Settings.model_fields
    monkeypatch.setenv("POLYHEAD_API_KEY", "")  # the value if none is chosen
    assert not Settings().api_key.get_secret_value()


def test_the_grace_period_is_longer_than_the_drain() -> None:
    allowed = int(SERVICES["polyhead"]["stop_grace_period"].removesuffix("s"))
    assert allowed > Settings().drain_seconds + EXIT_SECONDS
