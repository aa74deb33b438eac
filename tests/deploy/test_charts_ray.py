"""The chart's RayService: valid for KubeRay and Ray Serve, with the same guarantees as the Deployment.

The strict schemas in manifests.py were compared with the full definitions of KubeRay 1.6 and 1.7, which are a megabyte.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyhead.service.config.settings import Settings
from polyhead.service.fleet.deployment_settings import split_settings
from polyhead.service.fleet.frames import LEAVE_TIMEOUT_S
from polyhead.service.server.process import EXIT_SECONDS
from tests.support.manifests import Manifest, pods_of, rendered, template, validate
from tests.support.places import ROOT

MODELS = {"chat": "/models/a", "chat:tone": "/models/b", "mood": "/models/m", "spam": "/models/s"}
PLAIN: Manifest = {"config": {"models": MODELS}, "ray": {"enabled": True}, "models": {"claim": "checkpoints"}}
EVERYTHING: Manifest = {
    "config": {"models": MODELS, "precision": "int8", "drain_seconds": 90},
    "models": {"claim": "checkpoints"},
    "keys": {"secret": "polyhead-keys", "fileSecret": "polyhead-keys-file"},
    "autoscaling": {"by": "ray", "minReplicas": 2, "maxReplicas": 6, "tokens": 4096},
    "ingress": {"enabled": True},
    "monitoring": {"serviceMonitor": True, "rules": True, "keySecret": {"name": "k", "key": "metrics"}},
    "service": {"annotations": {"a/b": "c"}},
    "podLabels": {"team": "search"},
    "podAnnotations": {"a/b": "c"},
    "ray": {
        "enabled": True,
        "pools": {"small": ["mood", "spam"]},
        "deployments": {"chat": {"num_replicas": 3}, "Ingress": {"num_replicas": 2}},
        "workers": [
            {"name": "cpus", "minReplicas": 2, "maxReplicas": 5},
            {"name": "gpus", "minReplicas": 0, "maxReplicas": 2, "gpu": {"count": 1}, "nodeSelector": {"gpu": "yes"}},
        ],
        "redis": {"address": "redis:6379", "passwordSecret": {"name": "redis", "key": "password"}},
    },
}
TWO = ({"minReplicas": 1}, {"minReplicas": 1})  # the default worker groups of the chart
both = pytest.mark.parametrize("values", [PLAIN, EVERYTHING], ids=["plain", "everything"])
REFUSED = {
    "ray: {enabled: true}": "config.models: must not be empty with ray.enabled",
    "{ray: {enabled: true}, autoscaling: {by: keda}}": "autoscaling.by: keda scales pods",
    "{ray: {enabled: true}, autoscaling: {by: ray, tokens: 0}}": "must not be 0",
    "autoscaling: {by: ray}": "autoscaling.by: ray needs ray.enabled",
    "{ray: {enabled: true}, extraArgs: [--max-running, '3']}": "there is no command line",
    "ray: {enabled: true, pools: {small: [moods]}}": "ray.pools.small: moods is not in config.models",
    "ray: {enabled: true, pools: {chat: [mood]}}": "rename the pool",
    "ray: {enabled: true, deployments: {chta: {}}}": "chta: unknown; the deployments are Ingress, chat, mood, spam",
    "ray: {enabled: true, workers: [{name: a, minReplicas: 3, maxReplicas: 2}]}": "more than its maxReplicas, 2",
    f"{{ray: {{enabled: true}}, fullnameOverride: {'a' * 48}}}": "at most 47 characters",
    "ray: {enabled: true, replicaPorts: '9100'}": "replicaPorts",
}


def by_kind(values: Manifest) -> dict[str, Manifest]:
    """Rendered manifests by kind; the network policy of the head has the key "head's"."""
    found = rendered(values)
    return {
        "head's" if manifest["metadata"]["name"].endswith("-head") else manifest["kind"]: manifest for manifest in found
    }


def application(values: Manifest) -> Manifest:
    config = yaml.safe_load(by_kind(values)["RayService"]["spec"]["serveConfigV2"])
    (single,) = config["applications"]
    return single


def deployments(values: Manifest) -> dict[str, Manifest]:
    return {deployment["name"]: deployment for deployment in application(values)["deployments"]}


@both
def test_every_manifest_is_valid(values: Manifest) -> None:
    found = by_kind(values)
    for manifest in found.values():
        validate(manifest)
        assert manifest["metadata"]["namespace"] == "prod"
    assert not {"Deployment", "ConfigMap", "Service", "ServiceMonitor", "ScaledObject"} & found.keys()


@both
def test_ray_serve_accepts_its_configuration(values: Manifest) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    config = yaml.safe_load(by_kind(values)["RayService"]["spec"]["serveConfigV2"])
    validated = schema.ServeDeploySchema.model_validate(config)
    assert validated.applications[0].import_path == "polyhead.service.fleet.ray_app:application"
    known = schema.DeploymentSchema.model_fields.keys()
    assert all(options.keys() <= known for options in deployments(values).values())


@both
def test_the_code_that_it_names_exists(values: Manifest) -> None:
    """`module:name` of the application and of the policy, searched in the source, since importing them needs Ray."""
    named = re.findall(r"\bpolyhead(?:\.\w+)+:\w+", by_kind(values)["RayService"]["spec"]["serveConfigV2"])
    assert named
    for module, _, name in (each.partition(":") for each in named):
        source = (ROOT / Path(*module.split(".")[1:])).with_suffix(".py").read_text("utf-8")
        assert re.search(rf"^(class|def) {name}\b|^{name}\b.* = ", source, re.MULTILINE), f"{module}:{name}"
    assert not re.search(r": service\.", by_kind(values)["RayService"]["spec"]["serveConfigV2"])


@pytest.mark.parametrize(("given", "complaint"), REFUSED.items(), ids=REFUSED.keys())
def test_contradictory_values_are_refused_by_name(given: str, complaint: str) -> None:
    values: dict[str, Any] = yaml.safe_load(given)
    if "must not be empty" not in complaint:
        values["config"] = {"models": MODELS}
    done = template(values)
    assert done.returncode != 0
    assert complaint in done.stderr


@both
def test_the_application_arguments_are_valid_settings_without_keys(values: Manifest) -> None:
    args = application(values)["args"]
    known = Settings(**args)
    assert known.replica_port_range == range(9100, 9200)
    assert not {"api_key", "api_keys", "admin_key", "fleet_key"} & args.keys()
    for pod in pods_of(by_kind(values)["RayService"]).values():
        (container,) = pod["spec"]["containers"]
        secret = values.get("keys", {}).get("secret")
        assert container.get("envFrom") == ([{"secretRef": {"name": secret}}] if secret else None)


def test_each_model_has_a_deployment_except_adapters_and_pool_members() -> None:
    assert deployments(PLAIN).keys() == {"Ingress"}
    assert deployments(EVERYTHING).keys() == {"Ingress", "chat", "small"}
    assert split_settings(Settings(**application(EVERYTHING)["args"])).keys() == {"chat", "small"}
    assert split_settings(Settings(**application(PLAIN)["args"])).keys() == {"chat", "mood", "spam"}


def test_replicas_scale_by_tokens_unless_a_deployment_sets_their_number() -> None:
    assert Settings(**application(PLAIN)["args"]).replica_bounds == (1, 1)
    known = Settings(**application(EVERYTHING)["args"])
    assert (known.replica_bounds, known.queued_tokens) == ((2, 6), 4096)
    counted = deployments(EVERYTHING)
    chat = counted["chat"]["autoscaling_config"]
    assert (chat["min_replicas"], chat["max_replicas"]) == (3, 3)
    assert "num_replicas" not in counted["chat"]
    assert counted["Ingress"]["num_replicas"] == 2
    small = counted["small"]["autoscaling_config"]
    assert (small["min_replicas"], small["max_replicas"]) == known.replica_bounds
    assert small["policy"]["policy_kwargs"] == {"target": known.queued_tokens}


def test_each_replica_has_a_pod_that_prometheus_scrapes() -> None:
    found = by_kind({**PLAIN, "monitoring": {"serviceMonitor": True}})
    cpus = Settings(**application(PLAIN)["args"]).replica_cpus
    pods = pods_of(found["RayService"])
    requested = {
        name: float(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]) for name, pod in pods.items()
    }
    assert requested["ingress"] < cpus <= requested["replicas"] < 2 * cpus
    ports = {
        name: {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        for name, pod in pods.items()
    }
    assert ports["replicas"]["replica"] == 9101
    assert not [name for name in ("", "ingress") if "replica" in ports[name]]
    monitor = found["PodMonitor"]["spec"]
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["replica"]
    assert monitor["selector"]["matchLabels"].items() <= pods["replicas"]["metadata"]["labels"].items()


@both
def test_pods_have_time_to_drain(values: Manifest) -> None:
    service = by_kind(values)["RayService"]["spec"]
    drain = values["config"].get("drain_seconds", 30)
    for name, pod in pods_of(by_kind(values)["RayService"]).items():
        grace_period = pod["spec"]["terminationGracePeriodSeconds"]
        assert service["rayClusterDeletionDelaySeconds"] >= max(60, drain + EXIT_SECONDS)
        if name:
            hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
            drain_command, waited = hook.split(" && ", 1)
            assert drain_command.startswith("timeout 20 ray drain-node ")
            deadline = int(drain_command.split()[-1])
            assert f"$(seq {deadline})" in waited
            # Ray stops remaining replicas this long before the deadline, replaced or not.
            ending = LEAVE_TIMEOUT_S + drain + EXIT_SECONDS
            assert deadline == 120 + ending
            assert grace_period > 20 + deadline


@both
def test_ray_pods_have_the_security_context_of_a_server(values: Manifest) -> None:
    for pod in pods_of(by_kind(values)["RayService"]).values():
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert mounts["/models"]
        assert not mounts["/tmp"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
        assert container["image"].endswith("-ray")


def test_a_worker_group_may_have_its_own_values() -> None:
    head, cpus, gpus = pods_of(by_kind(EVERYTHING)["RayService"]).values()
    assert gpus["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert gpus["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert gpus["spec"]["containers"][0]["resources"]["requests"]["memory"] == "3Gi"  # the chart's default
    assert gpus["spec"]["containers"][0]["image"].endswith("-gpu-ray")
    assert "nvidia.com/gpu" not in cpus["spec"]["containers"][0]["resources"]["limits"]
    assert "nodeSelector" not in cpus["spec"]
    assert head["spec"]["containers"][0]["resources"]["limits"]["memory"] == "4Gi"


@both
def test_every_selector_matches_the_pods(values: Manifest) -> None:
    found = by_kind(values)
    head, *workers = (pod["metadata"]["labels"].items() for pod in pods_of(found["RayService"]).values())
    all_pods = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items()
    assert all(all_pods <= labels for labels in (head, *workers))
    own = found["head's"]["spec"]["podSelector"]["matchLabels"].items()
    assert own <= head
    assert not any(own <= labels for labels in workers)
    if budget := found.get("PodDisruptionBudget"):
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        assert all(chosen <= labels for labels in workers)
        assert not chosen <= head
        least_workers = sum(group["minReplicas"] for group in values.get("ray", {}).get("workers", TWO))
        assert budget["spec"]["minAvailable"] == least_workers - 1


def test_a_single_worker_may_be_evicted() -> None:
    """A disruption budget that permits no eviction would block the draining of its node for ever."""
    workers = [{"name": "all", "minReplicas": 1, "maxReplicas": 3}]
    assert "PodDisruptionBudget" not in by_kind({**PLAIN, "ray": {"enabled": True, "workers": workers}})


def test_the_network_policy_isolates_ray() -> None:
    own, clients, monitoring, operator = by_kind(PLAIN)["NetworkPolicy"]["spec"]["ingress"]
    assert "ports" not in own
    assert own["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "polyhead"
    assert [port["port"] for port in clients["ports"]] == [8000]
    assert {"port": 9100, "endPort": 9199, "protocol": "TCP"} in monitoring["ports"]
    assert 8265 in [port["port"] for port in operator["ports"]]
    assert all(rule["from"] for rule in (own, clients, monitoring, operator))
    out = by_kind(EVERYTHING)["NetworkPolicy"]["spec"]["egress"]
    assert [port["port"] for rule in out for port in rule.get("ports", [])] == [53, 53]
    heads = by_kind(EVERYTHING)["head's"]["spec"]
    assert heads["policyTypes"] == ["Egress"]
    assert {port["port"] for rule in heads["egress"] for port in rule["ports"]} == {443, 6443, 6379}


def test_the_service_keeps_its_name() -> None:
    found = by_kind(EVERYTHING)
    service = found["RayService"]["spec"]["serveService"]
    backend = found["Ingress"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert service["metadata"]["name"] == backend["name"] == "polyhead"
    assert [port["name"] for port in service["spec"]["ports"]] == [backend["port"]["name"]]
    (scraped,) = found["ScrapeConfig"]["spec"]["staticConfigs"]
    assert scraped["targets"] == [f"polyhead.prod.svc:{service['spec']['ports'][0]['port']}"]
