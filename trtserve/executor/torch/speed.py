"""What PyTorch's matrix kernels reach on this device: bytes/s with one row, operations/s with many."""

from __future__ import annotations

import torch

from trtserve.host.machine import fastest

_ROWS = 2048


def matrix_speed() -> tuple[float, float]:
    """Return bytes/s of bfloat16 weights and operations/s, on the GPU if PyTorch has one."""
    cuda = torch.cuda.is_available()
    device, width, layers = ("cuda", 8192, 8) if cuda else ("cpu", 2048, 4)
    weights = [torch.zeros(width, width, dtype=torch.bfloat16, device=device) for _ in range(layers)]

    def seconds(count: int) -> float:
        values = torch.ones(count, width, dtype=torch.bfloat16, device=device)

        def multiply() -> None:
            for each in weights:
                torch.matmul(values, each)
            if cuda:
                torch.cuda.synchronize()

        return fastest(multiply)

    with torch.inference_mode():
        numbers = layers * width**2
        return 2 * numbers / seconds(1), 2 * numbers * _ROWS / seconds(_ROWS)
