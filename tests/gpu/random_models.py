"""Decoders of usual sizes with random weights, made on the GPU: figures of speed do not depend on the weights."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import checkpoint_targets, family
from trtserve.checkpoint.quantized import FP8, FP8_BLOCK, FP8_BLOCKS, FP8_ROWS, is_quantised
from trtserve.checkpoint.sharding import Piece, Shard, matrix
from trtserve.executor.torch.choosing_model import ChoosingTorchModel
from trtserve.executor.torch.packed import PackedWeight, quantize
from trtserve.specs.runtime import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8

HF_SIZES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
    },
    "14B": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 13_824,
        "vocab_size": 152_064,
    },
    "1.1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32_000,
    },
}
for _sizes in HF_SIZES.values():
    _sizes |= {"model_type": "llama", "rope_theta": 500_000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
# A third of the layers of Qwen3 30B-A3B.
HF_SIZES["30B-A3B"] = HF_SIZES["8B"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# DeepSeek V2-Lite: latent attention.
HF_SIZES["V2-Lite"] = HF_SIZES["8B"] | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10_944,
    "vocab_size": 102_400,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
LORA_MODULES = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
TOKENS_PER_BLOCK = 16
MAX_NUM_TOKENS = 8192


Codes: TypeAlias = Literal["int8", "int4", "fp8", "fp8-rows", "fp8-blocks"]

_ALGORITHMS: dict[Codes, str] = {
    "int8": WEIGHT_ONLY_INT8,
    "int4": WEIGHT_ONLY_INT4,
    "fp8": FP8,
    "fp8-rows": FP8_ROWS,
    "fp8-blocks": FP8_BLOCKS,
}


class RandomWeights:
    """`Weights` of a whole model: matrices keep the size of their inputs, so that hidden states stay in range."""

    def __init__(self, config: CheckpointConfig, device: str, dtype: Any, codes: Codes | None) -> None:
        self._codes = codes
        self._targets = {each.name: each for each in checkpoint_targets(config)}
        self._device, self.dtype = device, dtype

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def tensor(self, name: str) -> Any:
        import torch

        shape = self._targets[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        values = torch.empty(shape, dtype=self.dtype, device=self._device)
        if self.fp8_scales(name):
            return values.normal_().to(torch.float8_e4m3fn)
        return values.normal_(std=1 / math.sqrt(shape[-1]))

    def fp8_scales(self, name: str) -> tuple[Any, Any | None] | None:
        import torch

        target = self._targets[name]
        if not str(self._codes).startswith("fp8") or not is_quantised(target):
            return None
        outputs, inputs = matrix(target.shape)
        shape = {"fp8": (1,), "fp8-rows": (outputs,)}.get(
            str(self._codes), (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        )
        scale = torch.full(shape, 1 / math.sqrt(inputs), device=self._device)
        return scale, torch.tensor([0.02], device=self._device) if self._codes == "fp8" else None

    def cache_scale(self, attention: str) -> float:
        assert f"{attention}.qkv.weight" in self._targets
        return 1.0

    def packed(self, name: str) -> tuple[PackedWeight, None] | None:
        if self._codes not in ("int8", "int4") or not is_quantised(self._targets[name]):
            return None
        return quantize(self.tensor(name), 8 if self._codes == "int8" else 4), None

    def split(self, name: str) -> Any:
        return self._targets[name].split

    def shard(self, name: str) -> Shard:
        shape = self._targets[name].shape
        rows, columns = matrix(shape)
        return Shard(shape=shape, pieces=(Piece(first_row=0, rows=rows, first_column=0, columns=columns),))


def random_model(
    name: str,
    *,
    batch: int,
    seq_len: int,
    device: str = "cuda",
    dtype: str = "bfloat16",
    layers: int | None = None,
    codes: Codes | None = None,
    rank: int = 0,
    kv_precision: str = "",
) -> ChoosingTorchModel:
    """Return the model `name` of HF_SIZES for `batch` sequences of `seq_len` tokens; `codes` of its matrices.

    With a `rank` it takes adapters of that on all matrices.
    """
    import torch

    sizes = HF_SIZES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    architecture = sizes.get("architectures", ["LlamaForCausalLM"])[0]
    model = family(architecture).checkpoint_config(sizes) | {"architecture": architecture, "dtype": dtype}
    model |= {"mapping": {"tp_size": 1, "pp_size": 1}}
    if codes is not None:
        model |= {"quantization": {"quant_algo": _ALGORITHMS[codes]}}
    build = {
        "max_seq_len": seq_len,
        "max_batch_size": batch,
        "max_num_tokens": MAX_NUM_TOKENS,
        "plugin_config": {"tokens_per_block": TOKENS_PER_BLOCK, "lora_plugin": dtype if rank else None},
        "lora_config": {"max_lora_rank": rank or 64, "lora_target_modules": list(LORA_MODULES) if rank else []},
    }
    compute = "bf16" if dtype == "bfloat16" else "f32"
    own = {"compute_precision": compute, "kv_precision": kv_precision or compute, "mlp": "gated"}
    config = {"pretrained_config": model, "build_config": build, "trtserve": own}
    typed = CheckpointConfig.of(model)
    weights = RandomWeights(typed, device, getattr(torch, dtype), codes)
    decoder = family(architecture).decoder(typed)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    made = ChoosingTorchModel(
        EngineConfig.of(config), decoder, weights, layers=range(sizes["num_hidden_layers"]), device=device
    )
    # What it holds besides, such as rotations and tables of draws, is little.
    made.weight_bytes = torch.cuda.memory_allocated() - before if device == "cuda" else 0  # type: ignore[attr-defined]
    return made
