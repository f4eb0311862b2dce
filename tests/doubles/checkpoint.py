"""Reading of a checkpoint as TensorRT-LLM's loader does, but stricter.

The loader hands `mapping`, `quantization` and `moe` on as keyword arguments, so a key that the release does not know
is a TypeError; which release has which key is from its public sources. Every `rankN.safetensors` must be there and its
header must describe exactly the bytes that follow; the names that any decoder has must be there, else the loader's
RuntimeError.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.doubles.flags import Release

_MAPPING_KEYS = frozenset(
    {"world_size", "gpus_per_node", "cp_size", "tp_size", "pp_size", "moe_tp_size", "moe_ep_size"}
)
_LATE_MAPPING_KEYS: dict[str, Release] = {
    "auto_parallel": (0, 17),
    "attn_tp_size": (0, 19),
    "attn_cp_size": (0, 19),
    "moe_cluster_size": (0, 20),
    "cp_config": (1, 1),
    "enable_attention_dp": (1, 2),
    "enable_lm_head_tp_in_adp": (1, 2),
}
_NO_AUTO_PARALLEL: Release = (1, 2)
_BALANCED_STAGES: Release = (0, 20)
_LATE_MOE_KEYS: dict[str, Release] = {
    "sparse_mixer_epsilon": (0, 13),
    "device_limited_n_group": (0, 15),
    "device_limited_topk_group": (0, 15),
    "device_limited_routed_scaling_factor": (0, 15),
    "shared_expert_intermediate_size": (0, 16),
}
_MOE_KEYS = frozenset({"num_experts", "top_k", "normalization_mode", "tp_mode"})
_OLD_MOE_KEYS = frozenset({"moe_intermediate_size", "num_shared_experts"})  # 0.14 and 0.15
_LATE_ALGOS: Release = (1, 0)
_QUANTIZATION_KEYS = frozenset(
    {
        "quant_algo",
        "kv_cache_quant_algo",
        "group_size",
        "smoothquant_val",
        "clamp_val",
        "has_zero_point",
        "pre_quant_scale",
        "exclude_modules",
    }
)
_LATE_QUANTIZATION_KEYS: dict[str, Release] = {"use_meta_recipe": (0, 15), "mamba_ssm_cache_dtype": (1, 1)}
_QUANT_ALGOS = frozenset(
    [
        "W8A16",
        "W4A16",
        "W4A16_AWQ",
        "W4A8_AWQ",
        "W8A16_GPTQ",
        "W4A16_GPTQ",
        "W8A8_SQ_PER_CHANNEL",
        "W8A8_SQ_PER_TENSOR_PLUGIN",
        "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
        "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
        "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
        "W4A8_QSERVE_PER_GROUP",
        "W4A8_QSERVE_PER_CHANNEL",
        "FP8",
        "FP8_PER_CHANNEL_PER_TOKEN",
        "INT8",
        "MIXED_PRECISION",
        "NO_QUANT",
    ]
)
_LATE_QUANT_ALGOS = frozenset(
    ["FP8_BLOCK_SCALES", "NVFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "W4A16_MXFP4"]
)
_REQUIRED = ("architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_ARCHITECTURES = frozenset(
    [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "QWenForCausalLM",
        "QWenLMHeadModel",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "GPTForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "Starcoder2ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "PhiForCausalLM",
        "Phi3ForCausalLM",
        "FalconForCausalLM",
        "RWForCausalLM",
        "BloomForCausalLM",
        "OPTForCausalLM",
        "GPTNeoXForCausalLM",
        "GPTJForCausalLM",
        "InternLMForCausalLM",
        "InternLM2ForCausalLM",
        "BaichuanForCausalLM",
    ]
)
_SINCE = {"Qwen3ForCausalLM": (0, 20), "Qwen3MoeForCausalLM": (0, 20), "Gemma3ForCausalLM": (0, 19)}
_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I16": 16,
    "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


class LoaderError(Exception):
    """A failure of the real loader: `kind` is the exception that ends its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Parallel sizes of a checkpoint or an engine."""

    tp_size: int
    pp_size: int
    cp_size: int

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size * self.cp_size


def _keywords(kind: str, given: dict[str, Any], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            raise LoaderError("TypeError", f"{kind}.__init__() got an unexpected keyword argument '{name}'")


def _there(since: dict[str, Release], release: Release) -> frozenset[str]:
    return frozenset(name for name, first in since.items() if first <= release)


def _check_experts(config: dict[str, Any], release: Release) -> None:
    old = _OLD_MOE_KEYS if (0, 14) <= release < (0, 16) else frozenset()
    _keywords("MoeConfig", config.get("moe") or {}, _MOE_KEYS | _there(_LATE_MOE_KEYS, release) | old)


def read_mapping(config: dict[str, Any], release: Release) -> Mapping:
    """The parallel mapping, checked as the class Mapping checks it."""
    given = config.get("mapping", {"world_size": 1})
    gone = {"auto_parallel"} if release >= _NO_AUTO_PARALLEL else set()
    _keywords("Mapping", given, (_MAPPING_KEYS | _there(_LATE_MAPPING_KEYS, release)) - gone)
    sizes = {name: given.get(name, 1) for name in ("tp_size", "pp_size", "cp_size")}
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise LoaderError("ValueError", f"mapping holds sizes that are no positive integers: {sizes}")
    mapping = Mapping(**sizes)
    world = given.get("world_size", 1)
    if world != mapping.world_size:
        raise LoaderError(
            "ValueError",
            f"world_size must equal to tp_size * pp_size * cp_size, but got {world} != {mapping.tp_size} * "
            f"{mapping.pp_size} * {mapping.cp_size}",
        )
    moe = (given.get("moe_tp_size", -1), given.get("moe_ep_size", -1))
    if -1 not in moe and moe[0] * moe[1] * given.get("moe_cluster_size", 1) != mapping.tp_size:
        raise LoaderError(
            "ValueError",
            f"tp_size must equal to moe_tp_size * moe_ep_size, but got {mapping.tp_size} != {moe[0]} * {moe[1]}",
        )
    return mapping


def _check_quantization(config: dict[str, Any], release: Release) -> None:
    given = config.get("quantization") or {}
    _keywords("QuantConfig", given, _QUANTIZATION_KEYS | _there(_LATE_QUANTIZATION_KEYS, release))
    algorithms = _QUANT_ALGOS | (_LATE_QUANT_ALGOS if release >= _LATE_ALGOS else frozenset())
    name = given.get("quant_algo")
    if name is not None and name not in algorithms:
        raise LoaderError("ValueError", f"'{name}' is not a valid QuantAlgo")
    if given.get("kv_cache_quant_algo") not in {None, "FP8", "INT8"} | ({"NVFP4"} if release >= (1, 0) else set()):
        raise LoaderError("ValueError", f"'{given['kv_cache_quant_algo']}' is not a valid QuantAlgo")


def read_config(path: Path, release: Release) -> dict[str, Any]:
    """The object of config.json, checked."""
    try:
        config = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise LoaderError("FileNotFoundError", f"[Errno 2] No such file or directory: '{path}'") from None
    except json.JSONDecodeError as error:
        raise LoaderError("json.decoder.JSONDecodeError", str(error)) from None
    for name in _REQUIRED:
        if name not in config:
            raise LoaderError("KeyError", f"'{name}'")
    architecture = config["architecture"]
    if architecture not in _ARCHITECTURES or release < _SINCE.get(architecture, release):
        raise LoaderError("AssertionError", f"Unsupported model architecture: {architecture}")
    if config["dtype"] not in {"float16", "bfloat16", "float32"}:
        raise LoaderError("KeyError", f"'{config['dtype']}'")
    read_mapping(config, release)
    _check_quantization(config, release)
    _check_experts(config, release)
    return config


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file: name → dtype, shape, data_offsets; sizes are compared with the file's length."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise LoaderError(
                    "safetensors_rust.SafetensorError", "Error while deserializing header: HeaderTooLarge"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise LoaderError("FileNotFoundError", f'No such file or directory: "{path}"') from None
    except (ValueError, UnicodeDecodeError):
        raise LoaderError(
            "safetensors_rust.SafetensorError", "Error while deserializing header: InvalidHeaderDeserialization"
        ) from None
    header.pop("__metadata__", None)
    _check_layout(header, size - 8 - length)
    return cast("dict[str, dict[str, Any]]", header)


def _check_layout(header: dict[str, dict[str, Any]], size: int) -> None:
    end = 0
    for name, tensor in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        first, last = tensor["data_offsets"]
        bits = _ITEM_BITS.get(tensor["dtype"])
        if bits is None or first != end or (last - first) * 8 != bits * math.prod(tensor["shape"]):
            raise LoaderError(
                "safetensors_rust.SafetensorError", f"Error while deserializing header: TensorInvalidInfo ({name})"
            )
        end = last
    if end != size:
        raise LoaderError(
            "safetensors_rust.SafetensorError", "Error while deserializing header: MetadataIncompleteBuffer"
        )


def layers_of(rank: int, config: dict[str, Any], release: Release) -> int:
    """Layers on this rank's pipeline stage: the first stages get one more in late releases, before the rest is lost."""
    mapping = read_mapping(config, release)
    stage = rank // (mapping.tp_size * mapping.cp_size)
    count, rest = divmod(int(config["num_hidden_layers"]), mapping.pp_size)
    return count + (1 if release >= _BALANCED_STAGES and stage < rest else 0)


def check_rank(folder: Path, rank: int, config: dict[str, Any], release: Release) -> int:
    """Read one rank's weight file as the loader does and return its bytes of tensors."""
    mapping = read_mapping(config, release)
    # The cp ranks of one group share a file.
    number = rank % mapping.tp_size + rank // (mapping.tp_size * mapping.cp_size) * mapping.tp_size
    header = read_header(folder / f"rank{number}.safetensors")
    stage = rank // (mapping.tp_size * mapping.cp_size)
    required = {
        f"transformer.layers.{layer}.{part}.weight"
        for layer in range(layers_of(rank, config, release))
        for part in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.proj", "input_layernorm")
    }
    if stage == 0:
        required.add("transformer.vocab_embedding.weight")
    if stage == mapping.pp_size - 1:
        required |= {"transformer.ln_f.weight"}
        if "transformer.vocab_embedding.weight" not in header:  # newer loaders copy a tied table that is there
            required |= {"lm_head.weight"}
    missing = sorted(required - header.keys())
    if missing:
        raise LoaderError(
            "RuntimeError",
            f"Required but not provided tensors:{set(missing)}",
        )
    return sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in header.values())
