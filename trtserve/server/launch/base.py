"""A launch as a value: its command, the arguments of each rank, and its shared-memory names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from trtserve.artifacts import ModelRepository
from trtserve.client.grpc_access import grpc_token
from trtserve.gateway.settings import read_key
from trtserve.host.cuda_devices import VISIBLE_DEVICES
from trtserve.host.ports import ipv4_address
from trtserve.nvidia.releases import NEWEST
from trtserve.nvidia.releases.launcher import CORE_MODEL, TRITONSERVER
from trtserve.process import Command
from trtserve.repository.preflight import Served
from trtserve.server.engine_version import launch_release
from trtserve.server.state import server_name
from trtserve.server.triton.installation import Triton, backend_folder
from trtserve.server.triton.tritonserver import (
    EXIT_TIMEOUT,
    Address,
    protection_arguments,
    stub_environment,
)
from trtserve.specs import ServerSpec
from trtserve.store import Store


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every launch mode composes its commands from."""

    executable: str = TRITONSERVER
    """Path of tritonserver where the server will run."""
    repository: Path
    address: Address
    release: str = NEWEST
    """TensorRT-LLM release whose launch script is followed."""
    shm_prefix: str
    """Start of the names of this launch's shared-memory regions; each rank adds its number."""
    core_models: tuple[str, ...] = (CORE_MODEL,)
    """Models that ranks other than 0 load."""
    gpus: tuple[int, ...] = ()
    """Devices that the processes may see; empty: all."""
    backends: Path | None = None
    """Folder of Triton's backends; None: the installation's own."""
    pool_bytes: int = 0
    """CUDA memory pool of GPU 0 on rank 0, in bytes."""
    exit_timeout: int = EXIT_TIMEOUT
    """Seconds that tritonserver has to finish its requests before it ends."""
    oversubscribe: bool = False
    """Whether mpirun may start more ranks than there are cores."""
    mpirun: str = "mpirun"
    bound: bool = True
    """Whether mpirun binds each rank to cores; with two ranks it gives each a single core."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every rank, besides those of the mode."""
    python: Path | None = None
    """Folder of the `python3` whose environment the stubs use; None: that of this process."""
    arguments: tuple[str, ...] = ()
    """Further arguments of tritonserver, after all others."""

    def rank_prefix(self, rank: int) -> str:
        """Return the shared-memory prefix of one rank; upstream's script uses the same one for every server."""
        return f"{self.shm_prefix}r{rank}_"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of one server."""

    mode: str
    """A key of `modes.MODES`."""
    command: Command
    """Starts all ranks on this machine."""
    groups: tuple[tuple[str, ...], ...]
    """Command line of each rank, so that srun, a container or Kubernetes can start the same ranks."""
    shm_prefixes: tuple[str, ...]
    """Prefix of each rank's shared-memory regions."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the mode sets; the command's environment contains them."""

    @property
    def ranks(self) -> int:
        """Processes that MPI starts, or 1 without MPI."""
        return len(self.groups)


class LaunchMode(Protocol):
    """How the processes of one server are started; a module of this package, listed in `modes.MODES`."""

    NAME: str

    def serves(self, served: Served, spec: ServerSpec) -> bool:
        """Return whether this mode starts such a repository with these options."""

    def check(self, served: Served, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
        """Raise UsageError or RepositoryError when the mode cannot run these models.

        The GPUs of other machines are unknown, so they are checked only for this one.
        """

    def ranks(self, served: Served, spec: ServerSpec) -> int:
        """Return the world size that --world-size is compared with."""

    def compose(self, setup: Setup, served: Served, spec: ServerSpec, *, nodes: int | None = None) -> Launch:
        """Return the launch for this machine, or for `nodes` of a cluster; nothing is started."""


def server_setup(
    triton: Triton, repository: ModelRepository, served: Served, address: Address, spec: ServerSpec, prefix: str
) -> Setup:
    """Return what the launches of a server on GPUs have in common, on this machine or another one."""
    return Setup(
        executable=str(triton.executable),
        repository=repository.path,
        address=address,
        release=launch_release(served, spec),
        shm_prefix=prefix,
        core_models=tuple(model.name for model in served.core_models),
        pool_bytes=spec.gpu0_pool_bytes,
        exit_timeout=spec.exit_timeout,
        gpus=spec.gpus,
        oversubscribe=spec.oversubscribe,
        arguments=triton_arguments(spec, server_name(repository, spec)),
    )


def in_this_python(setup: Setup, triton: Triton, store: Store, python: Path | None = None) -> Setup:
    """Return the setup for ranks whose models run in the Python that runs trtserve, as the embedded executor's do.

    `python` is the folder of another `python3`.
    """
    return replace(setup, backends=backend_folder(triton, store), bound=False, environment=stub_environment(python))


def triton_arguments(spec: ServerSpec, name: str) -> tuple[str, ...]:
    """Return the flags of tritonserver that follow from the options of the server `name`, those of the user last."""
    return (*protection_of(spec), *tracing_of(spec, name), *spec.extra_arguments)


def tracing_of(spec: ServerSpec, name: str) -> tuple[str, ...]:
    """Return the flags that send traces, with `name` as the service."""
    if spec.trace_to is None:
        return ()
    settings = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"rate={spec.trace_every}",
        f"opentelemetry,url={spec.trace_to}",
        f"opentelemetry,resource=service.name={name}",
    )
    return tuple(f"--trace-config={setting}" for setting in settings)


def protection_of(spec: ServerSpec) -> tuple[str, ...]:
    """Return the flags of tritonserver that close and protect what the options say."""
    key = spec.api_key if spec.api_key_file is None else read_key(spec.api_key_file)
    tls = None
    if spec.tls_certificate is not None and spec.tls_key is not None:
        tls = (spec.tls_certificate.expanduser().absolute(), spec.tls_key.expanduser().absolute())
    return protection_arguments(spec.open_api, token=None if key is None else grpc_token(key), tls=tls)


def first_address(spec: ServerSpec, host: str | None = None) -> Address:
    """Return the address and ports of the options. Raises UsageError for a host without an IPv4 address."""
    return Address(
        host=ipv4_address(spec.host if host is None else host),
        http_port=spec.http_port,
        grpc_port=spec.grpc_port,
        metrics_port=spec.metrics_port,
    )


def under_mpirun(
    setup: Setup, mode: str, groups: tuple[tuple[str, ...], ...], environment: Mapping[str, str] | None = None
) -> Launch:
    """Return one MPI job of all `groups`: `-n 1 GROUP :` for each, with a colon after the last one, as upstream has it.

    --tag-output puts the rank in front of every line, so that one log tells the ranks apart.
    """
    switches = (*(("--oversubscribe",) if setup.oversubscribe else ()), *(() if setup.bound else ("--bind-to", "none")))
    prefix = (setup.mpirun, "--allow-run-as-root", *switches)
    ranks = (part for group in groups for part in ("-n", "1", *group, ":"))
    return _launch(setup, mode, (*prefix, "--tag-output", *ranks), groups, environment or {})


def without_mpi(setup: Setup, mode: str, group: tuple[str, ...]) -> Launch:
    """Return a launch of one process without mpirun."""
    return _launch(setup, mode, group, (group,), {})


def _launch(
    setup: Setup, mode: str, argv: tuple[str, ...], groups: tuple[tuple[str, ...], ...], own: Mapping[str, str]
) -> Launch:
    devices = {VISIBLE_DEVICES: ",".join(map(str, setup.gpus))} if setup.gpus else {}
    environment = {**setup.environment, **devices, **own}
    return Launch(
        mode=mode,
        command=Command(argv=argv, env=environment, cwd=setup.repository.absolute()),
        groups=groups,
        shm_prefixes=tuple(setup.rank_prefix(rank) for rank in range(len(groups))),
        environment=environment,
    )
