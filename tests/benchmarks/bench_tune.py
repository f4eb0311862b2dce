"""`tune` against an exhaustive sweep: two models, three goals; how good what it finds is, and in how much of the time.

The found configuration, the best of the sweep and the file's own are measured again in turns, because the best of many
noisy trials looks better than it is.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from tests.support.tiny_models import write_tiny_model
from tests.support.tuning_landscapes import between
from trtserve.bench.targets import figure_of, read_goal
from trtserve.pipeline.setup_file.reading import read_setup
from trtserve.pipeline.tuning.answer import make_answer
from trtserve.pipeline.tuning.roofline import MachineSpeed
from trtserve.pipeline.tuning.search import Goal, Search, prepare, steady_rate
from trtserve.pipeline.tuning.space import Space, find_space
from trtserve.pipeline.tuning.trials import Trial, Trials, measure_speed
from trtserve.store import Store

SIZES: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "intermediate_size": 1536, "max_position_embeddings": 2048}
SETUP = """\
models:
  {name}: {{source: {source}, runtime: openvino, max_batch_size: 2, max_seq_len: 512}}
servers:
  {name}: {{model: {name}, auto_ports: true}}
tune:
  {name}:
    server: {name}
    num_requests: {requests}
    warmup_requests: 4
    calibrate: false
    input_mean: 48
    input_stdev: 8
    output_mean: 24
    output_stdev: 0
    ranges: {{max_batch_size: [1, 2, 4, 8, 16], max_num_tokens: [64, 2048], concurrency: [{loads}]}}
"""
TURNS = 2
BUDGET = 0.2
"""Of the sweep's time."""


def sweep_of(space: Space, trials: Trials) -> dict[Any, Trial]:
    """Measure every lane with all requests."""
    found = {}
    for candidate, load in itertools.product(space.candidates, space.loads):
        found[candidate.values, load] = trials.run(candidate, load, requests=trials.spec.num_requests, turn=90)
    return found


def again(search: Search, lanes: list[Any], folder: Path) -> dict[Any, float]:
    """Measure lanes in turns and return the median rate of each."""
    trials = Trials(folder=folder, spec=search.trials.spec, bench=search.trials.bench)
    candidates = {each.values: each for each in search.space.candidates}
    rates: dict[Any, list[float]] = {lane: [] for lane in lanes}
    for turn in range(TURNS):
        for lane in lanes if turn % 2 else reversed(lanes):
            trial = trials.run(candidates[lane[0]], lane[1], requests=trials.spec.num_requests, turn=50 + turn)
            rates[lane].append(steady_rate(trial.report, "throughput"))
    return {lane: statistics.median(values) for lane, values in rates.items()}


def main() -> None:
    """Measure, print the table and write tune.json."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", default="demo,llama-40m")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--loads", default="1, 2, 4, 8, 16")
    arguments = parser.parse_args()
    work: Path = arguments.work / "tune"
    work.mkdir(parents=True, exist_ok=True)
    os.environ["TRTSERVE_HOME"] = str(work / "store")
    store = Store()
    if MachineSpeed.read("openvino", store) is None:
        measure_speed("openvino")
    llama = work / "llama-40m"
    if not llama.is_dir():
        write_tiny_model(llama, dtype="float16", gain=0.05, **SIZES)
    rows: list[Row] = []
    details: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        file = work / f"{name}.yaml"
        file.write_text(
            SETUP.format(
                name=name,
                source="demo" if name == "demo" else llama,
                requests=arguments.requests,
                loads=arguments.loads,
            ),
            encoding="utf-8",
        )
        setup = read_setup(file)
        asked = setup.searches[0]
        space = find_space(setup, asked, store=store)
        whole = prepare(space, Goal(limits={}, aim="throughput"), asked, work / f"{name}.sweep", store)
        with whole.trials.bench:
            began = time.monotonic()
            sweep = sweep_of(space, whole.trials)
            seconds = whole.trials.used
        print(f"{name}: {len(sweep)} lanes in {seconds:.0f} s (now {time.monotonic() - began:.0f} s)", flush=True)
        limits = {
            figure: between([figure_of(trial.report.statistics, figure) or 0.0 for trial in sweep.values()], 0.3, 0.7)
            for figure in ("ttft_p99", "itl_p99")
        }
        for number, text in enumerate(
            ("", f"ttft p99 < {limits['ttft_p99']:.1f} ms", f"itl p99 < {limits['itl_p99']:.2f} ms")
        ):
            goal = Goal(limits=read_goal(text), aim="throughput")
            folder = work / f"{name}.{number}.search"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            search = prepare(space, goal, asked, folder, store, budget=BUDGET * seconds)
            with search.trials.bench:
                began = time.monotonic()
                outcome = search.run()
                share = (time.monotonic() - began) / seconds  # what the search itself computes counts too
                met = [
                    lane
                    for lane, trial in sweep.items()
                    if goal.missed(lambda name, of=trial: figure_of(of.report.statistics, name)) == 0  # type: ignore[misc]
                ]
                best = max(met, key=lambda lane: steady_rate(sweep[lane].report, "throughput"))
                own = max(
                    (lane for lane in met if not lane[0]),
                    key=lambda lane: steady_rate(sweep[lane].report, "throughput"),
                    default=None,
                )
                found = None if outcome.best is None else (outcome.best.candidate.values, outcome.best.load)
                lanes = list(dict.fromkeys(lane for lane in (found, best, own) if lane is not None))
                rates = again(search, lanes, folder / "again")
            answer = make_answer(search)
            case = f"{name}, {text or 'no goal'}"
            details.append({"case": case, "load": os.getloadavg()[0], "best": str(best), "answer": answer})
            print(
                f"{case}: found {found}, best {best}, own {own}; {outcome.reasons}; errors {answer.errors}", flush=True
            )
            value = 0.0 if found is None else rates[found] / rates[best]
            rows.append(Row(case=f"{case}: found ÷ best of the sweep", value=value, target=0.97))
            rows.append(Row(case=f"{case}: time ÷ the sweep's", value=share, target=0.2, at_most=True))
            if own is not None and found is not None:
                rows.append(Row(case=f"{case}: found ÷ the file's own", value=rates[found] / rates[own], target=1.0))
            print(table(rows), flush=True)
    finish(arguments, "tune", rows, details=details)


if __name__ == "__main__":
    main()
