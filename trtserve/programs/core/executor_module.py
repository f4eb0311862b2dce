"""The executor that runs the model: TensorRT-LLM's or the embedded one, and the differences between them."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# NumPy has no bfloat16: the two bytes of a value, on their way from Triton to PyTorch.
BFLOAT16 = np.dtype([("bfloat16", "<i2")])


@lru_cache(maxsize=16)
def release_order(release: str) -> tuple[int, int]:
    """`0.17.0.post1` → (0, 17)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class ExecutorModule:
    """TensorRT-LLM's executor bindings, or trtserve's embedded executor with the same interface."""

    api: Any
    """The module with the classes."""
    release: tuple[int, int]
    """The TensorRT-LLM release whose keywords the classes take."""
    torch: Any = None
    """PyTorch, whose tensors TensorRT-LLM takes, or None for the embedded executor, which takes NumPy arrays."""

    def since(self, release: str) -> bool:
        """Return whether the classes are those of `release` or later."""
        return self.release >= release_order(release)

    def as_tensor(self, array: NDArray[Any]) -> Any:
        """Convert an array to the tensor type of the executor."""
        array = np.ascontiguousarray(array)
        if self.torch is None:
            return array
        if array.dtype == BFLOAT16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def bfloat16_array(self, capsule: Any) -> NDArray[Any]:
        """Convert the DLPack capsule of a BF16 input to an array: BFLOAT16 for TensorRT-LLM, else float32."""
        if self.torch is None:
            return bfloat16_as_float32(capsule)
        tensor = self.torch.from_dlpack(capsule).cpu().contiguous()
        array: NDArray[Any] = tensor.view(self.torch.int16).numpy().view(BFLOAT16)
        return array

    def as_array(self, tensor: Any) -> NDArray[Any]:
        """Convert a tensor of the executor to a NumPy array; bfloat16 becomes float32."""
        if self.torch is None:
            return np.asarray(tensor)
        tensor = tensor.detach().cpu()
        array: NDArray[Any] = (tensor.float() if tensor.dtype == self.torch.bfloat16 else tensor).numpy()
        return array


def load_executor_module(name: str | None, release: str | None) -> ExecutorModule:
    """Import the embedded executor when the parameter `executor` names a runtime, TensorRT-LLM's when it is unset."""
    if name is not None:
        known = importlib.import_module("trtserve.executor.loaders").MODELS
        if name not in known:
            expected = " or ".join(known)
            raise ValueError(f"Parameter executor is {name!r}; expected {expected}, or no value for TensorRT-LLM.")
        return load_embedded_executor(release)
    api = importlib.import_module("tensorrt_llm.bindings.executor")
    return ExecutorModule(api, release_order(str(api.__version__)), importlib.import_module("torch"))


def load_embedded_executor(release: str | None) -> ExecutorModule:
    """Import the embedded executor with the keywords of `release`; None: the newest."""
    wanted = release or str(importlib.import_module("trtserve.nvidia.releases").NEWEST)
    api = importlib.import_module("trtserve.executor.api").for_release(wanted)
    return ExecutorModule(api, release_order(wanted))


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
