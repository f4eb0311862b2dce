"""What OpenVINO's matrix kernels reach on this CPU: bytes/s with one row, operations/s with many."""

from __future__ import annotations

import numpy as np

from trtserve.host.machine import fastest, has_bfloat16

_WIDTH, _LAYERS = 4096, 4
_ROWS = 512


def matrix_speed() -> tuple[float, float]:
    """Return bytes/s of weights and operations/s, as a server with float16 or bfloat16 weights has them."""
    import openvino as ov
    from openvino import opset13 as ops

    rows = ops.parameter([-1, _WIDTH], ov.Type.f32)
    weights = np.zeros((_WIDTH, _WIDTH), np.float16)
    found = rows
    for _ in range(_LAYERS):
        # A constant of its own each, of which nothing is left in a cache.
        found = ops.matmul(found, ops.convert(ops.constant(weights.copy()), "f32"), False, True)
    compute, item = ("bf16", 2) if has_bfloat16() else ("f32", 4)
    core = ov.Core()
    compiled = core.compile_model(ov.Model([found], [rows]), "CPU", {"INFERENCE_PRECISION_HINT": compute})
    request = compiled.create_infer_request()

    def seconds(count: int) -> float:
        values = np.ones((count, _WIDTH), np.float32)
        return fastest(lambda: request.infer([values]))

    numbers = _LAYERS * _WIDTH**2
    return numbers * item / seconds(1), 2 * numbers * _ROWS / seconds(_ROWS)
