"""Read a BF16 tensor without PyTorch: NumPy has no such type and refuses its DLPack capsule.

The structure is that of the DLPack specification, version 0, which capsules named `dltensor` hold.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CPU = 1
_BFLOAT_CODE = 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def bfloat16_as_float32(capsule: Any) -> NDArray[np.float32]:
    """Return a float32 copy of the tensor. Raises ValueError when it is not BF16 on the CPU.

    A bfloat16 is the upper half of a float32. The tensor must be contiguous, as Triton's are. The capsule is not
    consumed: its owner frees the memory.
    """
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(read(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    if (tensor.device_type, tensor.code, tensor.bits, tensor.lanes) != (_CPU, _BFLOAT_CODE, 16, 1):
        raise ValueError(f"A tensor of type code {tensor.code} and {tensor.bits} bits is not a BF16 tensor on the CPU.")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    count = int(np.prod(shape))
    halves = np.frombuffer(ctypes.string_at(tensor.data + tensor.byte_offset, count * 2) if count else b"", np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
