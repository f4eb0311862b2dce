"""What an architecture file says: how a Hugging Face model maps to a checkpoint, and its decoder's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trtserve.errors import UnsupportedModelError

HfConfig = Mapping[str, Any]
CheckpointConfig = Mapping[str, Any]

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned"]
Mlp = Literal["gated", "plain"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# How a tensor of the whole model is split over tensor-parallel ranks (convert-and-build, "Sharding rules"):
#   replicated  every rank holds it whole
#   column      split on dimension 0 (output features)
#   row         split on dimension 1 (input features)
#   qkv         [q; k; v] joined on dimension 0 per rank; a key/value head is repeated when there are fewer than ranks
#   vocab       split on dimension 0 after padding with zero rows to a multiple of the number of ranks
Split = Literal["replicated", "column", "row", "qkv", "vocab"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor of the checkpoint of the whole model and where it comes from.

    `shape` is the whole model's, [out, in] for weights, without vocabulary padding. `sources` are names in the
    Hugging Face model, joined on dimension 0. `parts` are the row counts of q, k and v in a fused tensor and
    `head_size` the rows that stay together. `transpose` is set for Conv1D weights, stored [in, out]. `layer` is the
    global layer index; a tensor outside the layers belongs to the first pipeline stage, or to the last one.
    """

    name: str
    sources: Sequence[str]
    shape: tuple[int, ...]
    split: Split = "replicated"
    parts: tuple[int, ...] = ()
    head_size: int = 0
    transpose: bool = False
    layer: int | None = None
    last_stage: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What a decoder layer stack is made of; read by the graph builder, together with the checkpoint's sizes.

    `rope_inv_freq` are the inverse frequencies (head_size / 2 numbers) with any scaling applied, None without rope;
    `rope_interleaved` tells GPT-J style pairs from the half-split of GPT-NeoX. `window` is the sliding window in
    tokens. `attention_scale` multiplies q·k.
    """

    norm: Norm
    positions: Positions
    mlp: Mlp
    activation: Activation
    attention_bias: bool
    dense_bias: bool
    mlp_bias: bool
    attention_scale: float
    rope_inv_freq: tuple[float, ...] | None = None
    rope_interleaved: bool = False
    window: int | None = None


class Architecture(Protocol):
    """One module per model family."""

    HF_ARCHITECTURES: tuple[str, ...]

    # Prefix of all source names but the head's; files of a model saved without its head lack it.
    BASE_PREFIX: str

    def checkpoint_config(self, hf: HfConfig) -> dict[str, Any]:
        """Family part of the checkpoint's `config.json` (sizes, positions, extra keys), without dtype and mapping.

        UnsupportedModelError when the model has a feature that cannot be converted.
        """

    def targets(self, config: CheckpointConfig) -> list[Target]:
        """Every tensor of the checkpoint of the whole model (tp 1, pp 1), in file order."""

    def unused(self, config: CheckpointConfig) -> Sequence[str]:
        """Patterns (fnmatch) of source tensors that are known and not needed."""

    def decoder(self, config: CheckpointConfig) -> Decoder:
        """What the decoder is made of, from the checkpoint's `config.json`."""


def required(hf: HfConfig, *keys: str) -> dict[str, Any]:
    """The sizes `keys` in a Hugging Face config; UnsupportedModelError for absent ones and what is no size."""
    absent = [key for key in keys if hf.get(key) is None]
    if absent:
        raise UnsupportedModelError(
            f"config.json of this {hf.get('model_type', 'unknown')} model lacks {', '.join(absent)}.",
            hint="Take config.json from the model's own repository.",
        )
    require_sizes(hf, *keys)
    return {key: hf[key] for key in keys}


def require_sizes(config: Mapping[str, Any], *keys: str) -> None:
    """UnsupportedModelError when one of `keys` is not a positive whole number."""
    wrong = [f"{key} = {config.get(key)!r}" for key in keys if not _is_size(config.get(key))]
    if wrong:
        raise UnsupportedModelError(
            f"config.json gives {', '.join(wrong)}; expected positive whole numbers.",
            hint="Take config.json from where the weights are from.",
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def embedding_split(config: CheckpointConfig) -> Split:
    """How embeddings are split: not at all, unless another tool's checkpoint says `use_parallel_embedding`."""
    if not config.get("use_parallel_embedding"):
        return "replicated"
    return "row" if config.get("embedding_sharding_dim") == 1 else "vocab"


def fused_qkv(config: CheckpointConfig) -> tuple[int, int, int]:
    """Row counts of q, k and v in the fused tensor of the whole model."""
    keys = config["num_key_value_heads"] * config["head_size"]
    return config["num_attention_heads"] * config["head_size"], keys, keys


def dense_moe(*, normalization_mode: int | None) -> dict[str, Any]:
    """TensorRT-LLM's `moe` object of a model without experts; upstream's Llama converter leaves the mode null."""
    return {
        "num_experts": 0,
        "shared_expert_intermediate_size": 0,
        "top_k": 0,
        "normalization_mode": normalization_mode,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }
