"""What `start` checks before it launches a server, and what it tells the user about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from trtserve.errors import PortInUseError, ServerStartError, TrtserveError, counted
from trtserve.host.gpus import list_gpus
from trtserve.host.machine import MINIMUM_SHARED_MEMORY, differences
from trtserve.host.ports import is_free, owner
from trtserve.nvidia.containers import known_container, require_docker
from trtserve.nvidia.releases.triton import EMBEDDED_TAG, known_faults
from trtserve.process import ProcessId, arguments
from trtserve.progress import Progress
from trtserve.repository.check.files import require_intact
from trtserve.server.doctor.examination import require_machine
from trtserve.server.doctor.findings import raise_failed
from trtserve.server.doctor.system import check_shared_memory
from trtserve.server.engine_fit import require_fitting_engine, require_release
from trtserve.server.front import ProxyPlan, is_loopback
from trtserve.server.gpu_checks import require_devices, require_gpu_memory, require_mpirun, require_workers
from trtserve.server.launch.devices import EngineNodes, fit_engines
from trtserve.server.memory import require_servable
from trtserve.server.plan import ServerPlan
from trtserve.server.repositories import chosen_by, require_sound_files
from trtserve.server.shutdown import end_server
from trtserve.server.state import list_servers, recorded_server, transaction_policy
from trtserve.server.triton.installation import require_stub_path
from trtserve.specs import ServerSpec
from trtserve.store import Store


def refuse_running(plan: ServerPlan) -> None:
    """Raise ServerStartError if a server of the same name runs. Remove the remains of a dead one."""
    server = recorded_server(plan.name, plan.store)
    if server is None:
        return
    myself = ProcessId.of(os.getpid())
    if myself is not None and server.supervisor is not None and server.supervisor.matches(myself):
        return  # this process starts it again, and has ended what was left of it
    if server.alive():
        repository = chosen_by(plan.repository.path.absolute(), plan.store)
        raise ServerStartError(
            f"The server {plan.name} is already running (pid {server.instances[0].process.pid}, HTTP port "
            f"{server.address.http_port}).",
            hint=f"Stop it with `trtserve stop {plan.name}`, or start a second one: trtserve start {repository} "
            "--name OTHER --auto-ports",
        )
    end_server(server, plan.store)


def require_ports(plan: ServerPlan) -> None:
    """Raise PortInUseError with every port that is taken, and its owner.

    Triton itself loads all models first, and then names only the first taken port. The ports of a proxy that is not
    installed need not be free.
    """
    several = len(plan.instances) > 1
    wanted = [
        (instance.address.host, port, flag, f"{flag} {port}{f' of instance {number}' if several else ''}")
        for number, instance in enumerate(plan.instances, start=1)
        for flag, port in instance.address.ports.items()
    ]
    if plan.proxy is not None and plan.proxy.executable is not None:
        host, http_port, grpc_port = plan.proxy.host, plan.proxy.http_port, plan.proxy.grpc_port
        wanted.append((host, http_port, "--proxy-port", f"--proxy-port {http_port}"))
        wanted.append((host, grpc_port, "--proxy-port", f"--proxy-port (for gRPC) {grpc_port}"))
    taken = [(flag, text, port) for host, port, flag, text in wanted if not is_free(host, port)]
    if taken:
        others = " ".join(f"{flag} PORT" for flag in dict.fromkeys(flag for flag, _, _ in taken))
        raise PortInUseError(
            "; ".join(f"{text} is taken by {_owner(port, plan.store)}" for _, text, port in taken) + ".",
            hint=f"Use --auto-ports, or choose others: trtserve start {others}",
        )


def check_before_launch(plan: ServerPlan, progress: Progress) -> Sequence[EngineNodes]:
    """Run all checks, cheapest first, and announce what will be served. Raises the first error.

    Returns the engines whose config.json must state the GPUs of this machine.
    """
    repository = plan.repository.path.absolute()
    require_sound_files(plan.repository, plan.spec, progress)
    if plan.spec.verify:
        require_intact(repository, [core.engine for core in plan.served.core_models], progress)
    engines = fit_engines(repository, plan.served.core_models if plan.needs_gpus else (), progress)
    announce(plan, progress)
    require_servable(plan.served, plan.name, progress)
    require_mpirun(plan)
    if plan.needs_gpus:
        require_devices(plan)
        require_gpu_memory(plan)
        require_workers(plan, progress)
        require_fitting_engine(plan.served, plan.spec, progress, repository=repository, store=plan.store)
    require_environment(plan, progress)
    return engines


def require_environment(plan: ServerPlan, progress: Progress) -> None:
    """Run the checks of `doctor` that this launch needs.

    These are all for the wheel's Triton, docker for a container, else enough shared memory.
    """
    require_stub_path(plan.repository.path.absolute())
    containers = [instance.container for instance in plan.instances if instance.container is not None]
    if containers:
        require_docker(containers[0])
    elif plan.triton.package is not None:
        require_machine(plan.store, progress=progress)
    else:
        raise_failed([check_shared_memory(least=plan.processes * MINIMUM_SHARED_MEMORY)])


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
    _warn_if_refused(progress, lambda: require_ports(plan), lambda: require_servable(plan.served, plan.name, progress))
    if plan.needs_gpus:
        fit_engines(repository, plan.served.core_models, progress)
        require_release(plan.served, plan.spec, progress, repository=repository)
        announce_oversubscription(plan, progress)
        if list_gpus():  # a machine without GPUs will certainly not serve
            _warn_if_refused(
                progress,
                lambda: require_mpirun(plan),
                lambda: require_devices(plan),
                lambda: require_gpu_memory(plan),
                lambda: require_workers(plan, progress),
            )
    if plan.proxy is not None:
        progress.step(f"A start writes the reverse proxy's configuration: {plan.proxy.file}")
        announce_proxy(plan.proxy, progress)


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
    """Describe what is served, and how."""
    served = plan.served
    policy, other = transaction_policy(served.streaming), transaction_policy(not served.streaming)
    progress.step(f"{plan.name}: serving {served.model}, transaction policy {policy}")
    progress.step(f"(to switch: `trtserve import` or `repo` with --{other})")
    progress.step(f"Repository: {plan.repository.path.absolute()}")
    if served.precision:
        progress.step("Engine: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in served.precision.items()))
    if plan.runs_ranks:
        each = counted(plan.instances[0].launch.ranks, "rank")
        several = f"{len(plan.instances)} instances of " if len(plan.instances) > 1 else ""
        progress.step(f"Mode: {plan.mode}, {several}{each}")
        announce_oversubscription(plan, progress)
    else:
        ranks = max(served.world_size, plan.spec.world_size or 1)
        if ranks > 1:
            progress.step(f"World size {ranks}: this runtime merges the shards, so one process serves them all.")
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
        known = None if spec.container is None else known_container(spec.container)
        tag = known.tag if known is not None else EMBEDDED_TAG if embedded else None
        faults = None if tag is None else known_faults(tag)
        no_key = "" if spec.api_key or spec.api_key_file else ", and need no API key"
        plain = "" if spec.tls_certificate else ". Nothing is encrypted"
        warnings.append(f"Other machines can reach {spec.host}{no_key}{plain}.{f' {faults}' if faults else ''}")
    return warnings


def announce_commands(plan: ServerPlan, progress: Progress) -> None:
    """Show the commands of the ranks, and that of the reverse proxy."""
    if plan.runs_ranks:
        for instance in plan.instances:
            progress.step(f"Command: {instance.launch.command}")
    if plan.proxy is not None:
        announce_proxy(plan.proxy, progress)


def announce_proxy(proxy: ProxyPlan, progress: Progress) -> None:
    """Show the command of the reverse proxy, or how to install and run it."""
    if proxy.executable is not None:
        progress.step(f"Reverse proxy: {proxy.command}")
        return
    progress.warn("nginx is not installed, so there is no common endpoint; each instance has its own ports.")
    progress.step(f"Install it (apt-get install nginx-light) and run: {proxy.command}")


def announce_oversubscription(plan: ServerPlan, progress: Progress) -> None:
    """Say that mpirun starts more ranks than there are cores, unless the user asked for it."""
    if "--oversubscribe" in plan.instances[0].launch.command.argv and not plan.spec.oversubscribe:
        progress.step("There are more ranks than cores, so mpirun gets --oversubscribe.")
