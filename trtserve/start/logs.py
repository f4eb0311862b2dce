"""The logs of servers, also of those that have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from trtserve.servers import find_server, log_file, recorded_server
from trtserve.store import Store
from trtserve.triton import server_log


def find_log(name: str | None = None, *, store: Store | None = None) -> Path:
    """Log of the server `name`, also when it has ended; without a name, of the only one that runs.

    `name@2` is the second instance of a server.
    """
    store = store or Store()
    if name is not None and log_file(name, store).exists():
        return log_file(name, store)
    return find_server(name, store=store).log


def follow_log(log: Path, *, position: int, pause: Callable[[], None], store: Store | None = None) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until its server has ended."""
    server = recorded_server(log.stem.split("@", maxsplit=1)[0], store or Store())
    return server_log.follow(log, position=position, ended=lambda: server is None or not server.alive(), pause=pause)
