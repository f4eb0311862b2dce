"""A server as objects of Kubernetes: Deployment and Service on one node, a LeaderWorkerSet on several.

Fields are those of Kubernetes' own API (apps/v1, v1) and of leaderworkerset.x-k8s.io/v1, which is an extension that a
cluster must have installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.errors import UsageError
from trtserve.launch.base import Launch, Setup
from trtserve.launch.end_script import END_SCRIPT
from trtserve.launch.kubernetes_scripts import SSH_PORT, WORKER_END, leader_script, worker_script

Object = dict[str, Any]

GPU = "nvidia.com/gpu"
# Probes, in seconds. Liveness asks for the process alone: a server that loads or is busy is no dead one.
_STARTUP_PERIOD = 10
_READY_PERIOD = 5
_LIVE_PERIOD = 15
_PROBE_TIMEOUT = 5
_END_GRACE = 30
# mpirun, which the cluster would ask to end, kills its ranks a moment later.
_ASKED_FIRST: Object = {"preStop": {"exec": {"command": ["bash", "-c", END_SCRIPT]}}}
_SCRIPTS, _SSH = "/trtserve/scripts", "/trtserve/ssh"
_LWS = "leaderworkerset.sigs.k8s.io"
# Pods of a LeaderWorkerSet are called NAME-GROUP-INDEX, and a host's name has 63 characters at most.
_LONGEST_NAME = 50
_DNS = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec:
    """What the cluster gives: all by reference, nothing of it is read here.

    `claim` is the PersistentVolumeClaim with models and repositories, mounted at `mount_path`. `hf_secret` has the key
    HF_TOKEN, `ssh_secret` (several nodes) the key ssh-privatekey, `pull_secret` is for the image. `nodes` is the number
    of pods of one server, `replicas` the number of servers. In seconds, `ready_timeout` is what a server has to load,
    `worker_timeout` what the leader of several pods waits before for the others, which pull the image at the same time.
    """

    image: str
    claim: str
    mount_path: str = "/models"
    namespace: str | None = None
    nodes: int = 1
    gpus_per_node: int | None = None
    replicas: int = 1
    hf_secret: str | None = None
    ssh_secret: str | None = None
    pull_secret: str | None = None
    ready_timeout: float = 600.0
    worker_timeout: float = 1800.0

    def __post_init__(self) -> None:
        for flag in ("claim", "namespace", "hf_secret", "ssh_secret", "pull_secret"):
            value = getattr(self, flag)
            if value is not None and not _DNS.fullmatch(value):
                raise UsageError(
                    f"--{flag.replace('_', '-')} is {value!r}; expected a name: lower-case letters, digits and '-'."
                )
        if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", self.mount_path):
            raise UsageError(f"--mount-path is {self.mount_path!r}; expected an absolute path such as /models.")
        if self.nodes < 1:
            raise UsageError(f"--nodes is {self.nodes}; it must be at least 1.")
        if self.worker_timeout <= 0:
            raise UsageError(f"--worker-timeout is {self.worker_timeout:g}; it must be above 0.")
        if self.nodes > 1 and self.ssh_secret is None:
            raise UsageError(
                "On several nodes mpirun starts its ranks through ssh, which needs a key: --ssh-secret NAME.",
                hint="ssh-keygen -t ed25519 -N '' -f key && kubectl create secret generic NAME "
                "--type=kubernetes.io/ssh-auth --from-file=ssh-privatekey=key",
            )


def object_name(name: str) -> str:
    """A server's name as Kubernetes takes it: lower-case letters, digits and '-'."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-")
    if not found:
        raise UsageError(f"{name!r} has no letter or digit that a name in Kubernetes may have.", hint="Give --name.")
    return found if found[0].isalpha() else f"s-{found}"  # a Service's name begins with a letter


def compose_objects(setup: Setup, launch: Launch, spec: KubernetesSpec, *, name: str, gpus: int) -> list[Object]:
    """The objects of a server whose ranks `launch` starts, with `gpus` in all; `setup` has the paths in the volume."""
    return [_named(each, spec) for each in _objects(setup, launch, spec, object_name(name), gpus)]


def _objects(setup: Setup, launch: Launch, spec: KubernetesSpec, name: str, gpus: int) -> list[Object]:
    if spec.nodes == 1:
        return [_deployment(setup, launch, spec, name, gpus), _service(setup, name, name, _labels(name))]
    each = gpus_on_node(spec, gpus)
    selector = {f"{_LWS}/name": name, f"{_LWS}/worker-index": "0"}
    return [
        _scripts(launch, spec, name, each),
        _worker_set(setup, launch, spec, name, each),
        # A LeaderWorkerSet makes a service of its own name, for the names of its pods.
        _service(setup, name, f"{name}-server", selector),
    ]


def gpus_on_node(spec: KubernetesSpec, gpus: int) -> int:
    """GPUs of each pod; UsageError when they are not one for each rank."""
    each = spec.gpus_per_node or max(1, gpus // spec.nodes)
    if each * spec.nodes != gpus:
        raise UsageError(
            f"--nodes {spec.nodes} × --ntasks-per-node {each} are {each * spec.nodes} ranks; the server has {gpus}.",
            hint="Their product must be the world size of the engine: tensor × pipeline parallel.",
        )
    return each


def _named(content: Object, spec: KubernetesSpec) -> Object:
    if spec.namespace is not None:
        content["metadata"]["namespace"] = spec.namespace
    return content


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "trtserve", "app.kubernetes.io/instance": name}


def _deployment(setup: Setup, launch: Launch, spec: KubernetesSpec, name: str, gpus: int) -> Object:
    container = _server_container(setup, launch, spec, list(launch.command.argv), gpus)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "replicas": spec.replicas,
            "selector": {"matchLabels": _labels(name)},
            # A new server needs the GPUs of an old one.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(setup, spec, container, gpus)},
        },
    }


def _worker_set(setup: Setup, launch: Launch, spec: KubernetesSpec, name: str, each: int) -> Object:
    leader = _server_container(setup, launch, spec, ["bash", f"{_SCRIPTS}/leader.sh"], each)
    worker = {
        **_container(setup, spec, ["bash", f"{_SCRIPTS}/worker.sh"], launch.environment, each),
        "name": "worker",
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "ssh"}, "periodSeconds": _READY_PERIOD},
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", WORKER_END]}}},
    }
    pods = {"leaderTemplate": leader, "workerTemplate": worker}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "replicas": spec.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "leaderWorkerTemplate": {
                "size": spec.nodes,
                # One MPI job: when a part of it ends, all of it begins again.
                "restartPolicy": "RecreateGroupOnPodRestart",
                **{
                    template: {
                        "metadata": {"labels": _labels(name)},
                        "spec": _with_scripts(_pod(setup, spec, container, each), spec, name),
                    }
                    for template, container in pods.items()
                },
            },
        },
    }


def _pod(setup: Setup, spec: KubernetesSpec, container: Object, ranks: int) -> Object:
    pod = {
        # The cluster's own first process reaps what ranks leave, and a server that loads can be ended.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": setup.exit_timeout + _END_GRACE,
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": spec.claim, "readOnly": True}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, ranks)}Gi"}},
        ],
    }
    return pod if spec.pull_secret is None else {**pod, "imagePullSecrets": [{"name": spec.pull_secret}]}


def _with_scripts(pod: Object, spec: KubernetesSpec, name: str) -> Object:
    """The pod with the scripts and the key that ranks on several nodes are started with."""
    (container,) = pod["containers"]
    container["volumeMounts"] += [
        {"name": "scripts", "mountPath": _SCRIPTS, "readOnly": True},
        {"name": "ssh", "mountPath": _SSH, "readOnly": True},
    ]
    pod["volumes"] += [
        {"name": "scripts", "configMap": {"name": f"{name}-scripts"}},
        {"name": "ssh", "secret": {"secretName": spec.ssh_secret, "defaultMode": 0o400}},
    ]
    return pod


def _container(
    setup: Setup, spec: KubernetesSpec, command: list[str], environment: Mapping[str, str], gpus: int
) -> Object:
    variables: list[Object] = [{"name": key, "value": value} for key, value in environment.items()]
    if spec.hf_secret is not None:
        token = {"secretKeyRef": {"name": spec.hf_secret, "key": "HF_TOKEN"}}
        variables.append({"name": "HF_TOKEN", "valueFrom": token})
    return {
        "name": "triton",
        "image": spec.image,
        "command": command,
        "workingDir": str(setup.repository),
        **({"env": variables} if variables else {}),
        "resources": {"limits": {GPU: gpus}},
        # What --ulimit memlock=-1 is for docker: pinned memory.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "models", "mountPath": spec.mount_path, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _server_container(setup: Setup, launch: Launch, spec: KubernetesSpec, command: list[str], gpus: int) -> Object:
    """The container that answers, with its three probes: they ask Triton's own health pages."""
    ready = {"httpGet": {"path": "/v2/health/ready", "port": "http"}, "timeoutSeconds": _PROBE_TIMEOUT}
    live = {"httpGet": {"path": "/v2/health/live", "port": "http"}, "timeoutSeconds": _PROBE_TIMEOUT}
    wait = spec.worker_timeout if spec.nodes > 1 else 0
    patience = math.ceil((wait + spec.ready_timeout) / _STARTUP_PERIOD)
    return {
        **_container(setup, spec, command, launch.environment, gpus),
        "ports": [{"name": port, "containerPort": number} for port, number in _ports(setup)],
        "startupProbe": {**ready, "periodSeconds": _STARTUP_PERIOD, "failureThreshold": patience},
        "readinessProbe": {**ready, "periodSeconds": _READY_PERIOD},
        "livenessProbe": {**live, "periodSeconds": _LIVE_PERIOD, "failureThreshold": 4},
        **({"lifecycle": _ASKED_FIRST} if launch.ranks > 1 else {}),
    }


def _ports(setup: Setup) -> list[tuple[str, int]]:
    address = setup.address
    return [("http", address.http_port), ("grpc", address.grpc_port), ("metrics", address.metrics_port)]


def _service(setup: Setup, name: str, own: str, selector: Mapping[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": own, "labels": _labels(name)},
        "spec": {
            "type": "ClusterIP",
            "selector": dict(selector),
            "ports": [{"name": port, "port": number, "targetPort": port} for port, number in _ports(setup)],
        },
    }


def _scripts(launch: Launch, spec: KubernetesSpec, name: str, each: int) -> Object:
    leader = leader_script(launch, each, _SSH, math.ceil(spec.worker_timeout))
    data = {"leader.sh": leader, "worker.sh": worker_script(_SSH)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-scripts", "labels": _labels(name)},
        "data": data,
    }


def to_yaml(objects: Sequence[Object]) -> str:
    """One document for each object; scripts stay readable."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Texts of several lines as they are, and no references between objects that share a part."""

        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return "".join(f"---\n{yaml.dump(each, Dumper=Dumper, sort_keys=False, width=100)}" for each in objects)
