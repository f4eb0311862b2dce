"""Parameters of a Triton model, read from its config: their values, and those that the embedded executor refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from .files import read_object

_PLACEHOLDER = re.compile(r"^\$\{.*\}$")
_TRUE = ("true", "1", "t", "y", "yes")
_FALSE = ("false", "0", "f", "n", "no")

T = TypeVar("T")


def check_request_type(parameters: str) -> None:
    """Raise ValueError for a request of disaggregated serving; `parameters` are the request's, as JSON."""
    asked = json.loads(parameters or "{}").get("request_type", "")
    if asked not in ("", "context_and_generation"):
        raise ValueError(f"request_type is {asked!r}; this model supports context_and_generation only.")


class ModelParameters:
    """The parameters of one model.

    A value that cannot be read counts as unset, as in NVIDIA's Python models, and `warn` gets one line about it.
    """

    def __init__(self, config: dict[str, Any], repository: Path, warn: Callable[[str], None]) -> None:
        self._entries = config.get("parameters", {})
        self._repository = repository
        self._warn = warn

    def without(self, keys: Collection[str]) -> ModelParameters:
        """Return a copy in which `keys` are unset."""
        entries = {key: entry for key, entry in self._entries.items() if key not in keys}
        return ModelParameters({"parameters": entries}, self._repository, self._warn)

    def text(self, key: str) -> str | None:
        """Return the value, or None when it is absent, empty or an unfilled placeholder of a template."""
        value = str(self._entries.get(key, {}).get("string_value", "")).strip()
        return None if not value or _PLACEHOLDER.match(value) else value

    def integer(self, key: str) -> int | None:
        """Return the value as an integer, or None when it is unset."""
        return self._converted(key, int)

    def number(self, key: str) -> float | None:
        """Return the value as a float, or None when it is unset."""
        return self._converted(key, float)

    def switch(self, key: str) -> bool | None:
        """Boolean by the core model's rule: `1` and `true` in any case are true, any other text is false."""
        value = self.text(key)
        return None if value is None else value.lower() in ("1", "true")

    def choice(self, key: str, *, default: bool) -> bool:
        """Boolean by the other models' rule: true/1/t/y/yes or false/0/f/n/no in any case, else the default."""
        value = self.text(key)
        if value is None:
            return default
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        self._warn(f"Parameter {key} is {value!r}; expected true or false. Using {default}.")
        return default

    def word(self, key: str, words: Collection[str], *, default: str) -> str:
        """Return the value if it is one of `words`; else the default with a warning, as in NVIDIA's backend."""
        value = self.text(key)
        if value is None or value in words:
            return value or default
        self._warn(f"Parameter {key} is {value!r}; expected one of {', '.join(words)}. Using {default}.")
        return default

    def path(self, key: str) -> Path | None:
        """Return the value as a path; a relative path starts at the model repository."""
        value = self.text(key)
        return None if value is None else self._repository / value

    def _converted(self, key: str, convert: Callable[[str], T]) -> T | None:
        value = self.text(key)
        if value is None:
            return None
        try:
            return convert(value)
        except ValueError:
            self._warn(f"Parameter {key} is {value!r}, which is not a number; it is ignored.")
            return None


_FILE = "parameter_classes.json"


def check_classes(
    parameters: ModelParameters, folder: Path, log: Callable[[str], None], *, kept: Collection[str] = ()
) -> ModelParameters:
    """Return `parameters` without those that the runtime ignores. Raises ValueError for one that it refuses.

    Ignored parameters (such as GPUs or paths of another machine) are unset in the result, and one line to `log` lists
    those that had a value. `folder` holds parameter_classes.json; `kept` are parameters that this engine uses.
    """
    classes = _read(folder / _FILE)
    for name, entry in classes["refused"].items():
        if reason := refusal(name, parameters.text(name), entry):
            raise ValueError(reason)
    unused = {name: entry for name, entry in classes["ignored"].items() if name not in kept}
    ignored = [name for name, entry in unused.items() if parameters.text(name) not in (None, entry["unset"])]
    if ignored:
        log(f"Parameters ignored on this runtime: {', '.join(ignored)}")
    return parameters.without(unused)


def refusal(name: str, value: str | None, entry: dict[str, Any]) -> str | None:
    """Return why `value` is refused, or None for a supported or neutral value."""
    if value is None or value.lower() in entry["accepted"]:
        return None
    if entry["values"] and value.lower() not in entry["values"]:
        return None
    return f"Parameter {name} is {value!r}, which this runtime does not support: {entry['why']}."


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) or {"refused": {}, "ignored": {}}
