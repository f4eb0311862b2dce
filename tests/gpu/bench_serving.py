"""Measure an 8 B model behind Triton against its executor in process, and its start.

`python -m tests.gpu.bench_serving`
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.gpu.random_engines import LLAMA_8B, core_repository, write_engine
from tests.gpu.served_bench import ANSWER, PROMPT, behind_triton, measured, print_figures, served
from tests.support.devices import DEVICE
from tests.support.model_server import ModelServer, integers
from trtserve.artifacts import ModelRepository
from trtserve.pipeline.gpu_fit import RESERVE, Gpu, fit_gpu
from trtserve.specs import BuildSpec

_CHUNK = 1 << 24
_BEGIN = time.monotonic()


def note(event: str) -> None:
    """Print when something happened."""
    print(f"{time.monotonic() - _BEGIN:.0f} s: {event}", flush=True)


def forget_cached(folder: Path) -> None:
    """Drop the pages of a folder's files from memory, as after a boot."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_read(folder: Path) -> float:
    """Read the files once, in order."""
    begin = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK):
                pass
    return time.perf_counter() - begin


def first_answer(repository: ModelRepository, home: Path) -> float:
    """Return the seconds from `start` to the first token of the first request."""
    begin = time.perf_counter()
    with served(repository, home) as server, ModelServer(server.address).stream() as stream:
        stream.all(
            "tensorrt_llm",
            {"input_ids": integers(5), "input_lengths": integers(1), "request_output_len": integers(1)},
        )
        return time.perf_counter() - begin


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("/tmp/trtserve-bench"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--parts", nargs="*", default=["start", "ratio"])
    options = parser.parse_args()
    hf = LLAMA_8B | {"num_hidden_layers": options.layers}
    build = BuildSpec(runtime="torch", device=DEVICE, max_batch_size=options.streams, max_seq_len=2048)
    shutil.rmtree(options.work, ignore_errors=True)
    engine = write_engine(options.work / "engine", hf, build)
    note("The engine is written")
    repository = core_repository(options.work / "served", engine)
    home = options.work / "home"
    with served(repository, home):
        note("The first start, which compiles kernels and tests Triton, is done")
    if "start" in options.parts:
        forget_cached(engine.path)
        read = seconds_to_read(engine.path)
        forget_cached(engine.path)
        cold = first_answer(repository, home)
        warm = first_answer(repository, home)
        note("The starts are measured")
        print_figures(
            read_seconds=round(read, 2),
            cold_start_seconds=round(cold, 2),
            cold_start_over_reading=round(cold / read, 2),
            warm_start_seconds=round(warm, 2),
        )
    if "ratio" in options.parts:
        requests = 8 * options.streams
        with served(repository, home) as server:
            used = memory_used()
            where = behind_triton(server)
            through = measured(where, options.streams, home, requests=requests, workers=options.workers)
        alone = measured(("--in-process", str(engine.path)), options.streams, home, requests=requests)
        print_figures(streams=options.streams, prompt=PROMPT, answer=ANSWER)
        for name, found in (("through_triton", through), ("in_process", alone)):
            statistics = found["statistics"]
            print_figures(
                **{
                    f"{name}_tokens_per_second": round(statistics["output_tokens_per_second"]),
                    f"{name}_median_gap_ms": round(statistics["inter_token_ms"]["p50"], 3),
                    f"{name}_median_first_token_ms": round(statistics["time_to_first_token_ms"]["p50"], 1),
                }
            )
        both = through["statistics"], alone["statistics"]
        tokens = [each["output_tokens_per_second"] for each in both]
        gaps = [each["inter_token_ms"]["p50"] for each in both]
        print_figures(
            through_triton_over_in_process=round(tokens[0] / tokens[1], 3),
            steps_that_only_generate_over_in_process=round(gaps[1] / gaps[0], 3),
        )
        if used is not None:
            print_figures(**memory_figures(engine.path, build, *used))


def memory_used() -> tuple[int, int] | None:
    """Return (used, total) bytes of the GPU, or None without one."""
    if DEVICE == "cpu":
        return None
    command = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")
    used, total = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split(",")
    return int(used) * 2**20, int(total) * 2**20


def memory_figures(engine: Path, build: BuildSpec, used: int, total: int) -> dict[str, object]:
    """Compare what `plan` predicts with what the server took."""
    import json

    config = json.loads((engine / "config.json").read_text())["pretrained_config"]
    fit = fit_gpu(config, build, Gpu(name="this", memory=total))
    kv = min(fit.tokens, build.max_batch_size * build.max_seq_len) if build.max_batch_size and build.max_seq_len else 0
    predicted = RESERVE + fit.weights + fit.activations + kv * fit.kv_per_token
    return {
        "predicted_gib": round(predicted / 2**30, 2),
        "used_gib": round(used / 2**30, 2),
        "used_over_predicted": round(used / predicted, 3),
    }


if __name__ == "__main__":
    main()
