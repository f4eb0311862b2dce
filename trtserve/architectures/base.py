"""What an architecture file says: how a Hugging Face model maps to a checkpoint, and its decoder's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

HfConfig = Mapping[str, Any]
CheckpointConfig = Mapping[str, Any]

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned"]
Mlp = Literal["gated", "plain"]

# How a tensor of the whole model is split over tensor-parallel ranks (convert-and-build, "Sharding rules"):
#   replicated  every rank holds it whole
#   column      split on dimension 0 (output features)
#   row         split on dimension 1 (input features)
#   qkv         [q; k; v] joined on dimension 0 per rank; a key/value head is repeated when there are fewer than ranks
#   vocab       split on dimension 0 after padding with zero rows to a multiple of the number of ranks
Split = Literal["replicated", "column", "row", "qkv", "vocab"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor of the checkpoint and where it comes from.

    `sources` are names in the Hugging Face model. Several sources are the q, k and v parts of a fused tensor.
    `transpose` is set for Conv1D weights, stored [in, out]. `layer` is the global layer index, None outside layers.
    `fallback` replaces missing `sources` (tied embeddings).
    """

    name: str
    sources: Sequence[str]
    split: Split = "replicated"
    transpose: bool = False
    layer: int | None = None
    fallback: Sequence[str] = ()


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
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"]
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

    def checkpoint_config(self, hf: HfConfig) -> dict[str, Any]:
        """Family part of the checkpoint's `config.json` (sizes, positions, extra keys), without dtype and mapping."""

    def targets(self, config: CheckpointConfig) -> list[Target]:
        """Every tensor of the checkpoint of the whole model (tp 1, pp 1), in file order."""

    def unused(self, config: CheckpointConfig) -> Sequence[str]:
        """Patterns (fnmatch) of source tensors that are known and not needed."""

    def decoder(self, config: CheckpointConfig) -> Decoder:
        """What the decoder is made of, from the checkpoint's `config.json`."""
