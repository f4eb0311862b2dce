"""Layers with a state in PyTorch: convolutions, gated delta rules, state spaces. Every rank computes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, Mixer, ShortConvolution, StateSpace
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.modules import Linear, WeightMatrix
from trtserve.executor.torch.operations import Operations
from trtserve.executor.torch.weights import EngineWeights

LayerCache: TypeAlias = Tensor | list[Tensor] | tuple[Tensor, list[Tensor]]
"""Of a layer: its keys and values, the tables of its states [rows, …], or both."""


def keys_of(cache: LayerCache) -> Tensor | None:
    """Return a layer's keys and values, or None where it has none."""
    if isinstance(cache, tuple):
        return cache[0]
    return cache if isinstance(cache, Tensor) else None


def tables_of(cache: LayerCache) -> Sequence[Tensor]:
    """Return the tables of a layer's states."""
    tables: Sequence[Tensor] = cache[1] if isinstance(cache, tuple) else [] if isinstance(cache, Tensor) else cache
    return tables


_CHUNK = 64  # tokens whose states are computed at once
_EPSILON = 1e-6  # of the length of queries and keys


@dataclass(frozen=True, slots=True)
class StepStates:
    """Where the states of a step's sequences are."""

    rows: Tensor
    """i64[s], of the tables."""
    fresh: Tensor
    """bool[s], the sequences without past tokens, which start from an empty state."""
    spans: Sequence[tuple[int, int]]
    """The first token of each sequence, and the end; empty: each has one token."""

    def read(self, table: Tensor) -> Tensor:
        """Return the states [s, …] that the sequences start from."""
        fresh = self.fresh.view(-1, *[1] * (table.dim() - 1))
        return table[self.rows].masked_fill(fresh, 0)


class Unprojected:
    """In place of a layer's first product, where that is not one matrix: returns its inputs."""

    matrix: WeightMatrix | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        del adapters  # refused when an engine is built
        return x


class MixerLayer:
    """What a layer with a state has instead of attention."""

    def __init__(
        self,
        mixer: Mixer,
        weights: EngineWeights,
        name: str,
        layer: int,
        operations: Operations,
        epsilon: float,
    ) -> None:
        def linear(part: str) -> Linear:
            return Linear(weights, [f"{name}.{part}"], operations, layer=layer)

        def wide(part: str) -> Tensor:
            return weights.tensor(f"{name}.{part}").float()

        self._mixer = mixer
        self._inner, self._outer = linear("in_proj"), linear("out_proj")
        self._taps = wide("conv.weight")
        self._bias = wide("conv.bias") if f"{name}.conv.bias" in weights else None
        if isinstance(mixer, DeltaNet):
            self._gates = linear("gates")
        if not isinstance(mixer, ShortConvolution):
            self._decay, self._time_bias = -wide("decay").exp(), wide("time_bias")
        self._factors = None
        if isinstance(mixer, StateSpace):
            self._skip = wide("skip")
            if mixer.input_factors is not None:
                self._factors = torch.tensor(mixer.input_factors, device=self._skip.device)
        self._norm_weight = wide("norm.weight") if f"{name}.norm.weight" in weights else None
        self._epsilon = epsilon

    def __call__(self, x: Tensor, states: StepStates, tables: Sequence[Tensor]) -> Tensor:
        """Return what the layer adds to its input for normed hidden states [t, hidden]; writes the new states."""
        mixer = self._mixer
        joined = self._inner(x)
        if self._factors is not None:
            joined = joined * self._factors.to(joined.dtype)
        if isinstance(mixer, ShortConvolution):
            before, after, value = joined.chunk(3, dim=-1)
            result = after * self._convolved(before * value, states, tables[0]).to(x.dtype)
        elif isinstance(mixer, DeltaNet):
            result = self._delta_net(mixer, joined, self._gates(x), states, tables)
        else:
            result = self._state_space(mixer, joined, states, tables)
        made = self._outer(result.to(x.dtype))
        return made * mixer.factor if isinstance(mixer, StateSpace) and mixer.factor != 1.0 else made

    def _convolved(self, inputs: Tensor, states: StepStates, table: Tensor) -> Tensor:
        """Convolve the inputs [t, channels] of each sequence; f32."""
        past, taps = states.read(table), self._taps.shape[-1]
        wide = inputs.float()
        if not states.spans:
            seen = torch.cat([past[..., 1:], wide.unsqueeze(-1)], -1)
            table[states.rows] = seen
            total = (seen * self._taps).sum(-1)
            return total if self._bias is None else total + self._bias
        parts, last = [], []
        for (first, end), before in zip(states.spans, past, strict=True):
            seen = torch.cat([before, wide[first:end].T], -1)
            last.append(seen[:, -taps:])
            parts.append(
                functional.conv1d(seen[None, :, 1:], self._taps[:, None], self._bias, groups=len(self._taps))[0].T
            )
        table[states.rows] = torch.stack(last)
        return torch.cat(parts)

    def _delta_net(
        self, mixer: DeltaNet, joined: Tensor, gates: Tensor, states: StepStates, tables: Sequence[Tensor]
    ) -> Tensor:
        inputs, output_gates = joined.split([mixer.channels, mixer.values], dim=-1)
        betas, steps = gates.float().chunk(2, dim=-1)
        convolved = functional.silu(self._convolved(inputs, states, tables[0]))
        parts = convolved.split([mixer.keys, mixer.keys, mixer.values], dim=-1)
        query, key = (part.unflatten(-1, (mixer.key_heads, -1)) for part in parts[:2])
        repeats = mixer.value_heads // mixer.key_heads
        query, key = (
            (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPSILON)).repeat_interleave(repeats, dim=1)
            for part in (query, key)
        )
        value = parts[2].unflatten(-1, (mixer.value_heads, -1))
        decays = self._decay * functional.softplus(steps + self._time_bias)
        operands = _Operands(query * mixer.key**-0.5, key, value, decays, betas.sigmoid())
        outputs = _recurrent(operands, states, tables[1])
        return self._normed(outputs).flatten(1) * functional.silu(output_gates.float())

    def _state_space(self, mixer: StateSpace, joined: Tensor, states: StepStates, tables: Sequence[Tensor]) -> Tensor:
        gates, inputs, steps = joined.split([mixer.inner, mixer.channels, mixer.heads], dim=-1)
        shared = mixer.groups * mixer.state
        convolved = functional.silu(self._convolved(inputs, states, tables[0]))
        x, b, c = convolved.split([mixer.inner, shared, shared], dim=-1)
        x = x.unflatten(-1, (mixer.heads, -1))
        b, c = (
            part.unflatten(-1, (mixer.groups, -1)).repeat_interleave(mixer.heads // mixer.groups, dim=1)
            for part in (b, c)
        )
        times = functional.softplus(steps.float() + self._time_bias)
        if mixer.time_limit is not None:
            times = times.clamp(*mixer.time_limit)
        operands = _Operands(c, b, x * times.unsqueeze(-1), self._decay * times)
        outputs = _recurrent(operands, states, tables[1])
        result = (outputs + self._skip.unsqueeze(-1) * x).flatten(1)
        gate = functional.silu(gates.float())
        if not mixer.norm_groups:
            return result * gate
        if mixer.norm_first:
            return self._normed(result.unflatten(-1, (mixer.norm_groups, -1))).flatten(1) * gate
        return self._normed((result * gate).unflatten(-1, (mixer.norm_groups, -1))).flatten(1)

    def _normed(self, states: Tensor) -> Tensor:
        """Norm [t, parts, n]; there is a weight for all parts, or one for each."""
        assert self._norm_weight is not None
        scaled = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self._epsilon)
        return scaled * self._norm_weight.view(-1, states.shape[-1])


@dataclass(frozen=True, slots=True)
class _Operands:
    """What the states of heads are read and written with: [t, heads, …] in float32.

    A head's state S [value, key] becomes exp(`decays`) S + v kᵀ, or with `betas` v is replaced by β (v − S k), where S
    has decayed already. The output is S q.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decays: Tensor
    betas: Tensor | None = None

    def part(self, first: int, end: int) -> _Operands:
        """Return those of tokens first … end - 1."""
        betas = None if self.betas is None else self.betas[first:end]
        return _Operands(
            self.query[first:end], self.key[first:end], self.value[first:end], self.decays[first:end], betas
        )


def _recurrent(operands: _Operands, states: StepStates, table: Tensor) -> Tensor:
    """Return the outputs [t, heads, value] and write the new states."""
    past = states.read(table)
    if not states.spans:
        outputs, table[states.rows] = _one_token(operands, past)
        return outputs
    parts, last = [], []
    for (first, end), before in zip(states.spans, past, strict=True):
        state = before
        for begin in range(first, end, _CHUNK):
            output, state = _chunk(operands.part(begin, min(begin + _CHUNK, end)), state)
            parts.append(output)
        last.append(state)
    table[states.rows] = torch.stack(last)
    return torch.cat(parts)


def _one_token(operands: _Operands, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and new states [s, heads, value, key] after one token of each sequence."""
    states = states * operands.decays.exp()[..., None, None]
    value = operands.value
    if operands.betas is not None:
        value = operands.betas.unsqueeze(-1) * (value - torch.einsum("shvk,shk->shv", states, operands.key))
    states = states + value.unsqueeze(-1) * operands.key.unsqueeze(-2)
    return torch.einsum("shvk,shk->shv", states, operands.query), states


def _chunk(operands: _Operands, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [c, heads, value] and the new state [heads, value, key] after the tokens of one sequence.

    All tokens are computed at once with matrix products (Yang et al. 2024, arXiv 2412.06464, section 3.3).
    """
    query, key, value = (part.transpose(0, 1) for part in (operands.query, operands.key, operands.value))
    sums = operands.decays.T.cumsum(-1)  # [heads, c]
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(
        torch.ones(len(operands.decays), len(operands.decays), dtype=torch.bool, device=sums.device).triu(1), -torch.inf
    )
    shares, since = between.exp(), sums.exp().unsqueeze(-1)
    if operands.betas is not None:
        betas = operands.betas.T.unsqueeze(-1)
        wanted = betas * (value - since * (key @ state.mT))
        mixed = betas * (key @ key.mT) * shares
        value = torch.linalg.solve_triangular(mixed, wanted, upper=False, unitriangular=True)
    output = since * (query @ state.mT) + ((query @ key.mT) * shares) @ value
    left = (sums[:, -1:] - sums).exp().unsqueeze(-1)
    return output.transpose(0, 1), since[:, -1:] * state + value.mT @ (key * left)
