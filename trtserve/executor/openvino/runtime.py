"""The CPU runtime: engines are OpenVINO graphs, served by the embedded executor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.artifacts import Checkpoint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import family, parameter_count
from trtserve.checkpoint.architectures.parts.mixers import StateSpace
from trtserve.checkpoint.memory import ITEM_SIZE
from trtserve.checkpoint.quantized import AWQ, FP8, FP8_BY_TOKEN, GPTQ, INT4_GROUPS
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import (
    BuildError,
    MemoryLimitError,
    MissingDependencyError,
    TrtserveError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.executor.embedded import (
    EmbeddedPlan,
    EmbeddedRuntime,
    compute_token,
    limits_of,
    resolve_features,
    write_config,
)
from trtserve.executor.openvino.memory import LIBRARIES, engine_needs
from trtserve.host import machine
from trtserve.host.machine import install_command
from trtserve.progress import Progress
from trtserve.specs import BuildSpec
from trtserve.specs.build import Device, DeviceName
from trtserve.specs.runtime import CPU_LIMITS, WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8, EngineNeeds, resolve_limits

if TYPE_CHECKING:
    from trtserve.executor.openvino.weight_quantization import Packing

_PACKINGS: Mapping[str, Packing] = {WEIGHT_ONLY_INT8: "int8", WEIGHT_ONLY_INT4: "int4"}
_SUPPORTED = (*_PACKINGS, GPTQ, AWQ, FP8, *FP8_BY_TOKEN)


@dataclass(frozen=True, kw_only=True)
class OpenvinoPlan(EmbeddedPlan):
    """An OpenVINO engine; `plugin` is OpenVINO's name of the device."""

    plugin: str = "CPU"

    @property
    def precision(self) -> str:
        where = "" if self.plugin == "CPU" else f" on the {self.plugin}"
        numbers = f"{self.weights_precision} weights, {self.compute_precision} arithmetic"
        return f"{numbers}, {self.kv_precision} KV cache{where}"

    def own(self) -> dict[str, str]:
        return {} if self.plugin == "CPU" else {"plugin": self.plugin}

    def settings(self) -> dict[str, Any]:
        """Features and precisions, and the maximum group size of int4 made from floats."""
        groups = {"int4_group_size": INT4_GROUPS[0]} if self.config.quantization.algorithm == WEIGHT_ONLY_INT4 else {}
        return {**self.features.record(), **self._precisions(), **self.own(), **groups}

    def build(
        self, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
    ) -> dict[str, Any]:
        """Write config.json, rank0.xml and rank0.bin, then load the engine and run it once."""
        del log, seconds  # no external program runs, and the progress shows what remains
        # Weights of varying sizes are copied and freed one after another. Without this setting, a model with experts
        # peaked a quarter higher and spent more time growing the heap.
        machine.take_large_blocks_from_system()
        try:
            return _build(self, checkpoint, folder, progress)
        except (RuntimeError, MemoryError) as error:
            raise _explained(error, self) from error


class OpenvinoRuntime(EmbeddedRuntime):
    """OpenVINO on CPUs; one process serves the merged ranks of a checkpoint."""

    name = "openvino"
    extra = "cpu"
    narrower = "--quantize int8 or int4"
    devices = ("cpu", "gpu", "auto")

    def device(self, asked: DeviceName | None = None) -> Device:
        del asked
        return "cpu"

    def matrix_speed(self) -> tuple[float, float]:
        from trtserve.executor.openvino.speed import matrix_speed

        return matrix_speed()

    def plan(self, config: CheckpointConfig, spec: BuildSpec) -> OpenvinoPlan:
        version = _openvino_version()
        plugin = plugin_of(spec.device)
        self.require_device(spec)
        _require_supported(config, spec)
        # The plugin keeps states in the type of arithmetic. In bfloat16 one that fades slowly loses what tokens add.
        decoder = family(config.architecture).decoder(config)
        wide = isinstance(decoder.mixer, StateSpace)
        bfloat16 = machine.has_bfloat16()
        compute, kv, notes = resolve_precision(config.dtype, spec.kv_precision, bfloat16=bfloat16 and not wide)
        if plugin == "GPU":
            compute, kv, notes = _gpu_precision(config, spec.kv_precision)
        elif wide and bfloat16 and config.dtype != "float32":
            notes += ("States of Mamba-2 need float32: this engine calculates in f32, about half as fast as bf16.",)
        features, remarks = resolve_features(config, spec)
        limits = resolve_limits(config, spec, CPU_LIMITS)
        capped = decoder.attention_softcap is not None or decoder.has_chunks(limits.max_seq_len)
        if plugin == "GPU" and (capped or decoder.mixer is not None):
            raise UnsupportedModelError(
                f"--device gpu: {config.architecture} caps its scores, attends in chunks or keeps states, for which "
                "only the CPU's part of this runtime has the operations.",
                hint="Leave out --device.",
            )
        if capped:
            kv = _cache_of_capped_scores(compute, spec.kv_precision)
        rows = limits.max_num_tokens if features.gather_context_logits else limits.max_batch_size * spec.max_beam_width
        needs = engine_needs(config, limits, compute=compute, kv=kv, rows=rows)
        mapping = config.content.get("mapping") or {}
        sizes = {key: 1 for key in mapping if key == "world_size" or key.endswith(("tp_size", "pp_size"))}
        return OpenvinoPlan(
            runtime=self.name,
            config=config.changed(mapping={**mapping, **sizes}),
            limits=limits,
            features=features,
            device="cpu",
            plugin=plugin,
            compute_precision=compute,
            kv_precision=kv,
            tools={"openvino": version},
            memory_bytes=needs.build,
            disk_bytes=needs.disk,
            serving_bytes=needs.serving,
            kv_bytes_per_token=needs.kv_per_token,
            libraries=LIBRARIES,
            notes=(*notes, *remarks, *_checkpoint_notes(config)),
        )

    def memory_of(self, config: EngineConfig) -> EngineNeeds:
        build, own, limits = config.build, config.trtserve, limits_of(config)
        rows = limits.max_batch_size * build.max_beam_width
        return engine_needs(
            config.model,
            limits,
            compute=own.compute_precision,
            kv=own.kv_precision,
            rows=limits.max_num_tokens if build.gather_context_logits else rows,
        )


def plugin_of(asked: DeviceName | None) -> str:
    """Return OpenVINO's name of a device: CPU or GPU.

    Raises UsageError for one that is not here, and for NPUs, whose plugin has no paged attention.
    """
    if asked == "npu":
        raise UsageError(
            "--device npu: OpenVINO has paged attention, which this runtime needs, for CPUs and GPUs only.",
            hint="Leave out --device, or choose --device auto: the GPU if there is one, else the CPU.",
        )
    if asked not in ("gpu", "auto"):
        return "CPU"
    from trtserve.executor.openvino.paged_model import openvino_core

    found: list[str] = openvino_core().available_devices
    if any(name.partition(".")[0] == "GPU" for name in found):
        return "GPU"
    if asked == "auto":
        return "CPU"
    raise UsageError(
        f"--device gpu: OpenVINO finds no Intel GPU here; it finds {', '.join(found)}.",
        hint="Install the GPU's OpenCL driver, or leave out --device. NVIDIA GPUs: --runtime torch.",
    )


def _gpu_precision(config: CheckpointConfig, asked: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the precision of arithmetic and KV cache on Intel GPUs, which have no bfloat16, and a note."""
    own = "f32" if config.dtype == "float32" else "f16"
    if asked not in ("auto", own):
        raise UsageError(
            f"--kv-precision {asked}: on a GPU the KV cache has the precision of arithmetic, {own}.",
            hint="Leave out --kv-precision.",
        )
    return own, own, ("No Intel GPU ran this yet: compare the engine with `trtserve check ENGINE` before you use it.",)


def resolve_precision(dtype: str, kv_precision: str, *, bfloat16: bool) -> tuple[str, str, tuple[str, ...]]:
    """Return the precision of arithmetic and KV cache, and notes about them.

    float32 weights use float32 arithmetic (the build that equals transformers), others bfloat16 where the CPU supports
    it. OpenVINO's attention kernel combines bfloat16 arithmetic only with a 16-bit or 8-bit cache.
    """
    compute = "bf16" if dtype != "float32" and bfloat16 else "f32"
    if kv_precision == "auto":
        return compute, "f32" if dtype == "float32" else "u8", ()
    if compute == "bf16" and kv_precision == "f32":
        note = "A float32 KV cache needs float32 arithmetic: this engine calculates in f32, about half as fast as bf16."
        return "f32", "f32", (note,)
    return compute, kv_precision, ()


def _cache_of_capped_scores(compute: str, asked: str) -> str:
    """Return the precision of the cache of a model with capped scores or chunks: that of arithmetic."""
    if asked not in ("auto", compute):
        raise UnsupportedModelError(
            f"The model caps its attention scores or attends in chunks, and its KV cache has the precision of "
            f"arithmetic, {compute}; --kv-precision is {asked}.",
            hint="Build without --kv-precision.",
        )
    return compute


_INT4_NOTE = (
    "int4 has a scale for each group of 256 inputs here (128, 64 or 32 where 256 does not divide them), and lm_head "
    "is int8; TensorRT-LLM's own W4A16 has a scale for each output channel and leaves lm_head alone."
)


def _checkpoint_notes(config: CheckpointConfig) -> Iterator[str]:
    algorithm, world = config.quantization.algorithm, config.mapping.ranks
    if algorithm == WEIGHT_ONLY_INT4:
        yield _INT4_NOTE
    if algorithm in (FP8, *FP8_BY_TOKEN):
        yield "This runtime converts FP8 weights to float16."
    if world > 1:
        yield f"The checkpoint's {world} ranks are merged: this runtime serves from one process."


def _explained(error: Exception, plan: OpenvinoPlan) -> TrtserveError:
    """Return the first useful line of OpenVINO's RuntimeError, which starts with a C++ location."""
    if machine.refused_memory(error) is not None:
        return MemoryLimitError(
            f"Out of memory while building the engine; it needs {machine.format_bytes(plan.memory_bytes)}.",
            hint="Free some memory or raise its limit (ulimit -v too), or convert with --quantize int4.",
        )
    reason = " ".join(str(error).split())
    return BuildError(
        f"OpenVINO could not build the engine: {reason}",
        hint="Run the command again as `trtserve --debug …` for the place; another --dtype may avoid it.",
    )


def _build(plan: OpenvinoPlan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> dict[str, Any]:
    _write_graph(plan, checkpoint, folder, progress)
    write_config(folder, plan.engine_config())
    # Free the graph's weights before the compiler packs its own copy: the peak was 1.6 × the weights without this.
    machine.give_memory_back()
    progress.step(f"Loading the engine: {plan.precision}")
    facts = _prove(folder)
    # OpenVINO chooses the block size when it compiles, which requires the rest of the config.
    write_config(folder, plan.engine_config(tokens_per_block=facts["tokens_per_block"]))
    return facts


def _openvino_version() -> str:
    try:
        return metadata.version("openvino")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "The openvino runtime needs the openvino package, which is not installed.",
            hint=install_command(OpenvinoRuntime.extra),
        ) from None


def _require_supported(config: CheckpointConfig, spec: BuildSpec) -> None:
    if spec.kv_precision == "fp8":
        raise UsageError(
            "--kv-precision fp8 is for the torch runtime; openvino keeps keys and values in f32, f16 or u8.",
            hint="Leave out --kv-precision: u8 takes as little memory and is the default of float16 and bfloat16.",
        )
    algorithm = config.quantization.algorithm
    kv_algorithm = config.quantization.kv_cache_quant_algo
    if algorithm is not None and algorithm not in _SUPPORTED:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}; the openvino runtime builds float weights and "
            f"{', '.join(_SUPPORTED)}.",
            hint="Convert the original model without --quantize, or with --quantize int8 or int4.",
        )
    if kv_algorithm is not None:
        raise UnsupportedModelError(
            f"The checkpoint carries scales for a {kv_algorithm} KV cache, which the openvino runtime does not use.",
            hint="Convert without KV cache quantisation, and choose the cache with --kv-precision.",
        )


def _write_graph(plan: OpenvinoPlan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    from trtserve.executor.engine.shapes import Sizes
    from trtserve.executor.openvino.graph import build_graph, save_graph

    config, item = plan.config, ITEM_SIZE[plan.config.dtype]
    with progress.task("Building the graph", total=parameter_count(config) * item, unit="bytes") as task:
        graph = build_graph(
            family(config.architecture).decoder(config),
            Sizes.of(config),
            CheckpointReader(checkpoint.path),
            packing=_PACKINGS.get(config.quantization.algorithm or ""),
            read=lambda count: task.advance(count * item),
        )
    progress.step(f"Writing {machine.format_bytes(plan.disk_bytes)}")
    save_graph(graph, folder / "rank0.xml")


def _prove(folder: Path) -> dict[str, Any]:
    """Load the engine, compute one token, and return time and memory from start to logits."""
    from trtserve.executor.openvino.paged_model import PagedModel

    before, started = _anonymous_memory(), time.monotonic()
    facts = compute_token(PagedModel(folder), started)
    return {
        "weights_bytes": (folder / "rank0.bin").stat().st_size,
        "load_memory_bytes": _anonymous_memory() - before,
        **facts,
    }


def _anonymous_memory() -> int:
    """Return this process's bytes not backed by files, or 0 when the kernel does not report them."""
    import psutil

    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))
