"""Memory of each stage on this machine, before its inputs are here, and which settings would fit."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.quantized import FP8, GPTQ
from trtserve.errors import TrtserveError
from trtserve.executor.openvino.memory import BUILD_PROCESS, whole_model_bytes
from trtserve.executor.runtimes import choose_runtime, smallest_step, step_flags, usual_steps
from trtserve.host.machine import format_bytes, require_memory, to_be_mapped
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.server.engine_fit import ServerNeeds, server_processes
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.specs.runtime import CPU_LIMITS, EnginePlan

# Anonymous memory of processes, measured (Python 3.11, transformers 5.23).
_TRANSFORMERS = 15 * 2**20
_TORCH = 215 * 2**20  # including what transformers uses of it
_SHORTEST = 128
_MOST_HALVINGS = 32


def build_addresses(engine: EnginePlan, *, tokenizer: bool = False) -> int:
    """Return what a build still maps into this process: libraries and the engine's files.

    `tokenizer`: it tests one first. Other runtimes build in separate processes, to which the limit does not apply.
    """
    if not engine.libraries:
        return 0
    names = (*engine.libraries, *(("transformers", "torch") if tokenizer else ()))
    return to_be_mapped(*names, files=engine.disk_bytes)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model, its conversion and build, and the server around it: everything that decides how much memory it needs."""

    hf: Mapping[str, Any]  # the model's config.json
    convert: ConvertSpec
    build: BuildSpec
    kv_tokens: int | None = None  # size of the KV cache; None: at least one sequence of max_seq_len
    tokenizers: int = 2  # processes of pre- and postprocessing
    bls: int = 1  # processes of each BLS model
    tokenizer_bytes: int = 0  # size of tokenizer.json
    draft: int = 0  # memory of a draft model


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """An engine, the memory to build it, and the memory to serve it, in bytes."""

    engine: EnginePlan
    build: int
    server: ServerNeeds

    @property
    def total(self) -> int:
        """The larger of build and server, which run one after the other."""
        return max(self.build, self.server.total)


def memory_needs(deployment: Deployment, engine: EnginePlan | None = None) -> MemoryNeeds:
    """Return the memory that `deployment` needs; `engine` is its engine's plan, if there is one already.

    Raises UsageError or UnsupportedModelError when its engine cannot be built.
    """
    if engine is None:
        runtime = choose_runtime(deployment.build.runtime, container=deployment.build.container)
        engine = runtime.plan(_config(deployment), deployment.build)
    tokens = deployment.kv_tokens or engine.limits.max_seq_len
    processes = server_processes(
        tokenizers=deployment.tokenizers, bls=deployment.bls, tokenizer_bytes=deployment.tokenizer_bytes
    )
    return MemoryNeeds(
        engine=engine,
        # The import builds after it has tested the tokenizer.
        build=engine.memory_bytes + _TRANSFORMERS + (_TORCH if importlib.util.find_spec("torch") else 0),
        server=ServerNeeds(
            processes=processes + deployment.draft,
            engine=engine.serving_bytes,
            kv=tokens * engine.kv_bytes_per_token,
            kv_tokens=tokens,
        ),
    )


def _config(deployment: Deployment) -> CheckpointConfig:
    return checkpoint_config(deployment.hf, deployment.convert)


def require_enough_memory(deployment: Deployment, need: MemoryNeeds, name: str) -> None:
    """Raise MemoryLimitError when `deployment` does not fit the free memory; the hint names a setting that fits."""
    server = need.server
    draft = " and the draft model" if deployment.draft else ""
    require_memory(
        need.total,
        f"{name} takes {format_bytes(need.build)} to build {format_bytes(need.engine.disk_bytes)} of engine, and"
        f" {format_bytes(server.engine)} to serve it, {format_bytes(server.kv)} KV cache for {server.kv_tokens} tokens,"
        f" {format_bytes(server.processes)} for the server{draft}: it needs",
        lambda free: advice(deployment, free),
        mapped=build_addresses(need.engine, tokenizer=True),
    )


def advice(deployment: Deployment, free: int) -> str:
    """Return the mildest change that makes `deployment` fit `free` bytes, as flags with the memory it then needs."""
    for flags, smaller in _smaller(deployment):
        try:
            need = memory_needs(smaller)
        except TrtserveError:
            continue
        if need.total <= free:
            return f"{flags} would fit: {format_bytes(need.total)}."
    return "No setting makes it fit here: use a smaller model, or a machine with more memory."


def _smaller(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Yield deployments that need less memory, with their flags, the mildest first.

    Reducing an oversized batch or step costs nothing, so every further change is tried with it too. Cutting sequences
    to a quarter is milder than coarser weights; cutting them further is not. Steps of few tokens come last.
    """
    limits = memory_needs(deployment).engine.limits
    asked, beams = (limits.max_batch_size, limits.max_num_tokens), deployment.build.max_beam_width
    usual = [_stepped(deployment, asked, step) for step in usual_steps(*asked, beams=beams)]
    smallest = _stepped(deployment, asked, smallest_step(*asked, beams=beams))
    yield from usual
    for halvings in (2, _MOST_HALVINGS):
        yield from _changed([("", deployment), *usual[-1:]], limits.max_seq_len, halvings)
    yield smallest
    yield from _changed([smallest], limits.max_seq_len, _MOST_HALVINGS)


def _stepped(deployment: Deployment, asked: tuple[int, int], step: tuple[int, int]) -> tuple[str, Deployment]:
    """Set max_batch_size and max_num_tokens; flags leave out a value that follows from the batch."""
    batch, tokens = step
    if deployment.build.max_num_tokens is None and tokens >= CPU_LIMITS.max_num_tokens:
        build = replace(deployment.build, max_batch_size=batch)
        return step_flags(asked, (batch, asked[1])), replace(deployment, build=build)
    build = replace(deployment.build, max_batch_size=batch, max_num_tokens=tokens)
    return step_flags(asked, step), replace(deployment, build=build)


def _changed(steps: Sequence[tuple[str, Deployment]], longest: int, halvings: int) -> Iterator[tuple[str, Deployment]]:
    """Combine coarser weights and sequences halved up to `halvings` times with each of `steps`."""
    first = steps[0][1]
    for changes, convert in _narrower(first.convert, _config(first).dtype):
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


def _shorter(deployment: Deployment, longest: int) -> Iterator[tuple[str, Deployment]]:
    """Halve the KV cache again and again where its size is given, else the longest sequence."""
    tokens = (deployment.kv_tokens or longest) // 2
    while tokens >= _SHORTEST:
        if deployment.kv_tokens:
            yield f"--max-tokens-in-paged-kv-cache {tokens}", replace(deployment, kv_tokens=tokens)
        else:
            inputs = min(deployment.build.max_input_len or tokens, tokens)
            build = replace(deployment.build, max_seq_len=tokens, max_input_len=inputs)
            more = f" --max-input-len {inputs}" if deployment.build.max_input_len not in (None, inputs) else ""
            yield f"--max-seq-len {tokens}{more}", replace(deployment, build=build)
        tokens //= 2


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
    counts = [math.prod(target.shape) for target in checkpoint_targets(config)]
    longest, row = max(lengths), config.vocab_size * 4
    stored = config.changed(quantization={})
    return CheckNeeds(
        processes=BUILD_PROCESS + _TRANSFORMERS + _TORCH,
        original=4
        * (beside + sum(counts) + (sum(counts) if config.quantization.algorithm in (GPTQ, FP8) else max(counts))),
        converted=max(whole_model_bytes(each, longest) for each in (stored, config)),
        # Logits of the original, the rounded original and the checkpoint; one prompt's as float64 during comparison.
        logits=3 * sum(lengths) * row + 8 * longest * row,
    )
