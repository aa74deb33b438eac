"""Kubernetes manifests as rendered by the real helm and kustomize, and the schemas they are validated against.

Both programs are those that `make` put into .venv/tools, or those on the PATH."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.places import ROOT

Manifest = dict[str, Any]

CHART = ROOT / "deploy" / "helm" / "polyhead"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
VERSIONS = ("1.30", kubernetes_validate.latest_version())  # the oldest and the newest version that the chart supports


def closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
LABELS = closed("matchLabels", matchLabels=TEXTS)
METADATA = closed("name labels", name=TEXT, namespace=TEXT, labels=TEXTS)


def custom(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return closed(
        "apiVersion kind metadata spec", apiVersion={"const": group}, kind={"const": kind}, metadata=METADATA, spec=spec
    )


WINDOW = closed(
    "stabilizationWindowSeconds",
    stabilizationWindowSeconds={**COUNT, "maximum": 3600},
    policies=listed(
        closed("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)
    ),
)
BEHAVIORS = ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]
# What the chart uses of custom resources: parts of their published definitions, without further fields.
CUSTOM = {
    "ScaledObject": custom(
        "keda.sh/v1alpha1",
        "ScaledObject",
        closed(
            "scaleTargetRef triggers",
            scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            fallback=closed(
                "failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT, behavior={"enum": BEHAVIORS}
            ),
            advanced=closed(
                "", horizontalPodAutoscalerConfig=closed("", behavior=closed("", scaleUp=WINDOW, scaleDown=WINDOW))
            ),
            triggers=listed(
                closed(
                    "type metadata",
                    type={"const": "prometheus"},
                    metricType={"enum": ["AverageValue", "Value"]},
                    metadata=closed(
                        "serverAddress query threshold",
                        **dict.fromkeys(("serverAddress", "query", "threshold", "ignoreNullValues"), TEXT),
                    ),
                )
            ),
        ),
    ),
    "ServiceMonitor": custom(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        closed(
            "selector endpoints",
            jobLabel=TEXT,
            selector=LABELS,
            namespaceSelector=closed("matchNames", matchNames=listed(TEXT)),
            endpoints=listed(
                closed(
                    "port",
                    port=TEXT,
                    path=TEXT,
                    interval=TEXT,
                    authorization=closed("credentials", credentials=closed("name key", name=TEXT, key=TEXT)),
                )
            ),
        ),
    ),
    "PrometheusRule": custom(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        closed(
            "groups",
            groups=listed(
                closed(
                    "name rules",
                    name=TEXT,
                    interval=TEXT,
                    rules=listed(
                        closed(
                            "expr",
                            alert=TEXT,
                            record=TEXT,
                            expr=TEXT,
                            labels=TEXTS,
                            annotations=TEXTS,
                            keep_firing_for=TEXT,
                            **{"for": TEXT},
                        )
                    ),
                )
            ),
        ),
    ),
}

SECRET = closed("name key", name=TEXT, key=TEXT)
POD = {"type": "object", "required": ["metadata", "spec"]}  # validated as Kubernetes' own kinds: `pods_of`
GROUP = closed(
    "groupName replicas minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
CUSTOM |= {
    "RayService": custom(
        "ray.io/v1",
        "RayService",
        closed(
            "serveConfigV2 rayClusterConfig",
            serveConfigV2=TEXT,
            upgradeStrategy=closed("type", type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}),
            rayClusterDeletionDelaySeconds=COUNT,
            excludeHeadPodFromServeSvc={"type": "boolean"},
            serveService={"type": "object"},
            rayClusterConfig=closed(
                "headGroupSpec",
                rayVersion=TEXT,
                authOptions=closed("", mode={"enum": ["disabled", "token"]}),
                enableInTreeAutoscaling={"type": "boolean"},
                autoscalerOptions=closed(
                    "",
                    version={"enum": ["v1", "v2"]},
                    idleTimeoutSeconds=COUNT,
                    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
                    securityContext={"type": "object"},
                ),
                gcsFaultToleranceOptions=closed(
                    "redisAddress",
                    redisAddress=TEXT,
                    redisPassword=closed("", valueFrom=closed("", secretKeyRef=SECRET)),
                ),
                headGroupSpec=closed("rayStartParams template", rayStartParams=TEXTS, template=POD),
                workerGroupSpecs=listed(GROUP),
            ),
        ),
    ),
    "ScrapeConfig": custom(
        "monitoring.coreos.com/v1alpha1",
        "ScrapeConfig",
        closed(
            "",
            staticConfigs=listed(closed("targets", targets=listed(TEXT), labels=TEXTS)),
            relabelings=listed(closed("", action={"enum": ["replace"]}, targetLabel=TEXT, replacement=TEXT)),
            metricsPath=TEXT,
            scrapeInterval=TEXT,
            authorization=closed("credentials", credentials=SECRET),
        ),
    ),
    "PodMonitor": custom(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        closed(
            "selector podMetricsEndpoints",
            jobLabel=TEXT,
            selector=LABELS,
            namespaceSelector=closed("matchNames", matchNames=listed(TEXT)),
            podMetricsEndpoints=listed(
                closed(
                    "port",
                    port=TEXT,
                    path=TEXT,
                    interval=TEXT,
                    relabelings=listed(closed("", action={"enum": ["keep"]}, sourceLabels=listed(TEXT), regex=TEXT)),
                )
            ),
        ),
    ),
}


def pods_of(service: Manifest) -> dict[str, Manifest]:
    """Of a RayService: the template of its head, and of each group of workers by name."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"": cluster["headGroupSpec"]["template"], **groups}


def inside(manifest: Manifest) -> list[Manifest]:
    """The Kubernetes objects inside a RayService, each as a manifest of its own."""
    service = {"apiVersion": "v1", "kind": "Service", **manifest["spec"]["serveService"]}
    pods = [{**pod, "metadata": {"name": "pod", **pod["metadata"]}} for pod in pods_of(manifest).values()]
    return [service, *({"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods)]


def tool(name: str) -> str:
    own = Path(sys.prefix) / "tools" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {name} here; `make .venv/.helm` fetches it")
    return found


def helm(*arguments: str, values: Manifest | None = None) -> subprocess.CompletedProcess[str]:
    command = [tool("helm"), *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, check=False)


def template(values: Manifest) -> subprocess.CompletedProcess[str]:
    return helm("template", "polyhead", str(CHART), "--namespace", "prod", values=values)


def rendered(values: Manifest) -> list[Manifest]:
    return read(printed(json.dumps(values, sort_keys=True)))


@cache
def printed(values: str) -> str:
    done = template(json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(folder: Path) -> list[Manifest]:
    """The manifests that `kubectl apply -k` would send."""
    command = [tool("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def read(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def kinds(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Manifests by kind; each kind is there at most once."""
    found = {manifest["kind"]: manifest for manifest in manifests}
    assert len(found) == len(manifests)
    return found


def validate(manifest: Manifest) -> None:
    """Raise unless every supported version of the API accepts it, without unknown fields."""
    checked(json.dumps(manifest, sort_keys=True))


@cache
def checked(manifest: str) -> None:
    content = json.loads(manifest)
    if content["kind"] in CUSTOM:
        jsonschema.validate(content, CUSTOM[content["kind"]])
        for part in inside(content) if content["kind"] == "RayService" else []:
            validate(part)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(content, version, strict=True)
