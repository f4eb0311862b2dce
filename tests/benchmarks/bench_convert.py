"""Conversion of a random 1.1 B-parameter Llama (2.2 GB of float16): peak memory, and speed beside `cp`.

Run as `python -m tests.benchmarks.bench_convert --work FOLDER`. This process imports nothing large, because the
kernel hands its resident size on to the ru_maxrss of the processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
CASES = {"tp 1": (1, "float16"), "tp 4": (4, "float16"), "tp 1 to bfloat16": (1, "bfloat16")}
SAMPLE_SECONDS = 0.004
TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One run: seconds of the call, of the whole process, and peaks in bytes.

    `sampled` is RssAnon + RssShmem as read every 4 ms; `maxrss` is ru_maxrss, which includes file pages of the
    interpreter; `imports` is ru_maxrss before the call.
    """

    seconds: float
    process_seconds: float
    sampled: int
    maxrss: int
    imports: int
    largest_tensor: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: medians over pairs; `speed` is seconds of cp divided by seconds of the conversion."""

    case: str
    pairs: int
    convert_seconds: float
    cp_seconds: float
    speed: float
    speed_lowest: float
    speed_highest: float
    sampled_peak: int
    maxrss_peak: int
    largest_tensor: int


def generate(folder: Path) -> None:
    """Write the model, tensor by tensor, with the format's header in front."""
    import numpy as np

    from tests.support.tiny_models import FAMILIES
    from trtserve.architectures.tensor_files import layout

    defaults, shapes = FAMILIES["llama"]
    config = defaults | SIZES | {"dtype": "float16", "torch_dtype": "float16"}
    listed = dict(shapes(config))
    header, _ = layout(listed, "float16")
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(header)
        for shape in listed.values():
            handle.write((0.02 * generator.standard_normal(shape, dtype=np.float32)).astype(np.float16).tobytes())
    (folder / "config.json").write_text(json.dumps(config))


def convert_once(model: Path, out: Path, tp_size: int, dtype: str) -> None:
    """Convert in this process and print what it took as JSON."""
    import resource

    import ml_dtypes  # noqa: F401 - loaded before the clock starts
    import numpy as np  # noqa: F401

    from trtserve.artifacts import Model
    from trtserve.convert import convert_model, plan_conversion
    from trtserve.specs import ConvertSpec, DType

    wanted: DType = "bfloat16" if dtype == "bfloat16" else "float16"
    spec = ConvertSpec(tp_size=tp_size, dtype=wanted)
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    convert_model(Model(path=model), spec, out=out)
    seconds = time.perf_counter() - start
    facts = {
        "seconds": seconds,
        "imports": imports,
        "maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "largest_tensor": plan_conversion(Model(path=model), spec).largest_tensor,
    }
    sys.stdout.write(json.dumps(facts))


def _call(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.bench_convert", *arguments]


def measure(model: Path, out: Path, tp_size: int, dtype: str) -> Conversion:
    """Convert in a fresh process and watch its memory."""
    start = time.perf_counter()
    with subprocess.Popen(
        _call("--convert", str(model), str(out), str(tp_size), dtype), stdout=subprocess.PIPE, text=True
    ) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _private_bytes(process.pid))
            if time.perf_counter() - start > TIMEOUT:
                process.kill()
            time.sleep(SAMPLE_SECONDS)
        answer = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"the conversion ended with code {process.returncode}")
    return Conversion(process_seconds=time.perf_counter() - start, sampled=peak, **json.loads(answer))


def _private_bytes(pid: int) -> int:
    """RssAnon + RssShmem of a process; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def copy_once(model: Path, out: Path) -> float:
    """Seconds that `cp` needs for the weights."""
    out.mkdir()
    start = time.perf_counter()
    subprocess.run(["cp", str(model / "model.safetensors"), str(out)], check=True, timeout=TIMEOUT)
    return time.perf_counter() - start


def _clean(*folders: Path) -> None:
    """Remove what a run wrote and let the disk come to rest, so that the next one does not pay for it."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def run_case(case: str, model: Path, work: Path, pairs: int) -> Row:
    """Alternate conversion and cp; the first pair warms both up and does not count."""
    tp_size, dtype = CASES[case]
    converted, copied = work / "converted", work / "copied"
    runs, copies = [], []
    for _ in range(pairs + 1):
        _clean(converted, copied)
        runs.append(measure(model, converted, tp_size, dtype))
        _clean(converted)
        copies.append(copy_once(model, copied))
    _clean(converted, copied)
    runs, copies = runs[1:], copies[1:]
    ratios = sorted(copy / run.seconds for run, copy in zip(runs, copies, strict=True))
    return Row(
        case=case,
        pairs=pairs,
        convert_seconds=statistics.median(run.seconds for run in runs),
        cp_seconds=statistics.median(copies),
        speed=statistics.median(ratios),
        speed_lowest=ratios[0],
        speed_highest=ratios[-1],
        sampled_peak=max(run.sampled for run in runs),
        maxrss_peak=max(run.maxrss for run in runs),
        largest_tensor=runs[0].largest_tensor,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; memory in MB (10^6 bytes)."""
    heads = (
        "Convert 1.1 B, float16",
        "convert s",
        "cp s",
        "speed / cp (lowest – highest)",
        "RssAnon+RssShmem MB",
        "ru_maxrss MB",
        "largest tensor MB",
        "allowed MB",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        allowed = (2 * row.largest_tensor + 300e6) / 1e6
        lines.append(
            f"| {row.case} | {row.convert_seconds:.2f} | {row.cp_seconds:.2f} | {row.speed:.2f} "
            f"({row.speed_lowest:.2f} – {row.speed_highest:.2f}, {row.pairs} pairs) | {row.sampled_peak / 1e6:.0f} | "
            f"{row.maxrss_peak / 1e6:.0f} | {row.largest_tensor / 1e6:.0f} | {allowed:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for the model and the copies (8 GB)")
    parser.add_argument("--out", type=Path, help="folder for convert.json; default: the work folder")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.generate:
        generate(options.generate)
    elif options.convert:
        model, out, tp_size, dtype = options.convert
        convert_once(Path(model), Path(out), int(tp_size), dtype)
    else:
        compare(options.work, options.case or list(CASES), options.pairs, options.out)


def compare(work: Path, cases: Sequence[str], pairs: int, out: Path | None) -> None:
    """Run the cases over the cached model and print the table."""
    model = work / "llama-1.1b"
    if not (model / "config.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        subprocess.run(_call("--generate", str(model)), check=True, timeout=TIMEOUT)
    rows = [run_case(case, model, work, pairs) for case in cases]
    print(table(rows))
    report = {"rows": [asdict(row) for row in rows]}
    ((out or work) / "convert.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
