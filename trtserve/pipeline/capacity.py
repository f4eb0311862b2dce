"""Whether an engine fits the memory of this machine, known before its weights are here, and what would make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.artifacts import Engine
from trtserve.convert import checkpoint_config
from trtserve.errors import MemoryLimitError
from trtserve.machine import free_memory, gibibytes
from trtserve.repo.engine import read_engine
from trtserve.runtimes import EnginePlan, choose_runtime
from trtserve.specs import BuildSpec, ConvertSpec

# Private memory of a served demo beside the engine's process, measured (USS, Triton 2.51, transformers 5.23): Triton
# and the BLS models 47 MiB, each process with a tokenizer 47 MiB. The demo's vocabulary is small: a large one has room.
TRITON_MEMORY = 64 * 2**20
TOKENIZER_MEMORY = 128 * 2**20

_SHORTEST = 128
_MOST_HALVINGS = 32
_ITEM_BYTES = {"f32": 4, "f16": 2}
# The uint8 caches of OpenVINO 2026.4 keep a scale and a zero point (8 bytes): keys for each channel of a block of 32
# tokens, [heads, 32 + 8, size]; values for each token, [heads, 32, size + 8].
_U8_EXTRA = 8
_U8_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What decides the memory of a served engine.

    `hf` is the model's `config.json`; `kv_tokens` is the explicit size of the KV cache in tokens. Without it the cache
    takes what is free, but one sequence of `max_seq_len` tokens must fit. `tokenizers` counts the processes of pre- and
    postprocessing, `draft` the bytes of a draft model (see `draft_bytes`).
    """

    hf: Mapping[str, Any]
    convert: ConvertSpec
    build: BuildSpec
    kv_tokens: int | None = None
    tokenizers: int = 2
    draft: int = 0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of memory: the engine plan's own, `kv` for a cache of `kv_tokens` tokens, `server` for all the rest."""

    engine: EnginePlan
    server: int
    kv: int
    kv_tokens: int

    @property
    def total(self) -> int:
        """Bytes of memory that the served engine needs at least."""
        return self.engine.memory_bytes + self.kv + self.server


def need_of(wish: Wish) -> Need:
    """What `wish` needs; UsageError or UnsupportedModelError when it cannot be built at all."""
    config = checkpoint_config(wish.hf, wish.convert)
    engine = choose_runtime(wish.build.runtime).plan(config, wish.build)
    tokens = wish.kv_tokens or engine.limits.max_seq_len
    return Need(
        engine=engine,
        kv=tokens * kv_bytes_per_token(config, engine.kv_precision),
        kv_tokens=tokens,
        server=TRITON_MEMORY + wish.tokenizers * TOKENIZER_MEMORY + wish.draft,
    )


def draft_bytes(engine: Engine, kv_tokens: int | None) -> int:
    """Bytes of a draft model: the weights of its engine, and a KV cache for `kv_tokens`, else for one sequence."""
    config = read_engine(engine.path)
    tokens = kv_tokens or int(config["build_config"].get("max_seq_len") or 0)
    precision = str(config.get("trtserve", {}).get("kv_precision"))
    weights = sum(path.stat().st_size for path in engine.path.glob("*.bin"))
    return weights + tokens * kv_bytes_per_token(config["pretrained_config"], precision)


def kv_bytes_per_token(config: Mapping[str, Any], precision: str) -> int:
    """Bytes of keys and values of all layers for one token, from a checkpoint's config."""
    size = int(config["head_size"])
    keys = values = size * _ITEM_BYTES.get(precision, 1)
    if precision == "u8":
        keys, values = size * (_U8_BLOCK + _U8_EXTRA) // _U8_BLOCK, size + _U8_EXTRA
    return int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * (keys + values)


def require_memory(wish: Wish, name: str) -> None:
    """MemoryLimitError when `wish` does not fit the free memory; its hint names a setting that fits, or says none."""
    need, free = need_of(wish), free_memory()
    if need.total <= free:
        return
    raise MemoryLimitError(
        f"{name} needs {gibibytes(need.total)} of memory: {gibibytes(need.engine.memory_bytes)} to build and load"
        f" {gibibytes(need.engine.disk_bytes)} of weights, {gibibytes(need.kv)} KV cache for {need.kv_tokens} tokens,"
        f" {gibibytes(need.server)} for the server{' and the draft model' if wish.draft else ''}."
        f" {gibibytes(free)} are free.",
        hint=_advice(wish, free),
    )


def _advice(wish: Wish, free: int) -> str:
    for flags, smaller in _smaller(wish):
        need = need_of(smaller)
        if need.total <= free:
            return f"{flags} would fit: {gibibytes(need.total)}."
    return "No setting makes it fit here: take a smaller model, or a machine with more memory."


def _smaller(wish: Wish) -> Iterator[tuple[str, Wish]]:
    """Wishes that need less, with the flags that ask for them; the mildest first.

    A sequence cut to a quarter is milder than coarser weights, a shorter one is not.
    """
    dtype = str(checkpoint_config(wish.hf, wish.convert)["dtype"])
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


def _shorter(wish: Wish) -> Iterator[tuple[str, Wish]]:
    tokens = need_of(wish).kv_tokens // 2
    while tokens >= _SHORTEST:
        if wish.kv_tokens:
            yield f"--max-tokens-in-paged-kv-cache {tokens}", replace(wish, kv_tokens=tokens)
        else:
            inputs = min(wish.build.max_input_len or tokens, tokens)
            build = replace(wish.build, max_seq_len=tokens, max_input_len=inputs)
            more = f" --max-input-len {inputs}" if wish.build.max_input_len not in (None, inputs) else ""
            yield f"--max-seq-len {tokens}{more}", replace(wish, build=build)
        tokens //= 2
