"""The mixture-of-experts parts of a graph: the weight of each expert for a token, and the experts' matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from openvino import opset13 as ops

from trtserve.checkpoint.architectures.base import Experts
from trtserve.checkpoint.quantized import Int4Weight
from trtserve.executor.openvino.graph_operations import integers

Array = npt.NDArray[Any]


def token_weights(hidden: Any, router: Any, experts: Experts) -> Any:
    """Return the weights [b, l, experts] of the experts' outputs: the probability of each chosen expert, 0 for others.

    The probabilities are the softmax over all experts (transformers' MixtralTopKRouter and Qwen2MoeTopKRouter).
    Dividing those of the chosen experts by their sum equals a softmax over these (TensorRT-LLM's RENORMALIZE).
    """
    probabilities = ops.softmax(ops.matmul(hidden, router, False, True), -1)
    best = ops.topk(probabilities, ops.constant(np.int64(experts.chosen)), -1, "max", "value", index_element_type="i64")
    weights = best.output(0)
    if experts.renormalized:
        weights = ops.divide(weights, ops.reduce_sum(weights, integers(-1), keep_dims=True))
    none = ops.broadcast(ops.constant(np.float32(0)), ops.shape_of(probabilities))
    return ops.scatter_elements_update(none, best.output(1), weights, ops.constant(np.int64(-1))).output(0)


def rows_of_experts(weight: Array) -> Array:
    """[experts, out, in] → [experts · out, in]: one product gives the outputs of all experts."""
    return weight.reshape(-1, weight.shape[-1])


def columns_of_experts(weight: Array) -> Array:
    """[experts, out, in] → [out, experts, in]: a product with its rows sums over all experts."""
    return np.ascontiguousarray(weight.transpose(1, 0, 2))


def stacked_int4(weight: Int4Weight, experts: int, arranged: Callable[[Array], Array]) -> Int4Weight:
    """Arrange the experts' matrices [experts · out, in] like `arranged` does for floats; groups stay whole."""

    def rearrange(values: Array) -> Array:
        rows = arranged(values.reshape(experts, -1, values.shape[-1]))
        return rows.reshape(len(rows), -1)

    zeros = weight.zero_points
    return replace(
        weight,
        codes=rearrange(weight.codes),
        scales=rearrange(weight.scales),
        zero_points=None if zeros is None else rearrange(zeros),
    )
