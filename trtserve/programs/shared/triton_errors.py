"""Error responses with the code that tells clients whose fault it is."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from .run_folder import STOPPED


def error_response(message: str) -> Any:
    """Return a response with an error: UNAVAILABLE (503 over HTTP) when the executor has stopped, else INTERNAL."""
    code = (pb_utils.TritonError.UNAVAILABLE,) if STOPPED in message else ()
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, *code))
