"""The workers of a follower: one process, which waits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


class MultiprocExecutor:
    def __init__(self, config: Any, *, monitor_workers: bool) -> None:
        assert not monitor_workers
        self._worker = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {config.master_port}"])

    def start_worker_monitor(self, *, inline: bool) -> None:
        assert inline
        self._worker.wait()
