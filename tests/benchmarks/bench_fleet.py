"""The simulation of a day of 1,000 nodes: CPU time, memory, and whether its cost grows with events.

With `--replicas 1,2,4` instead: the simulation against that many servers of the demo on this machine, in bursts.
Servers share its cores, so the speed of one is measured with all of them at work. `tests/unit/test_fleet_engines.py`
compares it with real engines in virtual time.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from trtserve.bench.report import BenchReport
from trtserve.pipeline.fleet import read_fleet
from trtserve.pipeline.fleet.simulation import Arrivals, Simulation
from trtserve.pipeline.fleet.sizing import fitted, simulate, size
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import plan_import
from trtserve.pipeline.tuning.trials import Bench
from trtserve.specs import BenchSpec, BuildSpec, ConvertSpec, RepositorySpec, ServerSpec
from trtserve.store import Store
from trtserve.store.sources import DEMO

DAY = """\
goal: ttft p99 < 2 s, itl p99 < 100 ms
gpus: {h100: {nodes: 1000, per_node: 8, price: 2.5}}
shapes:
  tp8: {gpu: h100, gpus: 8, max_batch_size: 64, load_seconds: 180,
        speed: {step_ms: 20, sequence_ms: 0.2, prompt_token_ms: 0.05, request_ms: 10, error: 0.05}}
traffic:
  requests_per_second: RATE
  day: [0.5, 0.4, 0.4, 0.35, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9, 1, 1,
        0.95, 0.95, 1, 1, 0.95, 0.9, 0.85, 0.8, 0.8, 0.75, 0.65, 0.55]
  input_tokens: 1000
  output_tokens: 4000
  variation: 0.8
  burstiness: 20
  shared_prefix: 0.4
failures: {node_hours: 2000, repair_minutes: 30}
update: {hour: 11, at_once: 0.05, drain_seconds: 300}
"""
RATES = (80, 160, 320)  # the last one takes 995 of 1,000 nodes


SLOTS = 8
LOAD = BenchSpec(
    input_mean=32, input_stdev=0, output_mean=32, output_stdev=0, warmup_requests=16, num_requests=160, calibrate=False
)
BUSY = 0.6
"""Part of the requests that replicas can answer at most."""


class _PerReplica:
    """A result of several replicas, as one of them sees it."""

    def __init__(self, report: BenchReport, count: int) -> None:
        self.model, self.load = report.model, report.load
        found = report.statistics
        self.statistics = replace(
            found,
            requests_per_second=found.requests_per_second / count,
            requests_in_flight=found.requests_in_flight / count,
        )


def against_servers(counts: list[int], work: Path) -> list[Row]:
    """Measure servers in bursts, simulate the same requests, and compare times to the first token."""
    os.environ["TRTSERVE_HOME"] = str(work / "store")
    store = Store()
    build = BuildSpec(runtime="openvino", max_batch_size=SLOTS)
    spec = resolve_import(
        DEMO, name="fleet", convert=ConvertSpec(), build=build, repository=RepositorySpec(), store=store
    )
    rows = []
    with Bench("fleet-bench", store) as bench:
        plan = plan_import(spec, store=store)
        for count in counts:
            server = ServerSpec(instances=count)
            closed = [
                bench.measure(plan, server, replace(LOAD, concurrency=count * each))
                for each in (1, 2, SLOTS // 2, SLOTS)
            ]
            views = [cast(BenchReport, _PerReplica(each, count)) for each in closed]
            speed, error = fitted(views, SLOTS)
            rate = BUSY * max(each.statistics.requests_per_second for each in closed)
            bursts = replace(LOAD, request_rate=rate, arrivals="gamma", burstiness=0.3, num_requests=600 * count)
            report = bench.measure(plan, server, bursts)
            sent = [each for each in report.records if each.sent_ns is not None]
            times = np.sort(np.array([each.sent_ns for each in sent], float)) / 1e9
            ones = np.ones(len(sent))
            arrivals = Arrivals(times - times[0], LOAD.input_mean * ones, LOAD.output_mean * ones, 0 * ones)
            found = Simulation(count, speed).run([arrivals]).first
            measured = report.statistics.time_to_first_token_ms
            print(f"{count} replicas: {speed}, off by {error:.0%}; {rate:.1f} requests/s; {report.verdict.judgement}")
            for name, quantile, real in (("p50", 0.5, measured.p50), ("p99", 0.99, measured.p99)):
                simulated = 1000 * (found.quantile(quantile) or 0.0)
                print(
                    f"{count} replicas, {name}: simulated {simulated:.1f} ms, measured {real or 0:.1f} ms", flush=True
                )
                off = abs(simulated / (real or 1e-9) - 1)
                case = f"{count} replicas in bursts: first token, {name}, off by"
                rows.append(Row(case=case, value=off, target=0.15, at_most=True, measured=real, base=simulated))
    return rows


def main() -> None:
    """Measure, print the table and write fleet.json."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--replicas", help="compare with so many servers on this machine, such as 1,2,4")
    arguments = parser.parse_args()
    if arguments.replicas:
        rows = against_servers([int(each) for each in arguments.replicas.split(",")], arguments.work)
        print(table(rows))
        finish(arguments, "replicas", rows)
        return
    seconds, events = [], []
    for rate in RATES:
        file = Path(arguments.work) / "fleet.yaml"
        file.write_text(DAY.replace("RATE", str(rate)), encoding="utf-8")
        fleet = read_fleet(file)
        began = time.process_time()
        day = simulate(fleet, size(fleet)[0])
        seconds.append(time.process_time() - began)
        events.append(day.found.events)
        print(f"{day.replicas} nodes, {events[-1]:,} events: {seconds[-1]:.1f} s of CPU", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    grown = seconds[-1] / seconds[0] / (events[-1] / events[0])
    rows = [
        Row(case="24 hours of 1,000 nodes: CPU seconds", value=seconds[-1], target=60, at_most=True),
        Row(case="memory (GiB)", value=memory, target=2, at_most=True),
        Row(case="four times the events: times as long, ÷ 4", value=grown, target=1.25, at_most=True),
    ]
    print(table(rows, value="Value"))
    finish(arguments, "fleet", rows)


if __name__ == "__main__":
    main()
