"""What `start` would do: which processes with which commands, known before anything runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.check.repository import require_sound
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.launch import Launch, Mode, Setup, leader, llmapi, orchestrator
from trtserve.launch.container import SHM_GIB, Box, container_name, image_of, in_container, with_targets
from trtserve.launch.gpus import count_gpus, split_gpus, visible_devices
from trtserve.launch.instances import instance_addresses
from trtserve.ports import ipv4_address, is_free, next_free
from trtserve.process import Command
from trtserve.servers import log_file
from trtserve.specs import ServerSpec
from trtserve.start.mentions import hub_cache, named_paths
from trtserve.start.mpi import mpirun_program, needs_oversubscription
from trtserve.start.proxy import Proxy, free_pair, plan_proxy
from trtserve.start.world import launch_release, pool_of, ranks_of, require_engine_mode, require_world_size
from trtserve.store import Store
from trtserve.triton.preflight import Served, inspect_repository, require_loadable
from trtserve.triton.server import (
    CONTAINER_TRITON,
    Address,
    Triton,
    backend_folder,
    find_triton,
    server_command,
    unique_prefix,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Runtimes that this process's own Triton and Python serve; a repository without an engine is a plain Triton model.
EMBEDDED = (None, "openvino")


@dataclass(frozen=True, kw_only=True)
class InstancePlan:
    """One launch of the server: where it listens, where its output goes, what is run, and in which container."""

    address: Address
    log: Path
    launch: Launch
    box: Box | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `start` would do: the server's name, what it serves, and every command of its instances."""

    name: str
    repository: Path
    served: Served
    triton: Triton
    shm_prefix: str
    instances: tuple[InstancePlan, ...]
    proxy: Proxy | None = None

    @property
    def mode(self) -> Mode:
        """How the processes of each instance belong together."""
        return self.instances[0].launch.mode

    @property
    def address(self) -> Address:
        """Where the first instance listens."""
        return self.instances[0].address

    @property
    def log(self) -> Path:
        """Log of the first instance."""
        return self.instances[0].log

    @property
    def command(self) -> Command:
        """Command of the first instance."""
        return self.instances[0].launch.command

    @property
    def needs_gpus(self) -> bool:
        """Whether every rank needs a GPU of its own."""
        return self.served.runtime not in EMBEDDED

    @property
    def processes(self) -> int:
        """Processes that are started, all instances together; their stubs and workers are not counted."""
        return sum(instance.launch.ranks for instance in self.instances)


def plan_server(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    served: Served | None = None,
    store: Store | None = None,
    elsewhere: bool = False,
) -> Plan:
    """Read the repository and compose the commands; nothing is written and nothing started.

    RepositoryError, MissingDependencyError, UsageError and UnsupportedModelError say what stands in the way.
    With `elsewhere` the commands need not work here: where no tritonserver fits, they are those for NVIDIA's container.
    `served` is what a repository that is not made yet will hold.
    """
    store = store or Store()
    name = server_name(repository, spec)
    if served is None:
        served = inspect_repository(repository)
        require_loadable(repository)
    first = Address(
        host=ipv4_address(spec.host), http_port=spec.http_port, grpc_port=spec.grpc_port, metrics_port=spec.metrics_port
    )
    addresses = instance_addresses(
        first, spec.instances, lambda port: spec.auto_ports and not is_free(first.host, port)
    )
    prefix = unique_prefix(name)
    if served.runtime in EMBEDDED:
        triton = find_triton(served.backends | {"python"})
        launches = [_embedded(triton, repository, first, spec, prefix, store)]
    else:
        triton = CONTAINER_TRITON if spec.container else gpu_triton(served, elsewhere=elsewhere)
        launches = _gpu_launches(triton, repository, served, addresses, spec, prefix)
    boxes = [_box(repository, served, spec, launch) for launch in launches]
    return Plan(
        name=name,
        repository=repository.path.absolute(),
        served=served,
        triton=triton,
        shm_prefix=prefix,
        instances=tuple(
            InstancePlan(address=address, log=log_file(name, store, number), launch=_boxed(launch, box), box=box)
            for number, (address, launch, box) in enumerate(zip(addresses, launches, boxes, strict=True), start=1)
        ),
        proxy=plan_proxy(name, addresses, spec, store) if spec.instances > 1 else None,
    )


def with_free_ports(spec: ServerSpec) -> ServerSpec:
    """The spec with each taken port replaced by the next free one, for further instances and their proxy too."""
    host, taken = ipv4_address(spec.host), list[int]()
    for port in (spec.http_port, spec.grpc_port, spec.metrics_port):
        taken.append(next_free(host, port, taken=taken))
    proxy = free_pair(host, spec.proxy_port, taken) if spec.instances > 1 else spec.proxy_port
    changed = replace(spec, http_port=taken[0], grpc_port=taken[1], metrics_port=taken[2], proxy_port=proxy)
    return replace(changed, auto_ports=True)


def _embedded(
    triton: Triton, repository: ModelRepository, address: Address, spec: ServerSpec, prefix: str, store: Store
) -> Launch:
    """One process, whatever the checkpoint's shards: the embedded executor merges them."""
    wanted = {"--instances": spec.instances > 1, "--multi-model": spec.multi_model, "--gpus": bool(spec.gpus)}
    wanted["--container"] = spec.container is not None
    for flag, given in wanted.items():
        if given:
            # One of the LLM API without its model.yaml looks like any Python model.
            require_sound(repository)
            raise UsageError(
                f"{flag} is for engines on GPUs; this repository is served by one process on the CPU.",
                hint=f"Leave {flag} out.",
            )
    command = server_command(
        triton,
        repository.path,
        address,
        backends=backend_folder(triton, store),
        shm_prefix=prefix,
        extra_arguments=spec.extra_arguments,
    )
    return Launch(mode="single", command=command, groups=(command.argv,), shm_prefixes=(prefix,))


def _box(repository: ModelRepository, served: Served, spec: ServerSpec, launch: Launch) -> Box | None:
    """The container of one launch: it sees the repository, and what its configurations name outside of it."""
    if spec.container is None:
        return None
    outside = named_paths(repository.path) + tuple(core.engine for core in served.core_models if core.engine)
    hub = hub_cache() if served.runtime == "llmapi" else None
    return Box(
        image=image_of(spec.container),
        name=container_name(repository.name if spec.name is None else spec.name),
        read_only=with_targets((repository.path, *outside)),
        writable=() if hub is None else (hub,),
        environment={} if hub is None else {"HF_HOME": str(hub)},
        flags=spec.container_flags,
        shm_gib=max(SHM_GIB, launch.ranks),
    )


def _boxed(launch: Launch, box: Box | None) -> Launch:
    return launch if box is None else replace(launch, command=in_container(launch.command, box))


def gpu_triton(served: Served, *, elsewhere: bool) -> Triton:
    """The tritonserver here that has the backends; `elsewhere`: NVIDIA's container's where there is none."""
    try:
        return find_triton(served.backends | {"python"}, system_first=True)
    except MissingDependencyError:
        if not elsewhere:
            raise
        return CONTAINER_TRITON


def _chosen(spec: ServerSpec, wanted: int) -> tuple[int, ...]:
    """--gpus; without it the first that $CUDA_VISIBLE_DEVICES shows, where several instances divide them.

    One instance inherits the variable. Where too few are shown, none are named: the start is refused then.
    """
    if spec.gpus or spec.instances == 1:
        return spec.gpus
    shown = visible_devices() or ()
    return shown[:wanted] if len(shown) >= wanted else ()


def _gpu_launches(
    triton: Triton,
    repository: ModelRepository,
    served: Served,
    addresses: Sequence[Address],
    spec: ServerSpec,
    prefix: str,
) -> list[Launch]:
    require_engine_mode(served, spec)
    require_world_size(served, spec, repository)
    ranks = ranks_of(served, spec)
    common = server_setup(triton, repository, served, addresses[0], spec, prefix)
    world, count = served.world_size, spec.instances
    gpus = [spec.gpus] if spec.multi_model else split_gpus(_chosen(spec, world * count), instances=count, ranks=world)
    common = replace(
        common,
        oversubscribe=spec.oversubscribe or needs_oversubscription(ranks * spec.instances),
        mpirun="mpirun" if spec.container else mpirun_program(),
    )
    setups = [
        replace(common, address=address, gpus=devices, shm_prefix=prefix if number == 1 else f"{prefix}i{number}_")
        for number, (address, devices) in enumerate(zip(addresses, gpus, strict=True), start=1)
    ]
    return [_gpu_launch(setup, served, spec) for setup in setups]


def server_setup(
    triton: Triton, repository: ModelRepository, served: Served, address: Address, spec: ServerSpec, prefix: str
) -> Setup:
    """What the launches of a server have in common, on this machine or another one."""
    return Setup(
        executable=str(triton.executable),
        repository=repository.path,
        address=address,
        release=launch_release(served, spec),
        shm_prefix=prefix,
        core_models=tuple(model.name for model in served.core_models),
        pool_bytes=spec.gpu0_pool_bytes,
        exit_timeout=spec.exit_timeout,
        oversubscribe=spec.oversubscribe,
        arguments=spec.extra_arguments,
    )


def server_name(repository: ModelRepository, spec: ServerSpec) -> str:
    """What the server is called; UsageError for what cannot be part of file names."""
    name = repository.name if spec.name is None else spec.name
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a server.", hint="Use letters, digits, '.', '_' and '-': --name NAME")
    return name


def _gpu_launch(setup: Setup, served: Served, spec: ServerSpec) -> Launch:
    if spec.multi_model:
        gpus = len(spec.gpus) or count_gpus()
        return orchestrator(setup, served.core_models, spawn=spec.spawn_processes, gpus=gpus)
    if served.runtime == "llmapi":
        return llmapi(setup, pool_of(served))
    return leader(setup, served.world_size)
