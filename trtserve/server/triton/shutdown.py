"""Stop the processes of a Triton server and remove its shared memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trtserve.errors import ServerStopError
from trtserve.process import ProcessId, stop_all
from trtserve.server.triton.tritonserver import EXIT_TIMEOUT, sweep_shared_memory

STOP_GRACE = EXIT_TIMEOUT + 4.0
"""Seconds until a server that was asked to end is killed."""


def stop_triton(
    identities: Collection[ProcessId],
    shm_prefix: str,
    *,
    urgent: Callable[[], bool] = lambda: False,
    asked: Collection[ProcessId] = (),
    grace: float = STOP_GRACE,
) -> None:
    """Stop a server with its stubs and remove its shared memory. Raises ServerStopError when a process survives.

    `asked` get the TERM signal instead of the roots `identities`; see `process.stop_all`.
    """
    if not stop_all(identities, grace=grace, urgent=urgent, asked=asked):
        pids = ", ".join(str(identity.pid) for identity in identities)
        raise ServerStopError(
            f"Processes of the server (pid {pids}) survived the KILL signal.",
            hint="They hang in the kernel, waiting for a disk or a driver; see: ps -o pid,stat,wchan,args",
        )
    sweep_shared_memory(shm_prefix)
