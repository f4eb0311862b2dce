"""How one declared table of parameters becomes constructors and properties like those of TensorRT-LLM's bindings.

Every parameter is declared once with the releases that know it. `Record.of(release)` gives the class as that release
has it: other releases' keywords are refused, and values convert as its binding tool does (pybind11, from 1.0 on
nanobind).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar, overload

from trtserve.executor.kinds import Kind

RELEASES = (
    *("0.10", "0.11", "0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20", "0.21"),
    *("1.0", "1.1", "1.2"),
)
"""Releases of TensorRT-LLM whose Python surface is known, oldest first."""

NANOBIND_SINCE = "1.0"

T = TypeVar("T")
Check = Callable[[Any], str | None]


class _Required:
    """Marks a parameter without a default."""


REQUIRED: Any = _Required()


def in_span(release: str | None, span: str) -> bool:
    """True when `release` lies in `span`: comma-separated `first-last`, `last` empty for "still there".

    `release` None stands for the union of all releases.
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
    """One parameter: the kind that converts it, its default, its check, and the releases that know it.

    `keyword` is the span in which it cannot be given by position; `newer` gives a default that changed with a
    release; `alias` names the field that holds the value of a deprecated name. A default that is a Record class is
    built anew.
    """

    def __init__(
        self,
        kind: Kind,
        default: Any = REQUIRED,
        span: str = "0.10-",
        *,
        check: Check | None = None,
        keyword: str = "",
        newer: tuple[str, Any] | None = None,
        readonly: bool = False,
        alias: str | None = None,
    ) -> None:
        self.kind = kind
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
        return self.kind.fresh(value)  # type: ignore[no-any-return]

    def __set__(self, instance: Record, value: T) -> None:
        if self.readonly or self.alias or not in_span(instance.release, instance.writable):
            raise AttributeError(f"{type(instance).__name__}.{self.name} cannot be set")
        instance.__dict__[self.name] = self.converted(value, type(instance))

    def converted(self, value: Any, owner: type[Record]) -> Any:
        """`value` as this parameter keeps it; TypeError for a wrong type, the owner's error for a wrong value."""
        strict = in_span(owner.release, f"{NANOBIND_SINCE}-") and owner.release is not None
        try:
            result = self.kind.convert(value, strict)
        except (TypeError, OverflowError) as error:
            raise TypeError(f"{owner.__name__}(): incompatible argument {self.name}: {error}") from None
        problem = self.problem(result, owner) if in_span(owner.release, owner.checked) else None
        if problem:
            raise owner.invalid(problem)
        return result

    def problem(self, value: Any, owner: type[Record]) -> str | None:
        """What is wrong with a converted value; None when nothing is."""
        expected = self.check(value) if self.check and value is not None else None
        return expected and f"{owner.__name__}.{self.name} is {value!r}; it must be {expected}"

    def initial(self, release: str | None) -> Any:
        """The default in `release`."""
        default = self.default
        if self.newer and in_span(release, f"{self.newer[0]}-"):
            default = self.newer[1]
        if isinstance(default, type) and issubclass(default, Record):
            return default.of(release)() if release else default()
        return default


class Record:
    """Base of the interface's parameter classes; subclasses declare `Field`s in positional order.

    `fields` are all of them, `parameters` those that the constructor of the class's release takes.
    """

    release: ClassVar[str | None] = None
    fields: ClassVar[tuple[Field[Any], ...]] = ()
    parameters: ClassVar[tuple[Field[Any], ...]] = ()
    writable: ClassVar[str] = ""
    checked: ClassVar[str] = "0.10-"
    dynamic: ClassVar[bool] = False
    invalid: ClassVar[type[Exception]] = RuntimeError

    def __init_subclass__(
        cls, *, writable: str | None = None, checked: str | None = None, dynamic: bool | None = None
    ) -> None:
        """`writable` is the span of releases whose properties can be set, `checked` that of checks at construction.

        `dynamic` allows arbitrary attributes.
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
        """Arguments by the name of the field that keeps them; TypeError for what the release does not take."""
        cls = type(self)
        positional = [f for f in cls.parameters if is_positional(f, cls.release)]
        if len(args) > len(positional):
            raise TypeError(f"{cls.__name__}() takes at most {len(positional)} positional arguments, got {len(args)}")
        named = {f.name: value for f, value in zip(positional, args, strict=False)}
        known = {f.name: f for f in cls.parameters}
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}{_of(cls.release)}")
            if name in named:
                raise TypeError(f"{cls.__name__}() got two values for {name!r}")
            named[name] = value
        given = _unalias(named, known)
        for field in known.values():
            if field.default is REQUIRED and not field.alias and field.name not in given:
                self.refuse_missing(field.name)
        return given

    def refuse_missing(self, name: str) -> None:
        """Raise for a required parameter that was not given."""
        raise TypeError(f"{type(self).__name__}() missing required argument {name!r}")

    def validate(self) -> None:
        """Check what several parameters say together; subclasses raise."""

    def problems(self) -> list[str]:
        """What is wrong with the values, for releases that do not check them at construction."""
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
        """This class as `release` has it."""
        plain = plain_class(cls)
        if (plain, release) not in _VIEWS:
            members = {"release": release, "__doc__": plain.__doc__, "__module__": plain.__module__}
            _VIEWS[plain, release] = type(plain.__name__, (plain,), members)
        return _VIEWS[plain, release]


_VIEWS: dict[tuple[type[Record], str], type[Record]] = {}


def plain_class(cls: type[Record]) -> type[Record]:
    """The class that knows all releases, of which `cls` may be one release's view."""
    return cls if cls.release is None else plain_class(cls.__mro__[1])


def is_positional(field: Field[Any], release: str | None) -> bool:
    """True when `field` can be given by position; the union of the releases follows the newest."""
    release = release or RELEASES[-1]
    return in_span(release, field.span) and not in_span(release, field.keyword)


def _restore(cls: type[Record], release: str | None, state: dict[str, Any]) -> Record:
    kind = cls if release is None else cls.of(release)
    record = kind.__new__(kind)
    record.__dict__.update(state)
    return record


def _of(release: str | None) -> str:
    return "" if release is None else f" in release {release}"


def _unalias(named: dict[str, Any], known: dict[str, Field[Any]]) -> dict[str, Any]:
    """Values under the names that keep them; the newer name wins when both were given."""

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, value in named.items():
            alias = known[name].alias
            if alias is None:
                yield name, value
            elif named.get(alias) is None:
                yield alias, value

    return dict(pairs())
