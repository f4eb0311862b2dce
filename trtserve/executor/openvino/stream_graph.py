"""Several states of each token in OpenVINO's graph: f32[b, l, n, hidden]; see `Streams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from openvino import opset13 as ops

from trtserve.executor.openvino.graph_parts import add, cut, integers

if TYPE_CHECKING:
    from trtserve.executor.openvino.graph import GraphBuilder

_LEAST_SQUARE = 1e-5


def enter_streams(builder: GraphBuilder, hidden: Any, count: int) -> Any:
    """Return the states that are made of an embedding [b, l, hidden], all as large as it."""
    made = [builder.linear(hidden, f"transformer.stream_entry.{n}", packing=None) for n in range(1, count)]
    return ops.concat([ops.unsqueeze(each, integers(2)) for each in [hidden, *_as_large(hidden, made)]], 2).output(0)


def leave_streams(builder: GraphBuilder, states: Any, count: int) -> Any:
    """Return the mean [b, l, hidden] of what is made of the states, all as large as the first one."""
    first, *others = (stream_of(states, n) for n in range(count))
    made = [
        builder.linear(each, f"transformer.stream_exit.{n}", packing=None) for n, each in enumerate(others, start=1)
    ]
    total = first
    for each in _as_large(first, made):
        total = add(total, each)
    return ops.multiply(total, ops.constant(np.float32(1 / count))).output(0)


def stream_of(states: Any, number: int) -> Any:
    """Return one of the states: [b, l, hidden]."""
    return ops.gather(states, ops.constant(np.int64(number)), ops.constant(np.int64(2))).output(0)


def predicted(builder: GraphBuilder, states: Any, name: str, count: int, active: int) -> Any:
    """Return the states, to each of which a mixture of all is added."""
    router = _routed(builder, stream_of(states, active), name)
    mixture = builder.linear(router, f"{name}.streams.prediction", packing=None)
    mixture = ops.reshape(mixture, integers(0, 0, count, count), special_zero=True)
    return add(states, ops.matmul(mixture, states, False, False))


def corrected(builder: GraphBuilder, predictions: Any, made: Any, name: str, active: int) -> Any:
    """Return the states after a layer, which made `made` of the active one."""
    factors = builder.linear(_routed(builder, made, name), f"{name}.streams.correction", packing=None)
    factors = ops.unsqueeze(ops.add(factors, ops.constant(np.float32(1))), integers(3))
    missing = ops.unsqueeze(ops.subtract(made, stream_of(predictions, active)), integers(2))
    return add(predictions, ops.multiply(factors, missing))


def changed_but_first(states: Any, change: Any, count: int) -> Any:
    """Return the states; `change` [b, l, hidden] is added to all but the first."""
    others = ops.constant(np.array([0] + [1] * (count - 1), np.float32).reshape(count, 1))
    return add(states, ops.multiply(ops.unsqueeze(change, integers(2)), others))


def beside_attention(builder: GraphBuilder, normed: Any, name: str) -> Any:
    """Return attention's input and the product of low rank that stands beside it."""
    low = builder.linear(normed, f"{name}.beside.left", packing=builder.packing)
    made = builder.linear(low, f"{name}.beside.right", packing=builder.packing)
    return add(normed, builder.normed(made, f"{name}.post_beside_layernorm"))


def joined(predictions: Any, beside: Any, own: Any, mark: str) -> tuple[Any, Any, Any]:
    """Return the three again as parts of one operation that `mark` names."""
    count, hidden = (int(predictions.get_partial_shape()[axis].get_length()) for axis in (2, 3))
    flat = ops.reshape(predictions, integers(0, 0, count * hidden), special_zero=True)
    whole = ops.concat([flat, beside, own], -1).output(0)
    whole.get_node().set_friendly_name(mark)
    size = int(own.get_partial_shape()[-1].get_length())
    flat, beside, own = cut(whole, count * hidden, hidden, size)
    return ops.reshape(flat, integers(0, 0, count, hidden), special_zero=True).output(0), beside, own


def far_above(gate: Any, deviations: float) -> Any:
    """Return by how much each number is larger than the mean and so many standard deviations, at least 0."""
    mean = ops.reduce_mean(gate, integers(-1), keep_dims=True)
    centred = ops.subtract(gate, mean)
    square = ops.reduce_mean(ops.multiply(centred, centred), integers(-1), keep_dims=True)
    least = ops.multiply(ops.sqrt(square), ops.constant(np.float32(deviations)))
    return ops.relu(ops.subtract(centred, least)).output(0)


def _routed(builder: GraphBuilder, hidden: Any, name: str) -> Any:
    normed = ops.multiply(
        builder.normed(hidden, f"{name}.streams_layernorm"), ops.constant(np.float32(1 / builder.sizes.hidden))
    )
    return ops.tanh(builder.linear(normed.output(0), f"{name}.streams.router", packing=None)).output(0)


def _as_large(like: Any, made: list[Any]) -> list[Any]:
    """Return `made` with the root mean square of `like`."""
    size = ops.sqrt(_square(like))
    roots = [ops.sqrt(ops.maximum(_square(each), ops.constant(np.float32(_LEAST_SQUARE)))) for each in made]
    return [ops.divide(ops.multiply(each, size), root).output(0) for each, root in zip(made, roots, strict=True)]


def _square(states: Any) -> Any:
    return ops.reduce_mean(ops.multiply(states, states), integers(-1), keep_dims=True)
