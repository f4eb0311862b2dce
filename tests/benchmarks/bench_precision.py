"""Decoding with float16, int8 and int4 weights, compared with each other and with llama.cpp on the same shapes.

Run as `python -m tests.benchmarks.bench_precision --work FOLDER --out FOLDER`; the model is a random Llama of 1.1 B
parameters. Everything runs in this process on two CPUs and keeps 8-bit keys and values. "float16" are weights that the
checkpoint holds as float16; OpenVINO packs them as bfloat16 and multiplies in bfloat16 where the CPU can, llama.cpp
widens float16 to float32. int8 and int4 multiply with activations that are rounded to 8 bits on both sides.

llama.cpp takes part when it is installed: `pip install '.[llama-cpp]'` builds it for this CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.benchmarks import llama_cpp_side
from tests.benchmarks.bench_executor import ExecutorSide
from tests.benchmarks.comparison import Comparison, compare, figures, table
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.results import benchmark_parser, finish
from trtserve.specs import Quantization

MODEL = "llama-1b"
THREADS = 2
PROMPT = 64
# New tokens by streams.
NEW = {1: 65, 8: 33}
KINDS: dict[str, tuple[Quantization, str]] = {
    "float16": ("none", "f16"),
    "int8": ("int8", "q8_0"),
    "int4": ("int4", "q4_0"),
}
# The target compared with float16 and, by number of streams, with llama.cpp.
FASTER: dict[str, dict[int, float | None]] = {"int8": {1: 1.5, 8: None}, "int4": {1: 1.6, 8: None}}
LLAMA_CPP: dict[str, dict[int, float | None]] = {
    "float16": {1: 1.0, 8: 1.4},
    "int8": {1: 1.0, 8: 2.0},
    "int4": {1: 0.9, 8: 1.2},
}


class Side(Protocol):
    """One implementation with one kind of weights."""

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first tokens to the last."""
        ...


def _rate(side: Side, streams: int) -> Callable[[int], float]:
    """New tokens per second after the first, on the random prompts of a pair."""

    def measure(number: int) -> float:
        random = np.random.default_rng(number)
        prompts = random.integers(3, SIZES[MODEL]["vocab_size"], size=(streams, PROMPT)).tolist()
        return streams * (NEW[streams] - 1) / side.seconds(prompts, NEW[streams])

    return measure


def _pair(case: str, streams: int, ours: Side, other: Side, target: float | None, pairs: int) -> Comparison:
    words = f"{case}, {streams} stream{'s' if streams > 1 else ''}"
    return compare(words, _rate(ours, streams), _rate(other, streams), pairs=pairs, unit="tokens/s", target=target)


@contextmanager
def _engine(work: Path, kind: str) -> Iterator[ExecutorSide]:
    quantize = KINDS[kind][0]
    name = "engine" if quantize == "none" else f"engine-{quantize}"
    side = ExecutorSide(make_engine(work, MODEL, name=name, quantize=quantize))
    try:
        yield side
    finally:
        side.executor.shutdown()
        del side
        gc.collect()


@contextmanager
def llama_cpp(work: Path, kind: str, streams: int) -> Iterator[llama_cpp_side.LlamaCppSide]:
    path = work / MODEL / f"{KINDS[kind][1]}.gguf"
    side = llama_cpp_side.LlamaCppSide(
        llama_cpp_side.write_gguf(path, SIZES[MODEL], KINDS[kind][1]), streams=streams, threads=THREADS
    )
    try:
        yield side
    finally:
        side.close()


def against_float16(work: Path, *, pairs: int) -> list[Comparison]:
    """Compare int8 and int4 with float16, at one stream and at eight."""
    rows = []
    with _engine(work, "float16") as base:
        for kind, targets in FASTER.items():
            with _engine(work, kind) as packed:
                rows += [_pair(kind, streams, packed, base, targets[streams], pairs) for streams in NEW]
    return rows


def against_llama_cpp(work: Path, *, pairs: int) -> list[Comparison]:
    """Compare each weight type with llama.cpp's of the same width."""
    rows = []
    for kind, targets in LLAMA_CPP.items():
        with _engine(work, kind) as ours:
            for streams in NEW:
                with llama_cpp(work, kind, streams) as theirs:
                    case = f"{kind} / {KINDS[kind][1]}"
                    rows.append(_pair(case, streams, ours, theirs, targets[streams], pairs))
    return rows


def two_cpus() -> None:
    """Before OpenVINO counts them, so that both sides have as many threads as there are in the comparison."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def run(work: Path, *, pairs: int) -> dict[str, Any]:
    """Measure all there is; the work folder keeps models and engines between runs."""
    two_cpus()
    report: dict[str, Any] = {"cpus": os.cpu_count(), "against_float16": against_float16(work, pairs=pairs)}
    if llama_cpp_side.is_installed():
        report["against_llama_cpp"] = against_llama_cpp(work, pairs=pairs)
    return report


def main() -> None:
    arguments = benchmark_parser("precision", __doc__).parse_args()
    report = run(arguments.work.absolute(), pairs=arguments.pairs)
    print(table(report["against_float16"], measured="Packed", base="float16") + "\n")
    if "against_llama_cpp" in report:
        print(table(report["against_llama_cpp"], measured="Ours", base="llama.cpp"))
    else:
        print("llama.cpp: skipped, it is not installed (pip install '.[llama-cpp]' builds it: CMake, a C++ compiler).")
    rows = [*report["against_float16"], *report.get("against_llama_cpp", [])]
    finish(arguments.out or arguments.work, "precision", report, figures(rows))


if __name__ == "__main__":
    main()
