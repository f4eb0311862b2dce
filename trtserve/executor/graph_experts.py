"""Experts as parts of a graph: how much each of them counts for a token, and their matrices side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from openvino import opset13 as ops

from trtserve.architectures.base import Experts
from trtserve.architectures.quantized import Int4Weight
from trtserve.executor.graph_operations import integers

Array = npt.NDArray[Any]


def token_weights(hidden: Any, router: Any, experts: Experts) -> Any:
    """Weights [b, l, experts] of the experts' outputs: the probability of each that a token takes, 0 of the others.

    The probabilities are the softmax over all experts (transformers' MixtralTopKRouter and Qwen2MoeTopKRouter).
    Dividing those of the chosen by their sum is the same as a softmax over the chosen (TensorRT-LLM's RENORMALIZE).
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
    """The matrices [experts · out, in] of experts as `arranged` puts those of floats; groups stay whole in both."""

    def turned(values: Array) -> Array:
        rows = arranged(values.reshape(experts, -1, values.shape[-1]))
        return rows.reshape(len(rows), -1)

    zeros = weight.zero_points
    return replace(
        weight,
        codes=turned(weight.codes),
        scales=turned(weight.scales),
        zero_points=None if zeros is None else turned(zeros),
    )
