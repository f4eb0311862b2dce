"""The folder through which a model and the supervisor of its server see each other.

`trtserve start` names it in the environment. A server that something else started, or one in a container, has none.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

VARIABLE = "TRTSERVE_RUN_FOLDER"
DRAINING = "draining"  # file that `trtserve stop --drain` makes
HEARTBEATS = "*.heartbeat"
SOCKETS = "trtserve-vllm-"
"""How temporary folders of sockets begin, and the links to them, which let `trtserve stop` remove what was killed."""
STOPPED = "The executor has stopped working"
"""How the embedded executor begins to say that it will answer nothing any more."""
_SIZE = 2048


def require_not_draining() -> None:
    """Raise ValueError while the server finishes its running requests before it stops."""
    folder = os.environ.get(VARIABLE)
    if folder is not None and Path(folder, DRAINING).exists():
        raise ValueError("The server is being stopped: it finishes its running requests and takes no new ones.")


class Heartbeat:
    """Shows that an executor works: one small file, overwritten in place.

    A file instead of a metric: it costs Triton nothing, it can be read while Triton hangs, and it names the process.
    Its times are those of the monotonic clock, which no change of the date moves.
    """

    def __init__(self, model: str) -> None:
        folder = os.environ.get(VARIABLE)
        self._path = None if folder is None else Path(folder, f"{model}-{os.getpid()}.heartbeat")
        self._model = model
        self._progress = -1
        self._moved = time.monotonic()

    def beat(self, *, open_requests: int, progress: int, failure: str | None) -> None:
        """Record that this process lives, what its executor has to do, and whether it makes steps."""
        now = time.monotonic()
        if progress != self._progress or not open_requests:
            self._progress, self._moved = progress, now
        if self._path is None:
            return
        record = {
            "model": self._model,
            "pid": os.getpid(),
            "time": now,
            "moved": self._moved,
            "open_requests": open_requests,
            "failure": None if failure is None else failure[:500],
        }
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        except FileNotFoundError:  # the server was started without a supervisor, or has been stopped
            return
        try:
            # One write of one page: a reader sees the old record or the new one.
            os.pwrite(handle, json.dumps(record).encode("utf-8").ljust(_SIZE), 0)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Remove the file: the model is unloaded."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
