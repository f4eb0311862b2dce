"""Options of specs: a field declares its flags, help, unit and range once; everything else is derived from it.

`tp_size: int = option(1, "--tp-size", help="…", minimum=1)` gives the command line its option,
`docs/reference/cli/` its line, the spec its check and `command_line.py` the words that ask for the same value.
Nothing here knows the command line. Options that several stages share are at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from trtserve.errors import UsageError, did_you_mean

INT32 = 2**31 - 1  # largest integer of Triton's configuration and of TensorRT-LLM's SizeType32
UINT64 = 2**64 - 1
# Of numbers that are not whole: a time or a rate beyond these would overflow where it is used.
_SMALLEST, _LARGEST = 1e-9, 10**9

_METADATA = "option"


@dataclass(frozen=True, kw_only=True)
class _Declaration:
    flags: tuple[str, ...]
    help: str
    panel: str | None
    common: bool
    metavar: str | None
    minimum: float | None
    maximum: float | None
    above: float | None
    separator: str | None
    unset: str | None
    variable: str | None
    extra: Mapping[str, Any]


def option(
    default: Any,
    *flags: str,
    help: str,  # noqa: A002 - what every command line calls it
    panel: str | None = None,
    common: bool = False,
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    separator: str | None = None,
    unset: str | None = None,
    variable: str | None = None,
    **extra: Any,
) -> Any:
    """Declare a field of a spec together with its option.

    `flags` default to the field's name; a switch with two sides is written "--streaming/--no-streaming", one that only
    turns off "/--no-reuse". `panel` is the heading in the help; `common` options stand above all headings. `metavar`
    names the value or its unit (TOKENS, SECONDS). Numbers lie between `minimum` and `maximum`, or `above` a bound. A
    list with a `separator` may be given in one word. `unset` says what None means. `variable` is an environment
    variable besides TRTSERVE_COMMAND_OPTION. `extra` is kept for the owner of the spec.
    """
    declaration = _Declaration(
        flags=flags,
        help=help,
        panel=panel,
        common=common,
        metavar=metavar,
        minimum=minimum,
        maximum=maximum,
        above=above,
        separator=separator,
        unset=unset,
        variable=variable,
        extra=extra,
    )
    metadata = {_METADATA: declaration}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """The option of one field: its declaration, and what follows from the field's type."""

    name: str
    type: Any  # without None; of a list or mapping the type of its values
    default: Any
    container: Literal["tuple", "dict"] | None
    nullable: bool
    declared: _Declaration

    @functools.cached_property
    def flags(self) -> tuple[str, ...]:
        """Spellings that set the value; for a switch those that turn it on."""
        given = self.declared.flags or ("--" + self.name.replace("_", "-"),)
        return tuple(on for flag in given if (on := flag.partition("/")[0]))

    @functools.cached_property
    def off_flags(self) -> tuple[str, ...]:
        """Spellings that turn a switch off."""
        return tuple(off for flag in self.declared.flags if (off := flag.partition("/")[2]))

    @property
    def flag(self) -> str:
        """The first spelling."""
        return (*self.flags, *self.off_flags)[0]

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that are allowed, or empty when the type does not list them."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def repeatable(self) -> bool:
        """Whether the option may be given several times."""
        return self.container is not None

    @property
    def metavar(self) -> str | None:
        """What stands for the value in the help, or None for a switch."""
        if self.type is bool:
            return None
        return self.declared.metavar or metavar_of(self.type)

    def check(self, value: Any) -> None:
        """Raise UsageError unless `value` is None, one of the choices or within the range."""
        if value is None:
            return
        if self.container == "tuple":
            for each in value:
                self._check_one(each)
        elif self.container is None:
            self._check_one(value)

    def _check_one(self, value: Any) -> None:
        if self.choices:
            if value not in self.choices:
                raise _no_choice(self.flag, value, self.choices)
        elif self.type in (int, float) and not self._in_range(value):
            raise UsageError(f"{self.flag} is {value!s:.80}; it must be {self._range(value)}.")

    @property
    def maximum(self) -> float | None:
        """The largest number; unless declared otherwise integers have 32 bits, others end at a billion."""
        if self.declared.maximum is not None or self.type not in (int, float):
            return self.declared.maximum
        return INT32 if self.type is int else _LARGEST

    def _in_range(self, value: float) -> bool:
        low, high, above = self.declared.minimum, self.maximum, self.declared.above
        return (
            abs(value) <= max(high or 0, UINT64 if self.type is int else _LARGEST)  # false for NaN
            and (low is None or value >= low)
            and (above is None or value > above + (self.type is float) * _SMALLEST)
            and (high is None or value <= high)
        )

    def _range(self, value: float) -> str:
        low, high, above = self.declared.minimum, self.declared.maximum, self.declared.above
        lower = f"at least {low}" if low is not None else f"above {above}" if above is not None else None
        if high is not None:
            return f"{lower} and at most {high}" if lower else f"at most {high}"
        if self.maximum is not None and value > self.maximum:
            return f"at most {self.maximum}"
        if above is not None and value > above:
            return f"above {above + _SMALLEST}"
        return lower or (f"at least {-_LARGEST}" if value < 0 else "a finite number")

    def value_of(self, given: Any) -> Any:
        """Return the field's value for what the command line gives: a list of words for tuples and mappings."""
        if self.container is None:
            return given
        if given is None or (not given and not self.nullable):
            return None if self.nullable else {} if self.container == "dict" else ()
        words = [part for text in given for part in text.split(self.declared.separator)] if self.split else given
        if self.container == "tuple":
            return tuple(read_value(self.type, word, self.flag) if isinstance(word, str) else word for word in words)
        values: dict[str, Any] = {}
        for word in words:
            key, sign, value = word.partition("=")
            if not key or not sign or (not value and self.type is Path):
                raise UsageError(f"{self.flag} is {word!r}; expected {self.metavar}.")
            if key in values:
                raise UsageError(f"{self.flag} gives {key} twice.")
            values[key] = _path_or_name(value) if self.type is Path else read_value(self.type, value, self.flag)
        return values

    @property
    def split(self) -> bool:
        """Whether one word may hold several values."""
        return self.declared.separator is not None

    def from_json(self, value: Any) -> Any:
        """Return the field's value for its JSON, which has neither tuples nor paths."""
        if value is None:
            return None
        if self.container == "dict":
            return {key: Path(each) if self.type is Path else each for key, each in value.items()}
        if self.container == "tuple":
            return tuple(value)
        return Path(value) if self.type is Path else value


def _path_or_name(text: str) -> Path:
    # A bare word may be a name of the store, so it is kept.
    path = Path(text)
    return path if text == path.name else path.expanduser().absolute()


def metavar_of(kind: Any) -> str:
    """Return what stands for a value of type `kind` in the help."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def read_value(kind: Any, text: str, name: str) -> Any:
    """Return `text` as `kind`: int, float, bool, Path, str or a Literal; UsageError names the option `name`."""
    try:
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
        if kind is bool:
            return _SWITCH[text.lower()]
    except (ValueError, KeyError):
        raise UsageError(f"{name} is {text!r}; expected {_EXPECTED[kind]}.") from None
    if get_origin(kind) is Literal:
        found = next((choice for choice in get_args(kind) if str(choice) == text), None)
        if found is None:
            raise _no_choice(name, text, get_args(kind))
        return found
    return Path(text) if kind is Path else text


def _no_choice(name: str, value: Any, choices: Sequence[Any]) -> UsageError:
    """Return the error for a value that is not one of the choices, with the closest in the hint."""
    known = list(map(str, choices))
    ours = OTHER_VALUES.get(str(value).lower())
    hint = f"{value} is {ours} here." if ours in known else did_you_mean(str(value), known, most=2)
    return UsageError(f"{name} is {value!r}; expected one of {', '.join(known)}.", hint=hint or None)


OTHER_VALUES = {
    **dict.fromkeys(("int4_wo", "4bit", "q4_0", "w4a16"), "int4"),
    **dict.fromkeys(("int8_wo", "8bit", "q8_0", "w8a16"), "int8"),
    **dict.fromkeys(("awq", "w4a16_awq"), "int4_awq"),
    **dict.fromkeys(("sq", "smoothquant"), "int8_sq"),
    "fp8_e4m3": "fp8",
    "full_prec": "none",
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float"), "float32"),
}
"""What other tools call a value → our name for it, where that is one of an option's choices."""
_EXPECTED = {int: "an integer", float: "a number", bool: "true or false"}
_SWITCH = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


class Spec:
    """Base of all specs; checks every field against its option when a spec is made."""

    def __post_init__(self) -> None:
        for each in options_of(type(self)).values():
            each.check(getattr(self, each.name))


def options_of(spec: type[Any]) -> Mapping[str, Option]:
    """Return field → option of a spec, those of its base classes last; fields without an option are left out."""
    return _options_of(cast(Hashable, spec))


@functools.cache
def _options_of(spec: Any) -> Mapping[str, Option]:
    hints = get_type_hints(spec)
    fields = sorted(dataclasses.fields(spec), key=lambda field: field.name not in spec.__annotations__)
    return {field.name: _option(field, hints[field.name]) for field in fields if _METADATA in field.metadata}


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    nullable = get_origin(hint) in (Union, UnionType)
    if nullable:
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    origin = get_origin(hint)
    container: Literal["tuple", "dict"] | None = None
    if origin in (tuple, Sequence):
        container, hint = "tuple", get_args(hint)[0]
    elif origin is dict:
        container, hint = "dict", get_args(hint)[1]
    return Option(
        name=field.name,
        type=hint,
        default=default_of(field),
        container=container,
        nullable=nullable,
        declared=field.metadata[_METADATA],
    )


def panel_of(field: dataclasses.Field[Any]) -> str | None:
    """Return the heading of a field's option, if it has any."""
    declared = field.metadata.get(_METADATA)
    return None if declared is None else declared.panel


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field; MISSING if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def given_flags(spec: Any, names: Sequence[str] = ()) -> list[str]:
    """Return the flags of the fields, among `names` if there are any, that differ from their default."""
    options = options_of(type(spec))
    return [options[name].flag for name in names or options if getattr(spec, name) != options[name].default]


def setting_value(key: str, text: str) -> Any:
    """Return the value of `--set key=text`. Raises UsageError for what is not YAML, or has no place in JSON."""
    import yaml

    try:
        value = yaml.safe_load(text)
        json.dumps(value)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # ValueError: a date such as 2001-99-99
        dated = isinstance(error, TypeError)
        reason = "a date, a set or bytes" if dated else f"not YAML: {getattr(error, 'problem', None) or error}"
        raise UsageError(
            f"--set {key}={text}: the value is {reason}.", hint=f"""A text in quotes: --set '{key}="…"'"""
        ) from None
    return value


def put_setting(into: dict[str, Any], key: str, value: object) -> None:
    """Set the keyword `key`. Raises UsageError when a part of it has a value that has no parts."""
    *parents, name = key.split(".")
    for parent in parents:
        into = into.setdefault(parent, {})
        if not isinstance(into, dict):
            raise UsageError(f"--set {key}: {parent} is set to {into!r} and has no parts.")
    into[name] = value


NVIDIA_TOOLS = "NVIDIA's tools"
_nvidia_tools = functools.partial(option, panel=NVIDIA_TOOLS)


@dataclass(frozen=True, kw_only=True)
class ForRelease(Spec):
    """The TensorRT-LLM to work for."""

    trtllm_version: str | None = _nvidia_tools(
        None,
        metavar="VERSION",
        help="TensorRT-LLM to work for, such as 1.2.0.",
        unset="the engine's, else the installed one",
        variable="TRTSERVE_TRTLLM_VERSION",
    )


@dataclass(frozen=True, kw_only=True)
class InContainer(ForRelease):
    """The container to run NVIDIA's tools in."""

    container: str | None = _nvidia_tools(
        None,
        "--container",
        "--container-image",
        metavar="IMAGE",
        help="Run NVIDIA's tools in this container: a tag such as 25.12, or an image by name or digest.",
    )
    container_flags: tuple[str, ...] = _nvidia_tools(
        (),
        "--container-flag",
        metavar="FLAG",
        help="Pass FLAG to docker run unchanged, for example --container-flag=--shm-size=8g; repeatable.",
    )
