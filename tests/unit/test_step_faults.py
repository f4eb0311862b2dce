"""What the exceptions of PyTorch and CUDA mean for the executor, without a GPU: the errors are raised by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trtserve.executor.engine.model import FatalModelError

pytestmark = pytest.mark.needs("torch")

HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with TORCH_USE_CUDA_DSA."
)
LOST = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: misaligned address",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error",
    "another rank of this model has ended",
)
WITHOUT_MEMORY = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
)


def raised(error: Exception, probe: Callable[[], None] | None = None) -> Exception:
    """Return what leaves a step in which `error` was raised."""
    from trtserve.executor.torch.model import StepFaults

    with pytest.raises(type(error) if probe is None else Exception) as found, StepFaults("cuda", probe):
        raise error
    return found.value


def answers() -> None:
    """Behave like a GPU that computes."""


def never() -> None:
    raise AssertionError("the error says enough")


@pytest.mark.parametrize("text", LOST)
def test_a_lost_gpu(text: str) -> None:
    import torch

    found = raised(torch.AcceleratorError(text + HINTS), never)
    assert isinstance(found, FatalModelError)
    assert str(found) == f"AcceleratorError: {text}"
    assert isinstance(raised(RuntimeError(text), never), FatalModelError)  # PyTorch before 2.8


def test_errors_between_ranks() -> None:
    import torch

    assert isinstance(raised(torch.distributed.DistBackendError("socket closed"), never), FatalModelError)


@pytest.mark.parametrize("text", WITHOUT_MEMORY)
def test_too_little_memory(text: str) -> None:
    import torch

    assert isinstance(raised(RuntimeError(text), never), MemoryError)
    assert isinstance(
        raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), never), MemoryError
    )


def test_an_unknown_error_of_a_gpu_that_answers_is_that_of_its_step() -> None:
    error = RuntimeError("CUDA error: invalid configuration argument")
    assert raised(error, answers) is error
    wrong = ValueError("a defect")
    assert raised(wrong, answers) is wrong


def test_an_unknown_error_of_a_gpu_that_does_not_answer() -> None:
    import torch

    def silent() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + HINTS)

    found = raised(RuntimeError("cuBLAS does something strange"), silent)
    assert isinstance(found, FatalModelError)
    assert str(found) == (
        "RuntimeError: cuBLAS does something strange; then the GPU did not answer either: "
        "AcceleratorError: CUDA error: an illegal memory access was encountered"
    )


def test_a_gpu_without_memory_for_the_probe_answers() -> None:
    import torch

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    error = ValueError("a defect")
    assert raised(error, full) is error


def test_a_cpu_needs_no_probe() -> None:
    from trtserve.executor.torch.model import StepFaults

    with pytest.raises(ValueError, match="a defect"), StepFaults("cpu"):
        raise ValueError("a defect")
    with StepFaults("cpu"):
        pass


def test_a_fault_that_is_known_stays_what_it_is() -> None:
    error = FatalModelError("the GPU is lost")
    assert raised(error, never) is error
