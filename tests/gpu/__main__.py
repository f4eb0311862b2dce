"""Run the tests or benchmarks for GPUs part by part, and write a report: `python -m tests.gpu test|bench [PART …]`.

Every part is a process with a time limit. Its result is printed at once and written to the report, so that a run that
is cut off leaves what it has. Lines of a part that begin with `figure:` are its figures, as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
SHARED = ("-n", "8", "--dist", "loadfile")
"""Test files among processes, which share the GPU."""
FIGURE = "figure:"
_LAST_LINES = 15

State = Literal["passed", "failed", "out of time", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of a run."""

    command: tuple[str, ...]
    seconds: int
    """Time limit."""
    gpus: int = 1
    """It is skipped with fewer GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a part."""

    part: str
    state: State
    seconds: float
    figures: dict[str, Any]
    summary: str
    """The last line of a part that passed, several of one that did not."""


ON_GPU = {"TRTSERVE_TEST_DEVICE": "cuda"}
FEATURES = (
    "beams", "bad_requests", "bls_features", "ending", "guided", "lora_names", "outputs", "prompts", "query_features",
    "sampling", "speculative", "text",
)  # fmt: skip

PARTS: dict[str, dict[str, Part]] = {
    "test": {
        "kernels": Part(command=(sys.executable, "-m", "tests.gpu.kernels"), seconds=300),
        "memory": Part(command=(sys.executable, "-m", "tests.gpu.memory"), seconds=300),
        "families": Part(
            command=(
                *(*PYTEST, "-n", "8", "-k", "on_torch"),
                *(f"tests/integration/test_{name}_oracle.py" for name in ("families", "quantised", "text_halves")),
            ),
            seconds=420,
            environment={**ON_GPU, "TRTSERVE_ALL": "1"},
        ),
        "demo": Part(command=(sys.executable, "-m", "tests.gpu.demo"), seconds=180, environment=ON_GPU),
        "features": Part(
            command=(*PYTEST, *SHARED, *(f"tests/e2e/test_{name}.py" for name in FEATURES)),
            seconds=420,
            environment={**ON_GPU, "TRTSERVE_TEST_RUNTIME": "torch"},
        ),
        "sums": Part(command=(sys.executable, "-m", "tests.gpu.sums"), seconds=60, gpus=2),
        "ranks": Part(command=(*PYTEST, "tests/e2e/test_torch_ranks.py"), seconds=240, gpus=2, environment=ON_GPU),
    },
    "bench": {
        "decode": Part(command=(sys.executable, "-m", "tests.gpu.bench_decode"), seconds=420),
        "serving": Part(command=(sys.executable, "-m", "tests.gpu.bench_serving"), seconds=300, environment=ON_GPU),
        "ranks": Part(command=(sys.executable, "-m", "tests.gpu.bench_ranks"), seconds=480, gpus=2, environment=ON_GPU),
    },
}


def run_part(name: str, part: Part, gpus: int) -> Result:
    """Run one part; what it prints is passed on."""
    if part.gpus > gpus:
        return Result(part=name, state="skipped", seconds=0, figures={}, summary=f"needs {part.gpus} GPUs, has {gpus}")
    begin, lines = time.monotonic(), list[str]()
    process = subprocess.Popen(
        ("timeout", "--kill-after=10", str(part.seconds), *part.command),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        lines.append(line.rstrip())
    code = process.wait()
    states: dict[int, State] = {0: "passed", 124: "out of time", 137: "out of time"}
    state = states.get(code, "failed")
    figures: dict[str, Any] = {}
    for line in lines:
        if line.startswith(FIGURE):
            figures |= json.loads(line.removeprefix(FIGURE))
    told = [line for line in lines if line and not line.startswith(FIGURE)]
    summary = "\n".join(told[-1:] if state == "passed" else told[-_LAST_LINES:])
    return Result(part=name, state=state, seconds=round(time.monotonic() - begin, 1), figures=figures, summary=summary)


def machine() -> dict[str, Any]:
    """Describe the machine and what runs on it."""
    import torch

    nvidia = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("TRTSERVE_COMMIT") or _output("git", "rev-parse", "--short", "HEAD") or "unknown",
        "gpus": nvidia.splitlines(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_report(kind: str, facts: Mapping[str, Any], results: Sequence[Result], folder: Path) -> None:
    """Write the report as JSON and as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"kind": kind, "machine": facts, "results": [asdict(result) for result in results]}
    (folder / f"gpu-{kind}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    lines = [f"# GPU {kind}, {facts['date'][:10]}", ""]
    lines += [f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in facts.items()]
    lines += ["", "| Part | Result | Seconds | Summary |", "|---|---|---|---|"]
    for result in results:
        last = re.sub(r"[|=]+", " ", result.summary.splitlines()[-1] if result.summary else "").strip()
        lines.append(f"| {result.part} | {result.state} | {result.seconds} | {last} |")
    figures = [(result.part, name, value) for result in results for name, value in result.figures.items()]
    if figures:
        lines += ["", "| Part | Figure | Value |", "|---|---|---|"]
        lines += [f"| {part} | {name} | {value} |" for part, name, value in figures]
    (folder / f"gpu-{kind}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run the parts and return 1 unless all that ran have passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--report", type=Path, default=ROOT / ".gpu-report", help="folder of the report")
    arguments = parser.parse_intermixed_args()
    known = PARTS[arguments.kind]
    if unknown := set(arguments.parts) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the parts are {', '.join(known)}")
    facts = machine()
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    results: list[Result] = []
    for name in arguments.parts or known:
        sys.stdout.write(f"\n== {name}\n")
        results.append(run_part(name, known[name], len(facts["gpus"])))
        sys.stdout.write(f"== {name}: {results[-1].state} after {results[-1].seconds} s\n")
        write_report(arguments.kind, facts, results, arguments.report)
    sys.stdout.write(f"\nReport: {arguments.report}\n")
    return int(any(result.state not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
