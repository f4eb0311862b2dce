"""The simulation of a day of 1,000 nodes: CPU time, memory, and whether its cost grows with events.

`tests/unit/test_fleet_engines.py` compares it with real engines.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from trtserve.pipeline.fleet.content import read_fleet
from trtserve.pipeline.fleet.sizing import simulate, size

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


def main() -> None:
    """Measure, print the table and write fleet.json."""
    arguments = benchmark_parser(__doc__).parse_args()
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
