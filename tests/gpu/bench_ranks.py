"""Measure an 8 B model on two GPUs against one, in process and behind Triton: `python -m tests.gpu.bench_ranks`."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.gpu.random_engines import LLAMA_8B, core_repository, write_engine
from tests.gpu.served_bench import behind_triton, measured, print_figures, served
from tests.support.devices import DEVICE
from trtserve.artifacts import Engine
from trtserve.specs import BuildSpec

LAYOUTS = ((1, 1), (2, 1), (1, 2))
"""tp_size and pp_size."""


def decoded_in_process(engine: Path, tp_size: int, pp_size: int, streams: list[int]) -> dict[int, float]:
    """Return the tokens per second of steps in which all streams decode."""
    mpirun = ("mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(tp_size * pp_size))
    measure = (sys.executable, "-m", "tests.gpu.ranked_decode", str(engine), "--streams", *map(str, streams))
    done = subprocess.run((*mpirun, *measure), stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    figures: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("figure:"):
            figures |= json.loads(line.removeprefix("figure:"))
    print_figures(**figures)
    return {each: figures[f"tp{tp_size} pp{pp_size}, {each} streams: tokens/s"] for each in streams}


def decoded_behind_triton(engine: Engine, name: str, streams_of: list[int], work: Path) -> dict[int, float]:
    """Return the tokens per second that the median gap between tokens gives, that of steps that only decode."""
    repository, found = core_repository(work / f"served-{name}", engine), dict[int, float]()
    with served(repository, work / "home") as server:
        for streams in streams_of:
            result = measured(
                behind_triton(server),
                streams,
                work / "home",
                requests=max(4, 3 * streams),
                workers=4 if streams > 1 else 1,
            )
            gap = result["statistics"]["inter_token_ms"]["p50"]
            found[streams] = streams * 1000 / gap
            whole = round(result["statistics"]["output_tokens_per_second"])
            print_figures(**{f"{name}, {streams} streams through Triton: tokens/s, median gap": [whole, round(gap, 3)]})
    shutil.rmtree(repository.path)
    return found


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    # The files of both engines are 32 GB; in memory they are written and read in seconds.
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/trtserve-bench"))
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--in-process", action="store_true", help="not through Triton")
    options = parser.parse_args()
    hf = LLAMA_8B | {"num_hidden_layers": options.layers}
    build = BuildSpec(runtime="torch", device=DEVICE, max_batch_size=max(options.streams), max_seq_len=2048)
    shutil.rmtree(options.work, ignore_errors=True)
    found: dict[str, dict[str, dict[int, float]]] = {"in process": {}, "through Triton": {}}
    try:
        for tp_size, pp_size in LAYOUTS:
            name = f"tp{tp_size} pp{pp_size}"
            folder = options.work / name.replace(" ", "-")
            engine = write_engine(folder, hf, build, tp_size=tp_size, pp_size=pp_size)
            found["in process"][name] = decoded_in_process(engine.path, tp_size, pp_size, options.streams)
            if not options.in_process and pp_size == 1:
                rates = decoded_behind_triton(engine, folder.name, options.streams, options.work)
                found["through Triton"][name] = rates
            shutil.rmtree(engine.path)
        for where, rates_of in found.items():
            for name, rates in list(rates_of.items())[1:]:
                ratios = {each: round(rate / rates_of["tp1 pp1"][each], 3) for each, rate in rates.items()}
                print_figures(**{f"{name} ÷ one GPU, {where}": ratios})
    finally:
        shutil.rmtree(options.work, ignore_errors=True)


if __name__ == "__main__":
    main()
