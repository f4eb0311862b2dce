"""Memory of each stage in bytes: import, build, and a server with its KV cache."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.checkpoint.architectures import family
from trtserve.checkpoint.quantized import FP8, GPTQ, quant_algo
from trtserve.executor.loaders import embedded_runtime
from trtserve.executor.openvino.memory import BUILD_PROCESS, whole_model_bytes
from trtserve.executor.runtimes import RUNTIMES, EnginePlan
from trtserve.pipeline.planner.guards import to_be_mapped
from trtserve.specs.runtime import CheckpointConfig, EngineNeeds

# Anonymous memory of processes, measured (Python 3.11, transformers 5.23, Triton 2.51).
_TRANSFORMERS = 15 * 2**20
_TORCH = 215 * 2**20  # including what transformers uses of it
# `trtserve start`, tritonserver, and both BLS models (the alias is the second).
_START_PROCESS = 44 * 2**20
_TRITON = 34 * 2**20
_BLS_PROCESS = 20 * 2**20
_BLS_MODELS = 2
# The door (FastAPI and the OpenAI API) beside its tokenizer.
_DOOR_PROCESS = 28 * 2**20
# Pre- and postprocessing, and the door: transformers, and tables proportional to tokenizer.json.
_TOKENIZER_PROCESS = 46 * 2**20
_TOKENIZER_FACTOR = 12


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """A server: its other `processes`, `engine` without its cache, and `kv` for `kv_tokens` tokens."""

    processes: int
    engine: int
    kv: int
    kv_tokens: int

    @property
    def total(self) -> int:
        """Memory of all processes with a full cache."""
        return self.processes + self.engine + self.kv


def import_memory(engine: EnginePlan) -> int:
    """Return the peak of an import's process, which builds after testing the tokenizer."""
    return engine.memory_bytes + _TRANSFORMERS + (_TORCH if importlib.util.find_spec("torch") else 0)


def build_addresses(engine: EnginePlan, *, tokenizer: bool = False) -> int:
    """Return what a build still maps into this process: libraries and the engine's files.

    `tokenizer`: it tests one first. Other runtimes build in separate processes, to which the limit does not apply.
    """
    libraries = RUNTIMES[engine.runtime].LIBRARIES
    if not libraries:
        return 0
    names = (*libraries, *(("transformers", "torch") if tokenizer else ()))
    return to_be_mapped(*names, files=engine.disk_bytes)


def server_processes(*, tokenizers: int = 2, bls: int = 1, tokenizer_bytes: int = 0) -> int:
    """Return the memory of a server's processes except the engine's; `tokenizer_bytes` is tokenizer.json's size."""
    each = _TOKENIZER_PROCESS + _TOKENIZER_FACTOR * tokenizer_bytes
    others = _START_PROCESS + _TRITON + _DOOR_PROCESS + _BLS_MODELS * bls * _BLS_PROCESS
    return others + (tokenizers + 1) * each


def engine_needs_of(config: Mapping[str, Any]) -> EngineNeeds:
    """Return what an existing engine takes of this machine's memory, from its `config.json`; 0 for one on GPUs."""
    needs = RUNTIMES[str(embedded_runtime(config))].needs_of(config)
    return needs or EngineNeeds(disk=0, build=0, serving=0, kv_per_token=0)


@dataclass(frozen=True, kw_only=True)
class CheckNeeds:
    """A numerical check: `original` and `converted` model, one after the other, and the `logits` of both.

    `processes` is the memory of PyTorch, transformers and OpenVINO themselves.
    """

    processes: int
    original: int
    converted: int
    logits: int

    @property
    def total(self) -> int:
        """Memory at the peak."""
        return self.processes + max(self.original, self.converted) + self.logits


def check_memory(config: CheckpointConfig, lengths: Sequence[int], *, beside: int = 0) -> CheckNeeds:
    """Return what a check of a checkpoint `config` needs for sequences of `lengths` tokens.

    `beside` counts the original's values that the checkpoint lacks, since the original is loaded in full.

    The original is float32; one weight is duplicated while read or rounded, or all of them when codes are dequantised
    first. The checkpoint runs as stored, then as a runtime quantises it.
    """
    counts = [math.prod(target.shape) for target in family(config["architecture"]).targets(config)]
    longest, row = max(lengths), int(config["vocab_size"]) * 4
    stored = {**config, "quantization": {}}
    return CheckNeeds(
        processes=BUILD_PROCESS + _TRANSFORMERS + _TORCH,
        original=4 * (beside + sum(counts) + (sum(counts) if quant_algo(config) in (GPTQ, FP8) else max(counts))),
        converted=max(whole_model_bytes(each, longest) for each in (stored, config)),
        # Logits of the original, the rounded original and the checkpoint; one prompt's as float64 during comparison.
        logits=3 * sum(lengths) * row + 8 * longest * row,
    )


def draft_memory(config: Mapping[str, Any], kv_tokens: int | None) -> int:
    """Return the memory of a draft model's process, with `kv_tokens` of cache, or one sequence's."""
    needs = engine_needs_of(config)
    return needs.serving + (kv_tokens or int(config["build_config"]["max_seq_len"])) * needs.kv_per_token
