"""Conversions that are killed at chosen moments, each in a process of its own: `python -m ... MODEL FOLDER KILLS`.

A moment is a call that touches the file system (as Python's audit events tell) or a report of progress, while another
process of the conversion reads and writes. One process imports everything and forks for each moment, which takes
milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.stages import convert_model
from trtserve.artifacts import MANIFEST, Model
from trtserve.checkpoint import streaming
from trtserve.progress import SilentProgress, Task
from trtserve.specs import ConvertSpec
from trtserve.store import Store

_TOUCHING = ("open", "os.", "shutil.", "fcntl.")
SPEC = ConvertSpec(tp_size=2, dtype="bfloat16")
OTHER = ConvertSpec(tp_size=1, dtype="float16")
LAST = 6  # moments at the end that are always tried


class _Moments(SilentProgress):
    """Counts moments once it is switched on, and calls `at` with their number; `renamed` counts the renames of them."""

    def __init__(self, at: Callable[[int], None]) -> None:
        self._at = at
        self.count = 0
        self.renamed = 0
        self.on = False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, _: object) -> None:
        self.renamed += self.on and event == "os.rename"
        if event.startswith(_TOUCHING):
            self._passed()

    @contextmanager
    def task(self, text: str, *, total: int, unit: str = "items", done: int = 0) -> Iterator[Task]:
        yield self

    def advance(self, amount: int) -> None:
        self._passed()

    def describe(self, text: str) -> None:
        pass

    def _passed(self) -> None:
        if self.on:
            self.count += 1
            self._at(self.count)


def _in_child(work: Callable[[], None]) -> int:
    """Exit status of `work` in a fork of this process, as os.waitpid gives it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def _convert(model: Path, folder: Path, spec: ConvertSpec, moments: _Moments | None = None) -> None:
    store = Store(folder / "home")
    if moments is None:
        convert_model(Model(path=model), spec, out=folder / "out" / "made", store=store)
    else:
        moments.on = True
        convert_model(Model(path=model), spec, out=folder / "out" / "made", store=store, progress=moments)
        moments.on = False


def _count_moments(model: Path, folder: Path) -> tuple[int, int]:
    """Moments and renames of an undisturbed conversion, read from a file that the process leaves."""

    def work() -> None:
        moments = _Moments(lambda _: None)
        _convert(model, folder, SPEC, moments)
        (folder / "count").write_text(f"{moments.count} {moments.renamed}")

    assert _in_child(work) == 0
    count, renamed = map(int, (folder / "count").read_text().split())
    (folder / "count").unlink()
    return count, renamed


def _killed(model: Path, folder: Path, moment: int) -> bool:
    """Whether a conversion was killed at that moment, its own or its helper's (it may have had fewer)."""

    def work() -> None:
        conversion = os.getpid()

        def at(count: int) -> None:
            if count == moment:
                os.kill(conversion, signal.SIGKILL)

        _convert(model, folder, SPEC, _Moments(at))

    status = _in_child(work)
    assert status in (0, signal.SIGKILL), f"moment {moment}: status {status}"
    return status != 0


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files below a folder by their places; the time in a manifest and measured rates do not count."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b"folder"
        if path.name == MANIFEST:
            data = json.dumps({key: value for key, value in json.loads(data).items() if key != "created"}).encode()
        found[str(path.relative_to(folder))] = "" if path.name == "rates.json" else hashlib.sha256(data).hexdigest()
    return found


def _prepare(folder: Path, earlier: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if earlier is not None:
        shutil.copytree(earlier, folder / "out" / "made")


def _complete_ones(folder: Path) -> dict[str, str] | None:
    """Return the contents of the destination if it looks complete."""
    made = folder / "out" / "made"
    return contents(made) if (made / MANIFEST).exists() else None


def run(model: Path, folder: Path, *, replace: bool, kills: int) -> dict[str, int]:
    """Kill a conversion at `kills` random moments and at its last ones, and run it again.

    With `replace` another checkpoint lay there before. Asserts that what looks complete after the kill is the old or
    the new checkpoint, that the second run ends with the files of an undisturbed one, and that nothing else is left.
    Returns how many were killed, how many of them while rank files were written, and the renames of one conversion.
    """
    earlier = folder / "earlier" / "out" / "made" if replace else None
    if earlier is not None:
        assert _in_child(lambda: _convert(model, folder / "earlier", OTHER)) == 0
    _prepare(folder / "run", earlier)
    count, renamed = _count_moments(model, folder / "run")
    expected = contents(folder / "run")
    whole = _complete_ones(folder / "run")
    allowed = [None, whole] if earlier is None else [None, whole, contents(earlier)]
    killed = writing = 0
    for moment in _moments(count, kills):
        if killed >= kills + LAST:
            break
        _prepare(folder / "run", earlier)
        killed += _killed(model, folder / "run", moment)
        writing += (folder / "run" / "out" / ".made.partial" / "rank1.safetensors").exists()
        assert _complete_ones(folder / "run") in allowed, f"moment {moment}"
        assert _in_child(lambda: _convert(model, folder / "run", SPEC)) == 0
        assert contents(folder / "run") == expected, f"moment {moment}"
    return {"renamed": renamed, "killed": killed, "writing": writing}


def _moments(count: int, kills: int) -> Iterator[int]:
    """The last few moments, where the checkpoint is put in its place, then random ones, the same in every run.

    More than `kills`: a conversion whose helper is faster reports less progress itself, and ends before a late moment.
    """
    first_of_last = max(1, count - LAST + 1)
    yield from range(first_of_last, count + 1)
    yield from random.Random(0).sample(range(1, first_of_last), min(3 * kills, first_of_last - 1))


if __name__ == "__main__":
    streaming.CHUNK, streaming.WORTH = 4 << 10, 1  # more moments, and processes that are all at work
    os.environ.pop("TRTSERVE_HOME", None)
    source, work, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    results = [run(source, work / str(replace), replace=replace, kills=number) for replace in (False, True)]
    sys.stdout.write(json.dumps(results))
