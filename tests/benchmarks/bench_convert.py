"""Conversion of a random 1.1 B-parameter Llama (2.2 GB): speed compared with `cp` and the usual way, and peak memory.

This process imports nothing large, because the kernel hands its resident size on to the ru_maxrss of the processes that
it starts. A case needs 9 GB in the work folder.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.conversions import (
    Case,
    Run,
    clean,
    convert_command,
    converted,
    converted_as_usual,
    copied,
    model_folder,
    require_same,
    watched,
)
from tests.benchmarks.engines import SIZES
from tests.benchmarks.frame import Row, benchmark_parser, compare, environment, finish, table
from tests.benchmarks.memory_group import memory_group

CASES = {
    "tp 1": Case(target=0.8),
    "tp 4": Case(tp_size=4),
    "pp 2": Case(pp_size=2),
    "bfloat16 to float16": Case(source="bfloat16"),
    "float16 to bfloat16": Case(dtype="bfloat16"),
}
USUAL = ("tp 1", "tp 4", "bfloat16 to float16")
LIMITED = ("tp 1", "tp 4", "bfloat16 to float16")
LIMIT = SIZES["llama-1b"]["vocab_size"] * SIZES["llama-1b"]["hidden_size"] * 2 + 250_000_000
"""Bytes of the largest tensor, the embeddings, and 250 MB."""


class Conversions:
    """Conversions of one case; the first one, which warms up, also tells their memory."""

    def __init__(self, name: str, work: Path) -> None:
        self.case, self._work = CASES[name], work
        self.model, self.out = model_folder(work, self.case.source), work / "converted"
        self.runs: list[Run] = []

    def seconds(self, number: int) -> float:
        """Convert once."""
        clean(self.out)
        run = converted(self.model, self.out, self.case, self._work / "convert-home", sample=number == 0)
        self.runs.append(run)
        return run.seconds


def compare_with_cp(name: str, work: Path, pairs: int) -> Row:
    """Compare whole commands with `cp`; also prints the time of writing alone, and the memory."""
    ours, copy = Conversions(name, work), work / "copied"

    def copying(_: int) -> float:
        clean(ours.out, copy)
        return copied(ours.model, copy)

    row = compare(name, copying, ours.seconds, pairs=pairs, target=ours.case.target)
    clean(ours.out, copy)
    writing, peak = statistics.median(run.writing for run in ours.runs[1:]), ours.runs[0].sampled
    largest = max(run.maxrss for run in ours.runs)
    print(f"{name}: writing {writing:.2f} s, RssAnon + RssShmem {peak / 1e6:.0f} MB, ru_maxrss {largest / 1e6:.0f} MB")
    return row


def compare_with_torch(name: str, work: Path, pairs: int) -> list[Row]:
    """Compare with the usual way, in time and memory; the first results must be the same."""
    ours, theirs = Conversions(name, work), work / "usual"
    usual: list[Run] = []

    def as_usual(number: int) -> float:
        clean(theirs)
        usual.append(converted_as_usual(ours.model, theirs, ours.case, sample=number == 0))
        if number == 0:
            ours.seconds(number)
            require_same(ours.out, theirs)
        return usual[-1].seconds

    row = compare(f"{name}, times faster", as_usual, ours.seconds, pairs=pairs, target=2)
    clean(ours.out, theirs)
    ours_mb, usual_mb = (runs[0].sampled / 1e6 for runs in (ours.runs, usual))
    memory = Row(
        case=f"{name}, memory in MB",
        value=ours_mb / usual_mb,
        target=0.25,
        at_most=True,
        measured=usual_mb,
        base=ours_mb,
    )
    return [row, memory]


def under_cgroup(name: str, work: Path) -> str:
    """Convert in a cgroup that allows the largest tensor and 250 MB, Python and the page cache included."""
    case, out = CASES[name], work / "limited" / "made"
    model = model_folder(work, case.source)
    clean(out.parent)
    with memory_group(LIMIT) as group:
        if group is None:
            return "no cgroup can be made here (root can)"
        variables = environment(TRTSERVE_HOME=str(out.parent / "home"))
        run = watched(convert_command(model, out, case), variables, sample=True, before=group.enter)
        killed = group.kills()
    clean(out.parent)
    return f"{run.seconds:.1f} s, RssAnon + RssShmem {run.sampled / 1e6:.0f} MB, {killed} processes killed"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--only", choices=("cp", "usual", "limit"), help="only this part")
    options = parser.parse_args(arguments)
    work, cases, parts = options.work, options.case or list(CASES), options.only or "cp usual limit"
    copies: list[Row] = []
    usual: list[Row] = []
    if "cp" in parts:
        copies = [compare_with_cp(name, work, options.pairs) for name in cases]
        print(table(copies, measured="`cp`, s", base="Whole command, s", value="Speed ÷ `cp`"), flush=True)
    if "usual" in parts and importlib.util.find_spec("torch") is None:
        print("\nPyTorch is not installed (extra `oracle`): the usual way is not measured.")
    elif "usual" in parts:
        usual = [row for name in cases if name in USUAL for row in compare_with_torch(name, work, options.pairs)]
        print(f"\n{table(usual, measured='Usual way, s', base='trtserve, s')}", flush=True)
    limited = {name: under_cgroup(name, work) for name in cases if name in LIMITED and "limit" in parts}
    for name, outcome in limited.items():
        print(f"{name} in a cgroup of {LIMIT / 1e6:.0f} MB: {outcome}", flush=True)
    finish(options, "convert", [*copies, *usual], limited=limited)


if __name__ == "__main__":
    main()
