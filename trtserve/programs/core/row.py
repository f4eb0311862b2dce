"""The input tensors of one batch row, with typed access by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[Any]]


class Row:
    """One batch row; it remembers which tensors were read, so that unsupported ones can be refused."""

    def __init__(self, tensors: Inputs) -> None:
        self._tensors = tensors
        self._read: set[str] = set()

    def array(self, name: str) -> NDArray[Any] | None:
        """Return the tensor, or None when it is absent or empty."""
        self._read.add(name)
        value = self._tensors.get(name)
        return None if value is None or value.size == 0 else value

    def scalar(self, name: str, default: Any = None) -> Any:
        """Return the only element, or `default` when the tensor is absent. Raises ValueError for several elements."""
        self._read.add(name)
        value = self._tensors.get(name)
        if value is None:
            return default
        if value.size != 1:
            raise ValueError(f"Expected a scalar tensor for tensor {name}, got {value.size} values.")
        return value.reshape(()).item()

    def required(self, name: str) -> Any:
        """Return the only element. Raises ValueError when the tensor is absent."""
        value = self.scalar(name)
        if value is None:
            raise ValueError(f"{name} is required.")
        return value

    def either(self, names: Sequence[str]) -> Any:
        """Return the value under any of `names`, which releases used for one setting.

        Raises ValueError when two differ.
        """
        values = {name: value for name in names if (value := self.scalar(name)) is not None}
        if len(set(values.values())) > 1:
            given = " and ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"Two names of one setting were given with different values: {given}.")
        return next(iter(values.values()), None)

    def integers(self, name: str) -> list[int]:
        """Return all elements, or [] when the tensor is absent."""
        value = self.array(name)
        return [] if value is None else list(value.reshape(-1).tolist())

    def text(self, name: str) -> str | None:
        """Return the first element, or None when it is absent or "". Raises ValueError when it is not UTF-8."""
        value = self.array(name)
        if value is None:
            return None
        try:
            return value.reshape(-1)[0].decode("utf-8") or None
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}.") from error

    def words(self, name: str) -> list[list[int]] | None:
        """Read a word list [2, n]: all ids, and the end offset of each word, padded with -1.

        Returns None when there are no words.
        """
        value = self.array(name)
        if value is None:
            return None
        if value.ndim != 2 or value.shape[0] != 2:
            raise ValueError(f"{name} has shape [batch, {', '.join(map(str, value.shape))}]; expected [batch, 2, n].")
        ids, ends = value.tolist()
        used = ends[: ends.index(-1)] if -1 in ends else ends
        starts = [0, *used[:-1]]
        padded = any(end != -1 for end in ends[len(used) :])
        rising = all(start < end for start, end in zip(starts, used, strict=False))
        if padded or not rising or (used and used[-1] > len(ids)):
            raise ValueError(
                f"{name} has offsets {ends}; they must rise, end within the {len(ids)} ids, and be padded with -1."
            )
        return [ids[start:end] for start, end in zip(starts, used, strict=False)] or None

    def is_set(self, name: str) -> bool:
        """Return whether the tensor has a value other than 0, False and "", which clients send as neutral values."""
        value = self._tensors.get(name)
        return value is not None and bool(np.any(value))

    def unread(self) -> list[str]:
        """Return the names of tensors with a value that is not neutral and that were not read."""
        return [name for name in self._tensors if name not in self._read and self.is_set(name)]


def rows_of(inputs: Inputs, batch: int) -> list[Row]:
    """Split a batch into rows; ValueError names a tensor whose first dimension is not `batch`."""
    for name, value in inputs.items():
        if value.ndim == 0 or value.shape[0] != batch:
            raise ValueError(
                f"{name} has shape {list(value.shape)}; its first dimension must be the batch size {batch}."
            )
    return [Row({name: np.asarray(value[index]) for name, value in inputs.items()}) for index in range(batch)]
