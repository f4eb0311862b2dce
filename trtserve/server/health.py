"""How a server is: which of its processes has ended, and which of its models do not answer although they live."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtserve.client.heartbeats import read_heartbeats
from trtserve.errors import ServerDiedError
from trtserve.process import exit_code, how_it_ended
from trtserve.server.logs import indented, last_lines
from trtserve.server.state import Instance, Server, run_folder
from trtserve.server.triton import server_log
from trtserve.server.triton.tritonserver import is_ready
from trtserve.store import Store

_INTERVAL = 0.25
# mpirun reports within this time for which rank it ended the job.
_EXPLANATION = 5.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A part of a server that will not work again by itself."""

    what: str
    """A sentence without its subject's name and full stop."""
    log: Path
    instance: Instance | None = None
    """The instance whose log explains it; None for a door and the reverse proxy, which have logs of their own."""
    ranks: Sequence[int] = ()
    """Its ranks that had ended by then."""
    explained: bool = False
    """Whether `what` says why, and no log has to."""


def ended(server: Server, store: Store) -> Ended | None:
    """Return the first part of a server that has ended, or None while all of them work."""
    failure = _failed_executor(server, store)
    for instance in server.instances:
        if what := _ended_in(instance):
            if failure is not None:  # the process of an executor that has stopped ends soon after
                return failure
            return Ended(what=what, log=instance.log, instance=instance, ranks=instance.dead_ranks)
        if instance.door is not None and instance.door.dead:
            how = how_it_ended(exit_code(instance.door.process))
            return Ended(what=f"its door, which answers HTTP requests, {how}", log=instance.door.log)
    if failure is not None:
        return failure
    if server.proxy is not None and server.proxy.dead:
        return Ended(what="its reverse proxy (nginx) has ended", log=server.proxy.log)
    return None


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


def unready_models(server: Server, store: Store) -> Mapping[str, str]:
    """Return what does not answer although its process lives → why. The name of the server stands for all models.

    Triton 2.51 calls a model ready as long as it is loaded, whatever has become of its process. So executors are judged
    by their heartbeats.
    """
    found = {each.model: each.ailment for each in read_heartbeats(run_folder(server.name, store)) if each.ailment}
    for instance in server.instances:
        if not is_ready(instance.address):
            found[server.name] = f"its HTTP port {instance.address.http_port} does not report it as ready"
    return found


def died_error(server: Server, end: Ended) -> ServerDiedError:
    """Explain an end by the log. Of an instance with ranks it is the rank that mpirun names: the others follow it."""
    if end.instance is None:
        return ServerDiedError(f"{server.name}: {end.what}. Last lines:\n{last_lines(end.log)}", log=end.log)
    instance, problem = end.instance, end.what
    lines = last_lines(instance.log)
    deadline = time.monotonic() + (_EXPLANATION if instance.ranks and not end.explained else 0)
    while instance.process.alive() and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
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
    hint = "A process that ends without an error line was killed, usually for lack of memory." if killed else None
    name = f"{server.name}, HTTP port {instance.address.http_port}" if len(server.instances) > 1 else server.name
    return ServerDiedError(f"{name}: {problem}. Last lines:\n{lines}", hint=hint, log=instance.log)
