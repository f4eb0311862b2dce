"""Run the benchmarks of a setup file, and compare their figures with the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtserve.pipeline.setup_file.content import BenchmarkSetup
from trtserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from trtserve.bench.report import BenchReport
    from trtserve.client.endpoint import Endpoint


@dataclass(frozen=True, kw_only=True)
class Result:
    """A benchmark that was run."""

    setup: BenchmarkSetup
    report: BenchReport

    @property
    def missed(self) -> list[str]:
        """The limits that its figures do not meet, one sentence for each."""
        return self.setup.requirements.missed_by(self.report.statistics)

    def to_json(self) -> dict[str, Any]:
        """Return name, report and missed limits."""
        return {"name": self.setup.name, "missed": self.missed, "report": self.report.to_json()}


def run(setup: BenchmarkSetup, endpoint: Endpoint, *, metrics: str | None, progress: Progress = SILENT) -> Result:
    """Measure a server of the file. Raises what `plan_benchmark` and `run_benchmark` raise."""
    from trtserve.bench.exports import write_result
    from trtserve.bench.plan import plan_benchmark
    from trtserve.bench.run import run_benchmark

    progress.step(f"Benchmark {setup.name}")
    report = run_benchmark(plan_benchmark(setup.spec, endpoint), progress=progress, metrics=metrics)
    if setup.out is not None:
        write_result(report, setup.out)
    return Result(setup=setup, report=report)
