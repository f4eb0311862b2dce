"""The little of PyTorch that tensors need on their way to TensorRT-LLM and back: a type of its own around NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

int16 = np.dtype(np.int16)
bfloat16 = "bfloat16"


class Tensor:
    """An array that is no NumPy array: TensorRT-LLM takes nothing else."""

    def __init__(self, array: NDArray[Any], dtype: Any = None) -> None:
        self._array = array
        self.dtype = array.dtype if dtype is None else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self._array.shape

    def detach(self) -> Tensor:
        """The same: nothing here has a gradient."""
        return self

    def cpu(self) -> Tensor:
        """The same: everything is there."""
        return self

    def numpy(self) -> NDArray[Any]:
        """The array; a bfloat16 has none."""
        if self.dtype == bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array


def from_numpy(array: NDArray[Any]) -> Tensor:
    """A tensor on the memory of `array`."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected np.ndarray (got {type(array).__name__})")
    return Tensor(array)
