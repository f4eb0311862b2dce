"""Record the fields of the objects that a fleet is handed over as: names, types and required ones, no texts.

Run as `python -m tests.golden.handover_schemas FOLDER`, where FOLDER has clones named as in SOURCES. On 2026-11-29 no
clone of Dynamo was at hand: its fields were copied by hand from the Go types that its CRD is generated from
(`deploy/operator/api/v1beta1`, at the commit named), and those that are used were compared by eye with the CRD at
01cc1c3b: names, types, required ones, kinds of components, and at least two nodes in `multinode`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".json")
# Kind → folder of the clone, file of its schema, version.
SOURCES = {
    "InferencePool": (
        "kubernetes-sigs+gateway-api-inference-extension/repo",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    "HTTPRoute": ("kubernetes-sigs+gateway-api/repo", "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"),
    "ScaledObject": ("kedacore+keda/repo", "config/crd/bases/keda.sh_scaledobjects.yaml"),
    "LeaderWorkerSet": ("kubernetes-sigs+lws/repo", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
    "DynamoGraphDeployment": (
        "ai-dynamo+dynamo/repo",
        "deploy/operator/config/crd/bases/nvidia.com_dynamographdeployments.yaml",
    ),
    "llm-d-modelservice": ("llm-d-incubation+llm-d-modelservice/repo", "charts/llm-d-modelservice/values.schema.json"),
}
DEPTH = 6
PODS = ("leaderTemplate", "workerTemplate", "podTemplate")
"""Kubernetes' own schema of pods, which `test_kubernetes.py` and `test_chart.py` compare."""
UNUSED = (
    "accelerator",
    "requester",
    "tracing",
    "extraObjects",
    "initContainers",
    "volumes",
    "status",
    "advanced",
    "filters",
)


def fields(schema: dict[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield path → [type, required names] of a schema and everything below it."""
    kind = schema.get("type") or ("any" if not schema.get("properties") else "object")
    open_map = "additionalProperties" in schema and not schema.get("properties")
    yield path, ["map" if open_map else kind, sorted(schema.get("required") or [])]
    if depth > DEPTH or open_map:
        return
    items = schema.get("items")
    if isinstance(items, dict):
        yield from fields(items, f"{path}[]", depth)
    for name, below in (schema.get("properties") or {}).items():
        if name in PODS or name in UNUSED:
            yield f"{path}.{name}", ["map", []]
        else:
            yield from fields(below, f"{path}.{name}", depth + 1)


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for kind, (clone, file) in SOURCES.items():
        repository = Path(sys.argv[1]) / clone
        show = ["git", "-C", str(repository), "show", f"HEAD:{file}"]
        content = yaml.safe_load(subprocess.run(show, check=True, capture_output=True, text=True).stdout)
        commit = subprocess.run(
            ["git", "-C", str(repository), "log", "-1", "--format=%h"], check=True, capture_output=True, text=True
        ).stdout.strip()
        version = ""
        schema = content
        if content.get("kind") == "CustomResourceDefinition":
            newest = next(each for each in content["spec"]["versions"] if each.get("storage"))
            version, schema = f"{content['spec']['group']}/{newest['name']}", newest["schema"]["openAPIV3Schema"]
        found[kind] = {"commit": commit, "version": version, "fields": dict(fields(schema))}
    lines = (f"{json.dumps(kind)}: {json.dumps(found[kind], sort_keys=True)}" for kind in sorted(found))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
