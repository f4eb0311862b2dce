"""Double of `trtllm-build`, with the failures of the real one.

Settings: build_fault = oom | no-engine | error | empty with build_fault_rank, or cut-config; build_seconds per rank,
gpus (0: no driver).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.doubles.build_config import check_arguments, make_build_config
from tests.doubles.build_options import build_parser
from tests.doubles.checkpoint import LoaderError, check_rank, read_config, read_mapping
from tests.doubles.containers import Versions, versions
from tests.doubles.engine import EngineHeader, write_config, write_engine
from tests.doubles.settings import Settings, read_settings, record_call

# Real engines are as large as the weights; without weights (config only) they are this small.
_ENGINE_BYTES = 4096


def _say(text: str, level: str = "I", source: str = "TRT-LLM") -> None:
    stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
    sys.stdout.write(f"[{stamp}] [{source}] [{level}] {text}\n")
    sys.stdout.flush()


def _traceback(text: str) -> int:
    """End as an uncaught Python exception does."""
    sys.stdout.flush()
    sys.stderr.write('Traceback (most recent call last):\n  File "/usr/local/bin/trtllm-build", line 8, in <module>\n')
    sys.stderr.write(f"    sys.exit(main())\n{text}\n")
    return 1


def _elapsed(since: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(time.time() - since))


def _build_rank(rank: int, size: int, weights: int, output: Path, settings: Settings, found: Versions) -> None:
    began = time.time()
    _say(f"Compute capability: {divmod(settings.sm, 10)}")
    _say(f"Build TensorRT engine Unnamed Network {rank}")
    time.sleep(settings.build_seconds)
    _say(f"Engine generation completed in {time.time() - began:.5f} seconds.", source="TRT")
    if rank == settings.build_fault_rank:
        if settings.build_fault == "oom":
            os.kill(os.getpid(), signal.SIGKILL)
        if settings.build_fault == "error":
            raise LoaderError("RuntimeError", "Provided tensor names are different from those expected by the engine.")
    _say(f"Total time of building Unnamed Network {rank}: {_elapsed(began)}")
    _say(f"Serializing engine to {output / f'rank{rank}.engine'}...")
    if settings.build_fault == "no-engine" and rank == settings.build_fault_rank:
        return
    header = EngineHeader(
        rank=rank,
        world_size=size,
        tensorrt_llm=found.tensorrt_llm,
        tensorrt=found.tensorrt,
        sm=settings.sm,
        size=max(weights, _ENGINE_BYTES),
    )
    write_engine(output / f"rank{rank}.engine", header)
    if settings.build_fault == "empty" and rank == settings.build_fault_rank:
        (output / f"rank{rank}.engine").write_bytes(b"")
    _say(f"Engine serialized. Total time: {_elapsed(began)}")


def _rank_order(size: int, workers: int) -> list[list[int]]:
    """Ranks built at the same time: one after another, or `workers` at once."""
    return [list(range(first, min(first + workers, size))) for first in range(0, size, workers)]


def _build(arguments: argparse.Namespace, settings: Settings, found: Versions) -> None:
    began = time.time()
    check_arguments(arguments)
    if settings.gpus == 0:
        raise LoaderError("RuntimeError", "Found no NVIDIA driver on your system.")
    source = Path(arguments.checkpoint_dir or arguments.model_config)
    only_config = source.suffix == ".json"
    config = read_config(source if only_config else source / "config.json", found.release)
    build = make_build_config(arguments, config, found.release, lambda text: _say(text, "W"))
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    size = read_mapping(config, found.release).world_size
    for group in _rank_order(size, min(arguments.workers, settings.gpus)):
        for rank in group:
            if not only_config:
                check_rank(source, rank, config, found.release)
            if rank == 0:
                write_config(output, found.tensorrt_llm, _pretrained(config, arguments), build)
            if not arguments.dry_run:
                weights = 0 if only_config else (source / f"rank{rank}.safetensors").stat().st_size
                _build_rank(rank, size, weights, output, settings, found)
    if arguments.output_timing_cache and not arguments.dry_run:
        # A relative path is one of the current folder, not of the engine folder.
        Path(arguments.output_timing_cache).write_bytes(b"timing cache of a double\n")
        _say(f"Timing cache serialized to {arguments.output_timing_cache}")
    if settings.build_fault == "cut-config":
        path = output / "config.json"
        path.write_bytes(path.read_bytes()[:-40])
    _say(f"Total time of building all engines: {_elapsed(began)}")


def _pretrained(config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    mapping = {"gpus_per_node": 8, **config.get("mapping", {})}
    if hasattr(arguments, "gpus_per_node"):  # up to 1.1 the flag's value is written over the checkpoint's
        mapping["gpus_per_node"] = arguments.gpus_per_node
    pretrained = {**config, "mapping": mapping}
    if arguments.logits_dtype:
        pretrained["logits_dtype"] = arguments.logits_dtype
    return pretrained


def main(arguments: list[str], folder: Path) -> int:
    """Run the double; returns the exit code."""
    record_call(folder, "trtllm-build", arguments)
    settings = read_settings(folder)
    found = versions(settings)
    sys.stdout.write(f"[TensorRT-LLM] TensorRT-LLM version: {found.tensorrt_llm}\n")
    sys.stdout.flush()
    parsed = build_parser(found.release).parse_args(arguments)
    try:
        _build(parsed, settings, found)
    except LoaderError as error:
        return _traceback(str(error))
    return 0
