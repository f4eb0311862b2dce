"""Modules of the decoder with the weights of a rank: norms, linear layers, float and FP8 matrices, MLPs, adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation, Decoder, Experts
from trtserve.checkpoint.architectures.base import Norm as NormKind
from trtserve.checkpoint.quantized import FP8_BLOCK as BLOCK
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.operations import ExpertWeights, Matrix, Operations, RotationTables, Rows
from trtserve.executor.torch.packed import FP8, Fp8Codes, PackedWeight, join_packed, spread
from trtserve.executor.torch.plain_operations import activate, rotate, xielu
from trtserve.executor.torch.rank_group import RankGroup
from trtserve.executor.torch.weights import EngineWeights


class Embedding:
    """Rows [n, hidden] for token ids or positions; ranks may share its rows or its columns."""

    def __init__(self, weights: EngineWeights, name: str, group: RankGroup) -> None:
        self.weight = weights.tensor(f"{name}.weight")
        self._split = weights.split(f"{name}.weight")
        self._group = group

    def __call__(self, ids: Tensor) -> Tensor:
        if self._split == "vocab" and self._group.tp_size > 1:
            local = ids - self._group.tp_rank * len(self.weight)
            own = (local >= 0) & (local < len(self.weight))
            found = functional.embedding(local.where(own, 0), self.weight)
            return self._group.all_reduce(found.where(own.unsqueeze(1), 0))
        found = functional.embedding(ids, self.weight)
        return self._group.all_gather(found) if self._split == "row" else found


class Projection(Protocol):
    """What makes outputs [t, out] of hidden states; `matrix` if that is one product."""

    @property
    def matrix(self) -> WeightMatrix | None:
        """The matrix of the product."""

    @property
    def bias(self) -> Tensor | None:
        """What is added to the product."""

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        """Return the outputs of the tokens `x` [t, in]."""


class Norm:
    """A norm over hidden states."""

    def __init__(
        self, weights: EngineWeights, name: str, kind: NormKind, epsilon: float, operations: Operations
    ) -> None:
        self._weight = weights.tensor(f"{name}.weight")
        self._is_rms = kind == "rms"
        self._bias = weights.tensor(f"{name}.bias") if f"{name}.bias" in weights else None
        self._epsilon = epsilon
        self._operations = operations

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_rms:
            return self._operations.rms_norm(x, self._weight, self._epsilon)
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and this sum; both may be overwritten."""
        if residual is None:
            return self(x), x
        if self._is_rms:
            return self._operations.add_rms_norm(x, residual, self._weight, self._epsilon)
        total = x + residual
        return self(total), total

    def then(
        self,
        linear: Projection,
        x: Tensor,
        residual: Tensor | None,
        adapters: Adapters | None,
        activation: Activation | None = None,
        *,
        factor_first: bool = False,
        rounding: Fp8Codes | None = None,
    ) -> tuple[Rows, Tensor]:
        """Return linear(norm(x + residual)), `gated` if there is an activation, and the sum.

        `rounding`: see `Operations.norm_linear`.
        """
        matrix = linear.matrix
        if self._is_rms and adapters is None and type(matrix) is WeightMatrix:
            return self._operations.norm_linear(
                x,
                residual,
                self._weight,
                self._epsilon,
                matrix.weight,
                linear.bias,
                activation,
                factor_first=factor_first,
                rounding=rounding,
            )
        normed, total = self.add(x, residual)
        product = linear(normed, adapters)
        if activation is not None:
            product = self._operations.gated(product, activation, factor_first=factor_first)
        return product, total


@dataclass(frozen=True, kw_only=True)
class JoinedNorms:
    """Norms of queries and keys that no kernel has: over all heads, of layer kind, or with a weight for each head."""

    query: Tensor
    """[D], or [H, D] for the heads of this rank."""
    key: Tensor
    heads: tuple[int, int]
    """Query and key/value heads of this rank."""
    decoder: Decoder
    epsilon: float
    group: RankGroup

    def __call__(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Return qkv [t, (H + 2 · KV) · D] with normed queries and keys."""
        del positions
        queries, keys = self.heads
        query, key, value = qkv.unflatten(1, (queries + 2 * keys, -1)).split([queries, keys, keys], 1)
        parts = [self._normed(query, self.query), self._normed(key, self.key), value]
        return torch.cat(parts, 1).flatten(1)

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        wide = states.float()
        if self.decoder.norm == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        mean = wide.square().mean(-1, keepdim=True)
        if self.decoder.qk_norm == "all":
            # Ranks that share a key/value head count it equally often, so the mean stays that of all heads.
            mean = self.group.all_reduce(mean.mean(1, keepdim=True)) / self.group.tp_size
        return (wide * torch.rsqrt(mean + self.epsilon) * weight.float()).to(states.dtype)


@dataclass(frozen=True)
class Rotated:
    """Rotates queries and keys before they are normed."""

    tables: RotationTables
    heads: int
    """Query and key heads of this rank together."""
    values: int
    """Value heads of this rank."""

    def __call__(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Return qkv [t, (H + 2 · KV) · D] with rotated queries and keys; positions i64[t]."""
        states, value = qkv.unflatten(1, (self.heads + self.values, -1)).split([self.heads, self.values], 1)
        return torch.cat([rotate(states, positions, self.tables), value], 1).flatten(1)


class Linear:
    """x [t, in] · weight [out, in]ᵀ + bias, and what LoRA adapters add.

    Several `names` are computed in one product, their outputs side by side. With a `group` each rank has some of the
    inputs, and the sum over the ranks is returned. A `matrix` that is loaded already takes the place of the weights.
    """

    def __init__(
        self,
        weights: EngineWeights,
        names: Sequence[str],
        operations: Operations,
        *,
        layer: int | None = None,
        group: RankGroup | None = None,
        matrix: WeightMatrix | None = None,
    ) -> None:
        biases = [weights.tensor(f"{name}.bias") for name in names if f"{name}.bias" in weights]
        self.matrix = matrix or load_matrix(weights, [f"{name}.weight" for name in names], operations)
        self.bias = biases[0] if len(biases) == 1 else torch.cat(biases) if biases else None
        # A bias that all ranks hold is added once to their sum; of another kind only the first rank's is not zero.
        self._bias_last = bool(biases) and group is not None and weights.split(f"{names[0]}.bias") == "replicated"
        self._operations = operations
        self._layer = layer
        self._group = group
        self._parts = []
        first = 0
        for name in names:
            outputs = slice(first, first + weights.shard(f"{name}.weight").shape[0])
            self._parts.append((name.removeprefix(f"transformer.layers.{layer}."), outputs))
            first = outputs.stop

    def __call__(self, x: Rows, adapters: Adapters | None = None) -> Tensor:
        add = None
        if adapters is not None and self._layer is not None and isinstance(x, Tensor):
            add = adapters.begin(x, self._layer, self._parts, self._operations)
        product = self.matrix(x, None if self._bias_last else self.bias)
        if add is not None:
            add(product)
        if self._group is not None:
            product = self._group.all_reduce(product)
        return product if self.bias is None or not self._bias_last else product + self.bias


class WeightMatrix:
    """A matrix of floats or of codes."""

    def __init__(self, weight: Matrix, operations: Operations) -> None:
        self.weight = weight
        self._operations = operations

    @property
    def rounding(self) -> Fp8Codes | None:
        """The matrix if its inputs may be rounded to FP8 before."""
        return self.weight if isinstance(self.weight, Fp8Codes) else None

    def __call__(self, x: Rows, bias: Tensor | None) -> Tensor:
        """Return x [t, in] · matrixᵀ + bias: [t, out]."""
        return self._operations.linear(x, self.weight, bias)


class ScaledMatrix(WeightMatrix):
    """A matrix whose inputs are multiplied by factors first (ModelOpt's AWQ)."""

    def __init__(self, weight: PackedWeight, input_scales: Tensor, operations: Operations) -> None:
        super().__init__(weight, operations)
        self._input_scales = input_scales

    def __call__(self, x: Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return super().__call__(x * self._input_scales.to(x.dtype), bias)


def load_matrix(weights: EngineWeights, names: Sequence[str], operations: Operations) -> WeightMatrix:
    """Return the matrices `names` as one, their outputs one after another.

    Codes stay codes where all have them, and the same factors of their inputs. FP8 matrices with different scales get
    the largest one: the codes of the others are rounded again.
    """
    packed = [each for each in map(weights.packed, names) if each is not None]
    if len(packed) == len(names) and len({_key(factors) for _, factors in packed}) == 1:
        weight, factors = join_packed([each for each, _ in packed]), packed[0][1]
        return WeightMatrix(weight, operations) if factors is None else ScaledMatrix(weight, factors, operations)
    scales = [weights.fp8_scales(name) for name in names]
    own = [pair for pair in scales if pair is not None]
    codes = [weights.tensor(name) for name in names] if len(own) == len(names) else []
    blocks = any(scale.ndim > 1 for scale, _ in own)
    if not codes or (blocks and any(len(part) % BLOCK for part in codes[:-1])):
        parts = [load_floats(weights, name) for name in names]
        return WeightMatrix(parts[0] if len(parts) == 1 else torch.cat(parts), operations)
    input_scales = [each for _, each in own if each is not None]
    if input_scales:
        shared = torch.stack([scale for scale, _ in own]).amax(0)
        codes = [
            part if torch.equal(scale, shared) else (part.float() * (scale / shared)).to(FP8)
            for part, (scale, _) in zip(codes, own, strict=True)
        ]
    else:
        shared = torch.cat([scale for scale, _ in own])
    # Bytes can be joined on every device.
    joined = codes[0] if len(codes) == 1 else torch.cat([part.view(torch.uint8) for part in codes]).view(FP8)
    return WeightMatrix(
        Fp8Codes(
            codes=joined,
            scale=shared,
            input_scale=torch.stack(input_scales).amax(0) if input_scales else None,
            dtype=weights.dtype,
        ),
        operations,
    )


def _key(factors: Tensor | None) -> bytes | None:
    return None if factors is None else factors.cpu().numpy().tobytes()


def load_floats(weights: EngineWeights, name: str) -> Tensor:
    """Return a tensor as floats; codes are widened."""
    packed = weights.packed(name)
    if packed is not None:
        weight, factors = packed
        return weight.floats(weights.dtype) * (1 if factors is None else factors.to(weights.dtype))
    tensor, scales = weights.tensor(name), weights.fp8_scales(name)
    if scales is None:
        return tensor
    # Experts [experts, out, in] have a scale each.
    factors = scales[0].view(-1, 1, 1) if tensor.ndim > 2 else spread(scales[0], tensor.shape)
    return (tensor.float() * factors).to(weights.dtype)


class Mlp(ABC):
    """[t, hidden] → [t, hidden], summed over the tensor-parallel ranks."""

    @abstractmethod
    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        """Return the outputs of the tokens `x`."""

    def after_norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of norm(x + residual), and this sum."""
        normed, total = norm.add(x, residual)
        return self(normed, adapters), total


def make_mlp(
    decoder: Decoder, weights: EngineWeights, layer: int, operations: Operations, group: RankGroup, epsilon: float
) -> Mlp:
    experts = decoder.experts_of(layer)
    if experts is not None:
        if experts.apart:
            return _ExpertsApart(experts, decoder, weights, layer, operations, group, epsilon)
        return _Experts(experts, decoder.activation, weights, layer, operations, group)
    if decoder.mlp == "plain" or (decoder.mlp == "experts" and not decoder.gated):
        return _Plain(decoder.activation, weights, layer, operations, group)
    if (threshold := decoder.gate_threshold(layer)) is not None:
        return _FarAbove(threshold, decoder, weights, layer, operations, group)
    scaled = decoder.gate_factor != 1.0 or decoder.mlp_factor != 1.0
    return (_ScaledGated if scaled else _Gated)(decoder, weights, layer, operations, group)


class _Plain(Mlp):
    def __init__(
        self, activation: Activation, weights: EngineWeights, layer: int, operations: Operations, group: RankGroup
    ) -> None:
        name = f"transformer.layers.{layer}.mlp"
        self._activation = activation
        self._numbers = weights.tensor(f"{name}.xielu") if activation == "xielu" else None
        self._fc = Linear(weights, [f"{name}.fc"], operations, layer=layer)
        self._proj = Linear(weights, [f"{name}.proj"], operations, layer=layer, group=group)

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        inner = self._fc(x, adapters)
        activated = activate(inner, self._activation) if self._numbers is None else xielu(inner, self._numbers)
        return self._proj(activated, adapters)


class _Gated(Mlp):
    """Both halves come from one product: of two matrices, or of one that holds the factor first ("fused")."""

    def __init__(
        self, decoder: Decoder, weights: EngineWeights, layer: int, operations: Operations, group: RankGroup
    ) -> None:
        name, self._factor_first = f"transformer.layers.{layer}.mlp", decoder.mlp == "fused"
        self._activation = decoder.activation
        self._operations = operations
        names = [f"{name}.fc"] if self._factor_first else [f"{name}.fc", f"{name}.gate"]
        self._joined = Linear(weights, names, operations, layer=layer)
        self._proj = Linear(weights, [f"{name}.proj"], operations, layer=layer, group=group)

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        joined = self._joined(x, adapters)
        return self._proj(self._operations.gated(joined, self._activation, factor_first=self._factor_first), adapters)

    def after_norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor]:
        states, total = norm.then(
            self._joined,
            x,
            residual,
            adapters,
            self._activation,
            factor_first=self._factor_first,
            rounding=self._proj.matrix.rounding,
        )
        return self._proj(states, adapters), total


class _ScaledGated(_Gated):
    """What is activated and what is returned are multiplied by factors."""

    def __init__(
        self, decoder: Decoder, weights: EngineWeights, layer: int, operations: Operations, group: RankGroup
    ) -> None:
        super().__init__(decoder, weights, layer, operations, group)
        self._factor, self._gate_factor = decoder.mlp_factor, decoder.gate_factor

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        first, second = self._joined(x, adapters).chunk(2, dim=-1)
        factor, gate = (first, second) if self._factor_first else (second, first)
        return self._proj(activate(gate * self._gate_factor, self._activation) * factor, adapters) * self._factor

    def after_norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor]:
        return Mlp.after_norm(self, norm, x, residual, adapters)


class _FarAbove(_Gated):
    """Of what is activated only that counts which is so many standard deviations above the mean of all ranks."""

    def __init__(
        self,
        threshold: float,
        decoder: Decoder,
        weights: EngineWeights,
        layer: int,
        operations: Operations,
        group: RankGroup,
    ) -> None:
        super().__init__(decoder, weights, layer, operations, group)
        self._threshold, self._group = threshold, group

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        gate, factor = self._joined(x, adapters).chunk(2, dim=-1)
        centred = gate.float() - self._mean(gate.float())
        least = self._threshold * self._mean(centred.square()).sqrt()
        states = activate(functional.relu(centred - least).to(gate.dtype), self._activation) * factor
        return self._proj(states, adapters)

    def _mean(self, values: Tensor) -> Tensor:
        return self._group.all_reduce(values.mean(-1, keepdim=True)) / self._group.tp_size

    def after_norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor]:
        return Mlp.after_norm(self, norm, x, residual, adapters)


class _Experts(Mlp):
    def __init__(
        self,
        experts: Experts,
        activation: Activation,
        weights: EngineWeights,
        layer: int,
        operations: Operations,
        group: RankGroup,
    ) -> None:
        name = f"transformer.layers.{layer}.mlp"
        self._experts = experts
        self._activation = activation
        self._operations = operations
        self._group = group
        self._router = weights.tensor(f"{name}.router.weight").float()
        self._router_bias, self._correction, self._scale = (
            weights.tensor(f"{name}.router.{part}").float() if f"{name}.router.{part}" in weights else None
            for part in ("bias", "correction", "scale")
        )
        held = weights.shard(f"{name}.proj.weight").pieces[0]
        outer = [load_floats(weights, f"{name}.fc.{kind}") for kind in _kinds(weights, f"{name}.fc")]
        inner = [load_floats(weights, f"{name}.proj.{kind}") for kind in _kinds(weights, f"{name}.proj")]
        if experts.interleaved:
            outer = [torch.cat([each[:, 1::2], each[:, 0::2]], 1) for each in outer]
        self._weights = ExpertWeights(
            outer=outer[0],
            inner=inner[0],
            outer_bias=outer[1].squeeze(-1) if len(outer) > 1 else None,
            # Ranks that share an expert add its bias once.
            inner_bias=inner[1].squeeze(-1) if len(inner) > 1 and not held.first_column else None,
            clamp=experts.clamp,
        )
        self._first = held.first_row // int(inner[0].shape[1])
        if experts.shared:
            self._shared = Linear(weights, [f"{name}.shared_expert.fc"], operations)
            self._shared_proj = Linear(weights, [f"{name}.shared_expert.proj"], operations)
            self._shared_gate = None
            if experts.shared_gate:
                self._shared_gate = Linear(weights, [f"{name}.shared_expert_gate"], operations)

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        del adapters  # LoRA's modules are those of decoders without experts
        output = self._routed(x, x)
        return self._group.all_reduce(output + self._shared_output(x) if self._experts.shared else output)

    def _routed(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return this rank's part of the experts' outputs; the router sees `seen`."""
        logits = functional.linear(seen.float(), self._router, self._router_bias)
        chosen, shares = self._operations.route(logits, self._correction, self._experts)
        if self._scale is not None:
            shares = shares * self._scale[chosen.long()]
        held = len(self._weights.outer)
        if self._first or held < self._experts.count:  # experts below the first belong to another rank too
            chosen = (chosen - self._first).where(chosen >= self._first, self._experts.count)
        if not self._experts.scaled_inputs:
            return self._operations.expert_mlp(x, self._weights, chosen, shares, self._activation)
        ones = torch.ones_like(shares[:, :1])
        outputs = [
            self._operations.expert_mlp(x * share.to(x.dtype), self._weights, one, ones, self._activation)
            for share, one in zip(shares.split(1, 1), chosen.split(1, 1), strict=True)
        ]
        return torch.stack(outputs).sum(0)

    def _shared_output(self, x: Tensor) -> Tensor:
        states = self._shared(x)
        if self._experts.gated:
            states = self._operations.gated(states, self._activation, factor_first=True)
        else:
            states = activate(states, self._activation)
        shared = self._shared_proj(states)
        return shared if self._shared_gate is None else shared * self._shared_gate(x).sigmoid()


class _ExpertsApart(_Experts):
    """Experts and a shared one that have norms of their own: see `Experts.apart`."""

    def __init__(
        self,
        experts: Experts,
        decoder: Decoder,
        weights: EngineWeights,
        layer: int,
        operations: Operations,
        group: RankGroup,
        epsilon: float,
    ) -> None:
        super().__init__(experts, decoder.activation, weights, layer, operations, group)
        names = "router_norm", "pre_experts_layernorm", "post_experts_layernorm", "post_shared_layernorm"
        self._seen, self._before, self._after, self._after_shared = (
            Norm(weights, f"transformer.layers.{layer}.mlp.{name}", decoder.norm, epsilon, operations) for name in names
        )

    def after_norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor]:
        del adapters
        normed, total = norm.add(x, residual)
        routed = self._routed(self._before(total), self._seen(total) * total.shape[-1] ** -0.5)
        shared = self._after_shared(self._group.all_reduce(self._shared_output(normed)))
        return shared + self._after(self._group.all_reduce(routed)), total


def _kinds(weights: EngineWeights, name: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{name}.{kind}" in weights]
