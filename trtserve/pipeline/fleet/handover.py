"""Hand a plan over to what runs it: Kubernetes objects, Slurm submissions, files for llm-d and NVIDIA Dynamo.

The server itself is what `start --kubernetes` or `start --slurm` wrote for one replica. Here the number of replicas,
scaling and the way in are put around it.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from trtserve.errors import UsageError
from trtserve.files import LARGEST_YAML, make_folder, read_text, write_whole
from trtserve.pipeline.fleet import Fleet, ShapeOption
from trtserve.pipeline.fleet.sizing import Sized

Object = dict[str, Any]
_PODS = {
    "Deployment": ("template",),
    "StatefulSet": ("template",),
    "LeaderWorkerSet": ("leaderWorkerTemplate", "leaderTemplate"),
}
"""Kind of a workload → where its spec describes the pods that answer."""
_APP, _MODEL = "app.kubernetes.io/name", "trtserve"
"""The label of the pods that serve the model; those of a gateway in front have another value."""
_VERSION = re.compile(r":v?\d+\.\d+\.\d+[^:/]*(@sha256:\w+)?$")
"""The end of an image whose tag is a version."""


def hand_over(fleet: Fleet, sized: Sized, folder: Path) -> list[Path]:
    """Write the files for which the shape has what they need, each in one rename, and return them.

    Raises UsageError for a shape that has nothing to write files from, or that Dynamo would refuse.
    """
    shape = fleet.shapes[sized.shape]
    texts: dict[str, str] = {}
    if shape.manifest is not None:
        texts["kubernetes.yaml"] = yaml.safe_dump_all(kubernetes_objects(fleet, sized, _manifest(shape.manifest)))
    if shape.job is not None:
        texts["submit.sh"] = slurm_script(shape, sized, shape.job)
    if shape.model is not None:
        texts["llm-d-values.yaml"] = yaml.safe_dump(llm_d_values(shape, sized, shape.model), sort_keys=False)
        texts["dynamo.yaml"] = yaml.safe_dump(dynamo_graph(fleet, sized, shape.model), sort_keys=False)
    if not texts:
        raise UsageError(
            f"The shape {sized.shape} has no `manifest`, `job` or `model`, so there is nothing to write.",
            hint="Add one: `manifest` (of start --kubernetes), `job` (of start --slurm) or `model` (llm-d, Dynamo).",
        )
    make_folder(folder)
    for name, text in texts.items():
        write_whole(folder / name, text, mode=0o755 if name.endswith(".sh") else None)
    return [folder / name for name in texts]


def _filled(template: str, **values: object) -> list[Object]:
    """Return the objects of a template in this folder; texts and maps become JSON, YAML whatever they contain."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    given = {name: json.dumps(value) if isinstance(value, (str, dict)) else value for name, value in values.items()}
    return list(yaml.safe_load_all(Template(text).substitute(given)))


def _manifest(path: Path) -> list[Object]:
    """Read the objects that `start --kubernetes` wrote."""
    try:
        found = [each for each in yaml.safe_load_all(read_text(path, UsageError, limit=LARGEST_YAML)) if each]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.", hint="Write it: trtserve start NAME --kubernetes") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    kinds = [each.get("kind") if isinstance(each, dict) else None for each in found]
    apps = [_app(each) for each, kind in zip(found, kinds, strict=True) if kind in _PODS]
    if apps.count(_MODEL) != 1 or "Service" not in kinds or None in kinds:
        raise UsageError(
            f"{path} has {', '.join(map(str, kinds))}; expected a Service and one of {', '.join(_PODS)}, whose pods "
            f"have the label {_APP}: {_MODEL}.",
            hint="Write it: trtserve start NAME --kubernetes, or helm template NAME examples/deploy/chart",
        )
    if len(apps) > 1:
        raise UsageError(
            f"{path} has a gateway in front of a fixed list of replicas, but a fleet changes their number.",
            hint="Write it with --inference-pool PICKER instead of --gateway-secret: each replica then has a gateway.",
        )
    return found


def _app(workload: Object) -> object:
    """Return the label that says what the pods of a workload are."""
    return _at(workload, "spec", *_PODS[workload["kind"]], "metadata", "labels", _APP)


def _at(found: Any, *keys: str) -> Any:
    """Return what stands in an object below these keys, or None."""
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def kubernetes_objects(fleet: Fleet, sized: Sized, manifest: Sequence[Object]) -> list[Object]:
    """Return the manifest with all replicas, what scales them between night and peak, and the inference gateway.

    An InferencePool and an HTTPRoute of the manifest stay as they are: their targets are the gateways in the pods. What
    scales the model in it goes, because two that do would work against each other.
    """
    objects, shape = [dict(each) for each in manifest], fleet.shapes[sized.shape]
    workload = next(each for each in objects if each["kind"] in _PODS and _app(each) == _MODEL)
    objects = [each for each in objects if not _scales(each, workload)]
    service = next(each for each in objects if each["kind"] == "Service")
    pool = next((each["metadata"]["name"] for each in objects if each["kind"] == "InferencePool"), None)
    whole, name = sized.replicas + sized.spare, workload["metadata"]["name"]
    workload["spec"] = {**workload["spec"], "replicas": whole}
    ports = [each for each in service["spec"]["ports"] if each.get("name", "http").startswith("http")]
    placed = {key: value for key, value in workload["metadata"].items() if key == "namespace"}
    labels = {"request_type": "waiting", "service": service["metadata"]["name"], **placed}
    counted = ",".join(f'{name}="{value}"' for name, value in labels.items())
    around = _filled(
        "around.yaml",
        name=name,
        version=workload["apiVersion"],
        kind=workload["kind"],
        fewest=max(1, round(whole * min(fleet.traffic.day))),
        most=whole,
        # A replica takes a while to load: do not take it away for a quiet minute.
        cooldown=max(300, round(3 * shape.load_seconds)),
        waiting=f"sum(nv_trt_llm_request_metrics{{{counted}}})",
        threshold=shape.max_batch_size // 4 or 1,
        labels=dict(service["spec"]["selector"]),
        port=int((ports or service["spec"]["ports"])[0]["port"]),
        pool=pool or name,
        picker=f"{name}-picker",
    )
    kinds = {each["kind"] for each in objects} - {"ScaledObject"}
    added = [each for each in around if each["kind"] not in kinds]
    for each in added:
        each["metadata"] |= placed
    return [*objects, *added]


def _scales(each: Object, workload: Object) -> bool:
    """Return whether an object changes the number of a workload's replicas. KEDA's default target is a Deployment."""
    if each["kind"] not in ("ScaledObject", "HorizontalPodAutoscaler"):
        return False
    kind, name = (_at(each, "spec", "scaleTargetRef", key) for key in ("kind", "name"))
    return (kind or "Deployment", name) == (workload["kind"], workload["metadata"]["name"])


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
    (values,) = _filled(
        "llm-d.yaml",
        model=model,
        uri=f"hf://{model}",
        size=shape.model_size,
        image=shape.image,
        replicas=sized.replicas + sized.spare,
        gpus=shape.gpus,
        slots=shape.max_batch_size,
    )
    return values


def dynamo_graph(fleet: Fleet, sized: Sized, model: str) -> Object:
    """Return a DynamoGraphDeployment: a frontend that routes by prefix, and vLLM in each replica.

    A replica with more GPUs than a node has spans several nodes.
    """
    shape = fleet.shapes[sized.shape]
    if not _VERSION.search(shape.dynamo_image):
        raise UsageError(
            f"dynamo_image of {sized.shape} is {shape.dynamo_image!r:.200}; Dynamo's operator takes only an image "
            "whose tag is a version.",
            hint="Expected an end such as :1.5.1",
        )
    nodes = math.ceil(shape.gpus / fleet.gpus[shape.gpu].per_node)
    if shape.gpus % nodes:
        raise UsageError(
            f"{sized.shape} has {shape.gpus} GPUs on {nodes} nodes; Dynamo gives each node of a replica as many.",
            hint=f"Take a multiple of {nodes}.",
        )
    (graph,) = _filled(
        "dynamo.yaml",
        name=re.sub("[^a-z0-9]+", "-", sized.shape.lower()).strip("-"),
        image=shape.dynamo_image,
        replicas=sized.replicas + sized.spare,
        model=model,
        gpus=shape.gpus,
        slots=shape.max_batch_size,
        on_node=shape.gpus // nodes,
    )
    if nodes > 1:
        graph["spec"]["components"][1]["multinode"] = {"nodeCount": nodes}
    return graph
