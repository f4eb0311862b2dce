"""A server as Kubernetes objects: a Deployment and a Service on one node, a LeaderWorkerSet on several.

LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) is an extension that a cluster must have installed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.executor.vllm.arguments import follower_port
from trtserve.nvidia.containers import END_SCRIPT, image_of
from trtserve.nvidia.releases.containers import containers_of
from trtserve.progress import SILENT, Progress
from trtserve.repository.served import ServedRepository
from trtserve.server.launch.cluster import (
    GATEWAY_PORT,
    ClusterJob,
    gateway_words,
    gpus_per_node,
    inspect_for_cluster,
    place_engines,
    ranks_per_node,
)
from trtserve.server.launch.commands import Launch, LaunchSetup, first_address, server_setup
from trtserve.server.launch.devices import claimed_gpus
from trtserve.server.launch.modes import Orchestrator, launch_mode
from trtserve.server.render import Verbatim, render
from trtserve.server.repositories import named_paths, require_sound_files
from trtserve.server.triton.installation import CONTAINER_TRITON
from trtserve.server.triton.tritonserver import unique_prefix
from trtserve.specs import ServerSpec
from trtserve.specs.cluster import ClusterSpec, KubernetesOptions
from trtserve.specs.options import option

SSH_PORT = 2222  # not 22, so that pods on the host's network do not meet the node's own sshd
_PICKER_PORT = 9002
"""Port of an endpoint picker where --inference-pool names none."""
_GATEWAY_MEMORY = {"request": "512Mi", "limit": "4Gi"}
"""Memory of a gateway's container.

The request: its processes with a tokenizer.json of 9 MiB, as Llama 3 has, take 460 MiB (`server/engine_fit.py` has the
measured parts: process and tokenizer 182, two that encode 256, two that render templates 22). The limit: 1.3 GiB with a
tokenizer.json of 33 MB, 0.4 GiB for large bodies, and two helpers at their bound of 1 GiB each.
"""
_STARTUP_PERIOD = 10  # seconds between two probes of a server that is starting
_SCRIPTS, _SSH = "/trtserve/scripts", "/trtserve/ssh"
_LONGEST_NAME = 50  # Pods of a LeaderWorkerSet are called NAME-GROUP-INDEX, and a host name has 63 characters at most


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec(KubernetesOptions):
    nodes: int = option(1, help="Pods of one server.", minimum=1)
    gpus_per_node: int | None = None  # GPUs of each pod; None: one for each rank
    replicas: int = 1  # number of servers
    ready_timeout: float = 600.0  # seconds that a server may take to load its models

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.claim:
            raise UsageError(
                "--kubernetes needs the volume that holds the repository: --claim NAME.",
                hint="NAME is a PersistentVolumeClaim with the repository under its own name.",
            )


def settings(cluster: ClusterSpec, options: KubernetesOptions, spec: ServerSpec) -> KubernetesSpec:
    return KubernetesSpec(
        **vars(options),
        nodes=cluster.nodes,
        gpus_per_node=cluster.ntasks_per_node,
        replicas=spec.instances,
        ready_timeout=spec.ready_timeout,
    )


def stop_command(place: Path) -> str:
    return f"kubectl delete -f {place}"


def object_name(name: str) -> str:
    """Return a server's name as Kubernetes takes it: lower-case letters, digits and '-'."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-")
    if not found:
        raise UsageError(f"{name!r} has no letter or digit that Kubernetes allows in a name.", hint="Give --name.")
    return found if found[0].isalpha() else f"s-{found}"  # a Service's name begins with a letter


def plan_job(
    repository: ModelRepository, spec: ServerSpec, cluster: KubernetesSpec, place: Path, *, progress: Progress = SILENT
) -> ClusterJob:
    """Return the manifest of a server, for the file `place`.

    The repository is expected in the volume under its own name, or at its present path if the volume is mounted there.
    """
    name, served = inspect_for_cluster(repository, spec, "kubernetes", progress)
    # Probes reach the server from outside of its pod.
    address = first_address(spec, host="0.0.0.0")
    if served.embedded and spec.container is None:
        raise UsageError(
            f"The {served.runtime} runtime needs an image that has trtserve: --container IMAGE.",
            hint="`trtserve help how-to/gpus` has the Dockerfile.",
        )
    if cluster.nodes > 1 and cluster.ssh_secret is None and not served.starts_workers:
        raise UsageError(
            "On several nodes mpirun starts its ranks through ssh, which needs a key: --ssh-secret NAME.",
            hint="ssh-keygen -t ed25519 -N '' -f key && kubectl create secret generic NAME "
            "--type=kubernetes.io/ssh-auth --from-file=ssh-privatekey=key",
        )
    in_volume = _in_volume(repository.path.absolute(), Path(cluster.mount_path))
    setup = server_setup(name, in_volume, served, spec, CONTAINER_TRITON, address, unique_prefix(name))
    setup = replace(setup, bound=not served.embedded)
    if cluster.inference_pool is not None:
        ports = {"http": address.http_port, "grpc": address.grpc_port, "metrics": address.metrics_port}
        if taken := [name for name, port in ports.items() if port == GATEWAY_PORT]:
            raise UsageError(
                f"--{taken[0]}-port is {GATEWAY_PORT}, where the gateway in each pod of --inference-pool listens.",
                hint="Choose another port for Triton; the ports of a pod need not be free on its node.",
            )
        progress.warn(
            "The gateways of an InferencePool ask for no key, and pods of all namespaces reach them: let the Gateway "
            "in front decide who may use the server, or narrow the NetworkPolicy."
        )
    image = image_of(spec.container) if spec.container else containers_of(setup.release)[-1].image
    require_sound_files(repository, spec, progress, volume=Path(cluster.mount_path))
    launch = launch_mode(served, spec).compose(setup, served, spec, nodes=cluster.nodes)
    gpus = _all_gpus(served, spec, cluster, launch)
    each = ranks_per_node(cluster.nodes, cluster.gpus_per_node, gpus, "ranks")
    pods = [rank // each for rank in range(gpus)]
    # The first pod also runs the orchestrator.
    nodes = [0, *pods] if spec.multi_model else pods
    engines = place_engines(repository, served, spec, nodes, each, progress)
    port = follower_port(served.engine) if served.starts_workers and cluster.nodes > 1 else None
    called = object_name(name)
    manifest = _manifest(setup, launch, cluster, called, image, each, followers=port)
    if cluster.nodes > 1 and spec.container is None:
        progress.warn(
            f"{image} has no sshd, which pods need to start ranks: use --container with an image that has it."
        )
    notes = [f"Image: {image}", f"Repository in the volume {cluster.claim}: {in_volume}"]
    if engines:
        notes.append("Its engine's config.json was changed for these nodes: copy the repository to the volume again.")
    kinds = ("Deployment", "Service") if cluster.nodes == 1 else ("ConfigMap", "LeaderWorkerSet", "Service")
    if cluster.inference_pool is not None:
        kinds = (*kinds, "InferencePool", *(["HTTPRoute"] if cluster.inference_gateway is not None else ()))
    elif cluster.gateway_image is not None:
        if cluster.nodes == 1:
            kinds = ("StatefulSet", "Service", "Service")
            notes.append(
                f"A Deployment {called} of an earlier manifest would stay and keep its GPUs. Delete it first: "
                f"kubectl delete deployment {called}{f' -n {cluster.namespace}' if cluster.namespace else ''}"
            )
        kinds = (*kinds, "Deployment", "Service")
    return ClusterJob(
        files={place: manifest},
        command=f"kubectl apply -f {place}",
        engines=engines,
        record={"manifest": place, "objects": [*kinds, "NetworkPolicy"]},
        notes=notes,
    )


def _in_volume(repository: Path, mount: Path) -> Path:
    """Return the path of the repository in the pods. Raises UsageError for one that names files elsewhere."""
    outside = next((path for path in named_paths(repository) if not path.is_relative_to(mount)), None)
    if outside is not None:
        raise UsageError(
            f"The repository names {outside}, which is not below {mount}, where the volume is mounted.",
            hint="Make it with the engine inside and relative paths (trtserve repo), or choose --mount-path.",
        )
    return repository if repository.is_relative_to(mount) else mount / repository.name


def _all_gpus(served: ServedRepository, spec: ServerSpec, cluster: KubernetesSpec, launch: Launch) -> int:
    """Return the GPUs of all pods. Raises UsageError for a server that cannot be spread over several."""
    gpus = served.world_size if served.starts_workers else launch.ranks
    if served.starts_workers:
        gpus_per_node(served, cluster.nodes, cluster.gpus_per_node)
    elif launch.ranks == 1 or spec.multi_model:
        # On several nodes the same numbers are different GPUs.
        claimed = len(claimed_gpus(served.core_models)) if cluster.nodes == 1 else 0
        gpus = claimed or sum(core.world_size * core.instances for core in served.core_models)
    if cluster.nodes > 1 and launch.ranks == 1:
        raise UsageError(
            f"--nodes is {cluster.nodes}; this server is one process, with its workers on its own node.",
            hint="Orchestrators: --disable-spawn-processes, with participant_ids. Several LLMs: one server for each."
            if spec.multi_model or served.uses_llmapi
            else "Build the engine for more ranks: tensor × pipeline parallel.",
        )
    return gpus


def _manifest(
    setup: LaunchSetup,
    launch: Launch,
    cluster: KubernetesSpec,
    name: str,
    image: str,
    gpus: int,
    *,
    followers: int | None,
) -> str:
    """Return the manifest of a server with `gpus` in each pod; the paths of `setup` are those in the volume.

    `followers` is the port where vLLM's workers on further nodes find their leader; None: mpirun starts ranks.
    """
    wait = cluster.ready_timeout + (cluster.worker_timeout if cluster.nodes > 1 else 0)
    address = setup.address
    server: dict[str, Any] = {
        "name": "triton",
        "answers": True,
        "command": launch.command.argv,
        # mpirun, which the cluster would ask to end, kills its ranks a moment later.
        "stop_script": END_SCRIPT if launch.ranks > 1 and followers is None else None,
    }
    values: dict[str, Any] = {
        **vars(cluster),
        "name": name,
        "image": image,
        "repository": str(setup.repository),
        # The user of the pod need not have a home.
        "environment": {"HOME": "/tmp", **launch.command.env},
        "scripts_folder": _SCRIPTS,
        "ssh_folder": _SSH if followers is None else None,
        "ssh_port": SSH_PORT,
        "gpus": gpus,
        "exit_timeout": setup.exit_timeout,
        "startup_period": _STARTUP_PERIOD,
        "startup_failures": math.ceil(wait / _STARTUP_PERIOD),
        "probes": {
            kind: render("probe.sh.j2", port=address.http_port, page=Verbatim(f"/v2/health/{page}"))
            for kind, page in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live"))
        },
        "ports": {"http": address.http_port, "grpc": address.grpc_port, "metrics": address.metrics_port},
        "named_pods": cluster.gateway_image is not None and cluster.inference_pool is None,
        "gateway": _gateway(setup, cluster, name),
    }
    if cluster.nodes == 1:
        return render("deployment.yaml.j2", **values, server=server)
    worker = {
        "name": "worker",
        "answers": False,
        "command": ["bash", f"{_SCRIPTS}/worker.sh"],
        "stop_script": render("stop_worker.sh.j2") if followers is None else None,
    }
    return render(
        "leader_worker_set.yaml.j2",
        **values,
        server={**server, "command": ["bash", f"{_SCRIPTS}/leader.sh"]},
        worker=worker,
        leader_script=_leader_script(setup, launch, gpus, math.ceil(cluster.worker_timeout))
        if followers is None
        else render("vllm_leader.sh.j2", command=launch.command.argv),
        worker_script=render("worker.sh.j2", ssh_folder=_SSH, ssh_port=SSH_PORT)
        if followers is None
        else render("vllm_follower.sh.j2", port=followers),
    )


def _gateway(setup: LaunchSetup, cluster: KubernetesSpec, name: str) -> dict[str, Any]:
    """Return what the templates need of a gateway: one in front of all copies, or one beside each for a picker."""
    address = setup.address
    first, *others = ["localhost"]
    if cluster.inference_pool is None:  # a LeaderWorkerSet makes the service of its own name
        service = f"{name}-pods" if cluster.nodes == 1 else name
        first, *others = [f"{name}-{number}.{service}" for number in range(cluster.replicas)]
    open_to = ["--api-key-file", "/tmp/key"] if cluster.gateway_secret else ["--no-auth"]
    picker, _, port = (cluster.inference_pool or "").partition(":")
    return {
        "image": cluster.gateway_image,
        "port": GATEWAY_PORT,
        "memory": _GATEWAY_MEMORY,
        "picker": picker,
        "picker_port": int(port or _PICKER_PORT),
        "script": 'umask 077; printenv TRTSERVE_API_KEY > /tmp/key; exec trtserve "$0" "$@"',
        "arguments": [
            *gateway_words(address, first, setup.repository, access=open_to),
            *(f"--replica={host}:{address.grpc_port}:{address.http_port}" for host in others),
        ],
    }


def _leader_script(setup: LaunchSetup, launch: Launch, gpus: int, worker_timeout: int) -> str:
    """Return what the leader's pod runs: `gpus` ranks on every node, rank 0 here; an orchestrator is one more here."""
    extra = 1 if launch.mode == Orchestrator.name else 0
    ranks = [{"node": max(0, rank - extra) // gpus, "command": command} for rank, command in enumerate(launch.groups)]
    return render(
        "leader.sh.j2",
        ssh_folder=_SSH,
        ssh_port=SSH_PORT,
        worker_timeout=worker_timeout,
        slots=gpus + extra,
        bound=setup.bound,
        environment=launch.command.env,
        ranks=ranks,
    )
