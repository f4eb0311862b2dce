"""Convert parameter values as the bindings of TensorRT-LLM do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import numpy as np

TOKEN_MIN, TOKEN_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class ValueType:
    """A parameter type."""

    convert: Callable[[Any, bool], Any]
    """convert(value, strict) returns the converted value or raises TypeError; strict means nanobind's rules."""
    fresh: Callable[[Any], Any] = lambda value: value
    """What a getter returns for a stored value: a copy for mutable types."""

    def with_convert(self, convert: Callable[[Any, bool], Any]) -> ValueType:
        """Return this converter with another conversion."""
        return ValueType(convert, self.fresh)


def _integer(low: int, high: int) -> Callable[[Any, bool], int]:
    def convert(value: Any, strict: bool) -> int:
        # A one-element array is accepted as its element, which upstream's tests rely on.
        number = operator.index(value.reshape(()).item() if getattr(value, "size", None) == 1 else value)
        if not low <= number <= high:
            raise TypeError(f"{number} is outside {low} … {high}")
        return int(number)

    return convert


def _floating(value: Any, strict: bool) -> float:
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _boolean(value: Any, strict: bool) -> bool:
    """Convert a bool; pybind11 accepts None as False, nanobind refuses it."""
    if value is None and not strict:
        return False
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected a bool, got {type(value).__name__}")
    return bool(value)


def _text(value: Any, strict: bool) -> str:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


def _duration(value: Any, strict: bool) -> timedelta:
    """Convert a timedelta, a float in seconds, or an int in milliseconds.

    An int is a TypeError upstream although its own Triton model passes one; here it has the meaning that model intends.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, float):
        return timedelta(seconds=value)
    return timedelta(milliseconds=operator.index(value))


def _tokens(value: Any, strict: bool) -> list[int]:
    """Convert a list of 32-bit token ids; NumPy arrays are accepted."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(f"expected a list of token ids, got {type(value).__name__}")
    if len(value) == 0:
        return []
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError("expected a flat list of integers")
    if int(array.min()) < TOKEN_MIN or int(array.max()) > TOKEN_MAX:
        raise TypeError("a token id does not fit 32 bits")
    return array.tolist()  # type: ignore[no-any-return]


def _array(value: Any, strict: bool) -> np.ndarray[Any, Any]:
    """Convert a tensor to a NumPy array; torch tensors are accepted, bfloat16 ones become float32."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "detach"):
        raise TypeError(f"expected a tensor, got {type(value).__name__}")
    tensor = value.detach().cpu()
    return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())


def _callable(value: Any, strict: bool) -> Any:
    if not callable(value):
        raise TypeError(f"expected a callable, got {type(value).__name__}")
    return value


def list_of(item: ValueType) -> ValueType:
    """Return a converter of lists; lists are copied when they are set and when they are read."""

    def convert(value: Any, strict: bool) -> list[Any]:
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
            raise TypeError(f"expected a list, got {type(value).__name__}")
        return [item.convert(element, strict) for element in value]

    return ValueType(convert, lambda value: [item.fresh(element) for element in value])


def dict_of(item: ValueType) -> ValueType:
    """Return a converter of dicts with string keys."""

    def convert(value: Any, strict: bool) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict, got {type(value).__name__}")
        return {_text(name, strict): item.convert(element, strict) for name, element in value.items()}

    return ValueType(convert, dict)


def optional(kind: ValueType) -> ValueType:
    """Return a converter that also accepts None."""

    def convert(value: Any, strict: bool) -> Any:
        return None if value is None else kind.convert(value, strict)

    return ValueType(convert, lambda value: None if value is None else kind.fresh(value))


def instance_of(expected: type) -> ValueType:
    """Return a converter that accepts objects of one class only."""

    def convert(value: Any, strict: bool) -> Any:
        if not isinstance(value, expected):
            raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
        return value

    return ValueType(convert)


INT = ValueType(_integer(-(2**31), 2**31 - 1))
LONG = ValueType(_integer(-(2**63), 2**63 - 1))
UNSIGNED = ValueType(_integer(0, 2**64 - 1))
FLOAT = ValueType(_floating)
BOOL = ValueType(_boolean)
OPT_BOOL = ValueType(lambda value, strict: False if value is None else _boolean(value, strict))
TEXT = ValueType(_text)
PATH = ValueType(lambda value, strict: str(value) if isinstance(value, PurePath) else _text(value, strict))
DURATION = ValueType(_duration)
TOKENS = ValueType(_tokens, list)
ARRAY = ValueType(_array)
CALLABLE = ValueType(_callable)
ANY = ValueType(lambda value, strict: value)


def positive(value: Any) -> str | None:
    """Check that a value is above zero."""
    return None if value > 0 else "greater than 0"


def not_negative(value: Any) -> str | None:
    """Check that a value is zero or more."""
    return None if value >= 0 else "0 or more"


def within(low: float, high: float) -> Callable[[Any], str | None]:
    """Return a check that a value is between `low` and `high`, both included."""
    return lambda value: None if low <= value <= high else f"between {low} and {high}"


def above_zero_to_one(value: Any) -> str | None:
    """Check that a value is in (0, 1]."""
    return None if 0 < value <= 1 else "greater than 0 and at most 1"


def not_empty(value: Any) -> str | None:
    """Check that a value is not empty."""
    return None if len(value) else "not empty"
