"""The operations of a decoder layer that a device may have kernels of its own for.

`plain_operations` has them in plain PyTorch, for any device.

Shapes: t new tokens of s sequences, H query heads and KV key/value heads of D numbers. The KV cache of a layer is one
tensor [blocks, 2, tokens_per_block, KV, D], keys before values; [blocks, 1, …] where keys are values too
(`Scores.turned`). It has the type of the hidden states, or FP8 codes, which are times a layer's scale. A token's place
in it is block * tokens_per_block + its offset in the block. `block_tables` i32[s, m] lists the blocks of each sequence;
entries beyond its length are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from trtserve.checkpoint.architectures.base import Activation, ClampedGate, Experts
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.packed import Fp8Codes, Fp8Rows, PackedWeight

Matrix: TypeAlias = Tensor | PackedWeight | Fp8Codes
"""A matrix [out, in] of floats or of codes."""
Rows: TypeAlias = Tensor | Fp8Rows
"""Inputs [t, in] of a matrix, maybe rounded for it."""


@dataclass(frozen=True, kw_only=True)
class RotationTables:
    """How queries and keys are rotated by their positions."""

    cos_sin: Tensor
    """f32[positions, rotated numbers of a head]: cosines in the first half, sines in the second."""
    interleaved: bool = False
    """Pairs are neighbours (GPT-J), not the two halves of the rotated numbers (GPT-NeoX)."""


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """Weights [D] of the RMS norms of each query and key head before rotation."""

    query: Tensor
    key: Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How attention scores are made from query · key."""

    scale: float
    """Factor of the products."""
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None: all before it."""
    chunked: bool = False
    """It sees its chunk of so many tokens instead."""
    slopes: Tensor | None = None
    """ALiBi: f32[H], slope × key index is added to the scaled scores."""
    soft_cap: float | None = None
    """c: scaled scores become c · tanh(score / c)."""
    sinks: Tensor | None = None
    """f32[H], a score per head that takes its share of the softmax and adds nothing."""
    turned: int = 0
    """Without these first numbers (rotated ones) a key is the value too, so that the cache holds it once."""
    cache_scale: float = 1.0
    """What the codes of an FP8 cache are times; its keys and values are apart."""


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The matrices of experts: `outer` [E, 2F, n], factor first (see `gated`), and `inner` [E, n, F], maybe biases.

    Without a factor `outer` is [E, F, n].
    """

    outer: Tensor
    inner: Tensor
    outer_bias: Tensor | None = None
    """[E, 2F]."""
    inner_bias: Tensor | None = None
    """[E, n]."""
    clamp: ClampedGate | None = None
    """How the halves become one, instead of activation and product."""


class Operations(Protocol):
    """A module with these functions. Sums, norms and softmax are computed in float32 whatever the tensors' type."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return x / rms(x) · weight, for each row of [..., n]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum. Both inputs may be overwritten."""
        ...

    def linear(self, x: Rows, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Return x [t, in] · weight [out, in]ᵀ + bias. The `x` of FP8 codes may have been rounded already."""
        ...

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        epsilon: float,
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation | None = None,
        *,
        factor_first: bool = False,
        rounding: Fp8Codes | None = None,
    ) -> tuple[Rows, Tensor]:
        """Return the product of a matrix with the RMS norm of x + residual, and this sum.

        With an activation the product is `gated`, and may be rounded to FP8 for the matrix `rounding` that follows.
        Both x and residual may be overwritten.
        """
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        kv_layer: Tensor,
        cache_places: Tensor,
        *,
        heads: int,
        rotation: RotationTables | None,
        norms: HeadNorms | None,
        cache_scale: float = 1.0,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache, and return the queries [t, H, D].

        qkv [t, (H + 2 · KV) · D], or [t, (H + KV) · D] for a cache of keys that are values too; positions i64[t] are
        rows of `rotation.cos_sin`; cache_places i64[t]; `heads` is H.
        """
        ...

    def gated(self, joined: Tensor, activation: Activation, *, factor_first: bool = False) -> Tensor:
        """Return activation(one half) · other half: [t, 2F] → [t, F].

        The activated half comes first; with `factor_first` it is the second (TensorRT-LLM's swiglu).
        """
        ...

    def share_keys(self, lengths: Tensor, kv_layer: Tensor, most_keys: int, scores: Scores, heads: int) -> Any:
        """Return how the keys of a decode step are shared out among programs, for all layers with the same window.

        A sequence has no more than `most_keys` tokens; `heads` is H. See `decode_attention` for the others.
        """
        ...

    def decode_attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        lengths: Tensor,
        scores: Scores,
        shared: Any = None,
        rounding: Fp8Codes | None = None,
    ) -> Tensor:
        """Attend from the last token of each sequence: query [s, H, D] → [s, H, D - `turned`].

        lengths i32[s] count the tokens in the cache, with the new one; a row of length 0 gives any finite numbers.
        `shared` comes from `share_keys`. The result may be rounded to FP8 for the matrix `rounding` that follows.
        Nothing is read on the host, so that a CUDA graph can capture it.
        """
        ...

    def prompt_attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        past_lengths: Tensor,
        begins: Tensor,
        scores: Scores,
        *,
        most_new: int,
    ) -> Tensor:
        """Attend from all new tokens of sequences that have different numbers of them.

        query [t, H, D] → [t, H, D - `turned`].
        Tokens begins[i] … begins[i + 1] (i32[s + 1]) belong to sequence i and follow its past_lengths[i] (i32[s])
        tokens in the cache, which already holds the new ones too. `most_new` is the largest number of new
        tokens of a sequence.
        """
        ...

    def route(self, logits: Tensor, correction: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
        """Return the numbers i32[t, k] or i64 and weights f32[t, k] of each token's experts.

        They are made of the router's logits f32[t, E]; `correction` f32[E] is added to the scores to choose by.
        """
        ...

    def begin_adapters(
        self, x: Tensor, adapters: Adapters, layer: int, matrix: int, parts: int
    ) -> Callable[[Tensor], None]:
        """Begin to compute what adapters make of `x` [t, inputs]; call the result to add it to a product [t, outputs].

        The product is that of `parts` matrices from number `matrix` on, side by side. `layer` is the number in the
        whole model.
        """
        ...

    def expert_mlp(
        self,
        x: Tensor,
        matrices: ExpertWeights,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token: [t, n] → [t, n].

        chosen i32[t, k] or i64, weights f32[t, k]. An expert of number E or more belongs to another rank: it adds
        nothing.
        """
        ...


Device = Literal["cpu", "cuda"]
