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
from trtserve.specs import BuildSpec


def decoded_in_process(engine: Path, ranks: int, streams: list[int]) -> dict[int, float]:
    """Return the tokens per second of steps in which all streams decode."""
    mpirun = ("mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks))
    measure = (sys.executable, "-m", "tests.gpu.ranked_decode", str(engine), "--streams", *map(str, streams))
    done = subprocess.run((*mpirun, *measure), stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    figures: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("figure:"):
            figures |= json.loads(line.removeprefix("figure:"))
    print_figures(**figures)
    return {each: figures[f"tp{ranks}, {each} streams: tokens/s"] for each in streams}


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    # The files of both engines are 32 GB; in memory they are written and read in seconds.
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/trtserve-bench"))
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    options = parser.parse_args()
    hf = LLAMA_8B | {"num_hidden_layers": options.layers}
    build = BuildSpec(runtime="torch", device=DEVICE, max_batch_size=max(options.streams), max_seq_len=2048)
    shutil.rmtree(options.work, ignore_errors=True)
    try:
        found: dict[int, dict[int, float]] = {}
        in_process: dict[int, dict[int, float]] = {}
        for tp_size in (1, 2):
            engine = write_engine(options.work / f"engine-{tp_size}", hf, build, tp_size=tp_size)
            in_process[tp_size] = decoded_in_process(engine.path, tp_size, options.streams)
            repository = core_repository(options.work / f"served-{tp_size}", engine)
            with served(repository, options.work / "home") as server:
                found[tp_size] = {}
                for streams in options.streams:
                    result = measured(
                        behind_triton(server),
                        streams,
                        options.work / "home",
                        requests=max(4, 3 * streams),
                        workers=4 if streams > 1 else 1,
                    )
                    # Prompts are computed between answers; the median gap is that of steps that only generate.
                    gap = result["statistics"]["inter_token_ms"]["p50"]
                    found[tp_size][streams] = streams * 1000 / gap
                    print_figures(
                        **{
                            f"tp{tp_size}_{streams}_streams_tokens_per_second": round(
                                result["statistics"]["output_tokens_per_second"]
                            ),
                            f"tp{tp_size}_{streams}_streams_median_gap_ms": round(gap, 3),
                        }
                    )
            shutil.rmtree(engine.path)
            shutil.rmtree(repository.path)
        for streams in options.streams:
            for where, rates in (("in_process", in_process), ("through_triton", found)):
                ratio = rates[2][streams] / rates[1][streams]
                print_figures(**{f"tp2_over_tp1_{where}_{streams}_streams": round(ratio, 3)})
    finally:
        shutil.rmtree(options.work, ignore_errors=True)


if __name__ == "__main__":
    main()
