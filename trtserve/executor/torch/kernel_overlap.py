"""Let a kernel begin while the one before it still runs (programmatic dependent launch, from Hopper on).

Every kernel waits for the one before it before it touches anything that a kernel writes. So a chain of such kernels is
ordered like any other, but the launches, and loads of weights before the wait, are hidden.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def overlap() -> dict[str, bool]:
    """Return the launch arguments of a kernel with the parameter OVERLAPS."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, then wait until the one before has ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
