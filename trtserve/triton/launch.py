"""From a command line to a ready server, or to the reason why it is not; and back to a clean machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from trtserve.errors import PortInUseError, ServerStartError, ServerStopError
from trtserve.process import Identity, exit_code, how_it_ended, listeners, stop_all, tree
from trtserve.triton import rank_log, server_log
from trtserve.triton.server import EXIT_TIMEOUT, Address, is_ready, metrics_page, sweep_shared_memory

STOP_GRACE = EXIT_TIMEOUT + 4.0
_READY_POLL = 0.1
_LAST_LINES = 5
_PORT_LOST = "Another program took the port in the meantime: start again with --auto-ports, or choose ports."


def wait_until_ready(
    identity: Identity, address: Address, log: Path, *, timeout: float, interrupted: Callable[[], int] = lambda: 0
) -> None:
    """Wait until every model is ready; KeyboardInterrupt when `interrupted` counts a signal.

    ServerStartError with the failing models and their reasons when the server ends, or when it can never become
    ready; after `timeout` seconds with the models that are still loading.
    """
    deadline = time.monotonic() + timeout
    while not came_up(identity, address, log):
        pause(interrupted)
        if time.monotonic() > deadline:
            raise timeout_error(timeout, log)


def came_up(identity: Identity, address: Address, log: Path, *, contained: bool = False) -> bool:
    """Whether every model is ready; ServerStartError when the server has ended or can never become ready.

    PortInUseError when a port was taken after the check.
    A `contained` server is not below `identity`, the client of the container's daemon: it is believed as it answers.
    """
    if is_ready(address) and (contained or _answers_itself(identity, address)):
        return True
    if not identity.alive():
        raise start_error(identity, log)
    if (failure := server_log.fatal(server_log.read(log))) is not None:
        raise ServerStartError(f"The server cannot become ready: {failure}", log=log)
    return False


def pause(interrupted: Callable[[], int]) -> None:
    """Wait for a moment between two looks; KeyboardInterrupt when `interrupted` counts a signal."""
    if interrupted():
        raise KeyboardInterrupt
    time.sleep(_READY_POLL)


def opened_all_ports(identity: Identity, address: Address, *, contained: bool = False) -> bool:
    """Whether the metrics port is open, which Triton opens last: one that is taken ends a server that was ready."""
    if contained or not listeners(address.metrics_port):  # the kernel tells nothing
        return metrics_page(address) is not None
    return _holds(identity, address.metrics_port)


def _answers_itself(identity: Identity, address: Address) -> bool:
    """False when another server took the port after it was found free: that one is ready, ours is about to fail."""
    return not listeners(address.http_port) or _holds(identity, address.http_port)


def _holds(identity: Identity, port: int) -> bool:
    own = {identity, *tree(identity)}
    return any(holder.matches(member) for holder in listeners(port) for member in own)


def stop_triton(
    identities: Collection[Identity],
    shm_prefix: str,
    *,
    urgent: Callable[[], bool] = lambda: False,
    asked: Collection[Identity] = (),
    grace: float = STOP_GRACE,
) -> None:
    """End a server with its stubs and remove its shared memory; ServerStopError when a process survives.

    `asked` get the TERM instead of the roots `identities`; see `process.stop_all`.
    """
    if not stop_all(identities, grace=grace, urgent=urgent, asked=asked):
        pids = ", ".join(str(identity.pid) for identity in identities)
        raise ServerStopError(
            f"Processes of the server (pid {pids}) survived the KILL signal.",
            hint="They wait in the kernel, for a disk or a driver; look with: ps -o pid,stat,wchan,args",
        )
    sweep_shared_memory(shm_prefix)


def start_error(identity: Identity, log: Path) -> ServerStartError | PortInUseError:
    """Why a server that has ended never became ready, as its log tells; PortInUseError when it lost a port."""
    text = server_log.read(log)
    ended = rank_log.first_end(text)
    ending = f"tritonserver {how_it_ended(exit_code(identity))}" if ended is None else ended.sentence
    own = text if ended is None else "\n".join(rank_log.lines_of(text, ended.rank))
    reasons = server_log.failures(own)
    if not reasons:
        last = own.splitlines() if ended is None else server_log.significant(own)
        lines = "\n".join(f"  {line}" for line in last[-_LAST_LINES:]) or "  (nothing was written)"
        hint = "Give --oversubscribe: mpirun starts one rank per core." if rank_log.lacks_slots(text) else None
        message = f"{ending} before the server was ready. Last lines:\n{lines}"
        return ServerStartError(message, hint=hint, log=log)
    words = "\n".join(f"  {str(reason).replace(chr(10), chr(10) + '  ')}" for reason in reasons)
    message = f"{ending} before the server was ready:\n{words}"
    if "already in use" in words:
        return PortInUseError(message, hint=_PORT_LOST, log=log)
    return ServerStartError(message, log=log)


def timeout_error(timeout: float, log: Path, ranks: str = "") -> ServerStartError:
    """What is not ready after `timeout` seconds; `ranks` describes the ranks of a server that has some."""
    loading = ", ".join(server_log.still_loading(server_log.read(log))) or "none that its log names"
    return ServerStartError(
        f"The server was not ready after {timeout:g} s; models still loading: {loading}.{ranks}",
        hint="Give it more time with --ready-timeout, or look into the log.",
        log=log,
    )
