"""Measure once what a runtime reaches on this machine: its matrices alone, and a server of the demo model around them.

The demo model is so small that its times are overheads: of a step, of a sequence in it, of a request.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import replace

from trtserve.bench.report import BenchReport
from trtserve.bench.run import machine
from trtserve.bench.targets import figure_of
from trtserve.errors import BenchmarkError
from trtserve.executor.runtimes import choose_runtime
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import plan_import
from trtserve.pipeline.tuning.roofline import MachineSpeed
from trtserve.pipeline.tuning.trials import Bench
from trtserve.progress import SILENT, Progress
from trtserve.specs import BenchSpec, BuildSpec, ConvertSpec, RepositorySpec, RuntimeName, ServerSpec
from trtserve.store import Store
from trtserve.store.sources import DEMO

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
    spec = BenchSpec(
        num_requests=32, input_mean=16, input_stdev=0, output_mean=_TOKENS, output_stdev=0, calibrate=False
    )
    with Bench("measure-tune", store, progress) as bench:
        plan = plan_import(imported, store=store, progress=progress)
        one, many = (
            bench.measure(plan, ServerSpec(), replace(spec, concurrency=count, num_requests=32 * count))
            for count in (1, _MANY)
        )
    # A request alone takes its first token and all steps; many together share the steps.
    request = _figure(one, "ttft_mean") / 1000
    token = max(2e-5, (1 / _figure(one, "requests_per_second") - request) / _TOKENS)
    shared = (1 / _figure(many, "requests_per_second") - request / _MANY) / _TOKENS
    sequence = min(0.95 * token, max(0.05 * token, (shared - token / _MANY) / (1 - 1 / _MANY)))
    speed = MachineSpeed(
        bytes_per_second=bytes_per_second,
        operations_per_second=operations_per_second,
        step_seconds=token - sequence,
        sequence_seconds=sequence,
        request_seconds=request,
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
