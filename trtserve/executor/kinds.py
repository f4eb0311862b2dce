"""Which Python values each parameter type accepts, as the bindings of TensorRT-LLM convert them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import numpy as np

TOKEN_MIN, TOKEN_MAX = -(2**31), 2**31 - 1


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """A parameter type: `convert(value, strict)` raises TypeError; `fresh` is what a getter returns."""

    convert: Callable[[Any, bool], Any]
    fresh: Callable[[Any], Any] = _same

    def with_convert(self, convert: Callable[[Any, bool], Any]) -> Kind:
        """This kind with another conversion."""
        return Kind(convert, self.fresh)


def _integer(low: int, high: int) -> Callable[[Any, bool], int]:
    def convert(value: Any, strict: bool) -> int:
        # A one-element array passes for its element; upstream's tests do so.
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
    """pybind11 takes None for False; nanobind refuses it."""
    if value is None and not strict:
        return False
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected a bool, got {type(value).__name__}")
    return bool(value)


def _optional_boolean(value: Any, strict: bool) -> bool:
    return False if value is None else _boolean(value, strict)


def _text(value: Any, strict: bool) -> str:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


def _path(value: Any, strict: bool) -> str:
    return str(value) if isinstance(value, PurePath) else _text(value, strict)


def _duration(value: Any, strict: bool) -> timedelta:
    """A timedelta, a float in seconds, or an int in milliseconds.

    The int is a TypeError upstream, although its own Triton model passes one; here it means what that model intends.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, float):
        return timedelta(seconds=value)
    return timedelta(milliseconds=operator.index(value))


def _tokens(value: Any, strict: bool) -> list[int]:
    """A list of 32-bit token ids; NumPy arrays pass as sequences."""
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
    """A tensor as a NumPy array; torch tensors are taken where torch is present, bfloat16 ones as float32."""
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


def listed(item: Kind) -> Kind:
    """A list of `item`; it is copied when given and when read."""

    def convert(value: Any, strict: bool) -> list[Any]:
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
            raise TypeError(f"expected a list, got {type(value).__name__}")
        return [item.convert(element, strict) for element in value]

    return Kind(convert, lambda value: [item.fresh(element) for element in value])


def mapped(item: Kind) -> Kind:
    """A dict from names to `item`."""

    def convert(value: Any, strict: bool) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict, got {type(value).__name__}")
        return {_text(name, strict): item.convert(element, strict) for name, element in value.items()}

    return Kind(convert, dict)


def optional(kind: Kind) -> Kind:
    """`kind` or None."""

    def convert(value: Any, strict: bool) -> Any:
        return None if value is None else kind.convert(value, strict)

    return Kind(convert, lambda value: None if value is None else kind.fresh(value))


def instance(expected: type) -> Kind:
    """An object of a class of this interface; an enumeration accepts its members only."""

    def convert(value: Any, strict: bool) -> Any:
        if not isinstance(value, expected):
            raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
        return value

    return Kind(convert)


INT = Kind(_integer(-(2**31), 2**31 - 1))
LONG = Kind(_integer(-(2**63), 2**63 - 1))
UNSIGNED = Kind(_integer(0, 2**64 - 1))
FLOAT = Kind(_floating)
BOOL = Kind(_boolean)
LATE_BOOL = Kind(_optional_boolean)
TEXT = Kind(_text)
PATH = Kind(_path)
DURATION = Kind(_duration)
TOKENS = Kind(_tokens, list)
ARRAY = Kind(_array)
CALLABLE = Kind(_callable)
ANY = Kind(lambda value, strict: value)


def positive(value: Any) -> str | None:
    """Check: above zero."""
    return None if value > 0 else "greater than 0"


def not_negative(value: Any) -> str | None:
    """Check: zero or more."""
    return None if value >= 0 else "0 or more"


def within(low: float, high: float) -> Callable[[Any], str | None]:
    """Check: between `low` and `high`, both included."""
    return lambda value: None if low <= value <= high else f"between {low} and {high}"


def above_zero_to_one(value: Any) -> str | None:
    """Check: in (0, 1]."""
    return None if 0 < value <= 1 else "greater than 0 and at most 1"


def not_empty(value: Any) -> str | None:
    """Check: at least one element."""
    return None if len(value) else "not empty"
