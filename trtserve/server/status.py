"""How a server is: what has ended, which models do not answer, and the figures that explain its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.client import metrics
from trtserve.client.endpoint import spoken_at
from trtserve.client.metrics import (
    GENERAL,
    TOKENS,
    CoreMetrics,
    GpuMetrics,
    ModelMetrics,
    core_metrics,
    gpu_metrics,
    model_metrics,
    parse,
    read_heartbeats,
)
from trtserve.errors import ServerDiedError, ServerUnreachableError, TrtserveError
from trtserve.gateway.settings import GatewaySettings
from trtserve.gateway.standstill import gateway_silence
from trtserve.host.machine import differences
from trtserve.process import ProcessId, exit_code, how_it_ended, since_boot, wait_gone
from trtserve.process.halts import HALTED
from trtserve.repository.profiles import CORE
from trtserve.repository.served import ServedRepository, inspect_repository
from trtserve.server.discovery import find_server
from trtserve.server.state import Instance, Server, State, is_stopping, last_record, recorded_servers, run_folder
from trtserve.server.triton import server_log
from trtserve.server.triton.server_log import indented, last_lines
from trtserve.server.triton.tritonserver import Address, client_host, is_ready, metrics_page, model_states
from trtserve.specs.server import METRICS_PORT
from trtserve.store import Store

_GATEWAY_SILENT = 4.0
_EXPLANATION = 5.0  # mpirun reports within this time for which rank it ended the job
# Name of each rate → the counter of the metrics page whose growth per second it is.
_RATES = {
    "generated_tokens": (TOKENS, "generated"),
    "prompt_tokens": (TOKENS, "prompt"),
    "iterations": (GENERAL, "iteration_counter"),
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A part of a server that will not work again by itself."""

    what: str  # a sentence without its subject's name and full stop
    log: Path
    instance: Instance | None = None
    """The instance whose log explains it; None for a gateway, which has a log of its own."""
    ranks: Sequence[int] = ()  # its ranks that had ended by then
    explained: bool = False  # whether `what` says why, and no log has to
    standing: Sequence[ProcessId] = ()  # its processes that live, but would not end in order either


def ended(server: Server, store: Store) -> Ended | None:
    """Return the first part of a server that has ended, or None while all of them work."""
    failure = _failed_executor(server, store)
    for instance in server.instances:
        if what := _ended_in(instance):
            if failure is not None:  # the process of an executor that has stopped ends soon after
                return failure
            return Ended(what=what, log=instance.log, instance=instance, ranks=instance.dead_ranks)
    for gateway in server.gateways:
        if gateway.dead:
            how = how_it_ended(exit_code(gateway.process))
            return Ended(what=f"its gateway, which answers HTTP requests, {how}", log=gateway.log)
    return failure


def _failed_executor(server: Server, store: Store) -> Ended | None:
    for heartbeat in read_heartbeats(run_folder(server.name, store)):
        if heartbeat.failure is not None:
            instance = server.instances[0]
            what = f"the executor of {heartbeat.model} has stopped working: {heartbeat.failure}"
            return Ended(what=what, log=instance.log, instance=instance, ranks=instance.dead_ranks, explained=True)
    return None


def _ended_in(instance: Instance) -> str:
    if not instance.process.alive():
        started = "mpirun" if instance.ranks else "tritonserver"
        return f"{started} {how_it_ended(exit_code(instance.process))} unexpectedly"
    if ranks := instance.dead_ranks:
        return f"rank {', '.join(map(str, ranks))} of {len(instance.ranks)} has ended"
    if stubs := instance.dead_stubs:
        models = ", ".join(sorted({stub.model for stub in stubs if stub.model})) or "unknown models"
        return f"{len(stubs)} of {len(instance.stubs)} Python stubs have ended ({models}); requests to them fail"
    return ""


def unready_models(server: Server, store: Store) -> dict[str, str]:
    """Return what does not answer although its process lives → why. The name of the server stands for all models.

    Triton 2.51 calls a model ready as long as it is loaded, whatever has become of its process. So executors are judged
    by their heartbeats.
    """
    found = {each.model: each.ailment for each in read_heartbeats(run_folder(server.name, store)) if each.ailment}
    for instance in server.instances:
        if server.kept is None and not is_ready(instance.address):
            found[server.name] = f"its HTTP port {instance.address.http_port} does not report it as ready"
    for gateway in server.gateways:
        silence = gateway_silence(run_folder(server.name, store), gateway.process.pid)
        if silence is not None and silence > _GATEWAY_SILENT:
            found[server.name] = f"its gateway, which answers HTTP requests, has answered none for {silence:.0f} s"
    halted = [f"{what} (pid {each.pid}) {HALTED}" for each, what in named_parts(server).items() if each.halted()]
    if halted:
        found[server.name] = "; ".join((*filter(None, [found.get(server.name)]), *halted))
    return found


def named_parts(server: Server) -> dict[ProcessId, str]:
    """Return the processes that a server cannot do without → what they are, for a sentence."""
    parts: dict[ProcessId, str] = {}
    for instance in server.instances:
        parts[instance.process] = "mpirun" if instance.ranks else "tritonserver"
        parts |= {process: f"rank {rank}" for rank, process in enumerate(instance.ranks)}
        parts |= {
            ProcessId(pid=stub.pid, started=stub.started): f"the Python stub of {stub.model}" for stub in instance.stubs
        }
    parts |= {gateway.process: "its gateway, which answers HTTP requests," for gateway in server.gateways}
    return parts


def died_error(server: Server, end: Ended) -> ServerDiedError:
    """Explain an end by the log. Of an instance with ranks it is the rank that mpirun names: the others follow it."""
    if end.instance is None:
        return ServerDiedError(f"{server.name}: {end.what}. Last lines:\n{last_lines(end.log)}", log=end.log)
    instance, problem = end.instance, end.what
    lines = last_lines(instance.log)
    if instance.ranks and not end.explained:
        wait_gone([instance.process], _EXPLANATION)
    text = server_log.read(instance.log)
    # Ranks in a container do not descend from our process, so only mpirun's own message tells how they ended.
    first = None if end.explained else server_log.first_end(text)
    if end.ranks and first is not None and first.rank not in end.ranks:
        first = None  # mpirun saw nothing wrong with the end of that rank, but with the end of the others afterwards
    if instance.ranks or first is not None:
        rank = first.rank if first is not None else next(iter(end.ranks), 0)
        problem = problem if first is None else f"{first.sentence}, which ends all ranks"
        own = server_log.significant("\n".join(server_log.lines_of(text, rank)))
        lines = indented(own[-5:]) or "  (it wrote nothing)"
    reported = "[ERROR]" in lines or server_log.failures("\n".join(server_log.significant(text)[-5:]))
    killed = not (reported or end.explained) if first is None else first.code < 0
    hint = None
    if killed:
        hint = "No error line, so it was killed: by the kernel for want of memory (`dmesg`), or by someone."
    name = f"{server.name}, HTTP port {instance.address.http_port}" if len(server.instances) > 1 else server.name
    return ServerDiedError(f"{name}: {problem}. Last lines:\n{lines}", hint=hint, log=instance.log)


@dataclass(frozen=True, kw_only=True)
class Status:
    server: Server
    state: State
    reason: str  # why it is not ready; empty while it is ready, and when it was stopped
    log: Path  # log of the part that has failed, else of the first instance
    models: Mapping[str, str] = field(default_factory=dict)  # Triton's state of each model
    uptime: float | None = None  # seconds since it became ready
    requests: Mapping[str, int] = field(default_factory=dict)
    """Requests of the core models: `running` now and `finished` since Triton was started."""
    precision: Mapping[str, str] = field(default_factory=dict)
    kv_blocks: Mapping[str, int] = field(default_factory=dict)
    """KV cache blocks by kind, as the core model counts them."""
    page: bool = False  # whether its HTTP port serves the page with a chat
    key: bool = False  # whether clients must send an API key
    ignored_parameters: tuple[str, ...] = ()  # parameters that the repository sets and that its runtime ignores
    warnings: tuple[str, ...] = ()


def server_state(server: Server, store: Store | None = None) -> tuple[State, str]:
    """Return how a server is now, and why if it is not ready."""
    state, reason, _ = _examined(server, store or Store())
    return state, reason


def _examined(server: Server, store: Store) -> tuple[State, str, Path]:
    log, supervisor = server.instances[0].log, server.supervisor
    if server.state == "stopped":
        return "stopped", "", log
    if server.state == "failed":
        failure = server.failure
        return "failed", "" if failure is None else failure.message, log if failure is None else failure.log or log
    if supervisor is not None and not supervisor.alive():
        return "failed", f"its supervisor (pid {supervisor.pid}) was killed, which ends the server too", log
    if server.state == "starting" and supervisor is not None and server.reason:
        return "starting", server.reason, log
    if not any(instance.process.alive() for instance in server.instances):
        return "failed", "tritonserver has ended without being stopped", log
    if server.state == "draining":
        return "draining", "it is being stopped", log
    if (end := ended(server, store)) is not None:
        return "failed", end.what, end.log
    if server.state == "starting":
        return "starting", "", log
    reason = "; ".join(f"{model}: {why}" for model, why in unready_models(server, store).items())
    return "degraded" if reason else "ready", reason, log


def server_status(name: str | None = None, *, store: Store | None = None) -> list[Status]:
    """Return the status of the server `name`, also of a stopped one, or of all that were not stopped.

    Raises ServerNotFoundError when it has none.
    """
    store = store or Store()
    if name is None:
        return [_status(server, store) for server in recorded_servers(store)]
    return [_status(last_record(name, store) or find_server(name, store=store), store)]


def _status(server: Server, store: Store) -> Status:
    state, reason, log = _examined(server, store)
    served = _served(server)
    alive = server.instances[0].process.alive()
    page = (metrics_page(server.address) if alive else None) or ""
    blocks = metrics.kv_blocks(page, CORE)
    gateway, warnings = server.gateway, []
    if server.supervisor is not None and server.supervisor.halted():
        warnings.append(
            f"its supervisor (pid {server.supervisor.pid}) {HALTED}, so nothing that fails is restarted. "
            f"Let it go on: kill -CONT {server.supervisor.pid}"
        )
    front = None
    if alive and gateway is not None and gateway.settings.is_file():
        front = GatewaySettings.read(gateway.settings)
    if served is not None:
        warnings += [*differences(served.machine), *served.cache_warnings(blocks)]
    return Status(
        server=server,
        state=state,
        reason=reason,
        log=log,
        models=_states(server) if alive else {},
        uptime=None if not alive or server.ready_at is None else since_boot() - server.ready_at,
        requests=_requests(page),
        precision={} if served is None else served.precision,
        kv_blocks=blocks,
        page=front is not None and front.ui,
        key=front is not None and front.key_file is not None,
        ignored_parameters=() if served is None else served.ignored_parameters,
        warnings=tuple(warnings),
    )


def _states(server: Server) -> Mapping[str, str]:
    if server.kept is None:
        return model_states(server.address)
    return {name: "READY" if how == "loaded" else f"UNAVAILABLE {how}" for name, how in server.kept.items()}


def _requests(page: str) -> dict[str, int]:
    cores = metrics.core_metrics(metrics.parse(page))
    if not cores:
        return {}
    running = sum(core.value(metrics.REQUESTS, "active") or 0 for core in cores)
    finished = sum(core.value(metrics.LENGTHS[1], "count") or 0 for core in cores)
    return {"running": int(running), "finished": int(finished)}


def _served(server: Server) -> ServedRepository | None:
    """Return what the repository says now, or None when it was removed, or changed into something unreadable."""
    try:
        return inspect_repository(load_artifact(ModelRepository, server.repository))
    except (TrtserveError, OSError):
        return None


@dataclass(frozen=True, kw_only=True)
class MetricsSource:
    name: str
    address: Address
    server: Server | None = None  # the server behind the port, if `store` has a record of it
    store: Store = field(default_factory=Store)


@dataclass(frozen=True, kw_only=True)
class Reading:
    seconds: float  # monotonic time of the reading
    text: str  # the metrics page as the server wrote it
    core: tuple[CoreMetrics, ...]
    models: tuple[ModelMetrics, ...]
    gpus: tuple[GpuMetrics, ...] = ()
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Core model → name → growth per second since the previous reading.

    A rate is missing when there was no previous reading, and when its counter is absent or was reset.
    """


def find_source(name: str | None = None) -> MetricsSource:
    """Return the running server `name`, or the only one; ServerNotFoundError or ServerAmbiguousError."""
    store = Store()
    server = find_server(name, store=store, hint="Name one of them: trtserve metrics NAME")
    return MetricsSource(name=server.name, address=server.address, server=server, store=store)


def remote_source(host: str, port: int) -> MetricsSource:
    """Return the metrics port of any Triton server."""
    address = Address(host=host, http_port=0, grpc_port=0, metrics_port=port)
    return MetricsSource(name=f"{host}:{port}", address=address)


def read_metrics(source: MetricsSource) -> Reading:
    """Read once.

    Raises ServerDiedError when the server has ended and ServerUnreachableError when the port does not answer.
    """
    text = metrics_page(source.address)
    if text is None:
        raise _no_answer(source)
    samples = parse(text)
    return Reading(
        seconds=time.monotonic(),
        text=text,
        core=tuple(core_metrics(samples)),
        models=tuple(model_metrics(samples)),
        gpus=tuple(gpu_metrics(samples)),
    )


def watch_metrics(
    source: MetricsSource, *, interval: float, count: int | None = None, pause: Callable[[float], None]
) -> Iterator[Reading]:
    """Yield a reading every `interval` seconds, `count` times or for ever; raises what `read_metrics` raises.

    `pause` waits between two readings.
    """
    before: Reading | None = None
    number = 0
    while count is None or number < count:
        if before is not None:
            pause(interval)
        reading = read_metrics(source)
        if before is not None:
            reading.rates.update(rates(before, reading))
        yield reading
        before = reading
        number += 1


def rates(before: Reading, after: Reading) -> dict[str, dict[str, float]]:
    """Return the growth per second of the counters of each core model between two readings."""
    seconds = after.seconds - before.seconds
    earlier = {each.model: each for each in before.core}
    found = {each.model: _growth(earlier[each.model], each) for each in after.core if each.model in earlier}
    return {model: {name: growth / seconds for name, growth in each.items()} for model, each in found.items()}


def _growth(before: CoreMetrics, after: CoreMetrics) -> dict[str, float]:
    grown = {}
    for name, (family, kind) in _RATES.items():
        first, last = before.value(family, kind), after.value(family, kind)
        if first is not None and last is not None and last >= first:
            grown[name] = last - first
    return grown


def _no_answer(source: MetricsSource) -> ServerDiedError | ServerUnreachableError:
    server = source.server
    if server is not None and is_stopping(server, source.store):
        return ServerDiedError(f"The server {server.name} was stopped.", hint="Start it again: trtserve start --detach")
    if server is not None and not server.instances[0].process.alive():
        log = server.instances[0].log
        return ServerDiedError(
            f"The server {server.name} has ended. Its last lines:\n{last_lines(log)}",
            hint="`trtserve status` shows which servers run.",
            log=log,
        )
    port = source.address.metrics_port
    # A recorded server is known to own its port; anything may listen on another one.
    spoken = spoken_at(f"{client_host(source.address.host)}:{port}") if server is None else None
    if spoken is not None:
        found = "It answers over HTTP, but has no page /metrics" if spoken == "HTTP" else f"It is a {spoken} port"
        return ServerUnreachableError(
            f"{source.name} is not the metrics port of a Triton server. {found}.",
            hint=f"Give --url HOST:PORT with the metrics port, {METRICS_PORT} by default.",
        )
    return ServerUnreachableError(
        f"{source.name} does not answer on its metrics port {port}.",
        hint="It may still be starting, have --allow-metrics=false, or use another port: see `trtserve status`.",
    )
