"""Whether what is wished for fits the memory of this machine, before its weights are here, and what would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.capacity.needs import ServerNeeds, import_memory, server_processes
from trtserve.capacity.room import require_memory
from trtserve.convert import checkpoint_config
from trtserve.errors import TrtserveError
from trtserve.machine import gibibytes
from trtserve.runtimes import EnginePlan, choose_runtime
from trtserve.runtimes.base import CheckpointConfig
from trtserve.specs import BuildSpec, ConvertSpec

_SHORTEST = 128
_MOST_HALVINGS = 32


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What decides the memory of a served engine.

    `hf` is the model's `config.json`; `kv_tokens` is the explicit size of the KV cache in tokens. Without it the cache
    takes what is free, but one sequence of `max_seq_len` tokens must fit. `tokenizers` counts the processes of pre- and
    postprocessing, `bls` those of each BLS model, `tokenizer_bytes` is the size of tokenizer.json, `draft` the memory
    of a draft model.
    """

    hf: Mapping[str, Any]
    convert: ConvertSpec
    build: BuildSpec
    kv_tokens: int | None = None
    tokenizers: int = 2
    bls: int = 1
    tokenizer_bytes: int = 0
    draft: int = 0


@dataclass(frozen=True, kw_only=True)
class Need:
    """The engine that is wished for, the memory to build it, and what serving it takes."""

    engine: EnginePlan
    build: int
    server: ServerNeeds

    @property
    def total(self) -> int:
        """Bytes of memory: the larger one of build and server, which come one after the other."""
        return max(self.build, self.server.total)


def need_of(wish: Wish) -> Need:
    """What `wish` needs; UsageError or UnsupportedModelError when it cannot be built at all."""
    engine = choose_runtime(wish.build.runtime, container=wish.build.container).plan(_config(wish), wish.build)
    tokens = wish.kv_tokens or engine.limits.max_seq_len
    processes = server_processes(tokenizers=wish.tokenizers, bls=wish.bls, tokenizer_bytes=wish.tokenizer_bytes)
    return Need(
        engine=engine,
        build=import_memory(engine),
        server=ServerNeeds(
            processes=processes + wish.draft,
            engine=engine.serving_bytes,
            kv=tokens * engine.kv_bytes_per_token,
            kv_tokens=tokens,
        ),
    )


def _config(wish: Wish) -> CheckpointConfig:
    return checkpoint_config(wish.hf, wish.convert)


def require_wish(wish: Wish, name: str) -> None:
    """MemoryLimitError when `wish` does not fit the free memory; its hint names a setting that fits, or says none."""
    need = need_of(wish)
    server = need.server
    draft = " and the draft model" if wish.draft else ""
    require_memory(
        need.total,
        f"{name} takes {gibibytes(need.build)} to build {gibibytes(need.engine.disk_bytes)} of engine, and"
        f" {gibibytes(server.engine)} to serve it, {gibibytes(server.kv)} KV cache for {server.kv_tokens} tokens,"
        f" {gibibytes(server.processes)} for the server{draft}: it needs",
        lambda free: advice(wish, free),
    )


def advice(wish: Wish, free: int) -> str:
    """The mildest change that makes `wish` fit `free` bytes, as flags, with what it needs then."""
    for flags, smaller in _smaller(wish):
        try:
            need = need_of(smaller)
        except TrtserveError:
            continue
        if need.total <= free:
            return f"{flags} would fit: {gibibytes(need.total)}."
    return "No setting makes it fit here: take a smaller model, or a machine with more memory."


def _smaller(wish: Wish) -> Iterator[tuple[str, Wish]]:
    """Wishes that need less, with the flags that ask for them; the mildest first.

    A sequence cut to a quarter is milder than coarser weights, a shorter one is not.
    """
    dtype = str(_config(wish)["dtype"])
    for halvings in (2, _MOST_HALVINGS):
        for changes, convert in _narrower(wish.convert, dtype):
            narrower = replace(wish, convert=convert)
            if changes:
                yield changes, narrower
            for flag, shorter in itertools.islice(_shorter(narrower), halvings):
                yield f"{changes} {flag}".strip(), shorter


def _narrower(spec: ConvertSpec, dtype: str) -> Iterator[tuple[str, ConvertSpec]]:
    yield "", spec
    half = replace(spec, dtype="bfloat16")
    if dtype == "float32":
        yield "--dtype bfloat16", half
    if spec.quantize == "none":
        yield "--quantize int8", replace(spec, quantize="int8")
        if dtype == "float32":
            yield "--dtype bfloat16 --quantize int8", replace(half, quantize="int8")
    if spec.quantize in ("none", "int8"):
        yield "--quantize int4", replace(spec, quantize="int4")
        if dtype == "float32":
            yield "--dtype bfloat16 --quantize int4", replace(half, quantize="int4")


def _shorter(wish: Wish) -> Iterator[tuple[str, Wish]]:
    tokens = need_of(wish).server.kv_tokens // 2
    while tokens >= _SHORTEST:
        if wish.kv_tokens:
            yield f"--max-tokens-in-paged-kv-cache {tokens}", replace(wish, kv_tokens=tokens)
        else:
            inputs = min(wish.build.max_input_len or tokens, tokens)
            build = replace(wish.build, max_seq_len=tokens, max_input_len=inputs)
            more = f" --max-input-len {inputs}" if wish.build.max_input_len not in (None, inputs) else ""
            yield f"--max-seq-len {tokens}{more}", replace(wish, build=build)
        tokens //= 2
