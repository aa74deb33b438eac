"""The Helm chart and the plain manifests: valid in every combination of values, with the right meaning.

Everything is rendered by the real helm and kustomize.  The checks of meaning are the requirements of the server: the
time that it needs to drain, the meaning of each probe, the metrics of its queues, and where keys may be stored.
"""

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from polyhead.service.api.operations.health import router
from polyhead.service.config.settings import Settings
from polyhead.service.metrics import Metrics
from polyhead.service.server.process import EXIT_SECONDS
from tests.support import manifests
from tests.support.manifests import CHART, KUSTOMIZE, ROOT, Manifest, built, kinds, rendered, template, tool, validate

OWN = {"config": {"models": {"chat": "/models/my-llama"}}, "models": {"claim": "checkpoints"}}
EVERYTHING: Manifest = {
    **OWN,
    "image": {"repository": "registry.example.com/polyhead", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "keys": {"secret": "polyhead-keys", "fileSecret": "polyhead-keys-file"},
    "monitoring": {
        "serviceMonitor": True,
        "labels": {"release": "prometheus"},
        "keySecret": {"name": "k", "key": "metrics"},
    },
    "autoscaling": {"by": "keda", "minReplicas": 2, "maxReplicas": 6},
    "ingress": {"enabled": True, "className": "nginx", "annotations": {"a/b": "off"}, "tlsSecret": "tls"},
    "networkPolicy": {"egress": [{"ports": [{"port": 4318}]}]},
    "serviceAccount": {"annotations": {"a/b": "c"}},
    "service": {"annotations": {"a/b": "c"}},
    "podAnnotations": {"a/b": "c"},
    "podLabels": {"team": "search"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "extraArgs": ["--max-running", "32"],
    "extraEnv": [{"name": "OTEL_SERVICE_NAME", "value": "polyhead"}],
}
MATRIX: dict[str, Manifest] = {
    "nothing given": {},
    "everything given": EVERYTHING,
    "own models on a claim": OWN,
    "own models on the node": {"config": OWN["config"], "models": {"hostPath": "/srv/models"}},
    "models of a hub": {"config": {"models": {"a": "org/name"}}, "models": {"download": True, "cache": {"claim": "c"}}},
    "a horizontal autoscaler": {"autoscaling": {"by": "hpa"}},
    "KEDA": {"autoscaling": {"by": "keda"}},
    "monitored": {"monitoring": {"serviceMonitor": True, "rules": True}},
    "on GPUs": {"gpu": {"count": 2, "runtimeClass": "nvidia"}, "strategy": {"type": "Recreate"}},
    "by digest": {"image": {"digest": "sha256:" + "0" * 64}},
    "an existing service account": {"serviceAccount": {"create": False, "name": "theirs"}},
    "a long drain": {"config": {"drain_seconds": 600}, "preStopSeconds": 15},
    "no drain": {"config": {"drain_seconds": 0}, "preStopSeconds": 0},
    "more time than needed": {"terminationGracePeriodSeconds": 90},
    "the smallest deployment": {
        "networkPolicy": {"enabled": False}, "disruption": {"enabled": False}, "spread": False,
        "serviceAccount": {"create": False},
    },
}  # fmt: skip
with_all_values = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
REFUSED = {
    "bogus: {}": "'bogus' not allowed",
    "autoscaling: {by: both}": "'none', 'hpa', 'keda'",
    "autoscaling: {by: keda, tokens: 0, running: 0}": "at least one must be set",
    "autoscaling: {by: hpa, minReplicas: 5}": "autoscaling.minReplicas: 5 is more than autoscaling.maxReplicas, 4",
    "config: {api_key: s3cret}": "config.api_key: a ConfigMap must not contain keys",
    "config: {api_keys: {a: s3cret}}": "config.api_keys: a ConfigMap must not contain keys",
    "config: {admin_key: s3cret}": "config.admin_key: a ConfigMap must not contain keys",
    "config: {fleet_key: s3cret}": "config.fleet_key: a ConfigMap must not contain keys",
    "config: {queued_tokens: 9}": "config.queued_tokens: set the values under ray and autoscaling instead",
    "config: {port: 9}": "config.port: the chart sets this itself",
    "extraArgs: [--api-key=s3cret]": "put keys into a Secret",
    "extraArgs: [--admin-key, s3cret]": "put keys into a Secret",
    "extraArgs: [--drain-seconds=3]": "set config.drain_seconds instead",
    "extraEnv: [{name: POLYHEAD_DRAIN_SECONDS, value: '3'}]": "set config.drain_seconds instead",
    "extraEnv: [{name: POLYHEAD_ADMIN_KEY, value: s3cret}]": "put it into a Secret",
    "terminationGracePeriodSeconds: 44": "44 is too short for preStopSeconds + config.drain_seconds + 10 = 45",
    "models: {claim: a, hostPath: /b}": "claim and hostPath are both given",
    "monitoring: {serviceMonitor: true, keySecret: {name: k}}": "name the entry of the Secret",
    "podLabels: {app.kubernetes.io/name: other}": "podLabels",
    "replicas: -1": "minimum",
}


def pod(found: dict[str, Manifest]) -> Manifest:
    return found["Deployment"]["spec"]["template"]["spec"]


def container(found: dict[str, Manifest]) -> Manifest:
    (single,) = pod(found)["containers"]
    return single


def settings(found: dict[str, Manifest]) -> Manifest:
    return yaml.safe_load(found["ConfigMap"]["data"]["polyhead.yaml"]) or {}


@with_all_values
def test_every_rendered_manifest_is_valid(values: Manifest) -> None:
    for manifest in rendered(values):
        validate(manifest)
        assert manifest["metadata"]["namespace"] == "prod"


def test_the_validation_finds_errors() -> None:
    found = kinds(rendered(EVERYTHING))
    container(found)["readynessProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="readynessProbe"):
        validate(found["Deployment"])
    found["ScaledObject"]["spec"]["triggers"][0]["metadata"]["threshold"] = 4
    with pytest.raises(jsonschema.ValidationError, match="4 is not of type"):
        validate(found["ScaledObject"])


def test_helm_lint_passes() -> None:
    done = manifests.helm("lint", "--strict", str(CHART), values=EVERYTHING)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("given", "complaint"), REFUSED.items(), ids=REFUSED.keys())
def test_contradictory_values_are_refused_by_name(given: str, complaint: str) -> None:
    done = template(yaml.safe_load(given))
    assert done.returncode != 0
    assert complaint in done.stderr
    assert not done.stdout


@with_all_values
def test_a_pod_is_confined(values: Manifest) -> None:
    found = kinds(rendered(values))
    inside = container(found)["securityContext"]
    assert inside["readOnlyRootFilesystem"]
    assert inside["capabilities"] == {"drop": ["ALL"]}
    assert not inside["allowPrivilegeEscalation"]
    assert not inside["privileged"]
    of_pod = pod(found)["securityContext"]
    assert of_pod["runAsNonRoot"]
    assert of_pod["runAsUser"] == of_pod["runAsGroup"] == of_pod["fsGroup"] == 10001
    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod(found)["automountServiceAccountToken"]
    assert not pod(found)["enableServiceLinks"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod(found).keys()


@with_all_values
def test_the_grace_period_is_longer_than_the_drain(values: Manifest) -> None:
    found = kinds(rendered(values))
    hook = container(found).get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]["seconds"]
    drain = settings(found).get("drain_seconds", Settings.model_fields["drain_seconds"].default)
    assert pod(found)["terminationGracePeriodSeconds"] > hook + drain + EXIT_SECONDS
    assert hook == values.get("preStopSeconds", 5)
    assert drain == values.get("config", {}).get("drain_seconds", 30)


def test_the_three_probes_request_their_routes() -> None:
    routes = {route.path for route in router.routes}  # type: ignore[attr-defined]
    pod_container = container(kinds(rendered({})))
    paths = {name: pod_container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in paths.items()} == {
        "startup": "/startupz", "liveness": "/livez", "readiness": "/readyz",
    }  # fmt: skip
    assert all(probe["port"] == "http" and probe["path"] in routes for probe in paths.values())


@pytest.mark.parametrize("port", [0, 8001])
def test_probes_speak_tls_where_the_port_of_clients_does(port: int) -> None:
    """The port for probes never does."""
    tls = {"tls_cert": "/etc/tls/tls.crt", "tls_key": "/etc/tls/tls.key"}
    pod_container = container(kinds(rendered({"config": tls, "probes": {"port": port}})))
    for name in ("startup", "liveness", "readiness"):
        assert pod_container[f"{name}Probe"]["httpGet"].get("scheme", "HTTP") == ("HTTP" if port else "HTTPS")


def test_probes_may_have_a_port_of_their_own() -> None:
    found = kinds(rendered({"probes": {"port": 8001}}))
    pod_container = container(found)
    assert {pod_container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness", "readiness")} == {
        "probes"
    }
    assert {"name": "probes", "containerPort": 8001} in pod_container["ports"]
    assert {"name": "POLYHEAD_PROBE_PORT", "value": "8001"} in pod_container["env"]
    assert [port["name"] for port in found["Service"]["spec"]["ports"]] == ["http"], (
        "the probe port is not in the Service"
    )


@pytest.mark.parametrize("seconds", [1, 60, 601])
def test_the_startup_probe_permits_the_configured_time(seconds: int) -> None:
    probe = container(kinds(rendered({"probes": {"startupSeconds": seconds}})))["startupProbe"]
    assert seconds <= probe["failureThreshold"] * probe["periodSeconds"] <= seconds + 1


@with_all_values
def test_every_selector_matches_the_pods(values: Manifest) -> None:
    found = kinds(rendered(values))
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [found["Service"]["spec"]["selector"], found["Deployment"]["spec"]["selector"]["matchLabels"]]
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selectors += [found[kind]["spec"][field]["matchLabels"]] if kind in found else []
    selectors += [spread["labelSelector"]["matchLabels"] for spread in pod(found).get("topologySpreadConstraints", [])]
    assert all(selector and selector.items() <= labels for selector in selectors)
    if monitor := found.get("ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
        assert monitor["spec"]["namespaceSelector"]["matchNames"] == [found["Service"]["metadata"]["namespace"]]


@with_all_values
def test_ports_are_found_by_their_name(values: Manifest) -> None:
    found = kinds(rendered(values))
    (port,) = container(found)["ports"]
    (offered,) = found["Service"]["spec"]["ports"]
    listening = {entry["name"]: entry.get("value") for entry in container(found)["env"]}
    assert offered["targetPort"] == port["name"] == "http"
    assert listening["POLYHEAD_PORT"] == str(port["containerPort"])
    assert listening["POLYHEAD_HOST"] == "0.0.0.0"
    if monitor := found.get("ServiceMonitor"):
        assert [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]] == [offered["name"]]


def test_an_update_takes_no_pod_away_before_another_is_ready() -> None:
    assert kinds(rendered({}))["Deployment"]["spec"]["strategy"] == {
        "type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }  # fmt: skip
    assert kinds(rendered(MATRIX["on GPUs"]))["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("by", "scaler"), [("none", None), ("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")]
)
def test_only_one_controller_sets_the_replica_count(by: str, scaler: str | None) -> None:
    found = kinds(rendered({"autoscaling": {"by": by}, "replicas": 3}))
    assert found.keys() & {"HorizontalPodAutoscaler", "ScaledObject"} == ({scaler} if scaler else set())
    assert found["Deployment"]["spec"].get("replicas") == (None if scaler else 3)
    if scaler:
        target = found[scaler]["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])


def test_autoscalers_query_exposed_metrics() -> None:
    page = Metrics(["chat"]).render("")[0].decode()
    exposed = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    hpa = kinds(rendered(MATRIX["a horizontal autoscaler"]))["HorizontalPodAutoscaler"]["spec"]["metrics"]
    asked = {metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"] for metric in hpa}
    assert asked == {"polyhead_tokens_in_flight": "8192", "polyhead_requests_running": "32"}
    assert asked.keys() <= exposed
    triggers = kinds(rendered(MATRIX["KEDA"]))["ScaledObject"]["spec"]["triggers"]
    queries = {trigger["metadata"]["query"]: trigger["metadata"]["threshold"] for trigger in triggers}
    labels = 'namespace="prod", service="polyhead"'
    assert queries == {
        f"sum(avg_over_time(polyhead_tokens_in_flight{{{labels}}}[1m]))": "8192",
        f'sum(avg_over_time(polyhead_requests_running{{{labels}, task="generate"}}[1m]))': "32",
    }


def test_the_metric_of_the_autoscaler_can_be_chosen() -> None:
    values = {"by": "keda", "tokens": 0, "running": 0, "waiting": 7}
    (trigger,) = kinds(rendered({"autoscaling": values}))["ScaledObject"]["spec"]["triggers"]
    assert "polyhead_requests_waiting{" in trigger["metadata"]["query"]
    assert trigger["metadata"]["threshold"] == "7"


def test_missing_metrics_do_not_scale_down() -> None:
    spec = kinds(rendered({"autoscaling": {"by": "keda", "minReplicas": 2}}))["ScaledObject"]["spec"]
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert spec["fallback"]["replicas"] == spec["minReplicaCount"] == 2
    assert {trigger["metricType"] for trigger in spec["triggers"]} == {
        "AverageValue"
    }  # KEDA has no fallback for other types
    # A missing series of queued tokens is an error. That of running sequences is missing if only encoders are served.
    assert [trigger["metadata"]["ignoreNullValues"] for trigger in spec["triggers"]] == ["false", "true"]


def test_keys_come_from_a_secret_and_are_in_no_manifest() -> None:
    assert "envFrom" not in container(kinds(rendered({})))
    with_keys = container(kinds(rendered({"keys": {"secret": "mine"}})))
    assert with_keys["envFrom"] == [{"secretRef": {"name": "mine"}}]
    found = kinds(rendered({"keys": {"fileSecret": "mine"}}))
    (volume,) = (volume["secret"] for volume in pod(found)["volumes"] if volume["name"] == "keys")
    (mount,) = (mount for mount in container(found)["volumeMounts"] if mount["name"] == "keys")
    (path,) = (entry["value"] for entry in container(found)["env"] if entry["name"] == "POLYHEAD_KEYS_FILE")
    assert (volume["secretName"], mount["readOnly"], path) == ("mine", True, f"{mount['mountPath']}/keys.yaml")
    secrets = {"api_key", "api_keys", "admin_key", "fleet_key"}
    assert not secrets & settings(kinds(rendered(EVERYTHING))).keys()
    known = {name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)}
    assert known == secrets, (
        "a new secret setting: the chart must also refuse it in its ConfigMap (templates/_rules.tpl)"
    )


@with_all_values
def test_the_config_file_has_valid_settings(values: Manifest) -> None:
    found = kinds(rendered(values))
    Settings(**settings(found))
    mounts = {mount["name"]: mount["mountPath"] for mount in container(found)["volumeMounts"]}
    assert container(found)["args"][:3] == ["serve", "--config", f"{mounts['config']}/polyhead.yaml"]
    assert mounts.keys() == {volume["name"] for volume in pod(found)["volumes"]}


@with_all_values
def test_environment_variables_are_valid_settings(values: Manifest) -> None:
    named = {entry["name"] for entry in container(kinds(rendered(values)))["env"]}
    labels = {name.removeprefix("POLYHEAD_").lower() for name in named if name.startswith("POLYHEAD_")}
    assert {"host", "port"} <= labels <= Settings.model_fields.keys()


def test_changed_settings_change_the_pod_template() -> None:
    def template_of(values: Manifest) -> Manifest:
        return kinds(rendered(values))["Deployment"]["spec"]["template"]

    assert template_of({"config": {"max_running": 8}}) != template_of({"config": {"max_running": 9}})
    assert template_of({"service": {"port": 80}}) == template_of({})


@pytest.mark.parametrize(
    ("values", "ways"),
    [
        ({}, {53, 443}),  # the quick start downloads its models
        (OWN, set()),
        ({**OWN, "models": {"download": True}}, {53, 443}),
        ({**OWN, "networkPolicy": {"egress": [{"ports": [{"port": 4318}]}]}}, {53, 4318}),
    ],
    ids=["quick start", "own models", "a hub", "a collector"],
)
def test_egress_is_closed_unless_configured(values: Manifest, ways: set[int]) -> None:
    policy = kinds(rendered(values))["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == ways


def test_ingress_is_open_only_to_clients_and_monitoring() -> None:
    rules = kinds(rendered({}))["NetworkPolicy"]["spec"]["ingress"]
    assert [rule["ports"] for rule in rules] == [[{"port": "http", "protocol": "TCP"}]] * 2
    assert all(rule["from"] for rule in rules)  # an empty list would permit every client
    closed = kinds(rendered({"networkPolicy": {"clients": [], "monitoring": []}}))["NetworkPolicy"]["spec"]
    assert not closed["ingress"]


def test_models_are_mounted_read_only() -> None:
    for values in (MATRIX["own models on a claim"], MATRIX["own models on the node"]):
        mounts = {
            mount["mountPath"]: mount.get("readOnly", False)
            for mount in container(kinds(rendered(values)))["volumeMounts"]
        }
        assert mounts == {"/models": True, "/etc/polyhead": True, "/cache": False, "/tmp": False}


def test_gpu_pods_use_the_gpu_image() -> None:
    on_gpus = container(kinds(rendered(MATRIX["on GPUs"])))
    assert on_gpus["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert on_gpus["image"].endswith("-gpu")
    without = container(kinds(rendered({})))
    assert "nvidia.com/gpu" not in without["resources"]["limits"]
    assert not without["image"].endswith("-gpu")


def test_the_chart_has_the_version_of_what_it_installs() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    gpu = yaml.safe_load((KUSTOMIZE / "components/gpu/kustomization.yaml").read_text())
    assert gpu["images"] == [{"name": "polyhead", "newTag": f"{version}-gpu"}]


def test_every_value_is_in_the_schema_and_nothing_else_is() -> None:
    def agree(values: Any, schema: Manifest) -> None:
        if "properties" in schema and schema.get("additionalProperties") is False:
            assert schema["properties"].keys() - {"global"} == values.keys()
            for name, value in values.items():
                agree(value, schema["properties"][name])

    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    agree(yaml.safe_load((CHART / "values.yaml").read_text()), schema)


def test_plain_manifests_are_those_of_the_chart(tmp_path: Path) -> None:
    environment = {"HELM": tool("helm"), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    subprocess.run([KUSTOMIZE / "render.sh", tmp_path], env=environment, check=True, capture_output=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml"))
    assert len(made) == 3
    for path in made:
        assert (KUSTOMIZE / path).read_text() == (tmp_path / path).read_text(), (
            f"{path} is outdated: run make manifests"
        )


@pytest.mark.parametrize("components", [[], ["gpu"], ["keda"], ["monitoring"], ["gpu", "keda", "monitoring"]], ids=str)
def test_components_fit_the_base(components: list[str], tmp_path: Path) -> None:
    folder = Path(os.path.relpath(KUSTOMIZE, tmp_path))
    overlay = {
        "resources": [str(folder / "base")],
        "components": [str(folder / "components" / name) for name in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    found = kinds(built(tmp_path))
    for manifest in found.values():
        validate(manifest)
    assert found["Deployment"]["spec"].get("replicas") == (None if "keda" in components else 1)
    assert ("nvidia.com/gpu" in container(found)["resources"]["limits"]) == ("gpu" in components)
    for name, kind in (("keda", "ScaledObject"), ("monitoring", "ServiceMonitor")):
        assert (kind in found) == (name in components)


def test_the_example_overlay_is_complete() -> None:
    found = kinds(built(KUSTOMIZE / "overlays" / "production"))
    for manifest in found.values():
        validate(manifest)
        assert manifest["metadata"].get("namespace", "polyhead") == "polyhead"
    Settings(**settings(found))
    volumes = {volume["name"]: volume for volume in pod(found)["volumes"]}
    assert volumes["config"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"] != "polyhead"
    assert {mount["name"] for mount in container(found)["volumeMounts"]} == volumes.keys()
    assert container(found)["envFrom"] == [{"secretRef": {"name": "polyhead-keys"}}]
    assert found["NetworkPolicy"]["spec"]["egress"] == []
    assert found["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    queries = [trigger["metadata"]["query"] for trigger in found["ScaledObject"]["spec"]["triggers"]]
    assert all('namespace="polyhead"' in query and 'service="polyhead"' in query for query in queries)
