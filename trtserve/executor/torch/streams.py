"""Several states of each token: [t, n, hidden]; see `Streams` (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Streams
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.torch.modules import Linear, Norm
from trtserve.executor.torch.operations import Operations
from trtserve.executor.torch.weights import EngineWeights

_LEAST_SQUARE = 1e-5


class StreamEnds:
    """Makes the states of an embedding [t, hidden], and one state of them after the last layer."""

    def __init__(self, streams: Streams, weights: EngineWeights, operations: Operations) -> None:
        numbers = range(1, streams.count)
        self._entries = [Linear(weights, [f"transformer.stream_entry.{n}"], operations) for n in numbers]
        self._exits = [Linear(weights, [f"transformer.stream_exit.{n}"], operations) for n in numbers]

    def enter(self, hidden: Tensor) -> Tensor:
        """Return [t, n, hidden]."""
        return torch.stack([hidden, *(_as_large(hidden, entry(hidden)) for entry in self._entries)], 1)

    def leave(self, states: Tensor) -> Tensor:
        """Return [t, hidden]."""
        first, *others = states.unbind(1)
        made = (_as_large(first, each(other.contiguous())) for each, other in zip(self._exits, others, strict=True))
        return torch.stack([first, *made]).mean(0)


class StreamLayer:
    """What one layer does with the states, apart from attention and MLP; every rank has all of it."""

    def __init__(
        self, streams: Streams, sizes: Sizes, weights: EngineWeights, number: int, operations: Operations
    ) -> None:
        name = f"transformer.layers.{number}"
        self._streams, self._hidden = streams, sizes.hidden
        self._router, self._prediction, self._correction = (
            weights.tensor(f"{name}.streams.{part}.weight") for part in ("router", "prediction", "correction")
        )
        self._scale = weights.tensor(f"{name}.streams.scale")
        self._norm, self._norm_beside = (
            Norm(weights, f"{name}.{part}_layernorm", "rms", sizes.epsilon, operations)
            for part in ("streams", "post_beside")
        )
        self._left = Linear(weights, [f"{name}.beside.left"], operations)
        self._right = Linear(weights, [f"{name}.beside.right"], operations)

    def active(self, states: Tensor) -> Tensor:
        """Return the state that the layer sees: [t, hidden]."""
        return states[:, self._streams.active].contiguous()

    def predict(self, states: Tensor) -> Tensor:
        """Return the states, to each of which a mixture of all is added."""
        mixture = functional.linear(self._routed(self.active(states)), self._prediction)
        return states + mixture.unflatten(1, (self._streams.count, self._streams.count)) @ states

    def beside(self, normed: Tensor) -> Tensor:
        """Return attention's input [t, hidden] and the product of low rank that stands beside it."""
        return normed + self._norm_beside(self._right(self._left(normed)))

    def correct(self, predictions: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after the layer, which made `made` of the active one, and what sees the layer's input."""
        factors = functional.linear(self._routed(made), self._correction) + 1
        states = predictions + factors.unsqueeze(-1) * (made - self.active(predictions)).unsqueeze(1)
        return states, self.active(states) * self._scale

    def _routed(self, hidden: Tensor) -> Tensor:
        router = functional.linear(self._norm(hidden) / self._hidden, self._router)
        return torch.tanh(router.float()).to(hidden.dtype)


def _as_large(like: Tensor, made: Tensor) -> Tensor:
    """Return `made` with the root mean square of `like`."""
    size, own = (each.float().square().mean(-1, keepdim=True) for each in (like, made))
    return (made * size.sqrt() / own.clamp(min=_LEAST_SQUARE).sqrt()).to(like.dtype)
