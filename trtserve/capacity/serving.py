"""Whether a repository can be served from this machine's memory: the engine, its KV cache, and Triton around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.capacity.needs import ServerNeeds, draft_memory, engine_needs_of, server_processes
from trtserve.capacity.room import memory_room, require_memory, to_be_mapped
from trtserve.capacity.steps import fitting_step
from trtserve.errors import MemoryLimitError
from trtserve.machine import address_space, gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.triton.preflight import Served
from trtserve.triton.profiles import BLS, POSTPROCESSING, PREPROCESSING

_BLOCK = 32
# What tritonserver takes of addresses, of which it holds next to nothing: shared memory, and its threads. Measured with
# five models on two cores; with less it neither serves nor ends.
_TRITON_ADDRESSES = 2700 * 2**20


def server_needs(
    engine: Mapping[str, Any],
    *,
    kv_tokens: int | None = None,
    draft: Mapping[str, Any] | None = None,
    tokenizers: int = 2,
    bls: int = 1,
    tokenizer_bytes: int = 0,
) -> ServerNeeds:
    """What a server of an engine with this `config.json` takes, with a cache of `kv_tokens`, else of one sequence."""
    needs = engine_needs_of(engine)
    tokens = -(-(kv_tokens or int(engine["build_config"]["max_seq_len"])) // _BLOCK) * _BLOCK
    processes = server_processes(tokenizers=tokenizers, bls=bls, tokenizer_bytes=tokenizer_bytes)
    return ServerNeeds(
        processes=processes + (draft_memory(draft, kv_tokens) if draft else 0),
        engine=needs.serving,
        kv=tokens * needs.kv_per_token,
        kv_tokens=tokens,
    )


def fitting_tokens(needs: ServerNeeds, kv_per_token: int, free: int) -> int:
    """Tokens of KV cache, in whole blocks, that `free` bytes hold beside everything else; 0 when nothing is left."""
    return max(0, free - needs.processes - needs.engine) // kv_per_token // _BLOCK * _BLOCK


def require_servable(served: Served, name: str, progress: Progress = SILENT) -> None:
    """MemoryLimitError when the embedded executor and Triton around it do not fit the free memory.

    With an explicit size of the cache all of it must fit. Otherwise the executor takes less where there is less, and
    sequences become shorter: then one block must fit, and a shorter sequence is a warning.
    """
    if served.runtime != "openvino":
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
    mapped = to_be_mapped("numpy", "openvino", files=engine_needs_of(served.engine).disk)
    require_memory(
        needs.processes + needs.engine + least,
        f"Serving {name} takes {gibibytes(needs.engine)} for the engine, {gibibytes(least)} for its KV cache and"
        f" {gibibytes(needs.processes)} for Triton: it needs",
        lambda free: _advice(served.engine, needs, per_token, free, explicit=explicit),
        mapped=mapped,
    )
    fitting = fitting_tokens(needs, per_token, memory_room(mapped).free)
    if fitting < needs.kv_tokens:
        progress.warn(
            f"Memory is left for a KV cache of {fitting} tokens; one sequence of max_seq_len has {needs.kv_tokens}."
        )


def _require_addresses() -> None:
    space = address_space()
    if space is not None and space.limit < _TRITON_ADDRESSES:
        raise MemoryLimitError(
            f"Triton takes {gibibytes(_TRITON_ADDRESSES)} of addresses, little of it memory; ulimit -v allows each "
            f"process {gibibytes(space.limit)}.",
            hint="Raise the limit: ulimit -v unlimited.",
        )


def _advice(engine: Mapping[str, Any], needs: ServerNeeds, per_token: int, free: int, *, explicit: bool) -> str:
    tokens = fitting_tokens(needs, per_token, free)
    if explicit and tokens:
        return f"--max-tokens-in-paged-kv-cache {tokens} of `trtserve repo` or `import` would fit."
    smaller = fitting_step(engine, free - needs.processes - _BLOCK * per_token)
    if smaller:
        return f"{smaller} of `trtserve build` or `import` would fit."
    return "Free some memory, or build a smaller engine: trtserve import --quantize int8 or int4, or a smaller model."
