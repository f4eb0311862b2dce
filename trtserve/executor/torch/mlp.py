"""The MLP of a layer: plain, gated, or a mixture of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation, Decoder, Experts
from trtserve.executor.torch.modules import Adapters, Linear, Norm, load_floats
from trtserve.executor.torch.operations import Operations, router_weights
from trtserve.executor.torch.plain_operations import activate
from trtserve.executor.torch.ranks import RankGroup
from trtserve.executor.torch.weights import ShardWeights


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


def make_mlp(decoder: Decoder, weights: ShardWeights, layer: int, operations: Operations, group: RankGroup) -> Mlp:
    """Return the MLP of the layer with this number."""
    if decoder.experts is not None:
        return _Experts(decoder.experts, decoder.activation, weights, layer, operations, group)
    if decoder.mlp == "plain":
        return _Plain(decoder.activation, weights, layer, operations, group)
    return _Gated(decoder, weights, layer, operations, group)


class _Plain(Mlp):
    def __init__(
        self, activation: Activation, weights: ShardWeights, layer: int, operations: Operations, group: RankGroup
    ) -> None:
        name = f"transformer.layers.{layer}.mlp"
        self._activation = activation
        self._fc = Linear(weights, [f"{name}.fc"], operations, layer=layer)
        self._proj = Linear(weights, [f"{name}.proj"], operations, layer=layer, group=group)

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        return self._proj(activate(self._fc(x, adapters), self._activation), adapters)


class _Gated(Mlp):
    """Both halves come from one product: of two matrices, or of one that holds the factor first ("fused")."""

    def __init__(
        self, decoder: Decoder, weights: ShardWeights, layer: int, operations: Operations, group: RankGroup
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
        """See `Mlp.after_norm`."""
        states, total = norm.then(
            self._joined, x, residual, adapters, self._activation, factor_first=self._factor_first
        )
        return self._proj(states, adapters), total


class _Experts(Mlp):
    def __init__(
        self,
        experts: Experts,
        activation: Activation,
        weights: ShardWeights,
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
        self._outer = load_floats(weights, f"{name}.fc.weight")
        self._inner = load_floats(weights, f"{name}.proj.weight")
        self._first = self._first_expert(weights.shard(f"{name}.proj.weight").pieces[0].first_row)
        if experts.shared:
            self._shared = Linear(weights, [f"{name}.shared_expert.fc"], operations)
            self._shared_proj = Linear(weights, [f"{name}.shared_expert.proj"], operations)
            self._shared_gate = Linear(weights, [f"{name}.shared_expert_gate"], operations)

    def _first_expert(self, row: int) -> int:
        """Return the number of the first expert on this rank, which begins at `row` of all experts' rows."""
        return row // int(self._inner.shape[1])

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        del adapters  # LoRA's modules are those of decoders without experts
        chosen, shares = router_weights(functional.linear(x.float(), self._router), self._experts)
        if self._first or len(self._outer) < self._experts.count:  # experts below the first belong to another rank too
            chosen = (chosen - self._first).where(chosen >= self._first, self._experts.count)
        output = self._operations.expert_mlp(x, self._outer, self._inner, chosen, shares, self._activation)
        if self._experts.shared:
            states = self._operations.gated(self._shared(x), self._activation, factor_first=True)
            output = output + self._shared_proj(states) * self._shared_gate(x).sigmoid()
        return self._group.all_reduce(output)
