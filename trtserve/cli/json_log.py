"""`trtserve start --log-format json`: what trtserve and Triton report, one JSON object per line on stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from trtserve.cli.output import CONTROLS
from trtserve.errors import TrtserveError
from trtserve.progress import SILENT, Task, Unit
from trtserve.server.triton import server_log

_PAUSE = 0.2


class JsonLog:
    """A Progress that writes JSON lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def step(self, text: str) -> None:
        self._write({"level": "info", "message": text})

    def warn(self, text: str) -> None:
        self._write({"level": "warning", "message": text})

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        self.step(text)
        with SILENT.task(text, total=total, unit=unit, done=done) as task:
            yield task

    def error(self, error: TrtserveError) -> None:
        """Write why the command ends."""
        facts = {"hint": error.hint, "log": error.log, "exit_code": error.code}
        self._write({"level": "error", "message": error.message, **facts})

    @contextmanager
    def following(self, logs: Iterable[Path]) -> Iterator[None]:
        """Write the lines that are added to the logs of a server during the block."""
        ending = threading.Event()
        # A start gives the log of the previous one another name.
        ends = [(log, log.stat().st_size if log.exists() else 0) for log in logs]
        threads = [threading.Thread(target=self._follow, args=(log, end, ending)) for log, end in ends]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ending.set()
            for thread in threads:
                thread.join()

    def _follow(self, log: Path, position: int, ending: threading.Event) -> None:
        rest = ""
        for text in server_log.follow(log, position=position, ended=ending.is_set, pause=lambda: time.sleep(_PAUSE)):
            *lines, rest = (rest + text).split("\n")
            for line in filter(None, lines):
                self._write({"server": log.stem, **server_log.described(line)})

    def _write(self, record: dict[str, object]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        with self._lock:
            text = json.dumps({"time": now, **record}, default=str, ensure_ascii=False)
            sys.stderr.write(CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
            sys.stderr.flush()
