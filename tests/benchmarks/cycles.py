"""`make cycles`: servers, imports and `up` of which a process is killed or stopped at random; nothing may be left.

Run as `python -m tests.benchmarks.cycles --work FOLDER`. Two loops run side by side, each with a store of its own. In
a cycle a server is started and one of its processes gets SIGKILL or SIGSTOP, then `stop`; or `import` is killed and run
again; or `up` is killed, then `down`, or `up` again and `down`. Afterwards no process of the store, no shared memory
and no unfinished folder may be left, and what was imported must be there.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.support.commands import command_line, environment
from tests.support.supervised import slow_model
from trtserve.host.machine import SHARED_MEMORY
from trtserve.server.doctor.stub import write_probe_repository

SETUP = """\
models:
  small: {{source: demo, runtime: openvino, max_batch_size: {batch}}}
servers:
  {name}: {{model: small, auto_ports: true}}
"""
KINDS = ("server",) * 7 + ("import",) * 2 + ("up",)
NOT_FOUND = 33


@dataclass(kw_only=True)
class Outcome:
    """How a cycle ended; one that was `wrong` or has `left` something is a fault."""

    cycle: str
    kind: str
    what: str = ""
    """What was killed or stopped, and when."""
    wrong: str = ""
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Loop:
    """Cycles one after the other in a store of their own."""

    def __init__(self, number: int, work: Path, seed: int) -> None:
        self.chance, self.number = random.Random(f"{seed}/{number}"), number
        self.home = work / f"home{number}"
        self.home.mkdir(parents=True)
        self.probe = write_probe_repository(work / f"probe{number}")
        slow_model(self.probe, 0.3)
        self.import_seconds = self.up_seconds = 6.0
        self.run("import", "demo", "--name", "warm", "--quiet")
        self.run("start", *self._server_arguments("warm"))  # the first start in a store tests Triton
        self.run("stop", "warm")

    def cycle(self, name: str) -> Outcome:
        outcome = Outcome(cycle=name, kind=self.chance.choice(KINDS))
        began = time.monotonic()
        steps = {"server": self._server, "import": self._import, "up": self._up}
        try:
            outcome.what = steps[outcome.kind](name)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            outcome.wrong = f"{type(error).__name__}: {error}"
        outcome.left = self._left(name)
        for each in self.processes():  # the next cycle begins clean
            with suppress(psutil.Error):
                each.kill()
        outcome.seconds = round(time.monotonic() - began, 1)
        return outcome

    def run(self, *words: str, wanted: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            command_line(*words),
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode in wanted, f"`{' '.join(words[:2])}` ended with {done.returncode}: {done.stderr[-600:]}"
        return done.stdout

    def spawn(self, *words: str) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        own = environment(self.home)
        return subprocess.Popen(
            command_line(*words), env=own, stdin=null, stdout=null, stderr=null, start_new_session=True
        )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ().get("TRTSERVE_HOME") == str(self.home)
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _left(self, name: str) -> list[str]:
        """Wait up to a minute, and return what does not go."""
        deadline = time.monotonic() + 60
        while True:
            left = [str(path) for path in SHARED_MEMORY.glob(f"trtserve_{name}*")]
            for each in self.processes():
                with suppress(psutil.Error):
                    left.append(f"{each.pid} {each.name()} {each.status()} {' '.join(each.cmdline())[:120]}")
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return left + [str(path) for path in self.home.glob("*/.*") if path.parent.name != "locks" and path.is_dir()]

    def _server_arguments(self, name: str) -> tuple[str, ...]:
        return ("--model-repository", str(self.probe), "--name", name, "--detach", "--auto-ports")

    def _server(self, name: str) -> str:
        policy = self.chance.choice(("never", "on-failure"))
        number = self.chance.choice((signal.SIGKILL,) * 3 + (signal.SIGSTOP,))
        began = time.monotonic()
        launcher = self.spawn("start", *self._server_arguments(name), "--restart", policy)
        wanted = self.chance.randint(1, 7)  # launcher, supervisor, Triton, its stubs, gateway
        while len(self.processes()) < wanted and time.monotonic() - began < 10 and launcher.poll() is None:
            time.sleep(0.05)
        time.sleep(self.chance.uniform(0, 1.5))
        moment, what = time.monotonic() - began, "nothing"
        victim = self.chance.choice(self.processes() or [None])
        with suppress(psutil.Error):
            if victim is not None:
                what = "launcher" if victim.pid == launcher.pid else _described(victim)
                victim.send_signal(number)
        time.sleep(self.chance.uniform(0, 1))
        if number == signal.SIGSTOP and victim is not None:  # nobody would end a stopped launcher or supervisor
            with suppress(psutil.Error):
                victim.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(60)
        self.run("stop", name, wanted=(0, NOT_FOUND))
        return f"{what} ({number.name} after {moment:.1f} s, {policy})"

    def _killed(self, seconds: float, *words: str) -> str:
        process = self.spawn(*words)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
            return f"{words[0]} (after {seconds:.1f} s)"
        return "nothing"

    def _forget(self) -> None:
        for part in ("models", "checkpoints", "engines", "repositories", "names"):
            shutil.rmtree(self.home / part, ignore_errors=True)

    def _import(self, name: str) -> str:
        self._forget()
        words = ("import", "demo", "--name", name, "--quiet", "--max-batch-size", str(self.chance.randint(1, 64)))
        what = self._killed(self.chance.uniform(0, self.import_seconds), *words)
        began = time.monotonic()
        self.run(*words)
        self.import_seconds = 0.7 * self.import_seconds + 0.3 * max(1.0, time.monotonic() - began)
        assert name in self.run("list"), "the import is not in the list"
        self.run("start", name, "--dry-run", "--auto-ports")
        return what

    def _up(self, name: str) -> str:
        self._forget()
        file = self.home / "setup.yaml"
        file.write_text(SETUP.format(batch=self.chance.randint(1, 64), name=name), encoding="utf-8")
        what = self._killed(self.chance.uniform(0, self.up_seconds), "up", str(file), "--quiet")
        if self.chance.random() < 0.7:
            began = time.monotonic()
            self.run("up", str(file), "--quiet")
            self.up_seconds = 0.7 * self.up_seconds + 0.3 * (time.monotonic() - began)
            assert self.run("query", "Hi", "--server", name, "--max-tokens", "2").strip(), "no answer"
        self.run("down", str(file))
        return what


def _described(process: psutil.Process) -> str:
    words = process.cmdline()
    if "--report-to" in words:
        return "supervisor"
    if any("trtserve.gateway" in word for word in words):
        return "gateway"
    return "stub" if "python_backend_stub" in words[0] else process.name()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60, help="begin no cycle after this time")
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    work = options.work.absolute() / "cycles"
    shutil.rmtree(work, ignore_errors=True)
    began, outcomes, lock = time.monotonic(), list[Outcome](), threading.Lock()
    numbers = iter(range(options.cycles))

    def run(number: int) -> None:
        loop = Loop(number, work, options.seed)
        while time.monotonic() < began + 60 * options.minutes:
            with lock:
                count = next(numbers, None)
            if count is None:
                return
            outcome = loop.cycle(f"q{number}c{count}")
            with lock:
                outcomes.append(outcome)
                if outcome.wrong or outcome.left:
                    print(json.dumps(asdict(outcome)), flush=True)
                elif len(outcomes) % 20 == 0:
                    print(f"{len(outcomes)} cycles after {time.monotonic() - began:.0f} s", flush=True)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    with (work / "outcomes.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(each)) + "\n" for each in outcomes)
    kinds = Counter(each.kind for each in outcomes)
    victims = Counter(each.what.partition(" (")[0] for each in outcomes)
    print(f"{len(outcomes)} cycles in {time.monotonic() - began:.0f} s: {dict(kinds)}; got a signal: {dict(victims)}")
    left, wrong = sum(bool(each.left) for each in outcomes), sum(bool(each.wrong) for each in outcomes)
    print(f"{left} left something, {wrong} ended wrongly; what each did: {work / 'outcomes.jsonl'}")
    sys.exit(bool(left or wrong or len(outcomes) < options.cycles))


if __name__ == "__main__":
    main()
