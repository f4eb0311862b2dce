"""`make interruptions`: `up` is interrupted at random moments and run again; the end must be that of one whole run.

Run as `python -m tests.benchmarks.interruptions --work FOLDER`. Ctrl-C and SIGKILL take turns, at moments that are
spread over the whole time of the command. Compared are the files of all artefacts, the records of the imports, the
running processes, an answer of the server, and what `diff` finds. Then `down` must leave no process and no shared
memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from tests.support.commands import command_line, environment, trtserve
from trtserve.host.machine import SHARED_MEMORY

SETUP = """\
models:
  small: {source: demo, runtime: openvino, max_batch_size: 4}
  other: {source: demo, runtime: openvino, max_batch_size: 2, dtype: float16}
servers:
  front: {model: small, auto_ports: true, ui: true}
"""
ARTEFACTS = ("models", "checkpoints", "engines", "repositories")
SIGNALS = (signal.SIGINT, signal.SIGKILL)
MOST_NAMES = 5
"""Names of files that an outcome shows."""
ENDS_WITHIN = 60.0
"""Seconds in which the processes of a stopped server or of a killed command end."""


@dataclass(frozen=True)
class State:
    """What a machine has after `up`."""

    files: dict[str, str]
    """File of an artefact → its hash; manifests are left out, because they hold the time."""
    imports: list[dict[str, Any]]
    processes: Counter[str]
    answer: str
    staged: list[str]
    """Folders of artefacts that are not complete."""
    difference: str
    """What `diff` prints."""


class Machine:
    """A store with its setup file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.home, self.file = folder / "home", folder / "setup.yaml"
        self.file.write_text(SETUP, encoding="utf-8")

    def clean(self) -> None:
        """Forget everything but what the first start in a store finds out about Triton."""
        for name in (*ARTEFACTS, "names", "servers", "locks"):
            shutil.rmtree(self.home / name, ignore_errors=True)

    def run(self, command: str, *arguments: str) -> str:
        """Run a command to its end, and return what it prints."""
        return trtserve(command, *(arguments or [str(self.file)]), home=self.home).stdout

    def interrupt(self, seconds: float, number: signal.Signals) -> bool:
        """Run `up` and send it the signal after `seconds`; returns whether it was still running then."""
        with subprocess.Popen(
            command_line("up", str(self.file), "--quiet"),
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                if number is signal.SIGINT:  # which a terminal sends to the whole group
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
                return True
        return False

    def files(self) -> dict[str, str]:
        """Return the hashes of the files of complete artefacts; compiled modules come when a server runs."""
        folders = [path.parent for kind in ARTEFACTS for path in self.home.glob(f"{kind}/[!.]*/manifest.json")]
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(self.home)): hashlib.sha256(content(path)).hexdigest()
            for path in paths
            if path.name != "manifest.json" and path.suffix != ".pyc"
        }

    def state(self) -> State:
        """Look at everything."""
        records = [json.loads(path.read_text()) for path in sorted(self.home.glob("names/*.json"))]
        return State(
            files=self.files(),
            imports=[{key: value for key, value in record.items() if key != "imported"} for record in records],
            processes=Counter(self.processes()),
            answer=self.run("query", "What is ML?", "--server", "front", "--max-tokens", "8", "--top-k", "1"),
            staged=[str(path) for kind in ARTEFACTS for path in self.home.glob(f"{kind}/.*")],
            difference=self.run("diff"),
        )

    def processes(self) -> list[str]:
        """Return the programs that work in this store."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TRTSERVE_HOME") == str(self.home):
                    found.append(process.name())
        return found

    def down(self) -> list[str]:
        """Stop the server, and return processes and regions of shared memory that do not go."""
        self.run("down")
        deadline = time.monotonic() + ENDS_WITHIN
        while (left := [*self.processes(), *map(str, SHARED_MEMORY.glob("trtserve_front_*"))]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.2)
        return left


def content(path: Path) -> bytes:
    """Return a file's content; a graph without the numbers of its nodes, which OpenVINO counts in each process."""
    return re.sub(rb'_\d+(?=")', b"", path.read_bytes()) if path.suffix == ".xml" else path.read_bytes()


def differences(state: State, whole: State) -> list[str]:
    """Return the fields in which two states differ, and the files."""
    found = [each.name for each in fields(State) if getattr(state, each.name) != getattr(whole, each.name)]
    return [*found, *sorted({name for name, _ in state.files.items() ^ whole.files.items()})[:MOST_NAMES]]


def one_interruption(machine: Machine, seconds: float, number: signal.Signals, whole: State) -> dict[str, Any]:
    """Interrupt after `seconds`, look, run again, look again."""
    machine.clean()
    interrupted = machine.interrupt(seconds, number)
    found = machine.files()
    half = [name for name, digest in found.items() if whole.files.get(name) != digest]
    machine.run("up")
    state = machine.state()
    return {
        "seconds": round(seconds, 2),
        "signal": number.name,
        "interrupted": interrupted,
        "files": len(found),
        "half": half[:MOST_NAMES],
        "differs": differences(state, whole),
        "left": machine.down(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Interrupt, print the findings, and exit with 1 when an end was not that of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for the store")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    machine = Machine(options.work.absolute() / "interruptions")
    machine.clean()
    machine.run("up")  # the first start in a store tests Triton
    machine.down()
    machine.clean()
    begin = time.perf_counter()
    machine.run("up")
    duration = time.perf_counter() - begin
    whole = machine.state()
    left = machine.down()
    print(f"{duration:.1f} s undisturbed: {len(whole.files)} files, {whole.processes.total()} processes", flush=True)
    generator = random.Random(options.seed)
    outcomes: list[dict[str, Any]] = []
    # `up` may end before its moment comes.
    while sum(each["interrupted"] for each in outcomes) < options.times and len(outcomes) < 3 * options.times:
        number = SIGNALS[len(outcomes) % len(SIGNALS)]
        outcomes.append(one_interruption(machine, generator.uniform(0, duration), number, whole))
        print(json.dumps(outcomes[-1]), flush=True)
    machine.clean()
    good = [each for each in outcomes if not each["half"] and not each["differs"] and not each["left"]]
    interrupted = sum(each["interrupted"] for each in outcomes)
    print(f"{interrupted} of {len(outcomes)} interrupted; {len(good)} ended like an undisturbed run")
    raise SystemExit(bool(left) or len(good) != len(outcomes) or interrupted < options.times)


if __name__ == "__main__":
    main()
