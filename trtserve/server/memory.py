"""Check that this machine's memory can serve a repository: the engine, its KV cache, and Triton's processes."""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import MemoryLimitError
from trtserve.executor.runtimes import RUNTIMES, draft_memory, engine_needs_of, fitting_step
from trtserve.host.machine import (
    address_space,
    available_memory,
    format_bytes,
    free_memory,
    require_memory,
    to_be_mapped,
)
from trtserve.progress import SILENT, Progress
from trtserve.repository.profiles import BLS, POSTPROCESSING, PREPROCESSING
from trtserve.repository.served import ServedRepository
from trtserve.specs.runtime import EnginePlan

# The smallest KV cache in tokens.
_BLOCK = 32
# Anonymous memory of processes, measured (Python 3.11, transformers 5.23, Triton 2.51).
# `trtserve start`, tritonserver, and both BLS models (the alias is the second).
_START_PROCESS = 44 * 2**20
_TRITON = 34 * 2**20
_BLS_PROCESS = 20 * 2**20
_BLS_MODELS = 2
# The gateway (FastAPI and the OpenAI API) without its tokenizer.
_GATEWAY_PROCESS = 28 * 2**20
# Pre- and postprocessing, and the gateway: transformers, and tables proportional to tokenizer.json.
_TOKENIZER_PROCESS = 46 * 2**20
_TOKENIZER_FACTOR = 12
# Address space of tritonserver, of which it uses little memory: shared memory and threads. Measured with five models on
# two cores; with less it can neither serve nor stop.
_TRITON_ADDRESSES = 2700 * 2**20


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """A server: its other `processes`, `engine` without its cache, and `kv` for `kv_tokens` tokens."""

    processes: int
    engine: int
    kv: int
    kv_tokens: int

    @property
    def total(self) -> int:
        return self.processes + self.engine + self.kv


def server_processes(*, tokenizers: int = 2, bls: int = 1, tokenizer_bytes: int = 0) -> int:
    """Return the memory of a server's processes except the engine's; `tokenizer_bytes` is tokenizer.json's size."""
    each = _TOKENIZER_PROCESS + _TOKENIZER_FACTOR * tokenizer_bytes
    others = _START_PROCESS + _TRITON + _GATEWAY_PROCESS + _BLS_MODELS * bls * _BLS_PROCESS
    return others + (tokenizers + 1) * each


def server_needs(
    engine: EngineConfig,
    *,
    kv_tokens: int | None = None,
    draft: EngineConfig | None = None,
    tokenizers: int = 2,
    bls: int = 1,
    tokenizer_bytes: int = 0,
) -> ServerNeeds:
    """Return what a server of an engine `config.json` needs, with `kv_tokens` of cache, or one sequence's."""
    needs = engine_needs_of(engine)
    tokens = -(-(kv_tokens or engine.build.max_seq_len) // _BLOCK) * _BLOCK
    processes = server_processes(tokenizers=tokenizers, bls=bls, tokenizer_bytes=tokenizer_bytes)
    return ServerNeeds(
        processes=processes + (draft_memory(draft, kv_tokens) if draft else 0),
        engine=needs.serving,
        kv=tokens * needs.kv_per_token,
        kv_tokens=tokens,
    )


def fitting_tokens(needs: ServerNeeds, kv_per_token: int, free: int) -> int:
    """Return the tokens of KV cache, in full blocks, that fit `free` bytes next to everything else."""
    return max(0, free - needs.processes - needs.engine) // kv_per_token // _BLOCK * _BLOCK


def require_servable(served: ServedRepository, name: str, progress: Progress = SILENT) -> None:
    """Raise MemoryLimitError when the embedded executor and Triton's processes do not fit the free memory.

    An explicit cache size must fit completely. Otherwise the executor shrinks its cache, and with it the longest
    sequence: then one block must fit, and a shorter sequence is a warning.
    """
    if served.runtime is None or served.needs_gpus:
        return
    _require_addresses()
    needs = server_needs(
        served.engine,
        kv_tokens=served.kv_tokens,
        draft=served.draft or None,
        tokenizers=sum(served.instances.get(model, 0) for model in (PREPROCESSING, POSTPROCESSING)),
        bls=served.instances.get(BLS, 1),
        tokenizer_bytes=served.tokenizer_bytes,
    )
    explicit = served.kv_tokens is not None
    per_token = needs.kv // needs.kv_tokens
    least = needs.kv if explicit else _BLOCK * per_token
    engine = engine_needs_of(served.engine)
    mapped = to_be_mapped(*engine.libraries, files=engine.disk)
    require_memory(
        needs.processes + needs.engine + least,
        f"Serving {name} takes {format_bytes(needs.engine)} for the engine, {format_bytes(least)} for its KV cache and"
        f" {format_bytes(needs.processes)} for Triton: it needs",
        lambda free: _advice(served.engine, needs, per_token, free, explicit=explicit),
        mapped=mapped,
    )
    fitting = fitting_tokens(needs, per_token, available_memory(mapped).free)
    if fitting < needs.kv_tokens:
        progress.warn(
            f"Memory remains for a KV cache of {fitting} tokens; one sequence of max_seq_len has {needs.kv_tokens}."
        )


def serving_note(engine: EnginePlan) -> str | None:
    """Return a note when an engine can be built but not served from the currently free memory.

    Returns None for runtimes that serve from GPUs.
    """
    if engine.needs_gpu:
        return None
    around, free = server_processes() + _BLOCK * engine.kv_bytes_per_token, free_memory()
    needed = engine.serving_bytes + around
    if needed <= free:
        return None
    smaller = fitting_step(EngineConfig.of(engine.config_outline()), free - around)
    return (
        f"Serving this engine will take {format_bytes(needed)} of memory (max_batch_size "
        f"{engine.limits.max_batch_size}, "
        f"max_num_tokens {engine.limits.max_num_tokens}), but only {format_bytes(free)} are free"
        f"{f'; {smaller} would fit' if smaller else ''}."
    )


def _require_addresses() -> None:
    space = address_space()
    if space is not None and space.limit < _TRITON_ADDRESSES:
        raise MemoryLimitError(
            f"Triton reserves {format_bytes(_TRITON_ADDRESSES)} of addresses, most of them without memory; "
            f"ulimit -v allows each process {format_bytes(space.limit)}.",
            hint="Raise the limit: ulimit -v unlimited.",
        )


def _advice(engine: EngineConfig, needs: ServerNeeds, per_token: int, free: int, *, explicit: bool) -> str:
    tokens = fitting_tokens(needs, per_token, free)
    if explicit and tokens:
        return f"--max-tokens-in-paged-kv-cache {tokens} of `trtserve repo` or `import` would fit."
    smaller = fitting_step(engine, free - needs.processes - _BLOCK * per_token)
    if smaller:
        return f"{smaller} of `trtserve build` or `import` would fit."
    narrower = RUNTIMES[engine.trtserve.runtime].narrower
    quantised = f"with {narrower}, or " if narrower else ""
    return f"Free some memory, or import {quantised}a smaller model."
