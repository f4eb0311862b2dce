"""Settings of the doubles: defaults, then `settings.json` in their folder, then TRTSERVE_DOUBLE_* variables.

The folder is the one that `tests.support.doubles.Doubles` made. It also holds `calls.jsonl`, to which every double
appends one line per call, and `scratch`, where the ranks of one launch meet. The file exists beside the environment
because some launchers (docker, srun --export) hand down no environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "TRTSERVE_DOUBLE_"
# Variables that decide what a launched process does; the call log keeps these and no others.
LOGGED_VARIABLES = (
    "OMPI_COMM_WORLD_",
    "OMPI_MCA_orte_",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "SLURM_",
    "TRTLLM_",
    "TLLM_",
    "tllm_",
    "CUDA_",
    "NVIDIA_",
    "LLM_CONFIG_PATH",
    "TRTSERVE_DOUBLE_",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One machine, its containers and its faults; a test may set every field."""

    container: str = "25.04"  # decides the versions of TensorRT-LLM, TensorRT and CUDA
    version: str = ""  # of TensorRT-LLM instead of the container's, for example 0.12.0
    gpus: int = 4
    gpus_apart: str = ""  # pairs without peer access, such as 0-1,2-3
    gpu_name: str = "NVIDIA H100 80GB HBM3"
    gpu_memory_mib: int = 81559
    sm: int = 90
    driver: str = "575.57.08"
    # trtllm-build and the converters. Faults: oom (SIGKILL), no-engine (exit 0, nothing written), error (traceback);
    # of trtllm-build also empty (an engine without weights) and cut-config (config.json ends in the middle).
    build_fault: str = ""
    build_fault_rank: int = 0
    build_seconds: float = 0.0  # per rank
    convert_fault: str = ""
    convert_seconds: float = 0.0
    # tritonserver: one rank dies, `die_after` seconds after it started (die_when=start), after all were ready
    # (die_when=ready), or after the test asked for it (die_when=asked): by signal `die_signal`, or if that is 0 with
    # the exit code `die_code`.
    die_rank: int = -1
    die_when: str = "ready"
    die_after: float = 0.0
    die_signal: int = 0
    die_code: int = 1
    hang_rank: int = -1  # this rank never ends its loading
    load_seconds: float = 0.0
    images: str = ""  # comma list of further image names that docker knows


def read_settings(folder: Path) -> Settings:
    """The settings of this call; an unknown name is a mistake of the test and ends the double with code 70."""
    known = {field.name: field for field in fields(Settings)}
    given: dict[str, str] = {}
    file = folder / "settings.json"
    if file.exists():
        given.update(json.loads(file.read_text(encoding="utf-8")))
    for name, text in os.environ.items():
        if name.startswith(PREFIX):
            given[name.removeprefix(PREFIX).lower()] = text
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        sys.stderr.write(f"double: unknown setting {', '.join(unknown)}\n")
        raise SystemExit(70)
    kinds = {"int": int, "float": float, "str": str}
    return Settings(**{name: kinds[str(known[name].type)](text) for name, text in given.items()})


def record_call(folder: Path, tool: str, arguments: list[str]) -> None:
    """Append one line about this call to the log: tool, arguments, folder, process id, telling variables."""
    line = {
        "tool": tool,
        "arguments": arguments,
        "cwd": str(Path.cwd()),
        "pid": os.getpid(),
        "time": time.time(),
        "environment": {name: text for name, text in os.environ.items() if name.startswith(LOGGED_VARIABLES)},
    }
    descriptor = os.open(folder / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)
