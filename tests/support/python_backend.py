"""The part of Triton's `triton_python_backend_utils` that the models need to be imported outside Triton.

tests/unit/conftest.py installs it under that name; tests replace what they look at.
"""

from __future__ import annotations

from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
InferenceRequest: Any = None


class Tensor:
    """A named array."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._value


class InferenceResponse:
    """The outputs of a model, or an error, without response parameters as in 24.10."""

    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors, error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Logger:
    """The server's log, which is dropped."""

    log_error = log_info = log_warn = staticmethod(lambda _message: None)


class TritonError(Exception):
    """An error for a client."""

    INTERNAL, INVALID_ARG, UNAVAILABLE = 1, 3, 5

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self._code = code

    def message(self) -> str:
        return str(self)

    def code(self) -> int:
        return self._code


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """An error at load."""


def using_decoupled_model_transaction_policy(config: dict[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
