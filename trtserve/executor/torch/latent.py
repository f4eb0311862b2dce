"""Multi-head latent attention as attention with one key: the latent vector, which is also the value.

The matrices that make keys and values of the latent vector are applied to queries and results instead ("absorbed"), so
that the cache holds one vector per token and layer for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtserve.checkpoint.architectures.base import LatentAttention
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.modules import Linear, Norm, WeightMatrix
from trtserve.executor.torch.operations import Operations
from trtserve.executor.torch.rank_group import RankGroup
from trtserve.executor.torch.weights import EngineWeights


class LatentProjection:
    """[t, hidden] → [t, (H + 1) · (rotated + rank)]: queries and the key, with what is rotated first."""

    matrix: WeightMatrix | None = None  # no single product, so that no kernel joins it with the norm before it

    bias: Tensor | None = None

    def __init__(
        self, latent: LatentAttention, weights: EngineWeights, attention: str, layer: int, operations: Operations
    ) -> None:
        def linear(name: str) -> Linear:
            return Linear(weights, [f"{attention}.{name}"], operations, layer=layer)

        def norm(name: str) -> Norm:
            return Norm(weights, f"{attention}.{name}", "rms", latent.epsilon, operations)

        self._latent = latent
        self._lower = (linear("q_a"), norm("q_a_layernorm")) if f"{attention}.q_a.weight" in weights else None
        self._queries = linear("q_b")
        self._keys, self._norm = linear("kv_a"), norm("kv_a_layernorm")
        self._absorbed, _ = absorbed(latent, weights, attention)

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        del adapters  # refused when an engine is built
        latent = self._latent
        lower = x if self._lower is None else self._lower[1](self._lower[0](x))
        plain, rotated = (
            self._queries(lower)
            .view(len(x), -1, latent.plain + latent.rotated)
            .split([latent.plain, latent.rotated], dim=-1)
        )
        stored, turned = self._keys(x).split([latent.rank, latent.rotated], dim=-1)
        heads = plain.shape[1]
        made = x.new_empty((len(x), heads + 1, latent.rotated + latent.rank))
        made[:, :heads, : latent.rotated] = rotated
        made[:, :heads, latent.rotated :] = torch.einsum("thp,hpr->thr", plain, self._absorbed)
        made[:, heads, : latent.rotated] = turned
        made[:, heads, latent.rotated :] = self._norm(stored.contiguous())
        return made.flatten(1)


class LatentOutput:
    """What the heads attend to [t, H · rank] → [t, hidden]."""

    def __init__(
        self,
        latent: LatentAttention,
        weights: EngineWeights,
        attention: str,
        layer: int,
        operations: Operations,
        group: RankGroup,
    ) -> None:
        self._dense = Linear(weights, [f"{attention}.dense"], operations, layer=layer, group=group)
        _, self._values = absorbed(latent, weights, attention)

    def __call__(self, attended: Tensor, adapters: Adapters | None = None) -> Tensor:
        del adapters
        heads = attended.unflatten(-1, (len(self._values), -1))
        return self._dense(torch.einsum("thr,hvr->thv", heads, self._values).flatten(1))


def absorbed(latent: LatentAttention, weights: EngineWeights, attention: str) -> tuple[Tensor, Tensor]:
    """Return the matrices of keys [H, plain, rank] and of values [H, value, rank] of this rank's heads."""
    whole = weights.tensor(f"{attention}.kv_b.weight").view(-1, latent.plain + latent.value, latent.rank)
    return whole[:, : latent.plain], whole[:, latent.plain :]
