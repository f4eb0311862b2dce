"""How `start` writes a job for Slurm or a manifest for Kubernetes instead of starting a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from trtserve.errors import UsageError
from trtserve.specs.options import Spec, option

_clusters = partial(option, panel="Clusters")
_slurm = partial(option, panel="With --slurm")
_kubernetes = partial(option, panel="With --kubernetes")

_WORD = re.compile(r"[A-Za-z0-9_.,:=@/+-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_MPI = re.compile(r"pmix(_v\d+)?")
_DNS = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PICKER = re.compile(_DNS.pattern + r"(:(?P<port>[1-9][0-9]{0,4}))?")


@dataclass(frozen=True, kw_only=True)
class Nodes(Spec):
    """How many machines a server has, and how many ranks each of them."""

    nodes: int = _clusters(1, metavar="N", help="Machines of one server.", minimum=1)
    ntasks_per_node: int | None = _clusters(
        None, metavar="N", help="Ranks on each machine.", minimum=1, unset="world size / nodes"
    )


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Spec):
    """What a Slurm job asks for; None leaves it to the cluster."""

    SUFFIX: ClassVar[str] = ".slurm"

    account: str | None = _slurm(None, help="Account that pays for the job.")
    partition: str | None = _slurm(None, help="Partition to run in.")
    time: str | None = _slurm(None, metavar="TIME", help="Time limit, such as 00:30:00.")
    job_name: str | None = _slurm(None, metavar="NAME", help="Name of the job.", unset="the server's")
    output: Path | None = _slurm(None, metavar="DIR", help="Folder of the logs.", unset="logs next to the job")
    gpu_clock: int | None = _slurm(
        None, metavar="MHZ", help="Lock the clock of the GPUs; needs sudo on the nodes.", minimum=1
    )
    mpi: str = _slurm("pmix", metavar="NAME", help="What srun calls PMIx; see srun --mpi=list.")
    gateway: Path | None = _slurm(
        None, metavar="KEYFILE", help="Run a gateway on the first node too, which asks for the key in KEYFILE."
    )
    flags: tuple[str, ...] = _slurm(
        (),
        "--sbatch-flag",
        metavar="FLAG",
        help="Pass FLAG to sbatch unchanged, for example --sbatch-flag=--cpus-per-task=16; repeatable. Without a flag "
        "about GPUs or whole nodes the job asks for one GPU per rank.",
    )
    submit: bool = _slurm(False, help="Hand the job to sbatch and print its number.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value in (("account", self.account), ("partition", self.partition), ("job-name", self.job_name)):
            if value is not None and not _WORD.fullmatch(value):
                raise UsageError(f"--{flag} is {value!r}; expected one word without spaces.")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UsageError(f"--time is {self.time!r}; Slurm takes 30, 00:30:00 or 1-00:00:00.")
        if not _MPI.fullmatch(self.mpi):
            raise UsageError(
                f"--mpi is {self.mpi!r}; TensorRT-LLM's Open MPI needs PMIx: pmix, or one of its versions.",
                hint="srun --mpi=list names those that this cluster has, such as pmix_v4.",
            )
        wrong = next((flag for flag in self.flags if not flag.startswith("--") or "\n" in flag), None)
        if wrong is not None:
            raise UsageError(f"--sbatch-flag is {wrong!r}; expected a long option such as --gpus-per-node=8.")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(Spec):
    """What the cluster provides, by name."""

    SUFFIX: ClassVar[str] = ".yaml"

    claim: str = _kubernetes("", metavar="NAME", help="PersistentVolumeClaim that holds the repository.")
    mount_path: str = _kubernetes("/models", metavar="PATH", help="Where that volume is mounted.")
    namespace: str | None = _kubernetes(None, metavar="NAME", help="Namespace of all objects.")
    hf_secret: str | None = _kubernetes(None, metavar="NAME", help="Secret whose key HF_TOKEN is the hub's token.")
    ssh_secret: str | None = _kubernetes(
        None, metavar="NAME", help="Secret whose key ssh-privatekey lets the leader start ranks on other nodes."
    )
    pull_secret: str | None = _kubernetes(None, metavar="NAME", help="Secret for pulling the image.")
    gateway_image: str | None = _kubernetes(
        None, metavar="IMAGE", help="Write a gateway in front of all copies too, from this image with trtserve."
    )
    inference_pool: str | None = _kubernetes(
        None,
        metavar="SERVICE[:PORT]",
        help="Write an InferencePool with this endpoint picker instead, and put a gateway into each pod.",
    )
    inference_gateway: str | None = _kubernetes(
        None, metavar="NAME", help="Write an HTTPRoute from this Gateway to the InferencePool too."
    )
    gateway_secret: str | None = _kubernetes(
        None, metavar="NAME", help="Secret whose entry `key` clients must send to the gateway."
    )
    worker_timeout: float = _kubernetes(
        1800.0,
        metavar="SECONDS",
        help="How long the leader of several nodes waits for the others, which pull the image first.",
        above=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gateway_image is None and (self.inference_pool or self.gateway_secret):
            raise UsageError(
                "--inference-pool and --gateway-secret need an image with trtserve: --gateway-image IMAGE.",
                hint="examples/deploy/Dockerfile makes one.",
            )
        if self.gateway_image is not None and not (self.inference_pool or self.gateway_secret):
            raise UsageError(
                "A gateway would answer every pod of the cluster: give clients a key with --gateway-secret NAME.",
                hint="kubectl create secret generic NAME --from-literal=key=$(openssl rand -hex 24)",
            )
        if self.inference_pool is not None:
            picker = _PICKER.fullmatch(self.inference_pool)
            if picker is None or int(picker["port"] or 1) > 65535:
                raise UsageError(
                    f"--inference-pool is {self.inference_pool!r}; expected the Service of the endpoint picker, NAME "
                    "or NAME:PORT with a port of 1 to 65535."
                )
            if self.gateway_secret:
                raise UsageError(
                    "--gateway-secret cannot be used with --inference-pool: endpoint pickers send no key, so the "
                    "gateways would refuse them their metrics.",
                    hint="Leave --gateway-secret out, and let the Gateway in front of the pool ask clients for a key.",
                )
        if self.inference_gateway is not None and self.inference_pool is None:
            raise UsageError(
                "--inference-gateway routes to an InferencePool, which needs an endpoint picker: --inference-pool NAME."
            )
        names = ("claim", "namespace", "hf_secret", "ssh_secret", "pull_secret", "gateway_secret", "inference_gateway")
        for name in names:
            value = getattr(self, name)
            if value and not _DNS.fullmatch(value):
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value!r}; expected a name: lower-case letters, digits and '-'."
                )
        if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", self.mount_path):
            raise UsageError(f"--mount-path is {self.mount_path!r}; expected an absolute path such as /models.")


_WITHOUT_TRTSERVE = (
    "auto_ports",
    "bindings",
    "restart",
    "restart_limit",
    "log_format",
    "cpus",
    "numa",
    "ui",
    "api_key",
    "api_key_file",
    "tls_certificate",
    "tls_key",
    "allow_origin",
    "raw_http",
    "max_requests",
    "gateway_processes",
    "request_log",
    "request_log_texts",
    "max_request_mib",
    "request_timeout",
    "proxy_port",
    "container_flags",
)
ON_THIS_MACHINE: Final = {"slurm": (*_WITHOUT_TRTSERVE, "ready_timeout"), "kubernetes": (*_WITHOUT_TRTSERVE, "gpus")}
"""Kind of cluster → fields of ServerSpec that it cannot have: Triton runs there without them."""
INSTEAD: Final = {
    "slurm": "Leave it out. sbatch's --requeue starts a job again; a gateway in front can ask for keys, encrypt "
    "and limit requests.",
    "kubernetes": "Leave it out. Kubernetes chooses GPUs and restarts what ended; a gateway in front can ask for keys, "
    "encrypt and limit requests.",
}
"""Kind of cluster → what does the same there."""

OPTIONS: Final[dict[str, type[SlurmOptions] | type[KubernetesOptions]]] = {
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
}
"""Kind of cluster → its own options; the name is also its flag in `ClusterSpec`."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Nodes):
    """The cluster that runs the server."""

    slurm: bool = _clusters(False, help="Write a Slurm job instead of starting here.")
    kubernetes: bool = _clusters(False, help="Write a Kubernetes manifest instead of starting here.")
    out: Path | None = _clusters(
        None,
        metavar="PATH",
        help="Folder of the job, or file of the manifest.",
        unset=", ".join(f"./NAME{each.SUFFIX}" for each in OPTIONS.values()),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(given := [name for name in OPTIONS if getattr(self, name)]) > 1:
            raise UsageError(f"--{given[0]} and --{given[1]} contradict each other; give one.")

    @property
    def kind(self) -> str | None:
        """The kind of cluster, a key of `OPTIONS`, or None if this machine serves."""
        return next((name for name in OPTIONS if getattr(self, name)), None)
