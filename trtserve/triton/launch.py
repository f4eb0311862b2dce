"""From a command line to a ready server, or to the reason why it is not; and back to a clean machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trtserve.errors import ServerStartError, ServerStopError
from trtserve.process import Identity, exit_code, listeners, stop, tree
from trtserve.triton import server_log
from trtserve.triton.server import EXIT_TIMEOUT, Address, is_ready, sweep_shared_memory

STOP_GRACE = EXIT_TIMEOUT + 4.0
_READY_POLL = 0.1
_PORT_LOST = "Another program took the port in the meantime: start again with --auto-ports, or choose ports."


def wait_until_ready(
    identity: Identity, address: Address, log: Path, *, timeout: float, interrupted: Callable[[], int] = lambda: 0
) -> None:
    """Wait until every model is ready; KeyboardInterrupt when `interrupted` counts a signal.

    ServerStartError with the failing models and their reasons when the server ends, or when it can never become
    ready; after `timeout` seconds with the models that are still loading.
    """
    deadline = time.monotonic() + timeout
    while not (is_ready(address) and _answers_itself(identity, address)):
        if interrupted():
            raise KeyboardInterrupt
        if not identity.alive():
            raise _start_error(_ending(identity), log)
        if (failure := server_log.fatal(server_log.read(log))) is not None:
            raise ServerStartError(f"The server cannot become ready: {failure}", log=log)
        if time.monotonic() > deadline:
            raise _timeout_error(timeout, log)
        time.sleep(_READY_POLL)


def _answers_itself(identity: Identity, address: Address) -> bool:
    """False when another server took the port after it was found free: that one is ready, ours is about to fail."""
    holders = listeners(address.http_port)
    own = {identity, *tree(identity)}
    return not holders or any(holder.matches(member) for holder in holders for member in own)


def stop_triton(identity: Identity, shm_prefix: str, *, urgent: Callable[[], bool] = lambda: False) -> None:
    """End a server with its stubs and remove its shared memory; ServerStopError when a process survives."""
    if not stop(identity, grace=STOP_GRACE, urgent=urgent):
        raise ServerStopError(
            f"Processes of the server (pid {identity.pid}) survived the KILL signal.",
            hint="They wait in the kernel, for a disk or a driver; look with: ps -o pid,stat,wchan,args",
        )
    sweep_shared_memory(shm_prefix)


def _start_error(ending: str, log: Path) -> ServerStartError:
    reasons = server_log.failures(server_log.read(log))
    if not reasons:
        lines = "\n".join(f"  {line}" for line in server_log.tail(log, 5))
        return ServerStartError(f"tritonserver {ending} before it was ready. Its last lines:\n{lines}", log=log)
    text = "\n".join(f"  {str(reason).replace(chr(10), chr(10) + '  ')}" for reason in reasons)
    hint = _PORT_LOST if "already in use" in text else None
    return ServerStartError(f"tritonserver {ending} before it was ready:\n{text}", hint=hint, log=log)


def _timeout_error(timeout: float, log: Path) -> ServerStartError:
    loading = ", ".join(server_log.still_loading(server_log.read(log))) or "none that its log names"
    return ServerStartError(
        f"The server was not ready after {timeout:g} s; models still loading: {loading}.",
        hint="Give it more time with --ready-timeout, or look into the log.",
        log=log,
    )


def _ending(identity: Identity) -> str:
    code = exit_code(identity)
    if code is None:
        return "ended"
    if code == -9:
        return "was killed (signal 9; the kernel does so when memory runs out)"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
