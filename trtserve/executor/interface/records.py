"""Base class of the parameter classes, with constructors and properties like those of TensorRT-LLM's bindings.

Every parameter is declared once, with its type (`ValueType`) and the releases that have it. `Record.of(release)`
returns the class of one release: it refuses the keywords of other releases, and converts values as that release's
bindings do (pybind11; nanobind since 1.0).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np

from trtserve.nvidia.releases import NEWEST, RELEASES

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


NANOBIND_SINCE = "1.0"

T = TypeVar("T")
Check = Callable[[Any], str | None]


class _Required:
    """Marks a parameter without a default."""


REQUIRED: Any = _Required()


def in_span(release: str | None, span: str) -> bool:
    """True when `release` is in `span`: comma-separated `first-last`; an empty `last` means up to the newest release.

    `release` None stands for all releases together.
    """
    if release is None:
        return span != ""
    index = RELEASES.index(release)
    for part in filter(None, span.split(",")):
        first, _, last = part.partition("-")
        if RELEASES.index(first) <= index <= (RELEASES.index(last) if last else len(RELEASES)):
            return True
    return False


class Field(Generic[T]):
    """One parameter.

    converter: converts and checks the type of a value.
    default: a Record class stands for a new object of it.
    span: the releases that have it.
    check: returns what a wrong value must be, None for a right one.
    keyword: the releases in which it cannot be given by position.
    newer: (release, default) if the default changed with a release.
    alias: for a deprecated name, the field that holds the value.
    """

    def __init__(
        self,
        kind: ValueType,
        default: Any = REQUIRED,
        span: str = "0.12-",
        *,
        check: Check | None = None,
        keyword: str = "",
        newer: tuple[str, Any] | None = None,
        readonly: bool = False,
        alias: str | None = None,
    ) -> None:
        self.converter = kind
        self.default = default
        self.span = span
        self.check = check
        self.keyword = keyword
        self.newer = newer
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
        value = instance.__dict__[self.alias or self.name]
        return self.converter.fresh(value)  # type: ignore[no-any-return]

    def __set__(self, instance: Record, value: T) -> None:
        if self.readonly or self.alias or not in_span(instance.release, instance.writable):
            raise AttributeError(f"{type(instance).__name__}.{self.name} cannot be set")
        instance.__dict__[self.name] = self.converted(value, type(instance))

    def converted(self, value: Any, owner: type[Record]) -> Any:
        """Convert `value`. Raises TypeError for a wrong type, the owner's exception for a wrong value."""
        strict = in_span(owner.release, f"{NANOBIND_SINCE}-") and owner.release is not None
        try:
            result = self.converter.convert(value, strict)
        except (TypeError, OverflowError) as error:
            raise TypeError(f"{owner.__name__}(): incompatible argument {self.name}: {error}") from None
        problem = self.problem(result, owner) if in_span(owner.release, owner.checked) else None
        if problem:
            raise owner.invalid(problem)
        return result

    def problem(self, value: Any, owner: type[Record]) -> str | None:
        """Return what is wrong with a converted value, or None."""
        expected = self.check(value) if self.check and value is not None else None
        return expected and f"{owner.__name__}.{self.name} is {value!r}; it must be {expected}"

    def initial(self, release: str | None) -> Any:
        """Return the default in `release`."""
        default = self.default
        if self.newer and in_span(release, f"{self.newer[0]}-"):
            default = self.newer[1]
        if isinstance(default, type) and issubclass(default, Record):
            return default.of(release)() if release else default()
        return default


class Record:
    """Base of the interface's parameter classes; subclasses declare `Field`s in positional order."""

    release: ClassVar[str | None] = None
    fields: ClassVar[tuple[Field[Any], ...]] = ()
    parameters: ClassVar[tuple[Field[Any], ...]] = ()
    """The fields that the constructor of this release accepts."""

    writable: ClassVar[str] = ""
    checked: ClassVar[str] = "0.12-"
    dynamic: ClassVar[bool] = False
    invalid: ClassVar[type[Exception]] = RuntimeError

    def __init_subclass__(
        cls, *, writable: str | None = None, checked: str | None = None, dynamic: bool | None = None
    ) -> None:
        """Configure a subclass.

        writable: the releases in which properties can be set. checked: the releases that check values at construction.
        dynamic: whether any attribute can be set.
        """
        super().__init_subclass__()
        cls.writable = cls.writable if writable is None else writable
        cls.checked = cls.checked if checked is None else checked
        cls.dynamic = cls.dynamic if dynamic is None else dynamic
        cls.fields += tuple(value for value in vars(cls).values() if isinstance(value, Field))
        cls.parameters = tuple(field for field in cls.fields if in_span(cls.release, field.span))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind(args, kwargs)
        for field in self.fields:
            if field.alias:
                continue
            value = given.get(field.name, REQUIRED)
            self.__dict__[field.name] = (
                field.initial(self.release) if value is REQUIRED else field.converted(value, type(self))
            )
        self.validate()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by field name. Raises TypeError for arguments that the release does not accept."""
        cls = type(self)
        positional = [f for f in cls.parameters if is_positional(f, cls.release)]
        if len(args) > len(positional):
            raise TypeError(f"{cls.__name__}() takes at most {len(positional)} positional arguments, got {len(args)}")
        named = {f.name: value for f, value in zip(positional, args, strict=False)}
        known = {f.name: f for f in cls.parameters}
        for name, value in kwargs.items():
            if name not in known:
                where = "" if cls.release is None else f" in release {cls.release}"
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}{where}")
            if name in named:
                raise TypeError(f"{cls.__name__}() got two values for {name!r}")
            named[name] = value
        given: dict[str, Any] = {}
        for name, value in named.items():
            alias = known[name].alias
            if alias is None:
                given[name] = value
            elif named.get(alias) is None:  # the newer name wins when both are given
                given[alias] = value
        for field in known.values():
            if field.default is REQUIRED and not field.alias and field.name not in given:
                self.refuse_missing(field.name)
        return given

    def refuse_missing(self, name: str) -> None:
        """Raise for a required parameter that was not given."""
        raise TypeError(f"{type(self).__name__}() missing required argument {name!r}")

    def validate(self) -> None:
        """Check combinations of parameters; subclasses raise."""

    def problems(self) -> list[str]:
        """Return what is wrong with the values, for releases that do not check them at construction."""
        cls = type(self)
        found = (field.problem(self.__dict__[field.name], cls) for field in cls.fields if not field.alias)
        return [problem for problem in found if problem]

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.dynamic and not isinstance(getattr(type(self), name, None), (Field, property)):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (plain_class(type(self)), self.release, dict(self.__dict__))

    def __repr__(self) -> str:
        inner = ", ".join(f"{f.name}={self.__dict__[f.name]!r}" for f in self.fields if not f.alias)
        return f"{type(self).__name__}({inner})"

    @classmethod
    def of(cls, release: str) -> type[Record]:
        """Return this class as `release` has it."""
        plain = plain_class(cls)
        if (plain, release) not in _VIEWS:
            members = {"release": release, "__doc__": plain.__doc__, "__module__": plain.__module__}
            _VIEWS[plain, release] = type(plain.__name__, (plain,), members)
        return _VIEWS[plain, release]


_VIEWS: dict[tuple[type[Record], str], type[Record]] = {}


def plain_class(cls: type[Record]) -> type[Record]:
    """Return the class of all releases that `cls` is a view of."""
    return cls if cls.release is None else plain_class(cls.__mro__[1])


def is_positional(field: Field[Any], release: str | None) -> bool:
    """True when `field` can be given by position; without a release, as in the newest one."""
    release = release or NEWEST
    return in_span(release, field.span) and not in_span(release, field.keyword)


def _restore(cls: type[Record], release: str | None, state: dict[str, Any]) -> Record:
    kind = cls if release is None else cls.of(release)
    record = kind.__new__(kind)
    record.__dict__.update(state)
    return record
