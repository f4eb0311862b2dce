"""Base class of the parameter classes, with constructors and properties like those of TensorRT-LLM's bindings.

Every parameter is declared once, with its type (`ValueType`). The classes accept the parameters of every release.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np

TOKEN_MIN, TOKEN_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class ValueType:
    """A parameter type."""

    convert: Callable[[Any], Any]  # returns the converted value or raises TypeError
    fresh: Callable[[Any], Any] = lambda value: value
    """What a getter returns for a stored value: a copy for mutable types."""


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        # A one-element array is accepted as its element, which upstream's tests rely on.
        number = operator.index(value.reshape(()).item() if getattr(value, "size", None) == 1 else value)
        if not low <= number <= high:
            raise TypeError(f"{number} is outside {low} … {high}")
        return int(number)

    return convert


def _floating(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _boolean(value: Any) -> bool:
    """Convert a bool; None is False, as in most releases."""
    if value is None:
        return False
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected a bool, got {type(value).__name__}")
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


def _duration(value: Any) -> timedelta:
    """Convert a timedelta, a float in seconds, or an int in milliseconds.

    An int is a TypeError upstream although its own Triton model passes one; here it has the meaning that model intends.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, float):
        return timedelta(seconds=value)
    return timedelta(milliseconds=operator.index(value))


def _tokens(value: Any) -> list[int]:
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


def _array(value: Any) -> np.ndarray[Any, Any]:
    """Convert a tensor to a NumPy array; torch tensors are accepted, bfloat16 ones become float32."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "detach"):
        raise TypeError(f"expected a tensor, got {type(value).__name__}")
    tensor = value.detach().cpu()
    return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())


def _callable(value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"expected a callable, got {type(value).__name__}")
    return value


def list_of(item: ValueType) -> ValueType:
    """Return a converter of lists; lists are copied when they are set and when they are read."""

    def convert(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
            raise TypeError(f"expected a list, got {type(value).__name__}")
        return [item.convert(element) for element in value]

    return ValueType(convert, lambda value: [item.fresh(element) for element in value])


def dict_of(item: ValueType) -> ValueType:
    """Return a converter of dicts with string keys."""

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict, got {type(value).__name__}")
        return {_text(name): item.convert(element) for name, element in value.items()}

    return ValueType(convert, dict)


def optional(kind: ValueType) -> ValueType:
    """Return a converter that also accepts None."""

    def convert(value: Any) -> Any:
        return None if value is None else kind.convert(value)

    return ValueType(convert, lambda value: None if value is None else kind.fresh(value))


def instance_of(expected: type) -> ValueType:
    """Return a converter that accepts objects of one class only."""

    def convert(value: Any) -> Any:
        if not isinstance(value, expected):
            raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
        return value

    return ValueType(convert)


INT = ValueType(_integer(-(2**31), 2**31 - 1))
LONG = ValueType(_integer(-(2**63), 2**63 - 1))
UNSIGNED = ValueType(_integer(0, 2**64 - 1))
FLOAT = ValueType(_floating)
BOOL = ValueType(_boolean)
TEXT = ValueType(_text)
PATH = ValueType(lambda value: str(value) if isinstance(value, PurePath) else _text(value))
DURATION = ValueType(_duration)
TOKENS = ValueType(_tokens, list)
ARRAY = ValueType(_array)
CALLABLE = ValueType(_callable)
ANY = ValueType(lambda value: value)


LARGEST = 10**9
"""Most of a number that scales logits or is added to them; the options of `query` have the same."""


def positive(value: Any) -> str | None:
    """Check that a value is above zero."""
    return None if value > 0 else "greater than 0"


def not_negative(value: Any) -> str | None:
    """Check that a value is zero or more."""
    return None if value >= 0 else "0 or more"


def within(low: float, high: float) -> Callable[[Any], str | None]:
    """Return a check that a value is between `low` and `high`, both included."""
    return lambda value: None if low <= value <= high else f"between {low} and {high}"


def divisor(value: Any) -> str | None:
    """Check what logits are divided by: they stay finite. The executor refuses what is infinite itself."""
    # Not 1e-9 itself, which float32 rounds down.
    in_range = not value > 0 or math.isinf(value) or 0.999e-9 <= value <= LARGEST
    return positive(value) if in_range else f"between 1e-09 and {LARGEST}"


def addend(value: Any) -> str | None:
    """Check what is added to logits: they stay finite. The executor refuses what is no finite number itself."""
    return None if not math.isfinite(value) or abs(value) <= LARGEST else f"between {-LARGEST} and {LARGEST}"


def above_zero_to_one(value: Any) -> str | None:
    """Check that a value is in (0, 1]."""
    return None if 0 < value <= 1 else "greater than 0 and at most 1"


def not_empty(value: Any) -> str | None:
    return None if len(value) else "not empty"


T = TypeVar("T")
Check = Callable[[Any], str | None]


class _Required:
    """Marks a parameter without a default."""


REQUIRED: Any = _Required()


class Field(Generic[T]):
    """One parameter.

    default: a Record class stands for a new object of it.
    check: returns what a wrong value must be, None for a right one.
    alias: for a former name, the field that holds the value.
    """

    def __init__(
        self,
        kind: ValueType,
        default: Any = REQUIRED,
        *,
        check: Check | None = None,
        readonly: bool = False,
        alias: str | None = None,
    ) -> None:
        self.kind = kind
        self.default = default
        self.check = check
        self.readonly = readonly
        self.alias = alias
        self.name = ""

    def __set_name__(self, owner: type[Record], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Field[T]: ...
    @overload
    def __get__(self, instance: Record, owner: type) -> T: ...
    def __get__(self, instance: Record | None, owner: type) -> Field[T] | T:
        if instance is None:
            return self
        return self.kind.fresh(instance.__dict__[self.alias or self.name])  # type: ignore[no-any-return]

    def __set__(self, instance: Record, value: T) -> None:
        if self.readonly or self.alias or not instance.writable:
            raise AttributeError(f"{type(instance).__name__}.{self.name} cannot be set")
        instance.__dict__[self.name] = self.converted(value, type(instance))

    def converted(self, value: Any, owner: type[Record]) -> Any:
        """Convert `value`. Raises TypeError for a wrong type, RuntimeError for a wrong value."""
        try:
            result = self.kind.convert(value)
        except (TypeError, OverflowError) as error:
            raise TypeError(f"{owner.__name__}(): incompatible argument {self.name}: {error}") from None
        if self.check and result is not None and (expected := self.check(result)):
            raise RuntimeError(f"{owner.__name__}.{self.name} is {result!r}; it must be {expected}")
        return result

    def initial(self) -> Any:
        return self.default() if isinstance(self.default, type) and issubclass(self.default, Record) else self.default


class Record:
    """Base of the interface's parameter classes; subclasses declare `Field`s in positional order."""

    fields: ClassVar[tuple[Field[Any], ...]] = ()
    writable: ClassVar[bool]
    dynamic: ClassVar[bool]

    def __init_subclass__(cls, *, writable: bool = False, dynamic: bool = False) -> None:
        """Configure a subclass: whether its properties can be set, and whether any attribute can."""
        super().__init_subclass__()
        cls.writable, cls.dynamic = writable, dynamic
        cls.fields += tuple(value for value in vars(cls).values() if isinstance(value, Field))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls, given = type(self), self._bind(args, kwargs)
        for field in self.fields:
            if field.name in given:
                self.__dict__[field.name] = field.converted(given[field.name], cls)
            elif field.default is REQUIRED and not field.alias:
                raise TypeError(f"{cls.__name__}() missing required argument {field.name!r}")
            elif not field.alias:
                self.__dict__[field.name] = field.initial()
        self.validate()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by field name. Raises TypeError for arguments that no release accepts."""
        name_of_class, known = type(self).__name__, {field.name: field for field in self.fields}
        positional = [field.name for field in self.fields if not field.alias]
        if len(args) > len(positional):
            raise TypeError(f"{name_of_class}() takes at most {len(positional)} positional arguments, got {len(args)}")
        named = dict(zip(positional, args, strict=False))
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(f"{name_of_class}() got an unexpected keyword argument {name!r}")
            if name in named:
                raise TypeError(f"{name_of_class}() got two values for {name!r}")
            named[name] = value
        given = {name: value for name, value in named.items() if not known[name].alias}
        for name, value in named.items():
            alias = known[name].alias
            if alias and given.get(alias) is None:  # the newer name wins when both are given
                given[alias] = value
        return given

    def validate(self) -> None:
        """Check combinations of parameters; subclasses raise."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.dynamic and not isinstance(getattr(type(self), name, None), (Field, property)):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        inner = ", ".join(f"{f.name}={self.__dict__[f.name]!r}" for f in self.fields if not f.alias)
        return f"{type(self).__name__}({inner})"


_C = TypeVar("_C")


def maybe(kind: type[_C]) -> Field[_C | None]:
    """Return a parameter that is an object of a class, or None by default."""
    return Field(optional(instance_of(kind)), None)


def made(kind: type[_C]) -> Field[_C]:
    """Return a parameter that is an object of a class, by default a new one."""
    return Field(instance_of(kind), kind)
