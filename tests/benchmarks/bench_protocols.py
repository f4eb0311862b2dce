"""The same run by every protocol and to every model of the demo: do the figures agree, and if not, why?

Everything goes through the command line, one user at a time. Protocols take turns, in the other order in every second
round; a difference is that from gRPC to the same model, with the 95 % interval of `trtserve bench compare`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import benchmark_parser, finish
from trtserve.bench.compare import Difference, compare
from trtserve.bench.report import read_report, read_runs

TOKENS, REQUESTS, ROUNDS = 32, 40, 4
LOAD = (
    *("--num-requests", str(REQUESTS), "--concurrency", "1", "--input-mean", "64", "--input-stdev", "0"),
    *("--output-mean", str(TOKENS), "--output-stdev", "0"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a way to it."""

    model: str
    way: str
    options: tuple[str, ...] = ()
    openai: bool = False

    @property
    def folder(self) -> str:
        """Name of its results."""
        return f"{self.model}-{self.way}".replace(" ", "-")


HTTP = ("--protocol", "http")
STREAMED = [
    *(
        Case(model=model, way=f"{way} stream", options=("--model", model, *options))
        for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", "demo")
        for way, options in (("gRPC", ()), ("HTTP", HTTP))
    ),
    Case(model="demo", way="OpenAI stream", openai=True),
]
WHOLE = [
    *(
        Case(model=model, way=f"{way} whole", options=("--model", model, "--no-streaming", *options))
        for model in ("tensorrt_llm", "demo")
        for way, options in (("gRPC", ()), ("HTTP", HTTP))
    ),
    Case(model="demo", way="OpenAI whole", options=("--no-streaming",), openai=True),
]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Means over the runs of a case, next to those of gRPC to the same model."""

    case: Case
    first_ms: float | None
    tokens_per_second: float
    floor_ms: float
    """First response of the echo server, which needs no time, over this protocol."""
    differences: list[Difference]


class CommandLine:
    """`trtserve` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self._environment = {**os.environ, "TRTSERVE_HOME": str(home), "OPENAI_API_KEY": "none"}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "trtserve", *arguments]
        ended = subprocess.run(program, env=self._environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{' '.join(arguments)} ended with {ended.returncode}:\n{ended.stderr}")
        return ended

    @contextmanager
    def serving(self, *options: str) -> Iterator[tuple[str, ...]]:
        """Import and serve the demo, and yield what `bench` needs to use its OpenAI API."""
        repository = Path(self("import", "demo", "--quiet", *options).stdout.strip())
        self("start", "demo", "--detach", "--auto-ports")
        try:
            (server,) = json.loads(self("status", "--json").stdout)["result"]
            address = f"http://127.0.0.1:{server['server']['http_port']}/v1"
            yield "--openai", address, "--tokenizer", str(repository / "preprocessing" / "1" / "tokenizer")
        finally:
            self("stop", "demo")


def measure(line: CommandLine, cases: list[Case], openai: tuple[str, ...], results: Path) -> None:
    """Measure each case once a round. The first round also calibrates the client."""
    for number in range(ROUNDS):
        for case in cases if number % 2 == 0 else reversed(cases):
            options = [*case.options, *(openai if case.openai else ())]
            if number:
                options.append("--no-calibrate")
            out = results / case.folder / str(number)
            line("bench", "token-norm-dist", *LOAD, *options, "--quiet", "--out", str(out))


def rows(cases: list[Case], results: Path) -> Iterator[Found]:
    """Compare the results of each case with those of the first one to the same model."""
    for case in cases:
        base = next(each for each in cases if each.model == case.model)
        runs = read_runs(results / case.folder)
        floor = read_report(results / case.folder / "0").calibration
        assert floor is not None
        yield Found(
            case=case,
            first_ms=_mean([run.statistics.time_to_first_token_ms.mean for run in runs]),
            tokens_per_second=_mean([run.statistics.output_tokens_per_second for run in runs]) or 0.0,
            floor_ms=floor.floor_p50_ms,
            differences=[] if case is base else compare(read_runs(results / base.folder), runs),
        )


def _mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def table(found: list[Found]) -> str:
    """The rows as a Markdown table."""
    lines = ["| Model | By | TTFT, ms | Δ to gRPC | Latency Δ to gRPC | Tokens/s | Client's floor, ms |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for row in found:
        first = "–" if row.first_ms is None else f"{row.first_ms:.2f}"
        changes = [_change(row.differences, name) for name in ("time to first token (ms)", "request latency (ms)")]
        lines.append(
            f"| {row.case.model} | {row.case.way} | {first} | {changes[0]} | {changes[1]} "
            f"| {row.tokens_per_second:.0f} | {row.floor_ms:.2f} |"
        )
    return "\n".join(lines)


def _change(differences: list[Difference], name: str) -> str:
    each = next((each for each in differences if each.name == name), None)
    if each is None or each.interval is None:
        return "–"
    low, high = (each.before * share for share in each.interval)
    mark = "" if low <= 0 <= high else "**"
    return f"{mark}{each.after - each.before:+.2f} ms ({low:+.2f} … {high:+.2f}){mark}"


def run(work: Path) -> dict[str, Any]:
    """Serve the demo with and without streaming, and measure every case."""
    line, results = CommandLine(work / "protocols"), work / "protocols" / "results"
    found: list[Found] = []
    gaps: dict[str, list[str]] = {}
    for cases, options in ((STREAMED, ()), (WHOLE, ("--no-streaming",))):
        with line.serving(*options) as openai:
            measure(line, cases, openai, results)
            if cases is STREAMED:
                gaps = {model: diagnosed(line, model) for model in ("ensemble", "tensorrt_llm_bls")}
        found += rows(cases, results)
    print(table(found))
    for model, lines in gaps.items():
        print(f"\n{model}:", *lines, sep="\n")
    return {"cases": found, "gaps": gaps}


def diagnosed(line: CommandLine, model: str) -> list[str]:
    """What `--diagnose` says about a model."""
    told = line("bench", "token-norm-dist", *LOAD, "--model", model, "--diagnose").stderr
    return [each for each in told.splitlines() if each.startswith("gap:")]


def main() -> None:
    """Measure, print the table, and write it as JSON."""
    arguments = benchmark_parser(__doc__).parse_args()
    finish(arguments, "protocols", [], **run(arguments.work))


if __name__ == "__main__":
    main()
