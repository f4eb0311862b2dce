"""Whether what is wished for fits the memory of this machine, before its weights are here, and what would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtserve.capacity.needs import ServerNeeds, build_addresses, import_memory, server_processes
from trtserve.capacity.room import require_memory
from trtserve.capacity.steps import USUAL_TOKENS, smallest_step, step_flags, usual_steps
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
        mapped=build_addresses(need.engine, tokenizer=True),
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

    A batch or step that is smaller than an excessive one costs nothing, so that each further change is tried with it,
    too. A sequence cut to a quarter is milder than coarser weights, a shorter one is not; steps of few tokens are last.
    """
    limits = need_of(wish).engine.limits
    asked, beams = (limits.max_batch_size, limits.max_num_tokens), wish.build.max_beam_width
    usual = [_stepped(wish, asked, step) for step in usual_steps(*asked, beams=beams)]
    smallest = _stepped(wish, asked, smallest_step(*asked, beams=beams))
    yield from usual
    for halvings in (2, _MOST_HALVINGS):
        yield from _changed([("", wish), *usual[-1:]], limits.max_seq_len, halvings)
    yield smallest
    yield from _changed([smallest], limits.max_seq_len, _MOST_HALVINGS)


def _stepped(wish: Wish, asked: tuple[int, int], step: tuple[int, int]) -> tuple[str, Wish]:
    """`wish` with this max_batch_size and max_num_tokens; what follows from the batch anyway is not named."""
    batch, tokens = step
    if wish.build.max_num_tokens is None and tokens >= USUAL_TOKENS:
        build = replace(wish.build, max_batch_size=batch)
        return step_flags(asked, (batch, asked[1])), replace(wish, build=build)
    build = replace(wish.build, max_batch_size=batch, max_num_tokens=tokens)
    return step_flags(asked, step), replace(wish, build=build)


def _changed(steps: Sequence[tuple[str, Wish]], longest: int, halvings: int) -> Iterator[tuple[str, Wish]]:
    """Coarser weights and sequences cut in half up to `halvings` times, each with all of `steps`."""
    first = steps[0][1]
    for changes, convert in _narrower(first.convert, str(_config(first)["dtype"])):
        narrower = [(f"{flags} {changes}".strip(), replace(each, convert=convert)) for flags, each in steps]
        if changes:
            yield from narrower
        shorter = zip(*(_shorter(each, longest) for _, each in narrower), strict=True)
        for cut in itertools.islice(shorter, halvings):
            for (flags, _), (flag, each) in zip(narrower, cut, strict=True):
                yield f"{flags} {flag}".strip(), each


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


def _shorter(wish: Wish, longest: int) -> Iterator[tuple[str, Wish]]:
    """With half the KV cache and half of that, where its size is given, else with sequences of half `longest`."""
    tokens = (wish.kv_tokens or longest) // 2
    while tokens >= _SHORTEST:
        if wish.kv_tokens:
            yield f"--max-tokens-in-paged-kv-cache {tokens}", replace(wish, kv_tokens=tokens)
        else:
            inputs = min(wish.build.max_input_len or tokens, tokens)
            build = replace(wish.build, max_seq_len=tokens, max_input_len=inputs)
            more = f" --max-input-len {inputs}" if wish.build.max_input_len not in (None, inputs) else ""
            yield f"--max-seq-len {tokens}{more}", replace(wish, build=build)
        tokens //= 2
