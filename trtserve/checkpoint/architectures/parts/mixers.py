"""Layers whose memory of a sequence is a state of fixed size, beside or instead of keys and values.

A state has tables of numbers: the last inputs of a causal convolution [channels, taps], and matrices of heads. The
tensors of such a layer have names that begin with `mixer.`.
"""

from __future__ import annotations

from dataclasses import dataclass

Table = tuple[int, ...]  # the shape of a part of a state


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """c · conv(b · x), where `in_proj` makes b, c and x of the hidden states [width] (LFM2)."""

    width: int
    taps: int  # inputs that a channel of the convolution sees, the newest included

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.width

    @property
    def tables(self) -> tuple[Table, ...]:
        """The shapes of the state's parts."""
        return ((self.channels, self.taps),)


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A gated delta rule (Yang et al. 2024, arXiv 2412.06464, equation 10), as Qwen3-Next has it.

    `in_proj` makes queries, keys, values and output gates z, `gates` makes b and a of each value head. With the decay
    α = exp(−exp(`decay`) · softplus(a + `time_bias`)) and β = sigmoid(b), a head's state S [value, key] becomes
    α S + β (v − α S k) kᵀ, and its output is S q / √key, normed and multiplied by silu(z). Queries and keys are normed
    to length 1. Value head h reads key head h · key_heads // value_heads.
    """

    key_heads: int
    value_heads: int
    key: int  # numbers of a head's key
    value: int
    taps: int

    @property
    def keys(self) -> int:
        """Numbers of all keys."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Numbers of all values."""
        return self.value_heads * self.value

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def tables(self) -> tuple[Table, ...]:
        """The shapes of the state's parts."""
        return (self.channels, self.taps), (self.value_heads, self.value, self.key)


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """A state space model (Mamba-2: Dao and Gu 2024, arXiv 2405.21060, section 5).

    `in_proj` makes gates z, then x, B and C, which go through the convolution, and a time step of each head. With
    Δ = softplus(time step + `time_bias`), a head's state S [head, state] becomes exp(−exp(`decay`) Δ) S + Δ x Bᵀ, and
    its output is S C + `skip` · x. Heads form groups, which share B and C.
    """

    heads: int
    head: int
    groups: int
    state: int
    taps: int
    norm_groups: int = 1  # parts of the gated output that are normed for themselves; 0: no norm
    norm_first: bool = False  # the gate is multiplied after the norm
    time_limit: tuple[float, float] | None = None  # of Δ
    factors: tuple[float, ...] = ()  # multiply z, x, B, C and the time steps of `in_proj`; (): all are 1
    factor: float = 1.0  # multiplies the result

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head

    @property
    def input_factors(self) -> list[float] | None:
        """What each output of `in_proj` is multiplied by; None: nothing."""
        sizes = self.inner, self.inner, *[self.groups * self.state] * 2, self.heads
        parts = zip(self.factors, sizes, strict=False)
        return [factor for factor, size in parts for _ in range(size)] if self.factors else None

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def tables(self) -> tuple[Table, ...]:
        """The shapes of the state's parts."""
        return (self.channels, self.taps), (self.heads, self.head, self.state)


Mixer = ShortConvolution | DeltaNet | StateSpace


@dataclass(frozen=True, kw_only=True)
class MixerTensor:
    """A tensor of a layer with a state; every rank has all of it."""

    name: str  # behind `mixer.`
    sources: tuple[str, ...]  # whole names behind the layer's prefix, joined on dimension 0
    shape: tuple[int, ...]
    parts: tuple[int, ...] = ()  # rows of each source, where there are several
    order: tuple[tuple[int, int], ...] = ()  # runs (first row, rows) of the one source
    offset: float = 0.0
    wide: bool = False  # float32 in every checkpoint
