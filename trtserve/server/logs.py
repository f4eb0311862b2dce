"""The logs of servers, also of those that have ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trtserve.server.state import log_file, recorded_server
from trtserve.server.triton import server_log
from trtserve.store import Store

_LARGEST = 64 * 2**20
_KEPT = 3


def rotate(log: Path) -> None:
    """Make room for a new log: the present one becomes `log`.1, and so on; three old ones are kept."""
    if log.exists() and log.stat().st_size:
        _shift(log)
        log.replace(_old(log, 1))


def limit_size(log: Path) -> None:
    """Rotate a log that has grown too large. Its writer keeps the file open, so it is copied and emptied."""
    if log.exists() and log.stat().st_size > _LARGEST:
        _shift(log)
        shutil.copyfile(log, _old(log, 1))
        with log.open("r+b") as handle:
            handle.truncate()


def _shift(log: Path) -> None:
    for number in range(_KEPT - 1, 0, -1):
        if _old(log, number).exists():
            _old(log, number).replace(_old(log, number + 1))


def _old(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def last_lines(log: Path, count: int = 5) -> str:
    """Return the last significant lines of a log, indented for a message."""
    return indented(server_log.significant(server_log.read(log))[-count:])


def indented(lines: Iterable[str]) -> str:
    """Return lines of a log without their headers, indented for a message."""
    return "\n".join(f"  {text}" for line in lines if (text := server_log.plain(line)))


def recorded_log(name: str, store: Store) -> Path | None:
    """Return the log of the server `name`, or of a further instance such as `name@2`, or None when it has none."""
    log = log_file(name, store)
    return log if log.exists() else None


def follow_log(log: Path, *, position: int, pause: Callable[[], None], store: Store | None = None) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until its server has ended."""
    server = recorded_server(log.stem.split("@", maxsplit=1)[0], store or Store())
    return server_log.follow(log, position=position, ended=lambda: server is None or not server.alive(), pause=pause)
