"""`bench_executor` with kernels for AVX2 only, as far as a processor with AVX-512 can play one without.

ONEDNN_MAX_CPU_ISA limits the kernels that oneDNN and OpenVINO's plugin generate when they run, on both sides. The
engine is built for float32, as on such a processor. Kernels that were compiled for AVX-512 ask the processor itself.
"""

from __future__ import annotations

import os

from tests.benchmarks import bench_executor
from trtserve.host import machine

if __name__ == "__main__":
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # read at oneDNN's first use
    own = machine.cpu_flags()
    wide = ("avx512", "amx", "avx_vnni", "bf16")
    machine.cpu_flags = lambda: frozenset(flag for flag in own if not flag.startswith(wide))
    bench_executor.main("avx2", targets=(1.0, 1.0, 1.1))
