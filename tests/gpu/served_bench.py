"""Measure engines behind a real Triton with `trtserve bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.servers import free_spec
from trtserve.artifacts import ModelRepository
from trtserve.server.plan import plan_server
from trtserve.server.shutdown import end_server
from trtserve.server.start import start_server
from trtserve.server.state import Server
from trtserve.store import Store

PROMPT, ANSWER = 512, 128


@contextmanager
def served(repository: ModelRepository, home: Path) -> Iterator[Server]:
    """A ready server in the store `home`."""
    plan = plan_server(
        repository, replace(free_spec("random", ready_timeout=240.0), oversubscribe=True), store=Store(home)
    )
    server = start_server(plan)
    try:
        yield server
    except BaseException:
        sys.stderr.write(server.instances[0].log.read_text(errors="replace")[-4000:])
        raise
    finally:
        end_server(server, plan.store)


def behind_triton(server: Server) -> tuple[str, ...]:
    """Return the flags of `bench` for the core model of a server in the store of `served`."""
    return ("--server", server.name, "--model", "tensorrt_llm")


def measured(
    where: tuple[str, ...], streams: int, home: Path, *, requests: int, workers: int = 1, answer: int = ANSWER
) -> dict[str, Any]:
    """Return the report of `streams` requests at a time; `where` are flags of the target."""
    command = (
        sys.executable, "-m", "trtserve", "bench", "token-norm-dist", *where, "--concurrency", str(streams),
        "--num-requests", str(requests), "--warmup-requests", str(streams), "--input-mean", str(PROMPT),
        "--input-stdev", "0", "--output-mean", str(answer), "--output-stdev", "0", "--no-calibrate", "--json",
        *(("--workers", str(workers)) if workers > 1 else ()),
    )  # fmt: skip
    environment = {**os.environ, "TRTSERVE_HOME": str(home)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)["result"]
    return found


def print_figures(**values: object) -> None:
    """Print figures for the report."""
    sys.stdout.write(f"figure:{json.dumps(values)}\n")
    sys.stdout.flush()
