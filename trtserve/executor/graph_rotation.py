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

    `frequencies` are the inverse frequencies, one per pair; with fewer than half of the `head` numbers, the first ones
    are turned and the rest stays. `interleaved` tells GPT-J's pairs of neighbours from GPT-NeoX's pairs over the two
    halves of what is turned; `scale` multiplies all of it. `longer` are other frequencies and a boolean node that
    tells, broadcast to [b, l, pairs], where they hold.
    """

    def __init__(
        self,
        position_ids: Any,
        frequencies: Sequence[float],
        *,
        head: int,
        interleaved: bool,
        scale: float = 1.0,
        longer: tuple[Sequence[float], Any] | None = None,
    ) -> None:
        self._size = 2 * len(frequencies)
        if self._size > head:
            raise UnsupportedModelError(f"The rotary embedding turns {self._size} numbers of a head, which has {head}.")
        self._head = head
        self._interleaved = interleaved
        positions = ops.convert(ops.unsqueeze(position_ids, integers(1)), "f32")
        angles = _angles(positions, frequencies)
        if longer is not None:
            angles = ops.select(longer[1], _angles(positions, longer[0]), angles)
        self._cosines, self._sines = (_scaled(table, scale) for table in self._tables(angles))

    def _tables(self, angles: Any) -> tuple[Any, Any]:
        """Cosines and sines of the positions: two f32[b, 1, l, numbers that are turned]."""
        if self._interleaved:
            repeated = ops.reshape(
                ops.concat([ops.unsqueeze(angles, integers(-1))] * 2, -1), integers(0, 0, self._size), True
            )
        else:
            repeated = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(repeated), integers(1)), ops.unsqueeze(ops.sin(repeated), integers(1))

    def turn(self, states: Any) -> Any:
        """The rotated `states` [b, heads, l, head]."""
        if self._size == self._head:
            return self._turn_all(states)
        first = ops.slice(states, integers(0), integers(self._size), integers(1), integers(3))
        rest = ops.slice(states, integers(self._size), integers(self._head), integers(1), integers(3))
        return ops.concat([self._turn_all(first), rest], -1).output(0)

    def _turn_all(self, states: Any) -> Any:
        turned = self._turn_pairs(states) if self._interleaved else self._turn_halves(states)
        return ops.add(ops.multiply(states, self._cosines), ops.multiply(turned, self._sines)).output(0)

    def _turn_halves(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are the two halves of what is turned (GPT-NeoX, Hugging Face's Llama).

        The axis of the concatenation must be written as -1: OpenVINO recognises (and fuses) only that form.
        """
        half = self._size // 2
        first = ops.slice(states, integers(0), integers(half), integers(1), integers(3))
        second = ops.slice(states, integers(half), integers(2 * half), integers(1), integers(3))
        return ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], -1)

    def _turn_pairs(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are neighbours (GPT-J)."""
        pairs = ops.reshape(states, integers(0, 0, 0, self._size // 2, 2), special_zero=True)
        first = ops.slice(pairs, integers(0), integers(1), integers(1), integers(4))
        second = ops.slice(pairs, integers(1), integers(2), integers(1), integers(4))
        turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], 4)
        return ops.reshape(turned, integers(0, 0, 0, self._size), special_zero=True)


def _angles(positions: Any, frequencies: Sequence[float]) -> Any:
    """Positions f32[b, 1, l] times each frequency: [b, l, pairs]."""
    columns = ops.constant(np.asarray(frequencies, dtype=np.float32).reshape(1, -1, 1))
    return ops.transpose(ops.matmul(columns, positions, False, False), integers(0, 2, 1))


def _scaled(table: Any, scale: float) -> Any:
    return table if scale == 1.0 else ops.multiply(table, ops.constant(np.float32(scale)))
