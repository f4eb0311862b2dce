"""Servers of `trtserve start --detach` for tests of faults, seen as a user sees them: commands, ports, state file."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.commands import environment
from tests.support.launches import assert_gone, start_flags
from tests.support.servers import HOST, free_spec
from tests.support.waiting import wait_until
from trtserve.process import ProcessId, tree
from trtserve.server.rank_processes import with_members
from trtserve.server.state import Server, last_record
from trtserve.server.status import server_state
from trtserve.store import Store

_numbers = itertools.count(1)
ALL = os.environ.get("TRTSERVE_FAULTS") == "all"
"""Whether `make faults` runs: every case instead of a selection."""


def measured(fault: str, **figures: object) -> None:
    """Append figures to the file that $TRTSERVE_FAULTS_OUT names, for docs/reliability.md."""
    if out := os.environ.get("TRTSERVE_FAULTS_OUT"):
        with Path(out).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"fault": fault, **figures}) + "\n")


@dataclass
class Supervised:
    """One server and the command that starts it."""

    name: str
    store: Store
    launcher: subprocess.Popen[str]
    seen: list[Server] = field(default_factory=list)
    """Records of each start, to look for their remains."""

    def record(self) -> Server:
        """What the state file holds now."""
        wait_until(lambda: last_record(self.name, self.store) is not None)
        server = last_record(self.name, self.store)
        assert server is not None
        return server

    def state(self) -> str:
        """What `trtserve status` would call it."""
        return server_state(self.record(), self.store)[0]

    def ready(self) -> Server:
        """Wait until the server is ready; remember its processes."""
        wait_until(lambda: self.state() == "ready" or self.launcher.poll() not in (None, 0), 120)
        server = self.record()
        assert server.state == "ready", (server.state, server.reason, server.failure, self.launcher.poll())
        self.seen.append(server)
        return server

    def victim(self, what: str) -> int:
        """The process to kill, once it exists: launcher, supervisor, tritonserver, gateway, or the stub of a model."""
        found: list[int] = []

        def look() -> bool:
            server = self.record()
            if what == "tritonserver":
                found.append(server.instances[0].process.pid)
            elif what == "supervisor" and server.supervisor is not None:
                found.append(server.supervisor.pid)
            elif what == "gateway":
                found.extend(each.gateway.process.pid for each in server.instances if each.gateway is not None)
            else:
                stubs = with_members(server).instances[0].stubs
                found.extend(stub.pid for stub in stubs if stub.model == what)
            return bool(found)

        if what == "launcher":
            return self.launcher.pid
        wait_until(look)
        return found[0]

    def ask(self, model: str = "probe") -> int:
        """Ask the model and return the HTTP status of the answer; 0 without an answer."""
        body = {
            "inputs": [
                {"name": "STRINGS", "shape": [1], "datatype": "BYTES", "data": ["x"]},
                {"name": "INTEGERS", "shape": [1], "datatype": "INT32", "data": [1]},
            ]
        }
        return self.post(f"/v2/models/{model}/infer", body)

    def post(self, path: str, body: Mapping[str, object]) -> int:
        """Send a request to the port that clients use."""
        connection = http.client.HTTPConnection(HOST, self.record().endpoint.http_port, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
        return answer.status

    @contextmanager
    def load(self, clients: int = 4, ask: Callable[[], int] | None = None) -> Iterator[None]:
        """Ask without a pause during the block."""
        ending, asked = threading.Event(), ask or self.ask

        def repeat() -> None:
            while not ending.is_set():
                asked()

        threads = [threading.Thread(target=repeat) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ending.set()
            for thread in threads:
                thread.join()

    def assert_nothing_left(self) -> None:
        """No process, port or shared memory of any of its starts is left."""
        for server in [*self.seen, self.record()]:
            roots = server.roots
            wait_until(lambda roots=roots: not any(root.alive() or tree(root) for root in roots))  # type: ignore[misc]
            assert server.supervisor is None or not server.supervisor.alive()
            assert_gone(server, self.store)


@contextmanager
def supervised(repository: Path, home: Path, *flags: str, gateway: bool = ALL) -> Iterator[Supervised]:
    """Start a server in the background; at the end stop it, however it is, and look for remains."""
    name = f"faulty{next(_numbers)}"  # the records of earlier ones stay
    line = [sys.executable, "-m", "trtserve", "start", "--model-repository", str(repository), "--name", name]
    line += ["--detach", "--auto-ports", *start_flags(free_spec(name, gateway=gateway)), *flags]
    errors = home / f"{name}.launcher.log"
    home.mkdir(parents=True, exist_ok=True)
    with (
        errors.open("w") as log,
        subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=log, text=True, env=environment(home)) as launcher,
    ):
        one = Supervised(name, Store(home), launcher)
        try:
            yield one
        except BaseException:
            for path in sorted([errors, *home.glob("servers/*.log*")]):
                sys.stderr.write(f"--- {path}\n{path.read_text(errors='replace')[-5000:]}\n")
            raise
        finally:
            launcher.wait(60)
            stop = [sys.executable, "-m", "trtserve", "stop", name]
            stopped = subprocess.run(
                stop, env=environment(home), capture_output=True, text=True, timeout=120, check=False
            )
            assert stopped.returncode in (0, 33), stopped.stderr
        one.assert_nothing_left()


def slow_model(repository: Path, seconds: float) -> None:
    """Add a model that takes so long to load."""
    version = repository / "slow" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(
        f"import time\n\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep({seconds})\n"
    )
    (repository / "slow" / "config.pbtxt").write_text('name: "slow"\nbackend: "python"\n')


def seconds_until(condition: object, seconds: float = 60.0) -> float:
    """Wait for a condition and return how long that took."""
    begin = time.monotonic()
    wait_until(condition, seconds)  # type: ignore[arg-type]
    return time.monotonic() - begin


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    identity = ProcessId.of(pid)
    return identity is not None and identity.alive()
