"""Conversion of a random 1.1 B-parameter Llama (2.2 GB): speed compared with `cp` and the usual way, and peak memory.

Run as `python -m tests.benchmarks.bench_convert --work FOLDER`. This process imports nothing large, because the
kernel hands its resident size on to the ru_maxrss of the processes that it starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.conversions import (
    TIMEOUT,
    Case,
    clean,
    convert_command,
    converted,
    converted_as_usual,
    copied,
    model_folder,
    require_same,
    watched,
)
from tests.benchmarks.memory_group import memory_group
from tests.benchmarks.processes import environment
from tests.benchmarks.results import Figure, finish

CASES = {
    "tp 1": Case(target=0.8),
    "tp 4": Case(tp_size=4),
    "pp 2": Case(pp_size=2),
    "bfloat16 to float16": Case(source="bfloat16"),
    "float16 to bfloat16": Case(dtype="bfloat16"),
}
USUAL = ("tp 1", "tp 4", "bfloat16 to float16")
LIMITED = ("tp 1", "tp 4", "bfloat16 to float16")
ALLOWANCE = 250_000_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case compared with `cp`: medians over pairs.

    `speed` is seconds of cp divided by those of the whole command, `writing_speed` by those of writing alone.
    """

    case: str
    pairs: int
    target: float
    seconds: float
    writing_seconds: float
    cp_seconds: float
    speed: float
    speed_lowest: float
    speed_highest: float
    writing_speed: float
    sampled_peak: int
    maxrss_peak: int


@dataclass(frozen=True, kw_only=True)
class UsualRow:
    """One case compared with the usual way, as complete processes: medians over pairs, peaks over all of them."""

    case: str
    pairs: int
    seconds: float
    usual_seconds: float
    speed: float
    speed_lowest: float
    speed_highest: float
    sampled_peak: int
    usual_sampled_peak: int
    memory: float


def compare_with_cp(name: str, work: Path, pairs: int) -> Row:
    """Alternate conversion and cp; the first pair warms up and measures memory, its times do not count."""
    case = CASES[name]
    model = model_folder(work, case.source)
    ours, copy, home = work / "converted", work / "copied", work / "convert-home"
    runs, copies = [], []
    for number in range(pairs + 1):
        clean(ours, copy)
        runs.append(converted(model, ours, case, home, sample=number == 0))
        clean(ours)
        copies.append(copied(model, copy))
    clean(ours, copy, home)
    sampled, runs, copies = runs[0].sampled, runs[1:], copies[1:]
    ratios = sorted(copy / run.seconds for run, copy in zip(runs, copies, strict=True))
    return Row(
        case=name,
        pairs=pairs,
        target=case.target,
        seconds=statistics.median(run.seconds for run in runs),
        writing_seconds=statistics.median(run.writing for run in runs),
        cp_seconds=statistics.median(copies),
        speed=statistics.median(ratios),
        speed_lowest=ratios[0],
        speed_highest=ratios[-1],
        writing_speed=statistics.median(copy / run.writing for run, copy in zip(runs, copies, strict=True)),
        sampled_peak=sampled,
        maxrss_peak=max(run.maxrss for run in runs),
    )


def compare_with_torch(name: str, work: Path, pairs: int) -> UsualRow:
    """Alternate conversion and the usual way.

    The first pair warms both up and tells their memory, and its results must be the same; its times do not count.
    """
    case = CASES[name]
    model = model_folder(work, case.source)
    ours, theirs, home = work / "converted", work / "usual", work / "convert-home"
    runs, usual = [], []
    for number in range(pairs + 1):
        clean(ours, theirs)
        runs.append(converted(model, ours, case, home, sample=number == 0))
        usual.append(converted_as_usual(model, theirs, case, sample=number == 0))
        if number == 0:
            require_same(ours, theirs)
    clean(ours, theirs, home)
    peak, usual_peak = runs[0].sampled, usual[0].sampled
    runs, usual = runs[1:], usual[1:]
    ratios = sorted(their.seconds / our.seconds for our, their in zip(runs, usual, strict=True))
    return UsualRow(
        case=name,
        pairs=pairs,
        seconds=statistics.median(run.seconds for run in runs),
        usual_seconds=statistics.median(run.seconds for run in usual),
        speed=statistics.median(ratios),
        speed_lowest=ratios[0],
        speed_highest=ratios[-1],
        sampled_peak=peak,
        usual_sampled_peak=usual_peak,
        memory=peak / usual_peak,
    )


def under_limit(name: str, work: Path) -> dict[str, Any]:
    """Convert with RLIMIT_AS set to the interpreter's size, the largest tensor and 250 MB."""
    case = CASES[name]
    out = work / "limited" / "made"
    clean(out.parent)
    arguments = [str(model_folder(work, case.source)), str(out), str(case.tp_size), case.dtype, str(ALLOWANCE)]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.limited_conversion", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    clean(out.parent)
    return {"case": name, **json.loads(result.stdout)}


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A conversion in a cgroup of `limit` bytes, Python and the page cache included."""

    case: str
    limit: int
    seconds: float
    sampled_peak: int
    kills: int


def under_cgroup(name: str, work: Path, largest_tensor: int) -> GroupRow | None:
    """Convert in a cgroup that allows the largest tensor and 250 MB; None when no cgroup can be made."""
    case = CASES[name]
    model, out, limit = model_folder(work, case.source), work / "limited" / "made", largest_tensor + ALLOWANCE
    clean(out.parent)
    with memory_group(limit) as group:
        if group is None:
            return None
        variables = environment(TRTSERVE_HOME=str(out.parent / "home"))
        run = watched(convert_command(model, out, case), variables, sample=True, before=group.enter)
        row = GroupRow(case=name, limit=limit, seconds=run.seconds, sampled_peak=run.sampled, kills=group.kills())
    clean(out.parent)
    return row


_HEADS = "Convert 1.1 B; Whole command, s; Writing, s; `cp`, s; Speed ÷ `cp` (lowest – highest); Target; Writing ÷ `cp`"
_PEAKS = "RssAnon + RssShmem, MB; ru_maxrss, MB; Pairs"
_USUAL_HEADS = "Whole processes; trtserve, s; Usual way, s; Times faster (lowest – highest); Target"
_LIMITED_HEADS = (
    "Under RLIMIT_AS; Python and libraries before, MB; Largest tensor, MB; "
    f"Limit (sum and {ALLOWANCE // 10**6}), MB; ru_maxrss, MB; Whole model, MB"
)
_GROUP_HEADS = "In a cgroup; Limit (largest tensor and 250), MB; RssAnon + RssShmem, MB; Killed; Whole command, s"
_USUAL_PEAKS = "trtserve, MB; Usual way, MB; Memory ratio; Target; Pairs"


def table(rows: Sequence[Row]) -> str:
    """Return the comparison with cp as Markdown; memory in MB (10^6 bytes)."""
    lines = [
        f"{row.case}; {row.seconds:.2f}; {row.writing_seconds:.2f}; {row.cp_seconds:.2f}; {row.speed:.2f} "
        f"({row.speed_lowest:.2f} – {row.speed_highest:.2f}); {row.target}; {row.writing_speed:.2f}; "
        f"{row.sampled_peak / 1e6:.0f}; {row.maxrss_peak / 1e6:.0f}; {row.pairs}"
        for row in rows
    ]
    return _markdown(f"{_HEADS}; {_PEAKS}", lines)


def usual_table(rows: Sequence[UsualRow]) -> str:
    """Return the comparison with the usual way as Markdown."""
    lines = [
        f"{row.case}; {row.seconds:.2f}; {row.usual_seconds:.2f}; {row.speed:.1f} ({row.speed_lowest:.1f} – "
        f"{row.speed_highest:.1f}); 2; {row.sampled_peak / 1e6:.0f}; {row.usual_sampled_peak / 1e6:.0f}; "
        f"{row.memory:.2f}; 0.25; {row.pairs}"
        for row in rows
    ]
    return _markdown(f"{_USUAL_HEADS}; {_USUAL_PEAKS}", lines)


def limited_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The conversions under a hard limit as Markdown; memory in MB."""
    lines = [
        f"{row['case']}; {row['base'] / 1e6:.0f}; {row['largest_tensor'] / 1e6:.0f}; {row['limit'] / 1e6:.0f}; "
        f"{row['maxrss'] / 1e6:.0f}; {row['model_bytes'] / 1e6:.0f} "
        f"({'fits' if row['whole_model_fits'] else 'does not fit'})"
        for row in rows
    ]
    return _markdown(_LIMITED_HEADS, lines)


def group_table(rows: Sequence[GroupRow]) -> str:
    """The conversions in a cgroup as Markdown; memory in MB."""
    lines = [
        f"{row.case}; {row.limit / 1e6:.0f}; {row.sampled_peak / 1e6:.0f}; {row.kills}; {row.seconds:.1f}"
        for row in rows
    ]
    return _markdown(_GROUP_HEADS, lines)


def _markdown(heads: str, rows: Sequence[str]) -> str:
    """Return a table of lines whose cells are separated by semicolons."""
    lines = [heads, "; ".join(["---", *["--:"] * heads.count(";")]), *rows]
    return "\n".join(f"| {' | '.join(line.split('; '))} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print the tables, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for models and copies (9 GB)")
    parser.add_argument("--out", type=Path, help="folder for convert.json; default: the work folder")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--only", choices=("cp", "usual", "limit"), help="only this part")
    options = parser.parse_args(arguments)
    work, cases, parts = options.work.absolute(), options.case or list(CASES), options.only or "cp usual limit"
    report: dict[str, object] = {}
    figures: list[Figure] = []
    if "cp" in parts:
        rows = [compare_with_cp(name, work, options.pairs) for name in cases]
        print(table(rows), flush=True)
        report["rows"] = rows
        figures += [Figure(case=f"{row.case}, ÷ cp", value=row.speed, target=row.target) for row in rows]
    if "usual" in parts:
        report["usual"] = usual = _usual_part([name for name in cases if name in USUAL], work, options.pairs)
        for row in usual:
            figures.append(Figure(case=f"{row.case}, times faster", value=row.speed, target=2))
            figures.append(Figure(case=f"{row.case}, memory", value=row.memory, target=0.25, at_most=True))
    if "limit" in parts:
        limited = [under_limit(name, work) for name in cases if name in LIMITED]
        report["limited"] = limited
        print(f"\n{limited_table(limited)}", flush=True)
        report["groups"] = _group_part(limited, work)
    finish(options.out or work, "convert", report, figures)


def _group_part(limited: Sequence[Mapping[str, Any]], work: Path) -> list[GroupRow]:
    rows = [under_cgroup(row["case"], work, row["largest_tensor"]) for row in limited]
    made = [row for row in rows if row is not None]
    if made:
        print(f"\n{group_table(made)}", flush=True)
    else:
        print("\nNo cgroup can be made here (root can): nothing is measured in one.")
    return made


def _usual_part(cases: Sequence[str], work: Path, pairs: int) -> list[UsualRow]:
    if importlib.util.find_spec("torch") is None:
        print("\nPyTorch is not installed (extra `oracle`): the usual way is not measured.")
        return []
    rows = [compare_with_torch(name, work, pairs) for name in cases]
    print(f"\n{usual_table(rows)}", flush=True)
    return rows


if __name__ == "__main__":
    main()
