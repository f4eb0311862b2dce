"""Hand a plan over to what runs it: Kubernetes objects, Slurm submissions, values of llm-d's chart.

The server itself is what `start --kubernetes` or `start --slurm` wrote for one replica. Here the number of replicas,
scaling and the way in are put around it.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trtserve.errors import UsageError
from trtserve.files import LARGEST_YAML, read_text, writing
from trtserve.pipeline.fleet.content import Fleet, ShapeOption
from trtserve.pipeline.fleet.sizing import Sized

_WORKLOADS = {"Deployment": "apps/v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
_PICKER_PORT = 9002  # of the endpoint picker's gRPC service
_WAITING = 'nv_trt_llm_request_metrics{request_type="waiting",service="%s"}'
Object = dict[str, Any]


def hand_over(fleet: Fleet, sized: Sized, folder: Path) -> list[Path]:
    """Write the files for which the shape has what they need, each in one rename, and return them.

    Raises UsageError for a shape that has nothing to write files from.
    """
    shape = fleet.shapes[sized.shape]
    texts: dict[str, str] = {}
    if shape.manifest is not None:
        texts["kubernetes.yaml"] = yaml.safe_dump_all(kubernetes_objects(fleet, sized, _manifest(shape.manifest)))
    if shape.job is not None:
        texts["submit.sh"] = slurm_script(shape, sized, shape.job)
    if shape.model is not None:
        texts["llm-d-values.yaml"] = yaml.safe_dump(llm_d_values(shape, sized, shape.model), sort_keys=False)
    if not texts:
        raise UsageError(
            f"The shape {sized.shape} has no `manifest`, `job` or `model`, so there is nothing to write.",
            hint="Add one: `manifest` (of start --kubernetes), `job` (of start --slurm) or `model` (for llm-d).",
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        path, staged = folder / name, folder / f".{name}.partial"
        with writing(path):
            staged.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                staged.chmod(staged.stat().st_mode | stat.S_IXUSR)
            staged.replace(path)
        written.append(path)
    return written


def _manifest(path: Path) -> list[Object]:
    """Read the objects that `start --kubernetes` wrote."""
    try:
        found = [each for each in yaml.safe_load_all(read_text(path, UsageError, limit=LARGEST_YAML)) if each]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.", hint="Write it: trtserve start NAME --kubernetes") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    kinds = [each.get("kind") if isinstance(each, dict) else None for each in found]
    if sum(kind in _WORKLOADS for kind in kinds) != 1 or "Service" not in kinds:
        raise UsageError(
            f"{path} has {', '.join(map(str, kinds))}; expected a Service and one of {', '.join(_WORKLOADS)}.",
            hint="Write it: trtserve start NAME --kubernetes, or helm template NAME examples/deploy/chart",
        )
    return found


def kubernetes_objects(fleet: Fleet, sized: Sized, manifest: Sequence[Object]) -> list[Object]:
    """Return the manifest with all replicas, what scales them between night and peak, and the inference gateway."""
    objects = [dict(each) for each in manifest]
    workload = next(each for each in objects if each["kind"] in _WORKLOADS)
    service = next(each for each in objects if each["kind"] == "Service")
    whole, name = sized.replicas + sized.spare, workload["metadata"]["name"]
    workload["spec"] = {**workload["spec"], "replicas": whole}
    lowest = max(1, round(whole * min(fleet.traffic.day)))
    waiting = fleet.shapes[sized.shape].max_batch_size // 4 or 1
    scaler = _object(
        "keda.sh/v1alpha1",
        "ScaledObject",
        name,
        {
            "scaleTargetRef": {
                "apiVersion": _WORKLOADS[workload["kind"]],
                "kind": workload["kind"],
                "name": name,
            },
            "minReplicaCount": lowest,
            "maxReplicaCount": whole,
            # A replica takes a while to load: do not take it away for a quiet minute.
            "cooldownPeriod": max(300, round(3 * fleet.shapes[sized.shape].load_seconds)),
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": "http://prometheus-operated:9090",
                        "query": f"sum({_WAITING % service['metadata']['name']})",
                        "threshold": str(waiting),
                    },
                }
            ],
        },
    )
    ports = [each for each in service["spec"]["ports"] if each.get("name", "http").startswith("http")]
    pool = _object(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        name,
        {
            "selector": {"matchLabels": dict(service["spec"]["selector"])},
            "targetPorts": [{"number": int((ports or service["spec"]["ports"])[0]["port"])}],
            "endpointPickerRef": {
                "name": f"{name}-picker",
                "port": {"number": _PICKER_PORT},
                "failureMode": "FailOpen",
            },
        },
    )
    route = _object(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        name,
        {
            "parentRefs": [{"name": "inference-gateway"}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}],
                }
            ],
        },
    )
    return [*objects, scaler, pool, route]


def _object(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def slurm_script(shape: ShapeOption, sized: Sized, job: Path) -> str:
    """Return a script that submits every replica as a job of its own, and says how to put the gateway in front."""
    if not (job / "server.sbatch").is_file():
        raise UsageError(f"{job} has no server.sbatch.", hint="Write it: trtserve start NAME --slurm")
    whole = sized.replicas + sized.spare
    return f"""#!/bin/bash
# {whole} replicas of {sized.shape}, {sized.spare} of them spare, with {shape.gpus} GPUs each.
# Every one is a job with nodes of its own, so their ports do not meet.
set -euo pipefail
cd {shlex.quote(str(job.absolute()))}
for number in $(seq 1 {whole}); do
    sbatch --exclusive --job-name="{sized.shape}-$number" server.sbatch
done
cat <<'END'
When they run, put one gateway in front of them:
  squeue --noheader --states=RUNNING --format='%B' --name="$(seq -s, -f '{sized.shape}-%.0f' 1 {whole})" > nodes
  trtserve gateway $(sed 's/.*/--replica &:8001/' nodes)
END
"""


def llm_d_values(shape: ShapeOption, sized: Sized, model: str) -> Object:
    """Return values for the chart llm-d-modelservice, with vLLM's own server in each replica."""
    arguments = ["--max-num-seqs", str(shape.max_batch_size)]
    return {
        "modelArtifacts": {"name": model, "uri": f"hf://{model}", "size": shape.model_size},
        "multinode": False,
        "accelerator": {"type": "nvidia"},
        "routing": {"servicePort": 8000, "proxy": {"enabled": False}},
        "decode": {
            "create": True,
            "replicas": sized.replicas + sized.spare,
            "parallelism": {"tensor": shape.gpus, "data": 1, "dataLocal": 1, "workers": 1},
            "containers": [
                {
                    "name": "vllm",
                    "image": shape.image,
                    "modelCommand": "vllmServe",
                    "args": arguments,
                    "mountModelVolume": True,
                }
            ],
        },
        "prefill": {"create": False},
    }
