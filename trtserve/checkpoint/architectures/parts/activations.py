"""Activation functions by their names in Hugging Face configs."""

from __future__ import annotations

from trtserve.checkpoint.architectures.base import Activation
from trtserve.errors import UnsupportedModelError

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def require_activation(name: str, *kinds: Activation) -> Activation:
    """Return the activation function called `name`.

    Raises UnsupportedModelError unless it is one of `kinds` (default: any).

    A family whose checkpoint does not record the activation passes the one kind that it implies.
    """
    allowed = [word for word, kind in ACTIVATIONS.items() if not kinds or kind in kinds]
    if name not in allowed:
        raise UnsupportedModelError(f"Activation {name!r} is not supported; supported: {', '.join(allowed)}.")
    return ACTIVATIONS[name]
