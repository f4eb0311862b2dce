"""What `start` will do: which processes with which commands and ports, known before anything runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.errors import RepositoryError, UsageError
from trtserve.executor.interface.bindings import PACKAGE, BindingsEnvironment, bindings_environment, imports_bindings
from trtserve.host.gpus import split_gpus, visible_devices
from trtserve.host.ports import free_ports, ipv4_address, is_free, next_free
from trtserve.nvidia.containers import (
    SHM_GIB,
    ContainerRun,
    container_name,
    image_of,
    in_container,
    vllm_image_of,
    with_targets,
)
from trtserve.repository.check import require_sound
from trtserve.repository.served import ServedRepository, inspect_repository
from trtserve.server.engine_fit import gpu_triton, require_world_size
from trtserve.server.front import GatewayPlan, plan_front, plan_gateway, require_protected
from trtserve.server.launch.commands import (
    PACKAGE_FOLDER,
    Launch,
    LaunchSetup,
    first_address,
    in_this_python,
    in_vllm_image,
    server_setup,
)
from trtserve.server.launch.modes import Single, launch_mode
from trtserve.server.rank_processes import mpirun_program, needs_oversubscription
from trtserve.server.repositories import engine_paths, hub_cache
from trtserve.server.state import log_file, server_name
from trtserve.server.triton.installation import CONTAINER_TRITON, Triton, find_triton
from trtserve.server.triton.tritonserver import LOOPBACK, Address, unique_prefix
from trtserve.specs import ServerSpec
from trtserve.store import Store

_LARGEST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class InstancePlan:
    address: Address  # where it listens
    log: Path
    launch: Launch
    container: ContainerRun | None = None  # the container that the launch runs in
    gateway: GatewayPlan | None = None  # what answers HTTP clients, or None when Triton does so itself


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """Everything that a start runs: made once by `plan_server`, run by `start_server` or `serve_foreground`."""

    name: str
    repository: ModelRepository
    spec: ServerSpec
    served: ServedRepository  # what the files of the repository say
    triton: Triton
    shm_prefix: str  # start of the names of all shared-memory regions
    instances: tuple[InstancePlan, ...]
    proxy: GatewayPlan | None = None  # the gateway in front of several instances
    bindings: BindingsEnvironment | None = None
    """The Python environment of models that import TensorRT-LLM's bindings."""
    store: Store

    @property
    def mode(self) -> str:
        return self.instances[0].launch.mode

    @property
    def watched_models(self) -> tuple[str, ...]:
        """Models whose Python stubs are processes of this machine, each as often as it has stubs.

        What runs in a container, or on other ranks, is not looked at from here.
        """
        watched = self.mode == Single.name and not any(instance.container for instance in self.instances)
        models = sorted(self.served.python_models) if watched else ()
        return tuple(name for name in models for _ in range(self.served.instances.get(name, 1)))

    @property
    def runs_ranks(self) -> bool:
        """Whether each rank of the engine is a process of its own, with or without a GPU."""
        return self.served.runtime is not None and not self.served.merges_ranks

    @property
    def processes(self) -> int:
        """Processes that are started for all instances; their stubs and workers are not counted."""
        return sum(instance.launch.ranks for instance in self.instances)

    @property
    def uses_mpirun(self) -> bool:
        """Whether this machine's mpirun starts the ranks; a container has its own."""
        return Path(self.instances[0].launch.command.argv[0]).name == "mpirun"


def plan_server(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    served: ServedRepository | None = None,
    store: Store | None = None,
    on_this_machine: bool = True,
) -> ServerPlan:
    """Read the repository and compose the commands; nothing is written and nothing started.

    Raises RepositoryError, MissingDependencyError, UsageError or UnsupportedModelError if it cannot be started.
    The commands for another machine need not work here: without a tritonserver that fits, they are those for NVIDIA's
    container. `served` describes a repository that does not exist yet.
    """
    store = store or Store()
    name = server_name(repository, spec)
    if served is None:
        served = inspect_repository(repository)
    mode = launch_mode(served, spec)
    alone = isinstance(mode, Single)
    try:
        mode.check(served, spec)
    except UsageError:
        if alone:
            require_sound(repository)  # a repository of the LLM API without its model.yaml looks like any Python model
        raise
    ranks = mode.ranks(served, spec)
    require_world_size(served, spec, repository, ranks)
    here = (alone or served.embedded) and spec.container is None
    bindings = _bindings(repository.path, spec, store, embedded=here)

    first, prefix = first_address(spec), unique_prefix(name)
    require_protected(spec, first.host)
    addresses = _addresses(first, spec)
    if here:
        triton = find_triton(served.backends | {"python"})
    else:
        triton = CONTAINER_TRITON if spec.container else gpu_triton(served, on_this_machine=on_this_machine)
    common = server_setup(name, repository.path, served, spec, triton, addresses[0], prefix)
    if here:
        common = in_this_python(common, triton, store, None if bindings is None else bindings.programs)
    elif served.starts_workers:
        common = in_vllm_image(common)
    several = not alone or spec.instances > 1
    world = 0 if alone and not served.starts_workers else served.world_size  # GPUs of an instance
    setups = _instance_setups(common, world, spec, addresses, ranks * spec.instances) if several else [common]
    instances = []
    for number, setup in enumerate(setups, start=1):
        launch = mode.compose(setup, served, spec)
        container = None if spec.container is None else _container(name, spec.container, spec, served, launch, setup)
        if container is not None:
            launch = replace(launch, command=in_container(launch.command, container))
        gateway = None
        if not spec.raw_http:
            gateway = plan_gateway(name, setup.address, number, spec, served, repository.path, store)
        log = log_file(name, store, number)
        instances.append(
            InstancePlan(address=setup.address, log=log, launch=launch, container=container, gateway=gateway)
        )
    return ServerPlan(
        name=name,
        repository=repository,
        spec=spec,
        served=served,
        triton=triton,
        shm_prefix=prefix,
        instances=tuple(instances),
        proxy=plan_front(name, addresses, spec, served, repository.path, store),
        bindings=bindings,
        store=store,
    )


def _bindings(repository: Path, spec: ServerSpec, store: Store, *, embedded: bool) -> BindingsEnvironment | None:
    """Return the environment of --bindings. Raises UsageError for engines on GPUs, RepositoryError where it lacks."""
    if spec.bindings is not None and not embedded:
        raise UsageError(
            "--bindings runs models on the embedded executor; this repository is served by TensorRT-LLM itself.",
            hint="Leave --bindings out.",
        )
    if spec.bindings is not None:
        return bindings_environment(spec.bindings, store, option="--bindings")
    programs = sorted(repository.glob("*/[0-9]*/model.py")) if embedded and find_spec(PACKAGE) is None else []
    program = next((each for each in programs if imports_bindings(each) and not (each.parent / PACKAGE).exists()), None)
    if program is not None:
        raise RepositoryError(
            f"{program} imports tensorrt_llm, which is not installed.",
            hint="Serve it on the embedded executor: trtserve start --bindings RELEASE, such as --bindings 0.16",
        )
    return None


def _addresses(first: Address, spec: ServerSpec) -> list[Address]:
    """Return the address of each instance, with a gateway in front of its HTTP service unless that is to be raw."""
    addresses = instance_addresses(
        first, spec.instances, lambda port: spec.auto_ports and not is_free(first.host, port)
    )
    if spec.raw_http:
        return addresses
    inner, secret = free_ports(LOOPBACK, len(addresses)), secrets.token_hex(16)
    return [
        replace(address, inner_http_port=port, inner_secret=secret)
        for address, port in zip(addresses, inner, strict=True)
    ]


def on_free_ports(plan: ServerPlan) -> ServerPlan:
    """Return the plan with ports that are free now, for a start that lost one of its ports to another program.

    Without --auto-ports only the ports behind the gateways change.
    """
    spec = with_free_ports(plan.spec) if plan.spec.auto_ports else plan.spec
    return plan_server(plan.repository, spec, served=plan.served, store=plan.store)


def _instance_setups(
    common: LaunchSetup, world: int, spec: ServerSpec, addresses: Sequence[Address], ranks: int
) -> list[LaunchSetup]:
    """Return the setup of each instance, with its own GPUs, ports and shared memory; `ranks` counts all instances'."""
    count = spec.instances
    if spec.multi_model:
        gpus = [spec.gpus]
    else:
        chosen = spec.gpus
        if not chosen and count > 1:
            # Several instances divide the GPUs that CUDA_VISIBLE_DEVICES shows; one instance inherits the variable.
            # Where there are too few none are named: the check of devices then refuses the start.
            shown = visible_devices() or ()
            chosen = shown[: world * count] if len(shown) >= world * count else ()
        gpus = split_gpus(chosen, instances=count, ranks=world)
    common = replace(
        common,
        oversubscribe=spec.oversubscribe or needs_oversubscription(ranks),
        mpirun="mpirun" if spec.container else mpirun_program(),
    )
    return [
        replace(
            common,
            address=address,
            gpus=devices,
            shm_prefix=common.shm_prefix if number == 1 else f"{common.shm_prefix}i{number}_",
        )
        for number, (address, devices) in enumerate(zip(addresses, gpus, strict=True), start=1)
    ]


def _container(
    name: str, image: str, spec: ServerSpec, served: ServedRepository, launch: Launch, setup: LaunchSetup
) -> ContainerRun:
    """Return the container of one launch; it sees the repository, and files outside it that its configurations name."""
    hub = hub_cache() if served.uses_llmapi else None
    package = (PACKAGE_FOLDER,) if served.starts_workers else ()
    protection = (path.expanduser() for path in (spec.tls_certificate, spec.tls_key) if path is not None)
    return ContainerRun(
        image=vllm_image_of(image) if served.starts_workers else image_of(image),
        name=container_name(name),
        read_only=with_targets((setup.repository, *engine_paths(setup.repository, served), *package, *protection)),
        writable=() if hub is None else (hub,),
        environment={} if hub is None else {"HF_HOME": str(hub)},
        flags=spec.container_flags,
        shm_gib=max(SHM_GIB, launch.ranks, served.world_size if served.starts_workers else 0),
    )


def with_free_ports(spec: ServerSpec) -> ServerSpec:
    """Return the options with each taken port replaced by the next free one, those of further instances included."""
    host, taken = ipv4_address(spec.host), list[int]()
    for port in (spec.http_port, spec.grpc_port, spec.metrics_port):
        taken.append(next_free(host, port, taken=taken))
    proxy = free_pair(host, spec.proxy_port, taken) if spec.instances > 1 else spec.proxy_port
    changed = replace(spec, http_port=taken[0], grpc_port=taken[1], metrics_port=taken[2], proxy_port=proxy)
    return replace(changed, auto_ports=True)


def instance_addresses(first: Address, count: int, is_taken: Callable[[int], bool] = lambda _: False) -> list[Address]:
    """Return the addresses of `count` instances: the first as given, each further port the next unused number.

    8000/8001/8002 is followed by 8003/8004/8005. Upstream's recipe (8002 for HTTP of the second instance) would need
    another metrics port for the first. `is_taken` reports ports that other programs use.
    """
    used = set(first.ports.values())
    found = [first]
    for _ in range(count - 1):
        ports = []
        for previous in (found[-1].http_port, found[-1].grpc_port, found[-1].metrics_port):
            candidates = (port for port in range(previous + 1, _LARGEST_PORT + 1) if port not in used)
            port = next((port for port in candidates if not is_taken(port)), None)
            if port is None:
                raise UsageError(
                    f"No port is left above {previous} for another instance.", hint="Choose smaller ports."
                )
            used.add(port)
            ports.append(port)
        found.append(Address(host=first.host, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2]))
    return found


def free_pair(host: str, first: int, taken: Collection[int]) -> int:
    """Return the first port from `first` on that is free, as is the next one, with neither in `taken`."""
    for port in range(first, min(first + 100, _LARGEST_PORT)):
        if not {port, port + 1} & set(taken) and is_free(host, port) and is_free(host, port + 1):
            return port
    raise UsageError(f"{host} has no two free neighbouring ports from {first} on.", hint="Choose --proxy-port.")
