"""`make kills`: a conversion is killed at random moments and run again; files must be those of an undisturbed one.

Run as `python -m tests.benchmarks.kills --work FOLDER`. The moments are spread over the whole time of the command,
its start included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tests.benchmarks.conversions import TIMEOUT, Case, clean, convert_command, model_folder

CASE = Case(dtype="bfloat16", tp_size=2)


def hashes(folder: Path) -> dict[str, str]:
    """Return SHA-256 of a checkpoint's files except its manifest, which holds the time."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while data := handle.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


class Conversions:
    """Conversions of one model into `folder/out/made`, with a store in `folder/home`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.made = folder / "out" / "made"
        self._command = convert_command(model, self.made, CASE)
        self._environment = {**os.environ, "TRTSERVE_HOME": str(folder / "home")}

    def run(self) -> float:
        """Convert to the end; returns the seconds it took."""
        start = time.perf_counter()
        subprocess.run(self._command, env=self._environment, stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT)
        return time.perf_counter() - start

    def kill(self, seconds: float) -> bool:
        """Convert, and kill it after `seconds`; returns whether it was still running."""
        with subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        return process.returncode == -signal.SIGKILL

    def left(self) -> list[str]:
        """Return everything next to the checkpoint except the measured rates."""
        wanted = {self.made, self.folder / "home" / "rates.json"}
        places = [*(self.folder / "out").glob("*"), *(self.folder / "home").glob("*")]
        return sorted(str(path.relative_to(self.folder)) for path in places if path not in wanted)


class Outcome(TypedDict):
    """The state after a kill: `left` next to the repeated checkpoint, which was the `same`."""

    seconds: float
    killed: bool
    while_writing: bool
    half: bool
    same: bool
    left: list[str]


def one_kill(conversions: Conversions, seconds: float, expected: dict[str, str]) -> Outcome:
    """Kill after `seconds`, look, run again, look again."""
    clean(conversions.folder)
    killed = conversions.kill(seconds)
    partial = (conversions.made.parent / f".{conversions.made.name}.partial").exists()
    complete = (conversions.made / "manifest.json").exists()
    half = complete and hashes(conversions.made) != expected
    conversions.run()
    return {
        "seconds": round(seconds, 3),
        "killed": killed,
        "while_writing": partial,
        "half": half,
        "same": hashes(conversions.made) == expected,
        "left": conversions.left(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill conversions, print the findings, and exit with 1 when a conversion failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for the model and the copies (9 GB)")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    work = options.work.absolute()
    conversions = Conversions(model_folder(work, CASE.source), work / "kills")
    clean(conversions.folder)
    duration = conversions.run()
    expected = hashes(conversions.made)
    generator = random.Random(options.seed)
    outcomes: list[Outcome] = []
    # A conversion may end before its moment comes: the first, which says how long they take, is the slowest one.
    while sum(outcome["killed"] for outcome in outcomes) < options.kills and len(outcomes) < 3 * options.kills:
        moment = generator.uniform(0, duration)
        outcomes.append(one_kill(conversions, moment, expected))
        if not outcomes[-1]["killed"]:
            duration = moment
        print(json.dumps(outcomes[-1]), flush=True)
    clean(conversions.folder)
    good = [outcome for outcome in outcomes if outcome["same"] and not outcome["half"] and not outcome["left"]]
    killed = sum(outcome["killed"] for outcome in outcomes)
    writing = sum(outcome["while_writing"] for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed, {writing} while writing; {len(good)} as if nothing had been")
    raise SystemExit(len(good) != len(outcomes) or killed < options.kills)


if __name__ == "__main__":
    main()
