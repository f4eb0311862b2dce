"""Rotary position embedding as a part of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from openvino import opset13 as ops

from trtserve.errors import UnsupportedModelError
from trtserve.executor.graph_operations import integers


class Rotation:
    """Turns the pairs of numbers in each head by position × frequency; all layers that turn alike share one.

    `frequencies` are the inverse frequencies, one per pair; `interleaved` tells GPT-J's pairs of neighbours from
    GPT-NeoX's pairs over the two halves of a head.
    """

    def __init__(self, position_ids: Any, frequencies: Sequence[float], *, head: int, interleaved: bool) -> None:
        if 2 * len(frequencies) != head:
            raise UnsupportedModelError(
                f"Rotary embedding over {2 * len(frequencies)} of {head} numbers per head is not built; "
                "expected all of them."
            )
        self._head = head
        self._interleaved = interleaved
        self._cosines, self._sines = self._tables(position_ids, frequencies)

    def _tables(self, position_ids: Any, frequencies: Sequence[float]) -> tuple[Any, Any]:
        """Cosines and sines of the positions: two f32[b, 1, l, head]."""
        positions = ops.convert(ops.unsqueeze(position_ids, integers(1)), "f32")
        columns = ops.constant(np.asarray(frequencies, dtype=np.float32).reshape(1, -1, 1))
        angles = ops.transpose(ops.matmul(columns, positions, False, False), integers(0, 2, 1))
        if self._interleaved:
            repeated = ops.reshape(
                ops.concat([ops.unsqueeze(angles, integers(-1))] * 2, -1), integers(0, 0, self._head), True
            )
        else:
            repeated = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(repeated), integers(1)), ops.unsqueeze(ops.sin(repeated), integers(1))

    def turn(self, states: Any) -> Any:
        """The rotated `states` [b, heads, l, head]."""
        turned = self._turn_pairs(states) if self._interleaved else self._turn_halves(states)
        return ops.add(ops.multiply(states, self._cosines), ops.multiply(turned, self._sines)).output(0)

    def _turn_halves(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are the two halves of a head (GPT-NeoX, Hugging Face's Llama).

        The axis of the concatenation must be written as -1: OpenVINO recognises (and fuses) only that form.
        """
        half = self._head // 2
        first = ops.slice(states, integers(0), integers(half), integers(1), integers(3))
        second = ops.slice(states, integers(half), integers(2 * half), integers(1), integers(3))
        return ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], -1)

    def _turn_pairs(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are neighbours (GPT-J)."""
        pairs = ops.reshape(states, integers(0, 0, 0, self._head // 2, 2), special_zero=True)
        first = ops.slice(pairs, integers(0), integers(1), integers(1), integers(4))
        second = ops.slice(pairs, integers(1), integers(2), integers(1), integers(4))
        turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], 4)
        return ops.reshape(turned, integers(0, 0, 0, self._head), special_zero=True)
