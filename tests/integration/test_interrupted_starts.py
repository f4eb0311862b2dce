"""Ctrl-C in the first moments of commands: one line or none, and never a traceback of ours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

OURS = re.compile(r'File ".*/trtserve/(?!__main__\.py)')


@pytest.mark.parametrize("arguments", [["import", "demo"], ["plan", "demo"], ["list"]])
def test_an_interrupted_start_prints_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    for delay in (0.06, 0.12, 0.2, 0.35, 0.6):
        child = subprocess.Popen(
            [sys.executable, "-m", "trtserve", *arguments],
            env={**os.environ, "TRTSERVE_HOME": str(tmp_path / f"{delay}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(delay)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert not OURS.search(errors), errors
        assert errors.count("Interrupted") <= 1, errors
        assert child.returncode in (0, 1, 130, -signal.SIGINT)  # 1: Python itself was still starting
