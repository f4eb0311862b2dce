"""Which executor drives the model, and how its tensors and keywords differ between implementations and releases."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from dlpack_bfloat16 import bfloat16_as_float32
from numpy.typing import NDArray

# What NumPy has no type for: two bytes of a bfloat16, on their way from Triton to PyTorch.
BFLOAT16 = np.dtype([("bfloat16", "<i2")])


def release_order(release: str) -> tuple[int, int]:
    """`0.17.0.post1` → (0, 17)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class ExecutorModule:
    """TensorRT-LLM's executor bindings or trtserve's embedded executor, which has the same interface.

    `api` holds the classes, `release` the TensorRT-LLM release that they have the keywords of.
    """

    api: Any
    release: tuple[int, int]
    torch: Any = None

    def since(self, release: str) -> bool:
        """Whether the classes are those of `release` or a later one."""
        return self.release >= release_order(release)

    def as_tensor(self, array: NDArray[Any]) -> Any:
        """A tensor as the executor takes it: torch for TensorRT-LLM, NumPy for the embedded one."""
        array = np.ascontiguousarray(array)
        if self.torch is None:
            return array
        if array.dtype == BFLOAT16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def bfloat16_array(self, capsule: Any) -> NDArray[Any]:
        """The DLPack capsule of a BF16 input as array: of BFLOAT16 for TensorRT-LLM, else of float32."""
        if self.torch is None:
            return bfloat16_as_float32(capsule)
        tensor = self.torch.from_dlpack(capsule).cpu().contiguous()
        array: NDArray[Any] = tensor.view(self.torch.int16).numpy().view(BFLOAT16)
        return array

    def as_array(self, tensor: Any) -> NDArray[Any]:
        """A tensor of the executor as NumPy array; bfloat16 becomes float32."""
        if self.torch is None:
            return np.asarray(tensor)
        tensor = tensor.detach().cpu()
        array: NDArray[Any] = (tensor.float() if tensor.dtype == self.torch.bfloat16 else tensor).numpy()
        return array


def load_executor_module(name: str | None, release: str | None) -> ExecutorModule:
    """The embedded executor when the parameter `executor` says so, else TensorRT-LLM's; ValueError for another name."""
    if name == "openvino":
        wanted = release or "1.2"
        api = importlib.import_module("trtserve.executor.api").for_release(wanted)
        return ExecutorModule(api, release_order(wanted))
    if name is not None:
        raise ValueError(f"Parameter executor is {name!r}; expected openvino, or nothing for TensorRT-LLM.")
    api = importlib.import_module("tensorrt_llm.bindings.executor")
    return ExecutorModule(api, release_order(str(api.__version__)), importlib.import_module("torch"))
