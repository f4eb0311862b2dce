"""Arguments of vLLM's engine: from the engine's limits, the settings of the executor, the user, or a `model.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.memory import kv_bytes_per_token
from trtserve.errors import RepositoryError
from trtserve.executor.engine.limits import DEFAULT_FREE_FRACTION, EngineOptions
from trtserve.files import optional_json_object, read_json_object
from trtserve.host import machine
from trtserve.host.gpus import Device as Gpu
from trtserve.host.gpus import gpus_now
from trtserve.specs.build import Device

MODEL_FOLDER = "model"  # the Hugging Face model in the engine's folder
ADAPTER_FOLDER, ADAPTERS_FILE = "lora", "adapters.json"
"""The PEFT adapters in the engine's folder, and the file there that says which task id has which folder."""

LEADER, NODES = "TRTSERVE_VLLM_LEADER", "TRTSERVE_VLLM_NODES"
"""Variables of a server on several nodes: the host of the first one, and their number."""
_MASTER_PORT = 29501

# Blocks of the KV cache are multiples of 16 tokens, and have 128 on CPUs.
_BLOCK = 128
_MOST_UTILIZATION = 0.98


def engine_arguments(config: EngineConfig, options: EngineOptions, model: Path, *, adapters: int) -> dict[str, Any]:
    """Return the keywords of AsyncEngineArgs; those that the user gave win."""
    build, mapping = config.build, config.mapping
    found: dict[str, Any] = {
        "model": str(model),
        "max_model_len": build.max_seq_len,
        "max_num_seqs": options.max_batch_size or build.max_batch_size,
        "max_num_batched_tokens": options.max_num_tokens or build.max_num_tokens,
        "enable_prefix_caching": options.kv_cache.reuse,
        "enable_chunked_prefill": options.chunked_context,
        "scheduling_policy": "priority",
        # Requests have all of their parameters; the defaults of generation_config.json are the gateway's matter.
        "generation_config": "vllm",
        "skip_tokenizer_init": options.guides is None and not config.trtserve.reads_images,
        **_cache_size(config, options),
    }
    if mapping.ranks > 1:
        found |= {"tensor_parallel_size": mapping.tp_size, "pipeline_parallel_size": mapping.pp_size}
    if build.max_prompt_embedding_table_size:
        found["enable_prompt_embeds"] = True
    if mapping.moe_ep_size > 1:
        found["enable_expert_parallel"] = True
    if options.guides is not None:
        # A model may write blanks up to the limit of the answer where a guide allows them.
        found["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    if adapters:
        rank = build.lora_config.max_lora_rank
        found |= {"enable_lora": True, "max_loras": min(adapters, 8), "max_cpu_loras": adapters, "max_lora_rank": rank}
    return {**found, **config.trtserve.engine_arguments}


def follower_port(config: EngineConfig) -> int:
    """Return the port where the followers on other nodes find the leader: the one below vLLM's `master_port`."""
    return int(config.trtserve.engine_arguments.get("master_port", _MASTER_PORT)) - 1


def _cache_size(config: EngineConfig, options: EngineOptions) -> dict[str, Any]:
    """Return how vLLM sizes its KV cache.

    `gpu_memory_utilization` is a part of all memory and has the weights in it; ours is a part of what the weights
    leave. The memory of a step comes out of it, which vLLM measures.
    """
    asked, on_cpu = options.kv_cache, config.trtserve.device == "cpu"
    per_token = kv_per_token(config)
    if asked.max_tokens is not None:
        return {"kv_cache_memory_bytes": -(-asked.max_tokens // _BLOCK) * _BLOCK * per_token}
    if on_cpu:
        free = max(0, machine.free_memory() - config.trtserve.weights_bytes)
        longest = -(-config.build.max_seq_len // _BLOCK) * _BLOCK * config.build.max_batch_size * per_token
        wanted = free if asked.free_fraction is not None else longest
        return {"kv_cache_memory_bytes": min(wanted, int((asked.free_fraction or DEFAULT_FREE_FRACTION) * free))}
    gpus = gpus_now()
    if asked.free_fraction is None or not gpus:
        return {}
    return {"gpu_memory_utilization": gpu_memory_utilization(config, asked.free_fraction, gpus)}


def gpu_memory_utilization(config: EngineConfig, fraction: float, gpus: tuple[Gpu, ...]) -> float:
    """Return the part of all memory that leaves `fraction` of the memory beside the weights for the KV cache."""
    weights = config.trtserve.weights_bytes / config.mapping.ranks
    fullest = min(gpus[: config.mapping.ranks], key=lambda gpu: gpu.free / gpu.memory)
    left = max(0.0, fullest.free - weights)
    return round(min((weights + fraction * left) / fullest.memory, fullest.free / fullest.memory, _MOST_UTILIZATION), 4)


def kv_per_token(config: EngineConfig) -> int:
    """Return the bytes of a token in the KV cache of one rank; an upper bound where some layers keep no tokens."""
    model, mapping = config.model, config.mapping
    precision = config.trtserve.kv_precision
    if latent := model.own("latent_size", 0):  # MLA: one vector for keys and values of all heads, on every rank
        layers = -(-model.num_hidden_layers // mapping.pp_size)
        return layers * latent * {"f32": 4, "f16": 2, "bf16": 2}.get(precision, 1)
    return kv_bytes_per_token(model, precision, tp_size=mapping.tp_size, pp_size=mapping.pp_size)


# What the architectures of vLLM's registry call the sizes of a model. Where none is, the sizes are unknown.
_SIZES = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"),
    "head_size": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx",
    ),
}  # fmt: skip
# Where a layer's kind is listed, a hybrid model may not give their number.
_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern", "hybrid_layer_ids")
_USUAL_POSITIONS = 2048


def shape_of(hf: Mapping[str, Any], *, dtype: str, tp_size: int, pp_size: int) -> dict[str, Any]:
    """Return a `pretrained_config` with what a server must know of a Hugging Face model of any architecture.

    A size that differs between layers is that of the largest; one that is not known is 0.
    """
    text = _language_model(hf)
    sizes = {name: _size(text, names) for name, names in _SIZES.items()}
    heads = sizes["num_attention_heads"] or 1
    kv_heads = sizes["num_key_value_heads"] or (1 if text.get("multi_query") else heads)
    layers = sizes["num_hidden_layers"] or next((len(text[name]) for name in _LISTS if text.get(name)), 0)
    own = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    found = {
        **sizes,
        "architecture": str((hf.get("architectures") or [""])[0]),
        "dtype": str(own if dtype == "auto" else dtype).removeprefix("torch."),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_size": sizes["head_size"] or sizes["hidden_size"] // heads,
        "max_position_embeddings": sizes["max_position_embeddings"] or _USUAL_POSITIONS,
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
    }
    if text.get("kv_lora_rank"):
        found["latent_size"] = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    return found


def _language_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with that of the language model and of its attention, which some models nest, on top."""
    inner = ("thinker_config", "text_config", "llm_config", "language_config", "attn_config")
    part = next((hf[key] for key in inner if isinstance(hf.get(key), Mapping) and hf[key]), None)
    return hf if part is None else {**hf, **_language_model(part)}


def _size(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((text[name] for name in names if text.get(name)), 0)
    return int(max(found) if isinstance(found, list) else found)


BACKEND = "vllm"  # the word in `config.pbtxt`
MODEL_JSON, ADAPTERS = "model.json", "multi_lora.json"
PYTHON = "vllm_python"
"""Parameter of our own in `config.pbtxt`: the interpreter that has vLLM. NVIDIA's backend does not read it."""
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
"""Their product is the number of ranks, here and in the model.yaml of TensorRT-LLM's LLM API."""


@dataclass(frozen=True)
class ModelJson:
    """The arguments of vLLM's engine."""

    arguments: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ModelJson:
        """Read the file. Raises RepositoryError when it is missing, names no model, or has a wrong parallel size."""
        try:
            found = cls(read_json_object(path, RepositoryError))
        except FileNotFoundError:
            raise RepositoryError(f"{path} does not exist.", hint='It needs at least {"model": "ORG/MODEL"}.') from None
        if not isinstance(found.arguments.get("model"), str):
            raise RepositoryError(f"{path} names no model.", hint='Add "model": a hub id, or a folder.')
        parallel_sizes(found.arguments, path)
        return found

    @property
    def model(self) -> str:
        """A hub id, or a folder."""
        return str(self.arguments["model"])

    @property
    def sizes(self) -> tuple[int, int]:
        """Tensor and pipeline parallelism."""
        tp_size, pp_size = (int(self.arguments.get(name) or 1) for name in PARALLEL_SIZES)
        return tp_size, pp_size

    @property
    def adapters(self) -> bool:
        """Whether LoRA is on, which is a text in some files."""
        return str(self.arguments.get("enable_lora", False)).lower() == "true"

    @property
    def pools(self) -> bool:
        """Whether the model makes vectors, not texts."""
        return self.arguments.get("runner") == "pooling"

    def engine_config(self, repository: Path, device: Device, python: str) -> EngineConfig:
        """Return what an engine of the vllm runtime with these arguments and this interpreter would record."""
        folder = repository / self.model
        hf = optional_json_object(folder / "config.json", RepositoryError) if folder.is_dir() else {}
        tp_size, pp_size = self.sizes
        dtype = str(self.arguments.get("dtype", "auto"))
        # Of a model on the hub only the ranks are known here.
        shape = {"mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}}
        if hf:
            shape = shape_of(hf, dtype=dtype, tp_size=tp_size, pp_size=pp_size)
        longest = self.arguments.get("max_model_len")
        content = {
            "pretrained_config": shape,
            "build_config": {"max_seq_len": longest if isinstance(longest, int) and longest > 0 else 0},
            "trtserve": {
                "runtime": BACKEND,
                "device": device,
                "compute_precision": shape.get("dtype", ""),
                "engine_arguments": self.arguments,
                "vllm_python": python,
            },
        }
        return EngineConfig.of(content)


def parallel_sizes(settings: Mapping[str, Any], path: Path) -> list[int]:
    """Return tensor and pipeline parallelism of a file of settings; RepositoryError names every wrong value."""
    found = {key: 1 if settings.get(key) is None else settings[key] for key in PARALLEL_SIZES}
    wrong = [key for key, value in found.items() if type(value) is not int or value < 1]
    if wrong:
        given = " and ".join(f"{key} is {found[key]!r}" for key in wrong)
        raise RepositoryError(
            f"{path}: {given}; expected a whole number of 1 or more.", hint=f"Correct it in {path.name}."
        )
    return list(found.values())


def read_adapters(folder: Path) -> dict[str, str]:
    """Return name → folder of the adapters. Raises RepositoryError when the file is missing or says something else."""
    path = folder / ADAPTERS
    try:
        found = read_json_object(path, RepositoryError)
    except FileNotFoundError:
        raise RepositoryError(
            f"{path} does not exist, and {MODEL_JSON} has enable_lora.",
            hint='It lists the adapters: {"NAME": "FOLDER"}.',
        ) from None
    if not all(isinstance(folder, str) for folder in found.values()):
        raise RepositoryError(f"{path} must have a folder for each name.")
    return {name: str(folder) for name, folder in found.items()}
