"""What the stages of one wish take: a conversion, a build, and a server with its KV cache; bytes throughout."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.architectures.streaming import Move, buffered_bytes
from trtserve.runtimes import EnginePlan
from trtserve.runtimes.base import Limits
from trtserve.runtimes.openvino_memory import EngineNeeds, engine_needs

# Anonymous memory of processes, measured (Python 3.11, transformers 5.23, Triton 2.51).
_CONVERT_PROCESS = 34 * 2**20
# An import loads transformers to test the tokenizer, and transformers loads PyTorch where it is installed.
_TRANSFORMERS = 15 * 2**20
_TORCH = 215 * 2**20
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


def convert_memory(moves: Sequence[Move], dtype: str, *, repacking: Sequence[int] = ()) -> int:
    """Peak of a conversion's process: one source tensor, or quantised matrix (its bytes), is under way at a time."""
    held = [buffered_bytes(move, dtype) for move in moves]
    return _CONVERT_PROCESS + max([*held, *repacking], default=0)


def import_memory(engine: EnginePlan) -> int:
    """Peak of an import's process, which builds after it has tested the tokenizer."""
    return engine.memory_bytes + _TRANSFORMERS + (_TORCH if importlib.util.find_spec("torch") else 0)


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


def draft_memory(config: Mapping[str, Any], kv_tokens: int | None) -> int:
    """Memory of the process of a draft model, with a KV cache for `kv_tokens` tokens, else for one sequence."""
    needs = engine_needs_of(config)
    return needs.serving + (kv_tokens or int(config["build_config"]["max_seq_len"])) * needs.kv_per_token
