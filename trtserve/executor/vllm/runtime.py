"""The runtime on vLLM: the Hugging Face folder is the engine, which vLLM loads in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.memory import PRECISIONS
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.executor.vllm.arguments import kv_per_token, shape_of
from trtserve.executor.vllm.installation import VllmInstallation, find_installation
from trtserve.nvidia.releases import LAST_WITH_ENGINES
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.specs.build import Device, DeviceName
from trtserve.specs.command_line import given_values
from trtserve.specs.options import put_setting, setting_value
from trtserve.specs.runtime import CPU_LIMITS, GPU_LIMITS, EngineNeeds, Runtime, resolve_limits

# Python, PyTorch and vLLM in three processes before the first weight, measured with vLLM 0.32 on a CPU.
_PROCESSES = 1_600 * 2**20
# Keys of a config.json: where the parts of the model are that see, or what stands for an image in a prompt.
_VISION = ("vision_config", "visual", "image_token_id", "image_token_index", "img_processor", "mm_vision_tower")
_CONVERT = ("tp_size", "pp_size", "dtype", "quantize", "moe_ep_size", "gpu_sm", "trtllm_examples", "trtllm_version")
_BUILD = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_lora_rank",
    "max_prompt_embedding_table_size", "tokens_per_block", "device", "runtime", "trtllm_version",
)  # fmt: skip


# vLLM's arguments that decide about memory, GPUs or nodes before vLLM runs → how they are given.
_OWN = {
    "model": "MODEL",
    "dtype": "--dtype",
    "tensor_parallel_size": "--tp-size",
    "pipeline_parallel_size": "--pp-size",
    "enable_expert_parallel": "--moe-ep-size",
    "max_num_seqs": "--max-batch-size",
    "max_num_batched_tokens": "--max-num-tokens",
    "max_lora_rank": "--max-lora-rank",
    "data_parallel_size": "`start --instances N`",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr"), "`start --nodes`"),
}


class VllmRuntime(Runtime):
    """vLLM's engine behind TensorRT-LLM's executor interface."""

    name = "vllm"
    requirements = frozenset({"triton", "vllm"})
    folder_loader = "vLLM"
    folder_as_engine = True
    devices = ("cpu", "cuda")
    gpu_limits = GPU_LIMITS

    def device(self, asked: DeviceName | None = None, *, recorded: str = "") -> Device:
        """Return the device that is asked for, else the one that the vLLM of a server is for, else a GPU."""
        if asked is not None:
            return "cpu" if asked == "cpu" else "cuda"
        with suppress(MissingDependencyError):
            found = find_installation(recorded=recorded)
            return "cpu" if found is not None and found.on_cpu else "cuda"
        return "cuda"

    def memory_of(self, config: EngineConfig) -> EngineNeeds:
        """Return the needs of a model in main memory; 0 for one on GPUs."""
        if config.trtserve.device == "cuda":
            return EngineNeeds()
        weights = config.trtserve.weights_bytes
        return EngineNeeds(disk=weights, serving=_PROCESSES + weights, kv_per_token=kv_per_token(config))


def vllm_engine_config(
    hf: Mapping[str, Any],
    weights_bytes: int,
    convert: ConvertSpec,
    build: BuildSpec,
    settings: Mapping[str, str],
    installation: VllmInstallation,
    *,
    named: str | None,
    pools: bool = False,
) -> EngineConfig:
    """Return the `config.json` of an engine's folder for a Hugging Face model with the config `hf`.

    `settings` are vLLM's own arguments (`--set`), `named` is the interpreter, if the user named one, and `pools` says
    that the model makes vectors or scores. Raises UsageError for options and arguments that vLLM does not have, and
    UnsupportedModelError for an architecture.
    """
    for given, known in ((given_values(convert), _CONVERT), (given_values(build), _BUILD)):
        if unknown := sorted(given.keys() - {*known}):
            raise UsageError(
                f"--{unknown[0].replace('_', '-')} has no meaning with --runtime vllm: nothing is converted or built.",
                hint="Arguments of vLLM's engine are given with --set, such as --set kv_cache_dtype=fp8.",
            )
    arguments = _arguments(convert, build, settings)
    installation.require_arguments(arguments)
    if "model_impl" not in arguments:
        installation.require_architecture(str((hf.get("architectures") or ["None"])[0]), pools=pools)
    shape = shape_of(hf, dtype=convert.dtype, tp_size=convert.tp_size, pp_size=convert.pp_size)
    shape["mapping"]["moe_ep_size"] = convert.moe_ep_size or 1
    VllmRuntime().require_device(build)
    device: Device = "cpu" if (build.device or ("cpu" if installation.on_cpu else "cuda")) == "cpu" else "cuda"
    limits = resolve_limits(
        EngineConfig.of({"pretrained_config": shape}).model, build, CPU_LIMITS if device == "cpu" else GPU_LIMITS
    )
    if device == "cuda" and build.max_seq_len is None:
        arguments.setdefault("max_model_len", -1)  # vLLM fits it to the memory
    kept = str(arguments.get("kv_cache_dtype", "auto"))
    kept = shape["dtype"] if kept == "auto" else kept
    content = {
        "version": f"{LAST_WITH_ENGINES}.0",
        "pretrained_config": shape,
        "build_config": {
            **asdict(limits),
            "max_beam_width": 1,
            "kv_cache_type": "PAGED",
            "max_prompt_embedding_table_size": build.max_prompt_embedding_table_size,
            "lora_config": {"max_lora_rank": build.max_lora_rank},
            "plugin_config": {"lora_plugin": "auto", "use_paged_context_fmha": True},
        },
        "trtserve": {
            "runtime": VllmRuntime.name,
            "device": device,
            "compute_precision": shape["dtype"],
            "kv_precision": PRECISIONS.get(kept, "fp8" if kept.startswith("fp8") else kept),
            "weights_bytes": weights_bytes,
            "vllm": installation.version,
            "vllm_python": str(installation.python) if named else "",
            "engine_arguments": arguments,
            "reads_images": _reads_images(hf, arguments),
        },
    }
    return EngineConfig.of(content)


def _reads_images(hf: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a model reads images, unless vLLM is told to leave that out."""
    limits = arguments.get("limit_mm_per_prompt")
    off = bool(arguments.get("language_model_only")) or (isinstance(limits, dict) and limits.get("image") == 0)
    return not off and any(key in each for each in (hf, hf.get("thinker_config") or {}) for key in _VISION)


def _arguments(convert: ConvertSpec, build: BuildSpec, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return vLLM's arguments that the user gave, with --set or with an option that means the same."""
    found: dict[str, Any] = {}
    if convert.dtype != "auto":
        found["dtype"] = convert.dtype
    if convert.quantize not in ("none", "fp8"):
        raise UsageError(
            f"--quantize {convert.quantize}: vLLM quantises to fp8 when it loads a model, and loads models that are "
            "quantised already.",
            hint="Use --quantize fp8, or import an AWQ or GPTQ model.",
        )
    if convert.quantize == "fp8":
        found["quantization"] = "fp8"
    if build.tokens_per_block is not None:
        found["block_size"] = build.tokens_per_block
    for key, text in settings.items():
        if (option := _OWN.get(key)) is not None:
            raise UsageError(f"--set {key}: trtserve itself needs to know it.", hint=f"Give it as {option}.")
        put_setting(found, key, setting_value(key, text))
    return found
