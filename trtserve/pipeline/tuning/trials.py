"""One trial: a server of a configuration is measured at a load, and the result is kept as a folder of `bench`.

A trial that was finished is read again instead of measured, so an interrupted search continues where it was. Servers
end with this process. Engines and conversions are those of the store, which candidates share by fingerprint.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.bench.exports import write_result
from trtserve.bench.plan import plan_benchmark
from trtserve.bench.report import BenchReport, read_report
from trtserve.bench.run import machine, run_benchmark
from trtserve.bench.targets import figure_of
from trtserve.errors import BenchmarkError, UsageError
from trtserve.executor.runtimes import choose_runtime
from trtserve.files import read_json_object, write_json, writing
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import ImportPlan, plan_import, run_import
from trtserve.pipeline.tuning.roofline import MachineSpeed
from trtserve.pipeline.tuning.space import Candidate, Values, words
from trtserve.progress import SILENT, Progress
from trtserve.server.detach import start_in_background
from trtserve.server.discovery import endpoint_of
from trtserve.server.plan import with_free_ports
from trtserve.server.shutdown import stop_server
from trtserve.server.state import Server, recorded_server
from trtserve.server.triton.tritonserver import client_host
from trtserve.specs import BenchSpec, BuildSpec, ConvertSpec, RepositorySpec, RuntimeName, ServerSpec
from trtserve.store import Store
from trtserve.store.sources import DEMO

_TRIAL = "trial.json"
_ENDING = 60.0
_SLUG = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A measured configuration."""

    candidate: Candidate
    load: Values
    report: BenchReport
    folder: Path
    seconds: float  # how long it took, with the start of its server and what had to be built
    earlier: bool  # whether an earlier run of the search measured it

    @property
    def name(self) -> str:
        """Configuration and load, for people."""
        return "; ".join(filter(None, (self.candidate.name, words(self.load))))


class Bench:
    """The place where servers are tried, one at a time; a context manager, which stops the last one."""

    def __init__(self, name: str, store: Store, progress: Progress = SILENT) -> None:
        self._name, self._store, self._progress = name, store, progress
        self._running: Server | None = None
        self._what: tuple[ModelRepository, ServerSpec] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server that runs, if there is one."""
        if self._running is not None and recorded_server(self._name, self._store) is not None:
            stop_server(self._name, store=self._store)
        self._running = self._what = None

    def _wait_for_name(self) -> None:
        """Wait for the server of a search that was killed, which ends a moment after it."""
        end = time.monotonic() + _ENDING
        while time.monotonic() < end:
            other = recorded_server(self._name, self._store)
            if other is None or not other.alive():
                return
            time.sleep(0.2)

    def measure(self, plan: ImportPlan, server: ServerSpec, spec: BenchSpec) -> BenchReport:
        """Measure a server, which is started unless it runs. Raises what building, starting and measuring raise."""
        made = run_import(plan, record=False, progress=self._progress)
        if self._what is None or self._what[0].path != made.path or self._what[1] != server:
            self.stop()
            self._wait_for_name()
            self._progress.step(f"Starting {self._name}")
            # One more than it needs would disturb the figures: no page, and ports that are free.
            asked = with_free_ports(replace(server, name=self._name, ui=False))
            self._running = start_in_background(made, asked, bound=True, store=self._store)
            self._what = made, server
        running = self._running
        if running is None:
            raise BenchmarkError(f"The server {self._name} did not start.")
        address = running.address
        metrics = f"http://{client_host(address.host)}:{address.metrics_port}/metrics"
        return run_benchmark(plan_benchmark(spec, endpoint_of(running)), progress=self._progress, metrics=metrics)


@dataclass
class Trials:
    """Runs trials of one search, whose results are folders below `folder`."""

    folder: Path
    spec: BenchSpec
    bench: Bench
    used: float = 0.0  # seconds of all trials, also those of earlier runs
    done: list[Trial] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    def run(self, candidate: Candidate, load: Values, *, requests: int, turn: int = 0) -> Trial:
        """Return the result of a trial with this many requests; `turn` numbers its repetitions.

        Raises KeyboardInterrupt if it was interrupted; then nothing of it is kept.
        """
        folder = self.folder / self._key(candidate, load, requests, turn)
        began = self.clock()
        if (folder / _TRIAL).is_file():
            report, earlier = read_report(folder), True
            seconds = float(read_json_object(folder / _TRIAL, UsageError)["seconds"])
        else:
            # Trials that only explore do without the client's calibration, which takes as long as they do.
            asked = {"num_requests": requests, "seed": self.spec.seed + turn, **dict(load)}
            spec = replace(self.spec, calibrate=self.spec.calibrate and turn > 0, **asked)
            report, earlier = self.bench.measure(candidate.plan, candidate.server, spec), False
            if report.interrupted:
                raise KeyboardInterrupt
            seconds = self.clock() - began
            self._keep(report, folder, {"candidate": dict(candidate.values), "load": dict(load), "seconds": seconds})
        trial = Trial(candidate=candidate, load=load, report=report, folder=folder, seconds=seconds, earlier=earlier)
        self.used += seconds
        self.done.append(trial)
        return trial

    def _keep(self, report: BenchReport, folder: Path, facts: dict[str, object]) -> None:
        """Write the folder and rename it: what has the final name is complete."""
        staged = folder.with_name(f".{folder.name}.partial")
        with writing(folder):
            shutil.rmtree(staged, ignore_errors=True)
            write_result(report, staged)
            write_json(staged / _TRIAL, facts)
            shutil.rmtree(folder, ignore_errors=True)  # incomplete, of a tool that wrote into it
            staged.rename(folder)

    def _key(self, candidate: Candidate, load: Values, requests: int, turn: int) -> str:
        facts = json.dumps([candidate.values, load, requests, turn], default=str)
        slug = _SLUG.sub("-", "-".join(filter(None, (words(candidate.values), words(load))))).strip("-")
        return f"{slug[:80]}-{requests}-{turn}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


_MANY = 8
_TOKENS = 64


def measure_speed(name: RuntimeName, *, progress: Progress = SILENT) -> tuple[str, MachineSpeed]:
    """Measure the runtime, keep the figures in the store, and return its name and them.

    Raises UsageError for a runtime without kernels at hand, BenchmarkError when the demo was not measured, and what
    importing and starting the demo raise.
    """
    store, runtime = Store(), choose_runtime(name, progress)
    progress.step(f"Measuring the matrices of {runtime.name}")
    bytes_per_second, operations_per_second = runtime.matrix_speed()
    build = BuildSpec(runtime=name, max_batch_size=_MANY)
    imported = resolve_import(
        DEMO, name="measure", convert=ConvertSpec(), build=build, repository=RepositorySpec(), store=store
    )
    spec = BenchSpec(num_requests=8, input_mean=16, input_stdev=0, output_mean=_TOKENS, output_stdev=0, calibrate=False)
    with Bench("measure-tune", store, progress) as bench:
        plan = plan_import(imported, store=store, progress=progress)
        one, many = (
            bench.measure(plan, ServerSpec(), replace(spec, concurrency=count, num_requests=8 * count))
            for count in (1, _MANY)
        )
    # A request alone has all steps for itself, and waits for the engine first; many share the steps.
    first = _figure(one, "ttft_mean") / 1000
    token = max(2e-5, (1 / _figure(one, "requests_per_second") - first) / (_TOKENS - 1))
    shared = (_MANY / _figure(many, "requests_per_second") - first) / (_TOKENS - 1)
    sequence = min(0.95 * token, max(0.05 * token, (shared - token) / (_MANY - 1)))
    speed = MachineSpeed(
        bytes_per_second=bytes_per_second,
        operations_per_second=operations_per_second,
        step_seconds=token - sequence,
        sequence_seconds=sequence,
        request_seconds=max(1e-4, first - token),
        device=str(machine()["cpu"]),
        measured=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    speed.write(runtime.name, store)
    return runtime.name, speed


def _figure(report: BenchReport, name: str) -> float:
    value = figure_of(report.statistics, name)
    if value is None or not 0 < value < math.inf:
        raise BenchmarkError(
            "The demo model was not measured: requests failed.", hint="Try `trtserve run demo`, whose log says why."
        )
    return value
