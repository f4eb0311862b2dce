"""The tensors of one batch row, each read by its name, and which of them nobody has read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[Any]]


class Row:
    """One batch row; it remembers what was read, so that what asks for something and was not read can be refused."""

    def __init__(self, tensors: Inputs) -> None:
        self._tensors = tensors
        self._read: set[str] = set()

    def array(self, name: str) -> NDArray[Any] | None:
        """The tensor; None when it is absent or empty."""
        self._read.add(name)
        value = self._tensors.get(name)
        return None if value is None or value.size == 0 else value

    def scalar(self, name: str, default: Any = None) -> Any:
        """The only element; ValueError when there are others."""
        self._read.add(name)
        value = self._tensors.get(name)
        if value is None:
            return default
        if value.size != 1:
            raise ValueError(f"Expected a scalar tensor for tensor {name}, got {value.size} values.")
        return value.reshape(()).item()

    def required(self, name: str) -> Any:
        """The only element; ValueError when the tensor is absent."""
        value = self.scalar(name)
        if value is None:
            raise ValueError(f"{name} is required.")
        return value

    def either(self, names: Sequence[str]) -> Any:
        """The value under any of the names that releases gave one setting; ValueError when two differ."""
        values = {name: value for name in names if (value := self.scalar(name)) is not None}
        if len(set(values.values())) > 1:
            told = " and ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"Two names of one setting were given with different values: {told}.")
        return next(iter(values.values()), None)

    def integers(self, name: str) -> list[int]:
        """All elements; [] when the tensor is absent."""
        value = self.array(name)
        return [] if value is None else list(value.reshape(-1).tolist())

    def text(self, name: str) -> str | None:
        """The first element; None when it is absent or "". ValueError when it is no UTF-8."""
        value = self.array(name)
        if value is None:
            return None
        try:
            return value.reshape(-1)[0].decode("utf-8") or None
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}.") from error

    def words(self, name: str) -> list[list[int]] | None:
        """Words [2, n] (ids in a row; running ends, padded with -1) as lists of ids; None when there is no word."""
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

    def asks(self, name: str) -> bool:
        """Whether the tensor has anything but zeros, False and "", which clients send to ask for nothing."""
        value = self._tensors.get(name)
        return value is not None and bool(np.any(value))

    def unread(self) -> list[str]:
        """Names of the tensors that ask for something and that nobody read."""
        return [name for name in self._tensors if name not in self._read and self.asks(name)]


def rows_of(inputs: Inputs, batch: int) -> list[Row]:
    """The rows of a batch; ValueError names a tensor whose first dimension is another."""
    for name, value in inputs.items():
        if value.ndim == 0 or value.shape[0] != batch:
            raise ValueError(
                f"{name} has shape {list(value.shape)}; its first dimension must be the batch size {batch}."
            )
    return [Row({name: np.asarray(value[index]) for name, value in inputs.items()}) for index in range(batch)]
