"""Wait until a server is ready, or explain why it is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trtserve.errors import PortInUseError, ServerStartError
from trtserve.host.ports import taken_meanwhile
from trtserve.process import (
    ProcessId,
    exit_code,
    how_it_ended,
    listeners,
    tree,
    was_killed,
)
from trtserve.server.triton import server_log
from trtserve.server.triton.tritonserver import Address, is_ready, metrics_page

_READY_POLL = 0.1
_LAST_LINES = 5
# Triton 2.51 aborts with it when several Python models are loaded at once on a busy machine.
_STUB_RACE = "boost::interprocess::lock_exception"


def wait_until_ready(
    identity: ProcessId, address: Address, log: Path, *, timeout: float, interrupted: Callable[[], int] = lambda: 0
) -> None:
    """Wait until every model is ready. Raises KeyboardInterrupt when `interrupted` counts a signal.

    Raises ServerStartError with the failed models and their reasons when the server ends or cannot become ready; after
    `timeout` seconds with the models that are still loading.
    """
    deadline = time.monotonic() + timeout
    while not came_up(identity, address, log):
        pause(interrupted)
        if time.monotonic() > deadline:
            raise timeout_error(timeout, log)


def came_up(identity: ProcessId, address: Address, log: Path, *, contained: bool = False) -> bool:
    """Return whether every model is ready. Raises ServerStartError when the server has ended or cannot become ready.

    Raises PortInUseError when another program took a port meanwhile. A `contained` server is not a child of `identity`,
    the client of the container daemon, so whatever answers on its port is taken for it.
    """
    port = address.triton_http[1]
    if is_ready(address) and (contained or not listeners(port) or _holds(identity, port)):
        return True
    if not identity.alive():
        raise start_error(identity, log)
    if (failure := server_log.fatal(server_log.read(log))) is not None:
        raise ServerStartError(f"The server cannot become ready: {failure}", log=log)
    return False


def pause(interrupted: Callable[[], int]) -> None:
    """Sleep briefly between two checks. Raises KeyboardInterrupt when `interrupted` counts a signal."""
    if interrupted():
        raise KeyboardInterrupt
    time.sleep(_READY_POLL)


def opened_all_ports(identity: ProcessId, address: Address, *, contained: bool = False) -> bool:
    """Return whether the metrics port is open. Triton opens it last; if it is taken, even a ready server ends."""
    if contained or not listeners(address.metrics_port):  # the kernel does not show who listens
        return metrics_page(address) is not None
    return _holds(identity, address.metrics_port)


def _holds(identity: ProcessId, port: int) -> bool:
    own = {identity, *tree(identity)}
    return any(holder.matches(member) for holder in listeners(port) for member in own)


def start_error(identity: ProcessId, log: Path) -> ServerStartError | PortInUseError:
    """Explain from its log why a server ended before it was ready. Raises PortInUseError when a port was taken."""
    text = server_log.read(log)
    ended = server_log.first_end(text)
    ending = f"tritonserver {how_it_ended(exit_code(identity))}" if ended is None else ended.sentence
    own = text if ended is None else "\n".join(server_log.lines_of(text, ended.rank))
    reasons = server_log.failures(own)
    if not reasons:
        last = own.splitlines() if ended is None else server_log.significant(own)
        lines = "\n".join(f"  {line}" for line in last[-_LAST_LINES:]) or "  (none)"
        hint = "Add --oversubscribe: mpirun starts only one rank per core." if server_log.lacks_slots(text) else None
        error = ServerStartError(f"{ending} before the server was ready. Last lines:\n{lines}", hint=hint, log=log)
        error.killed = was_killed(exit_code(identity)) or (ended is not None and was_killed(ended.code))
        error.by_chance = _STUB_RACE in own
        return error
    words = "\n".join(f"  {str(reason).replace(chr(10), chr(10) + '  ')}" for reason in reasons)
    message = f"{ending} before the server was ready:\n{words}"
    if "already in use" in words:
        return PortInUseError(message, hint=taken_meanwhile("other ports"), log=log)
    return ServerStartError(message, log=log)


def timeout_error(timeout: float, log: Path, details: str = "") -> ServerStartError:
    """Return the error for a server that is not ready in time; `details` describes its processes."""
    loading = ", ".join(server_log.still_loading(server_log.read(log))) or "unknown"
    return ServerStartError(
        f"The server was not ready after {timeout:g} s; models still loading: {loading}.{details}",
        hint="Give it more time with --ready-timeout, or read the log.",
        log=log,
    )
