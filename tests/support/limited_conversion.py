"""A conversion under a hard limit of memory: `python -m ... MODEL OUT TP_SIZE DTYPE ALLOWANCE`.

RLIMIT_AS bounds the address space of each process, which is more than what it holds: stacks of threads and what the
allocator sets aside count in full. The limit is the space that the interpreter and its libraries take before the
conversion, plus the largest tensor, plus ALLOWANCE bytes; whatever goes beyond it fails with MemoryError.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 - part of what is there before the conversion
import numpy as np
import psutil

from tests.support.stages import convert_model
from trtserve.artifacts import Model
from trtserve.pipeline.convert_own import plan_own_conversion
from trtserve.specs import ConvertSpec, DType
from trtserve.store import Store

# This one, and those that it has waited for.
_PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def limit_memory(allowance: int) -> int:
    """Limit this process to `allowance` bytes more than it has now, and return the present size in bytes."""
    base = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (base + allowance, base + allowance))
    return int(base)


def run(model: Path, out: Path, tp_size: int, dtype: DType, allowance: int) -> dict[str, object]:
    """Convert within the limit, then check that loading the complete model would exceed it."""
    spec = ConvertSpec(tp_size=tp_size, dtype=dtype)
    plan = plan_own_conversion(Model(path=model), spec)
    base = limit_memory(plan.largest_tensor + allowance)
    convert_model(Model(path=model), spec, out=out, store=Store(out.parent / "home"))
    try:
        np.fromfile(model / "model.safetensors", np.uint8)
    except MemoryError:
        whole_model_fits = False
    else:
        whole_model_fits = True
    return {
        "base": base,
        "limit": base + plan.largest_tensor + allowance,
        "largest_tensor": plan.largest_tensor,
        "model_bytes": plan.source_bytes,
        "maxrss": max(resource.getrusage(who).ru_maxrss for who in _PROCESSES) * 1024,
        "whole_model_fits": whole_model_fits,
    }


if __name__ == "__main__":
    wanted: DType = "bfloat16" if sys.argv[4] == "bfloat16" else "float16"
    sys.stdout.write(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), wanted, int(sys.argv[5]))))
