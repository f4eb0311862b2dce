"""What the stages of one wish take: a conversion, a build, and a server with its KV cache; bytes throughout."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.architectures import family
from trtserve.architectures.quantized import FP8, GPTQ, quant_algo
from trtserve.capacity.room import to_be_mapped
from trtserve.runtimes import EnginePlan, openvino
from trtserve.runtimes.base import CheckpointConfig, Limits
from trtserve.runtimes.openvino_memory import BUILD_PROCESS, EngineNeeds, engine_needs, whole_model_bytes

# Anonymous memory of processes, measured (Python 3.11, transformers 5.23, Triton 2.51).
# An import loads transformers to test the tokenizer, and transformers loads PyTorch where it is installed.
_TRANSFORMERS = 15 * 2**20
_TORCH = 215 * 2**20  # with what transformers asks of it
# `trtserve start`, tritonserver, and both BLS models (the alias is the second).
_START_PROCESS = 44 * 2**20
_TRITON = 34 * 2**20
_BLS_PROCESS = 20 * 2**20
_BLS_MODELS = 2
# Pre- and postprocessing: transformers, and the tables that are made of each byte of tokenizer.json.
_TOKENIZER_PROCESS = 46 * 2**20
_TOKENIZER_FACTOR = 12


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """A server: `processes` around the engine, `engine` without its cache, `kv` for `kv_tokens` tokens."""

    processes: int
    engine: int
    kv: int
    kv_tokens: int

    @property
    def total(self) -> int:
        """Memory of all processes together with a full cache."""
        return self.processes + self.engine + self.kv


def import_memory(engine: EnginePlan) -> int:
    """Peak of an import's process, which builds after it has tested the tokenizer."""
    return engine.memory_bytes + _TRANSFORMERS + (_TORCH if importlib.util.find_spec("torch") else 0)


def build_addresses(engine: EnginePlan, *, tokenizer: bool = False) -> int:
    """What a build of the openvino runtime still maps into its process: libraries, and the engine's files.

    `tokenizer`: it tests one before. Other runtimes build in processes of their own, which no such limit suits.
    """
    if engine.runtime != openvino.NAME:
        return 0
    names = ("numpy", "openvino", *(("transformers", "torch") if tokenizer else ()))
    return to_be_mapped(*names, files=engine.disk_bytes)


def server_processes(*, tokenizers: int = 2, bls: int = 1, tokenizer_bytes: int = 0) -> int:
    """Everything of a server but the engine's process; `tokenizer_bytes` is the size of tokenizer.json."""
    each = _TOKENIZER_PROCESS + _TOKENIZER_FACTOR * tokenizer_bytes
    return _START_PROCESS + _TRITON + _BLS_MODELS * bls * _BLS_PROCESS + tokenizers * each


def engine_needs_of(config: Mapping[str, Any]) -> EngineNeeds:
    """Needs of an engine of the openvino runtime that exists, from its `config.json`."""
    build, own = config["build_config"], config["trtserve"]
    limits = Limits(**{name: int(build[name]) for name in Limits.__dataclass_fields__})
    rows = limits.max_batch_size * int(build.get("max_beam_width", 1))
    return engine_needs(
        config["pretrained_config"],
        limits,
        compute=str(own["compute_precision"]),
        kv=str(own["kv_precision"]),
        rows=limits.max_num_tokens if build.get("gather_context_logits") else rows,
    )


@dataclass(frozen=True, kw_only=True)
class CheckNeeds:
    """A numerical check: the `original` and the `converted` model are in memory one after the other, `logits` of both.

    `processes` are what PyTorch, transformers and OpenVINO take themselves.
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
    """What comparing a checkpoint with `config` takes over sequences of `lengths` tokens.

    `beside` counts the numbers of the original that the checkpoint does not have: it is loaded whole.

    The original is float32, and one of its weights is there twice while it is read or rounded; all of them where codes
    are widened before transformers takes them. The checkpoint is run as it is stored, then as a runtime quantises it.
    """
    counts = [math.prod(target.shape) for target in family(config["architecture"]).targets(config)]
    longest, row = max(lengths), int(config["vocab_size"]) * 4
    stored = {**config, "quantization": {}}
    return CheckNeeds(
        processes=BUILD_PROCESS + _TRANSFORMERS + _TORCH,
        original=4 * (beside + sum(counts) + (sum(counts) if quant_algo(config) in (GPTQ, FP8) else max(counts))),
        converted=max(whole_model_bytes(each, longest) for each in (stored, config)),
        # Of the original, its rounded self and the checkpoint; those of one prompt as float64 while they are compared.
        logits=3 * sum(lengths) * row + 8 * longest * row,
    )


def draft_memory(config: Mapping[str, Any], kv_tokens: int | None) -> int:
    """Memory of the process of a draft model, with a KV cache for `kv_tokens` tokens, else for one sequence."""
    needs = engine_needs_of(config)
    return needs.serving + (kv_tokens or int(config["build_config"]["max_seq_len"])) * needs.kv_per_token
