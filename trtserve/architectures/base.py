"""What an architecture file says: how a Hugging Face model maps to a checkpoint, and its decoder's parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trtserve.errors import UnsupportedModelError

HfConfig = Mapping[str, Any]
CheckpointConfig = Mapping[str, Any]

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned", "alibi"]

# How the MLP is made: fc → activation → proj; gated: the activation is multiplied with gate; fused: fc holds both, the
# factor before what is activated (TensorRT-LLM's swiglu); experts: several fused ones, of which each token takes some.
Mlp = Literal["gated", "plain", "fused", "experts"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# How a layer adds attention and MLP to its input:
#   sequential  x + attention(norm(x)), then the same with the MLP
#   sandwich    x + norm(attention(norm(x))), then the same with the MLP: norms on both sides (Gemma 2)
#   parallel    x + attention(norm(x)) + MLP(norm(x)), each with its own norm or both with one (GPT-J, Falcon)
#   post        norm(x + attention(x)), then the same with the MLP; no norm after the last layer (OPT-350m)
Block = Literal["sequential", "sandwich", "parallel", "post"]

# How a tensor of the whole model is split over tensor-parallel ranks (convert-and-build, "Sharding rules"):
#   replicated     every rank holds it whole
#   column         split on dimension 0 (output features)
#   row            split on dimension 1 (input features)
#   qkv            [q; k; v] joined on dimension 0 per rank; key/value heads are repeated when they are too few
#   fused          `parts` joined on dimension 0 per rank, each split on dimension 0
#   first_rank     rank 0 holds it whole and the others hold zeros: a bias that the sum over ranks must have once
#   vocab          split on dimension 0 after padding with zero rows to a multiple of the number of ranks
#   expert_column  [experts, out, in]: experts split over expert-parallel ranks, then each of their `parts` as `fused`
#   expert_row     [experts, out, in]: experts split over expert-parallel ranks, then the input features of each
Split = Literal["replicated", "column", "row", "qkv", "fused", "first_rank", "vocab", "expert_column", "expert_row"]


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A matrix of the Hugging Face model [width, columns] that rows of `width` numbers are multiplied with.

    `transposed` tells that it is stored [columns, width].
    """

    name: str
    width: int
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor of the checkpoint of the whole model and where it comes from.

    `shape` is the whole model's, [out, in] for weights, without vocabulary padding. `sources` are names in the
    Hugging Face model, joined on dimension 0. `parts` are the row counts of what is fused (q, k and v, or the halves
    of a gated MLP) and `head_size` the rows of q, k and v that stay together. `order` are runs (first row, rows) of
    the one source in the order in which the target has them; empty when it has them all as they lie. `transpose` is
    set for Conv1D weights, stored [in, out]. `offset` is added to all values. With a `factor` the target is the product
    of its one source and that matrix. `layer` is the global layer index; a
    tensor outside the layers belongs to the first pipeline stage, or to the last one. `dtype` is its type where that
    is not the checkpoint's.

    A tensor of experts has three dimensions and counts as a matrix of its last one: its sources, and `parts`, are
    those of the first expert, then those of the next one.
    """

    name: str
    sources: Sequence[str]
    shape: tuple[int, ...]
    split: Split = "replicated"
    parts: tuple[int, ...] = ()
    head_size: int = 0
    order: tuple[tuple[int, int], ...] = ()
    transpose: bool = False
    offset: float = 0.0
    factor: Factor | None = None
    layer: int | None = None
    last_stage: bool = False
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """Inverse frequencies `inv_freq` of sequences that have, or will have, more than `beyond` tokens (LongRoPE)."""

    inv_freq: tuple[float, ...]
    beyond: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A layer has `count` experts; a token takes the `chosen` ones that the router finds most probable.

    Their outputs are weighted by these probabilities, which are made to sum to 1 when `renormalized`. A `shared` expert
    works on every token besides, weighted by the sigmoid of its gate.
    """

    count: int
    chosen: int
    renormalized: bool
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What a decoder layer stack is made of; read by the graph builder, together with the checkpoint's sizes.

    `rope_inv_freq` are the inverse frequencies with any scaling applied, one for every pair of numbers of a head that
    is rotated (the first ones of a head when it is a part), None without rope; `local_rope_inv_freq` those of the
    layers with a window, None when they are the same. `rope_interleaved` tells GPT-J style pairs from the half-split
    of GPT-NeoX, `rope_scale` multiplies what is rotated. `alibi_slopes` (one per head) times the position of a key are
    added to the scaled scores. `windows` are the sliding windows of the layers in tokens, None for a layer that sees
    all, repeated over the layers; empty for none at all. `attention_scale` multiplies q·k; `attention_softcap` c makes
    scores s to c·tanh(s / c), `logits_softcap` the same with logits. `qk_norm` tells that queries and keys of each
    head are normed, before they are rotated. `embedding_scale` multiplies embeddings, `embedding_norm` tells that they
    are normed. `mlp_norm` is the name of the norm before the MLP; None when a parallel MLP takes what attention takes.
    `experts` describes the experts of an MLP of that kind.
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
    local_rope_inv_freq: tuple[float, ...] | None = None
    rope_interleaved: bool = False
    rope_scale: float = 1.0
    long_rope: LongRope | None = None
    alibi_slopes: tuple[float, ...] | None = None
    windows: tuple[int | None, ...] = ()
    block: Block = "sequential"
    qk_norm: bool = False
    mlp_norm: str | None = "post_layernorm"
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: Experts | None = None

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens; None when it sees all tokens before it."""
        return self.windows[layer % len(self.windows)] if self.windows else None


class Architecture(Protocol):
    """One module per model family."""

    # Prefix of all source names but the head's; files of a model saved without its head lack it.
    BASE_PREFIX: str

    # transformers' default of `tie_word_embeddings`: the head is the embedding table.
    TIED: bool

    def checkpoint_config(self, hf: HfConfig) -> dict[str, Any]:
        """Family part of the checkpoint's `config.json` (sizes, positions, extra keys), without dtype and mapping.

        UnsupportedModelError when the model has a feature that cannot be converted.
        """

    def targets(self, config: CheckpointConfig) -> list[Target]:
        """Every tensor of the checkpoint of the whole model (tp 1, pp 1), in file order.

        When sources matter, `config` has what `architectures.described` adds, which TensorRT-LLM's config lacks.
        """

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


def require_numbers(config: Mapping[str, Any], *keys: str) -> None:
    """UnsupportedModelError when one of `keys` is there and no positive real number."""
    wrong = [f"{key} = {config[key]!r}" for key in keys if config.get(key) is not None and not _is_number(config[key])]
    if wrong:
        raise UnsupportedModelError(
            f"config.json gives {', '.join(wrong)}; expected positive numbers.",
            hint="Take config.json from where the weights are from.",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def embedding_split(config: CheckpointConfig) -> Split:
    """How embeddings are split: not at all, unless the config says `use_parallel_embedding`."""
    if not config.get("use_parallel_embedding"):
        return "replicated"
    return "row" if config.get("embedding_sharding_dim") == 1 else "vocab"


def fused_qkv(config: CheckpointConfig) -> tuple[int, int, int]:
    """Row counts of q, k and v in the fused tensor of the whole model."""
    keys = config["num_key_value_heads"] * config["head_size"]
    return config["num_attention_heads"] * config["head_size"], keys, keys


def expert_size(config: CheckpointConfig) -> int:
    """Width of one expert: where there is no key for it (Mixtral), the intermediate size is that of an expert."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def dense_moe(*, normalization_mode: int | None) -> dict[str, Any]:
    """TensorRT-LLM's `moe` object of a model without experts; upstream's Llama converter leaves the mode null."""
    return moe_object(normalization_mode=normalization_mode)


def moe_object(
    *, num_experts: int = 0, top_k: int = 0, normalization_mode: int | None, shared_size: int = 0
) -> dict[str, Any]:
    """TensorRT-LLM's `moe` object (MoeConfig), with the keys that any release has."""
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": 0,
        "num_shared_experts": 0,
        "shared_expert_intermediate_size": shared_size,
        "top_k": top_k,
        "normalization_mode": normalization_mode,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }
