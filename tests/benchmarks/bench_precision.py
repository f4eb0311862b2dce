"""Decoding with float16, int8 and int4 weights, compared with each other and with llama.cpp on the same shapes.

The model is a random Llama of 1.1 B parameters. Everything runs in this process on two CPUs and keeps 8-bit keys and
values. "float16" are weights that the checkpoint holds as float16; OpenVINO packs them as bfloat16 and multiplies in
bfloat16 where the CPU can, llama.cpp widens float16 to float32. int8 and int4 multiply with activations that are
rounded to 8 bits on both sides.

llama.cpp takes part when it is installed: `pip install '.[llama-cpp]'` builds it for this CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.benchmarks import llama_cpp_side
from tests.benchmarks.bench_executor import ExecutorSide, Shape, Side, ended, rate
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table
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


def _pair(case: str, streams: int, ours: Side, other: Side, target: float | None, pairs: int) -> Row:
    words = f"{case}, {streams} stream{'s' if streams > 1 else ''}"
    shape = Shape(streams=streams, prompt=PROMPT, new=NEW[streams])
    return compare(words, rate(ours, shape, MODEL), rate(other, shape, MODEL), pairs=pairs, target=target)


def _engine(work: Path, kind: str) -> AbstractContextManager[ExecutorSide]:
    return ended(ExecutorSide(make_engine(work, MODEL, quantize=KINDS[kind][0])))


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


def against_float16(work: Path, *, pairs: int) -> list[Row]:
    """Compare int8 and int4 with float16, at one stream and at eight."""
    rows = []
    with _engine(work, "float16") as base:
        for kind, targets in FASTER.items():
            with _engine(work, kind) as packed:
                rows += [_pair(kind, streams, packed, base, targets[streams], pairs) for streams in NEW]
    return rows


def against_llama_cpp(work: Path, *, pairs: int) -> list[Row]:
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


def print_others(rows: Sequence[Row]) -> None:
    """Print the comparison with llama.cpp, or why there is none."""
    if rows:
        print(table(rows, measured="Ours, tokens/s", base="llama.cpp, tokens/s"))
    else:
        print("llama.cpp: skipped, it is not installed (pip install '.[llama-cpp]' builds it: CMake, a C++ compiler).")


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    two_cpus()
    own = against_float16(arguments.work, pairs=arguments.pairs)
    print(table(own, measured="Packed, tokens/s", base="float16, tokens/s") + "\n")
    others = against_llama_cpp(arguments.work, pairs=arguments.pairs) if llama_cpp_side.is_installed() else []
    print_others(others)
    finish(arguments, "precision", [*own, *others])


if __name__ == "__main__":
    main()
