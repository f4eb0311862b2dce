"""The Helm chart of the examples, rendered by Helm itself: what Kubernetes gets, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trtserve.cli.app import command_tree

pytestmark = pytest.mark.needs("helm")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "examples" / "deploy" / "chart"
_PULLED = {"source": "oci://registry.example/models/llama:v1", "name": "llama"}


def _rendered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chart's objects by kind, all but those of operators compared with Kubernetes' schemas."""
    from helm_python import Chart

    chart = Chart.load(CHART)
    chart.validate_schema(chart.merge_values(dict(values)))
    texts = chart.render(dict(values), name="demo", namespace="llm").values()
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    for each in found:
        if each["kind"] not in ("ServiceMonitor", "ScaledObject"):
            kubernetes_validate.validate(each, "1.30", strict=True)
    return {each["kind"]: each for each in found}


def _commands(objects: Mapping[str, Any]) -> list[list[str]]:
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return [shlex.split(line) for line in container["args"][0].splitlines()]


@pytest.mark.parametrize("model", [{"source": "demo", "name": "demo"}, _PULLED])
def test_the_pod_runs_commands_that_trtserve_has(model: dict[str, Any]) -> None:
    model = {**model, "startOptions": ["--max-requests", "64"]}
    objects = _rendered({"model": model})
    first, start = _commands(objects)
    assert first[:3] == (
        ["trtserve", "pull", "$SOURCE"] if model["name"] == "llama" else ["trtserve", "import", "$SOURCE"]
    )
    assert start[:4] == ["exec", "trtserve", "start", "$NAME"]
    known = {flag for option in command_tree(("start",)).commands["start"].params for flag in option.opts}
    assert {word for word in start if word.startswith("--")} <= known
    assert start[-2:] == ["--max-requests", "64"]
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["enableServiceLinks"] is False


def test_a_key_is_asked_for_where_one_is_given() -> None:
    assert "--no-auth" in _commands(_rendered({}))[-1]
    objects = _rendered({"apiKeySecret": "keys", "monitoring": {"serviceMonitor": True, "dashboard": True}})
    assert "--no-auth" not in _commands(objects)[-1]
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    variable = next(each for each in container["env"] if each["name"] == "TRTSERVE_API_KEY")
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "key"}
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "keys", "key": "key"}
    dashboard = json.loads(objects["ConfigMap"]["data"]["trtserve.json"])
    assert dashboard == json.loads((ROOT / "examples" / "monitoring" / "dashboard.json").read_text())


def test_scaling_follows_the_waiting_requests() -> None:
    assert _rendered({})["Deployment"]["spec"]["replicas"] == 1
    hpa = _rendered({"autoscaling": {"kind": "hpa", "waitingRequests": 7}})
    assert "replicas" not in hpa["Deployment"]["spec"]
    (metric,) = hpa["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "7"
    keda = _rendered({"autoscaling": {"kind": "keda"}})["ScaledObject"]["spec"]
    assert keda["scaleTargetRef"]["name"] == "demo-trtserve"
    query = keda["triggers"][0]["metadata"]["query"]
    assert query == ('sum(nv_trt_llm_request_metrics{request_type="waiting",service="demo-trtserve",namespace="llm"})')


@pytest.mark.parametrize(
    "values",
    [
        {"gpus": "two"},
        {"replica": 2},
        {"autoscaling": {"kind": "always"}},
        {"model": {"source": "demo", "name": "a b"}},
        {"model": {"source": "demo", "name": "demo", "startOptions": ["'; rm -rf /; '"]}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    from helm_python.errors import HelmValuesError

    with pytest.raises(HelmValuesError):
        _rendered(values)
