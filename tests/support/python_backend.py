"""The part of Triton's `triton_python_backend_utils` that the models need to be imported outside Triton.

tests/unit/conftest.py installs it under that name; tests replace what they look at.
"""

from __future__ import annotations

from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
InferenceRequest: Any = None
InferenceResponse: Any = None
Tensor: Any = None


class Logger:
    """The server's log, which is dropped."""

    log_error = log_info = log_warn = staticmethod(lambda _message: None)


class TritonError(Exception):
    """An error for a client."""


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """An error at load."""
