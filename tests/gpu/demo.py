"""The README's way on a GPU: import the demo model for the torch runtime, start a real Triton, and ask it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.support.devices import DEVICE

QUESTION = "What is ML?"


def trtserve(*arguments: str) -> dict[str, Any]:
    """Run a command with --json, and return what it prints."""
    command = (sys.executable, "-m", "trtserve", *arguments, "--json")
    sys.stdout.write(f"$ trtserve {' '.join(arguments)}\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=150)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Import, start, query, metrics, stop; print how long each took."""
    with tempfile.TemporaryDirectory(prefix="trtserve-demo-") as home:
        os.environ["TRTSERVE_HOME"] = home
        seconds = {}
        for name, arguments in {
            "import": ("import", "demo", "--runtime", "torch", "--device", DEVICE),
            "start": ("start", "demo", "--detach", "--auto-ports"),
            "query": ("query", QUESTION),
            "metrics": ("metrics",),
        }.items():
            begin = time.monotonic()
            answer = trtserve(*arguments)
            seconds[f"{name} seconds"] = round(time.monotonic() - begin, 1)
            if name == "query":
                sys.stdout.write(f"{json.dumps(answer)[:1000]}\n")
        trtserve("stop", "demo")
    sys.stdout.write(f"figure:{json.dumps(seconds)}\n")
    sys.stdout.write("The demo model was imported, served and asked.\n")


if __name__ == "__main__":
    main()
