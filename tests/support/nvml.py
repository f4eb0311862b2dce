"""A stand-in for `pynvml` (package nvidia-ml-py): the calls that the product makes, answered from a description.

Names, argument orders and types are those of nvidia-ml-py 12 and 13; a call that it does not have is an AttributeError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """One GPU; None means "Not Supported"."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 140 * GIB
    used: int = GIB // 2
    reserved: int = GIB // 2
    mig: int | None = 0
    persistence: int | None = 1
    errors: int | None = 0


@dataclass(kw_only=True)
class FakeNvml:
    """The module; nvmlInit fails with `fault`, and the pairs `apart` cannot read each other's memory."""

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    driver: str | bytes = "580.159.04"
    cuda: int | None = 13000
    fault: str = ""
    apart: frozenset[tuple[int, int]] | None = frozenset()
    open: int = 0
    memory_v2: bool = True

    class NVMLError(Exception):
        """As in pynvml."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - named after the constant
    NVML_P2P_CAPS_INDEX_READ = (0,)  # a comma too many in nvidia-ml-py 13
    NVML_P2P_STATUS_OK = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answer = getattr(type(self), f"_{name.removeprefix('nvml')}")

        def call(*arguments: Any) -> Any:
            if name != "nvmlInit" and not self.open:
                raise self.NVMLError("Uninitialized")
            return answer(self, *arguments)

        return call

    def _told(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def _Init(self) -> None:  # noqa: N802 - named after the call
        if self.fault:
            raise self.NVMLError(self.fault)
        self.open += 1

    def _Shutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def _SystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        return self.driver

    def _SystemGetCudaDriverVersion_v2(self) -> Any:  # noqa: N802
        return self._told(self.cuda)

    def _DeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def _DeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def _DeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        name = self.gpus[handle].name
        return name.encode() if isinstance(self.driver, bytes) else name

    def _DeviceGetUUID(self, handle: int) -> str | bytes:  # noqa: N802
        uuid = f"GPU-00000000-0000-0000-0000-{handle:012d}"
        return uuid.encode() if isinstance(self.driver, bytes) else uuid

    def _DeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return self.gpus[handle].capability

    def _DeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
        gpu = self.gpus[handle]
        if version is None:
            used = gpu.used + gpu.reserved
            return SimpleNamespace(total=gpu.memory, used=used, free=gpu.memory - used)
        free = gpu.memory - gpu.used - gpu.reserved
        assert version == self.nvmlMemory_v2
        return self._told(
            SimpleNamespace(total=gpu.memory, reserved=gpu.reserved, used=gpu.used, free=free)
            if self.memory_v2
            else None
        )

    def _DeviceGetMigMode(self, handle: int) -> Any:  # noqa: N802
        mode = self._told(self.gpus[handle].mig)
        return [mode, mode]

    def _DeviceGetPersistenceMode(self, handle: int) -> Any:  # noqa: N802
        return self._told(self.gpus[handle].persistence)

    def _DeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> Any:  # noqa: N802
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return self._told(self.gpus[handle].errors)

    def _DeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:  # noqa: N802
        if not isinstance(index, int):
            raise ctypes.ArgumentError("argument 3: TypeError: Don't know how to convert parameter 3")
        assert index == 0
        return int((one, other) in self._told(self.apart))
