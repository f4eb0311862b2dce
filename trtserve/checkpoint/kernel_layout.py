"""The memory layout of 4-bit weights in TensorRT-LLM's mixed-precision GEMM kernels, in both directions.

A matrix goes through four steps, from signed codes [in, out] to bytes [in, out / 2]:

1. within every 32 input rows, reorder the rows as a tensor core's threads read them;
2. transpose, so that the codes of one output are contiguous;
3. except on Hopper: interleave 64 inputs of one output with the same 64 of the next three outputs;
4. make codes unsigned (+ 8), put the even ones of every 8 first, and pack two per byte, low nibble first.

Source: `preprocess_weights_for_mixed_gemm` of TensorRT-LLM (quantization/functional.py from 0.17, C++ before).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Inputs reordered together in step 1, and inputs per tile in step 3.
_ROWS, _TILE = 32, 64
_INTERLEAVED = 4
HOPPER = 90
EXPERTS_GPU_SM = 80
"""The matrices of experts have the order of Ampere on every GPU."""
_OLDEST = 75
# GPUs from this compute capability on use Ampere's layout again.
_LIKE_AMPERE = 120


def require_gpu_sm(gpu_sm: int) -> None:
    """Raise UnsupportedModelError for a compute capability (× 10) whose 4-bit layout is unknown.

    From 12.0 on it is Ampere's. 10.0 and 10.3 used Ampere's too, until their own kernels, which read codes in plain
    order, arrived with TensorRT-LLM's pull request 10190 (January 2026) in a release not yet known.
    """
    if not (_OLDEST <= gpu_sm <= HOPPER or gpu_sm >= _LIKE_AMPERE):
        raise UnsupportedModelError(
            f"The layout of 4-bit weights for compute capability {gpu_sm / 10:.1f} is unknown "
            f"(known: --gpu-sm {_OLDEST} … {HOPPER}, and from {_LIKE_AMPERE} on); for 10.0 and 10.3 "
            "it differs between releases.",
            hint="Convert on such a GPU with --converter upstream.",
        )


def _interleaves(gpu_sm: int) -> bool:
    """Return whether the GPU's kernels need step 3."""
    return gpu_sm < HOPPER or gpu_sm >= _LIKE_AMPERE


def to_kernel(codes: npt.NDArray[np.int8], gpu_sm: int) -> npt.NDArray[np.uint8]:
    """Convert signed codes −8 … 7 [in, out] to the kernels' bytes [in, out / 2]."""
    import numpy as np

    require_gpu_sm(gpu_sm)
    inputs, outputs = codes.shape
    ordered = codes.reshape(-1, _ROWS, outputs)[:, _row_order()].reshape(inputs, outputs)
    columns = np.ascontiguousarray(ordered.T)
    if _interleaves(gpu_sm):
        columns = columns.reshape(outputs // _INTERLEAVED, _INTERLEAVED, inputs // _TILE, _TILE).swapaxes(1, 2)
    unsigned = (columns + 8).astype(np.uint8).reshape(-1, 4, 2)
    even_first = np.ascontiguousarray(unsigned.swapaxes(1, 2)).reshape(-1, 2)
    packed: npt.NDArray[np.uint8] = even_first[:, 0] | (even_first[:, 1] << 4)
    return packed.reshape(inputs, outputs // 2)


def from_kernel(packed: npt.NDArray[np.uint8], gpu_sm: int) -> npt.NDArray[np.uint8]:
    """Convert the result of `to_kernel` back to codes 0 … 15 (8 means zero) [out, in]."""
    import numpy as np

    require_gpu_sm(gpu_sm)
    inputs, outputs = packed.shape[0], packed.shape[1] * 2
    pairs = nibbles(packed.reshape(-1)).reshape(-1, 2, 4).swapaxes(1, 2)
    if _interleaves(gpu_sm):
        pairs = pairs.reshape(outputs // _INTERLEAVED, inputs // _TILE, _INTERLEAVED, _TILE).swapaxes(1, 2)
    columns = pairs.reshape(outputs, -1, _ROWS)
    codes: npt.NDArray[np.uint8] = np.empty((outputs, inputs // _ROWS, _ROWS), dtype=np.uint8)
    codes[:, :, _row_order()] = columns
    return codes.reshape(outputs, inputs)


def nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack the two 4-bit codes of each byte, low first: [..., n] becomes [..., 2 n]."""
    import numpy as np

    halves: npt.NDArray[np.uint8] = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1)


def _row_order() -> Any:
    """Return the order of 32 rows: 0 1 8 9 16 17 24 25, 2 3 10 11 …"""
    import numpy as np

    return (np.arange(0, 8, 2)[:, None, None] + np.arange(0, 32, 8)[:, None] + np.arange(2)).reshape(-1)
