"""Rotary position embedding in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from openvino import opset13 as ops

from trtserve.errors import UnsupportedModelError
from trtserve.executor.openvino.graph_operations import integers


class GraphRotation:
    """Rotates pairs of numbers in each head by position × frequency; layers with the same rotation share one.

    frequencies: inverse frequencies, one per pair. If they cover less than `head`, only the first numbers are rotated.
    interleaved: pairs are neighbours (GPT-J), not the two halves of the rotated numbers (GPT-NeoX).
    scale: factor of the result.
    longer: other frequencies, and a boolean node, broadcast to [b, l, pairs], that selects them.
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
            raise UnsupportedModelError(
                f"The rotary embedding covers {self._size} numbers of a head, which has {head}."
            )
        self._head = head
        self._interleaved = interleaved
        positions = ops.convert(ops.unsqueeze(position_ids, integers(1)), "f32")
        angles = _angles(positions, frequencies)
        if longer is not None:
            angles = ops.select(longer[1], _angles(positions, longer[0]), angles)
        self._cosines, self._sines = (
            table if scale == 1.0 else ops.multiply(table, ops.constant(np.float32(scale)))
            for table in self._tables(angles)
        )

    def _tables(self, angles: Any) -> tuple[Any, Any]:
        """Return cosines and sines of the positions: two f32[b, 1, l, rotated numbers]."""
        if self._interleaved:
            repeated = ops.reshape(
                ops.concat([ops.unsqueeze(angles, integers(-1))] * 2, -1), integers(0, 0, self._size), True
            )
        else:
            repeated = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(repeated), integers(1)), ops.unsqueeze(ops.sin(repeated), integers(1))

    def rotate(self, states: Any) -> Any:
        """Return the rotated `states` [b, heads, l, head]."""
        if self._size == self._head:
            return self._rotate_all(states)
        first = ops.slice(states, integers(0), integers(self._size), integers(1), integers(3))
        rest = ops.slice(states, integers(self._size), integers(self._head), integers(1), integers(3))
        return ops.concat([self._rotate_all(first), rest], -1).output(0)

    def _rotate_all(self, states: Any) -> Any:
        turned = self._swap_neighbours(states) if self._interleaved else self._swap_halves(states)
        return ops.add(ops.multiply(states, self._cosines), ops.multiply(turned, self._sines)).output(0)

    def _swap_halves(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are the two halves of the rotated numbers (GPT-NeoX, Hugging Face's Llama).

        The axis of the concatenation must be written as -1: OpenVINO recognises (and fuses) only that form.
        """
        half = self._size // 2
        first = ops.slice(states, integers(0), integers(half), integers(1), integers(3))
        second = ops.slice(states, integers(half), integers(2 * half), integers(1), integers(3))
        return ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], -1)

    def _swap_neighbours(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are neighbours (GPT-J)."""
        pairs = ops.reshape(states, integers(0, 0, 0, self._size // 2, 2), special_zero=True)
        first = ops.slice(pairs, integers(0), integers(1), integers(1), integers(4))
        second = ops.slice(pairs, integers(1), integers(2), integers(1), integers(4))
        turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], 4)
        return ops.reshape(turned, integers(0, 0, 0, self._size), special_zero=True)


def _angles(positions: Any, frequencies: Sequence[float]) -> Any:
    """Return positions f32[b, 1, l] times each frequency: [b, l, pairs]."""
    columns = ops.constant(np.asarray(frequencies, dtype=np.float32).reshape(1, -1, 1))
    return ops.transpose(ops.matmul(columns, positions, False, False), integers(0, 2, 1))
