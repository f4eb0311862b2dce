"""The runtime for CPUs: engines are OpenVINO graphs, served by the embedded executor."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve import machine
from trtserve.architectures import family, parameter_count
from trtserve.architectures.base import Decoder
from trtserve.architectures.checkpoint import CheckpointReader
from trtserve.architectures.quantized import AWQ, FP8, GPTQ, Int4Weight, quant_algo
from trtserve.artifacts import Checkpoint
from trtserve.errors import (
    BuildError,
    MemoryLimitError,
    MissingDependencyError,
    TrtserveError,
    UnsupportedModelError,
)
from trtserve.executor.attention_limits import require_paged_attention
from trtserve.progress import Progress, Task
from trtserve.runtimes.base import (
    WEIGHT_ONLY_INT4,
    WEIGHT_ONLY_INT8,
    CheckpointConfig,
    Limits,
    resolve_limits,
)
from trtserve.runtimes.features import resolve_features
from trtserve.runtimes.openvino_memory import engine_needs
from trtserve.runtimes.openvino_plan import OpenvinoPlan
from trtserve.specs import BuildSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    from trtserve.executor.graph import Weights
    from trtserve.executor.int4 import Packing

NAME = "openvino"

# Release of TensorRT-LLM whose config.json this one follows.
_CONFIG_RELEASE = "1.2.0"

# On a CPU a step over more tokens or requests gains nothing, and an answer rarely needs more than 4096 tokens: longer
# contexts are a matter of asking for them.
_DEFAULTS = Limits(max_batch_size=16, max_input_len=4096, max_seq_len=4096, max_num_tokens=2048)

# Keys of TensorRT-LLM's plugin_config beside dtype and tokens_per_block: kernels that are plugins, and switches.
_PLUGINS = (
    "bert_attention_plugin",
    "gpt_attention_plugin",
    "gemm_plugin",
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "nccl_plugin",
    "lora_plugin",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "gemm_allreduce_plugin",
)
_FEATURES = (
    "dora_plugin",
    "context_fmha",
    "bert_context_fmha_fp32_acc",
    "paged_kv_cache",
    "remove_input_padding",
    "reduce_fusion",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "fuse_fp4_quant",
    "norm_quant_fusion",
    "multiple_profiles",
    "paged_state",
    "streamingllm",
    "use_fused_mlp",
    "pp_reduce_scatter",
    "user_buffer",
)

_PACKINGS: Mapping[str, Packing] = {WEIGHT_ONLY_INT8: "int8", WEIGHT_ONLY_INT4: "int4"}
_SUPPORTED = (*_PACKINGS, GPTQ, AWQ, FP8)

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def plan(config: CheckpointConfig, spec: BuildSpec) -> OpenvinoPlan:
    """Limits and precision of the engine; the memory and disk it needs."""
    version = _openvino_version()
    _require_supported(config)
    compute, kv, notes = resolve_precision(config["dtype"], spec.kv_precision, bfloat16=machine.has_bfloat16())
    features, remarks = resolve_features(config, spec)
    limits = resolve_limits(config, spec, _DEFAULTS)
    rows = limits.max_num_tokens if features.gather_context_logits else limits.max_batch_size * spec.max_beam_width
    needs = engine_needs(config, limits, compute=compute, kv=kv, rows=rows)
    return OpenvinoPlan(
        runtime=NAME,
        config=_merged_config(config),
        limits=limits,
        features=features,
        compute_precision=compute,
        kv_precision=kv,
        tools={"openvino": version},
        memory_bytes=needs.build,
        disk_bytes=needs.disk,
        serving_bytes=needs.serving,
        kv_bytes_per_token=needs.kv_per_token,
        notes=(*notes, *_weight_notes(config), *remarks, *_merge_notes(config)),
    )


def resolve_precision(dtype: str, kv_precision: str, *, bfloat16: bool) -> tuple[str, str, tuple[str, ...]]:
    """Precision of arithmetic and KV cache, and what has to be said about them.

    float32 weights are calculated in float32 (the build that equals transformers); others in bfloat16 where the CPU
    has it. OpenVINO's attention kernel joins bfloat16 arithmetic with a 16-bit or 8-bit cache only.
    """
    compute = "bf16" if dtype != "float32" and bfloat16 else "f32"
    if kv_precision == "auto":
        return compute, "f32" if dtype == "float32" else "u8", ()
    if compute == "bf16" and kv_precision == "f32":
        note = "A float32 KV cache needs float32 arithmetic: this engine calculates in f32, about half as fast as bf16."
        return "f32", "f32", (note,)
    return compute, kv_precision, ()


_INT4_NOTE = (
    "int4 has a scale for each group of 256 inputs here (128, 64 or 32 where 256 does not divide them), and lm_head "
    "is int8; TensorRT-LLM's own W4A16 has a scale for each output channel and leaves lm_head alone."
)


def packing_of(config: CheckpointConfig) -> Packing:
    """What the float matrices inside the layers are to be quantised to; None: nothing."""
    return _PACKINGS.get(quant_algo(config) or "")


def _weight_notes(config: CheckpointConfig) -> tuple[str, ...]:
    algorithm = quant_algo(config)
    if algorithm == WEIGHT_ONLY_INT4:
        return (_INT4_NOTE,)
    return ("This runtime widens FP8 weights to float16.",) if algorithm == FP8 else ()


def build(
    plan: OpenvinoPlan, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
) -> dict[str, Any]:
    """Write config.json, rank0.xml and rank0.bin, then load the engine and let it calculate once."""
    del log, seconds  # no program is run, and the progress knows how much is left
    # A weight comes, is copied and goes, and the next one is of another size: without this the peak of a model with
    # experts was a quarter higher, and more time went into moving the heap's end.
    machine.take_large_blocks_from_system()
    try:
        return _build(plan, checkpoint, folder, progress)
    except (RuntimeError, MemoryError) as error:
        raise _explained(error, plan) from error


def _explained(error: Exception, plan: OpenvinoPlan) -> TrtserveError:
    """OpenVINO raises RuntimeError for everything, with the C++ place of it in the first line."""
    if machine.refused_memory(error) is not None:
        return MemoryLimitError(
            f"The memory ran out while the engine was built; it needs {machine.gibibytes(plan.memory_bytes)}.",
            hint="Free some memory or raise its limit (ulimit -v too), or convert with --quantize int4.",
        )
    reason = " ".join(str(error).split())
    return BuildError(
        f"OpenVINO could not build the engine: {reason}",
        hint="Run the command again as `trtserve --debug …` for the place; another --dtype may avoid it.",
    )


def _build(plan: OpenvinoPlan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> dict[str, Any]:
    _write_graph(plan, checkpoint, folder, progress)
    decoder = family(plan.config["architecture"]).decoder(plan.config)
    _write_config(folder, engine_config(plan, decoder))
    # The graph's weights, before the compiler packs its own copy: the peak was 1.6 × the weights without this.
    machine.give_memory_back()
    progress.step(f"Loading the engine: {plan.precision}")
    facts = _prove(folder)
    # OpenVINO chooses the size of a block when it compiles, and compiling takes the rest of the config.
    _write_config(folder, engine_config(plan, decoder, tokens_per_block=facts["tokens_per_block"]))
    return facts


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def engine_config(plan: OpenvinoPlan, decoder: Decoder, *, tokens_per_block: int | None = None) -> dict[str, Any]:
    """`config.json` of the engine: TensorRT-LLM's keys, and ours under `trtserve`.

    `tokens_per_block` of the KV cache is None until the engine was compiled.
    """
    return {
        "version": _CONFIG_RELEASE,
        "pretrained_config": dict(plan.config),
        "build_config": _build_config(plan, tokens_per_block),
        "trtserve": {
            "runtime": NAME,
            "openvino": plan.tools["openvino"],
            "compute_precision": plan.compute_precision,
            "kv_precision": plan.kv_precision,
            "windows": list(decoder.windows),
            "mlp": decoder.mlp,
            "machine": machine.describe(),
        },
    }


def _build_config(plan: OpenvinoPlan, tokens_per_block: int | None) -> dict[str, Any]:
    """TensorRT-LLM's build_config, key by key in its order; what only TensorRT has is off or empty."""
    limits, features = plan.limits, plan.features.build_config()
    return {
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "opt_batch_size": min(8, limits.max_batch_size),
        "max_batch_size": limits.max_batch_size,
        "max_beam_width": features["max_beam_width"],
        "max_num_tokens": limits.max_num_tokens,
        "opt_num_tokens": limits.max_batch_size * features["max_beam_width"],
        "max_prompt_embedding_table_size": features["max_prompt_embedding_table_size"],
        "kv_cache_type": "PAGED",
        "gather_context_logits": features["gather_context_logits"],
        "gather_generation_logits": features["gather_generation_logits"],
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": "layer_names_only",
        "enable_debug_output": False,
        "max_draft_len": features["max_draft_len"],
        "speculative_decoding_mode": features["speculative_decoding_mode"],
        "use_refit": False,
        "input_timing_cache": None,
        "output_timing_cache": None,
        "lora_config": features["lora_config"],
        "auto_parallel_config": {"world_size": 1},
        "weight_sparsity": False,
        "weight_streaming": False,
        "plugin_config": _plugin_config(plan, tokens_per_block),
        "use_strip_plan": False,
        "max_encoder_input_len": 1024,
        "use_fused_mlp": False,
        "monitor_memory": False,
        "use_mrope": False,
    }


def _plugin_config(plan: OpenvinoPlan, tokens_per_block: int | None) -> dict[str, Any]:
    """No plugin is used (None) but that of adapters, and of the switches (bool) only those of paged attention."""
    switches = dict.fromkeys(_FEATURES, False) | {"remove_input_padding": True, "paged_kv_cache": True}
    return {
        "dtype": plan.config["dtype"],
        **dict.fromkeys(_PLUGINS),
        **switches,
        **plan.features.plugin_config(),
        "tokens_per_block": tokens_per_block,
    }


def _openvino_version() -> str:
    try:
        return metadata.version("openvino")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "The openvino runtime needs the package openvino, which is not installed.",
            hint="pip install 'trtserve[cpu]'",
        ) from None


def _require_supported(config: CheckpointConfig) -> None:
    algorithm = quant_algo(config)
    kv_algorithm = (config.get("quantization") or {}).get("kv_cache_quant_algo")
    if algorithm is not None and algorithm not in _SUPPORTED:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}; the openvino runtime builds float weights and "
            f"{', '.join(_SUPPORTED)}.",
            hint="Convert the original model with --quantize int8 or int4, or without.",
        )
    if kv_algorithm is not None:
        raise UnsupportedModelError(
            f"The checkpoint carries scales for a {kv_algorithm} KV cache, which the openvino runtime does not use.",
            hint="Convert without KV cache quantisation, and choose the cache with --kv-precision.",
        )
    require_paged_attention(family(config["architecture"]).decoder(config))


def _merged_config(config: CheckpointConfig) -> dict[str, Any]:
    """The checkpoint's config of a model on one rank: the engine holds all shards."""
    sizes = {
        key: 1 for key in config.get("mapping") or {} if key == "world_size" or key.endswith(("tp_size", "pp_size"))
    }
    return {**config, "mapping": {**(config.get("mapping") or {}), **sizes}}


def _merge_notes(config: CheckpointConfig) -> tuple[str, ...]:
    world = int((config.get("mapping") or {}).get("world_size", 1))
    return (
        (f"The {world} ranks of the checkpoint are merged: this runtime serves from one process.",) if world > 1 else ()
    )


class _Reported:
    """Weights that report to a progress task as they are read, as numbers of `item` bytes."""

    def __init__(self, weights: Weights, task: Task, item: int) -> None:
        self._weights = weights
        self._task = task
        self._item = item

    def names(self) -> list[str]:
        return self._weights.names()

    def merged(self, name: str) -> npt.NDArray[Any]:
        tensor = self._weights.merged(name)
        self._task.advance(tensor.size * self._item)
        return tensor

    def kind(self, name: str) -> Literal["float", "int4", "fp8"]:
        return self._weights.kind(name)

    def int4(self, name: str) -> Int4Weight:
        weight = self._weights.int4(name)
        self._task.advance(weight.codes.size * self._item)
        return weight


def _write_graph(plan: OpenvinoPlan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    from trtserve.executor.graph import Sizes, build_graph, save_graph

    config = plan.config
    total = parameter_count(config) * _ITEM_SIZE[config["dtype"]]
    reader = CheckpointReader(checkpoint.path)
    with progress.task("Building the graph", total=total, unit="bytes") as task:
        graph = build_graph(
            family(config["architecture"]).decoder(config),
            Sizes.of(config),
            _Reported(reader, task, _ITEM_SIZE[config["dtype"]]),
            packing=packing_of(config),
        )
    progress.step(f"Writing {machine.gibibytes(plan.disk_bytes)}")
    save_graph(graph, folder / "rank0.xml")


def _prove(folder: Path) -> dict[str, Any]:
    """Load the engine, calculate one token, and say how long and how much memory it took from start to logits.

    The first calculation belongs to the load: OpenVINO packs the weights in it.
    """
    import numpy as np

    from trtserve.executor.paged_model import PagedModel

    before, started = _anonymous_memory(), time.monotonic()
    model = PagedModel(folder)
    model.allocate(1)
    logits = model.forward(
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        past_lens=np.zeros(1, dtype=np.int32),
        subsequence_begins=np.array([0, 1], dtype=np.int32),
        block_indices=np.zeros(1, dtype=np.int32),
        block_indices_begins=np.array([0, 1], dtype=np.int32),
        max_context_len=1,
        rows=np.zeros(1, dtype=np.int32),
    )
    seconds, memory = time.monotonic() - started, _anonymous_memory() - before
    if not np.isfinite(logits).all():
        raise BuildError(
            "The engine computes logits that are not finite.",
            hint="The weights overflow in this precision, or are damaged: convert with another --dtype.",
        )
    return {
        "weights_bytes": (folder / "rank0.bin").stat().st_size,
        "load_seconds": round(seconds, 3),
        "load_memory_bytes": memory,
        "kv_bytes_per_token": model.bytes_per_block // model.tokens_per_block,
        "tokens_per_block": model.tokens_per_block,
    }


def _anonymous_memory() -> int:
    """Bytes of this process that are not backed by files; 0 where the kernel does not say."""
    import psutil

    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))
