"""How the Python models read parameters: those of their config.pbtxt, and those that a request carries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

_PLACEHOLDER = re.compile(r"^\$\{.*\}$")
_TRUE = ("true", "1", "t", "y", "yes")
_FALSE = ("false", "0", "f", "n", "no")

T = TypeVar("T")


def check_request_type(parameters: str) -> None:
    """Refuse with ValueError the half requests of disaggregated serving; `parameters` are a request's, as JSON."""
    asked = json.loads(parameters or "{}").get("request_type", "")
    if asked not in ("", "context_and_generation"):
        raise ValueError(f"request_type is {asked!r}; this model carries out context_and_generation only.")


class ModelParameters:
    """The parameters of one model.

    `warn` receives one line for each value that cannot be read; such a value counts as unset, as in NVIDIA's
    python models.
    """

    def __init__(self, config: dict[str, Any], repository: Path, warn: Callable[[str], None]) -> None:
        self._entries = config.get("parameters", {})
        self._repository = repository
        self._warn = warn

    def without(self, keys: Collection[str]) -> ModelParameters:
        """The same parameters, of which those called `keys` are unset."""
        entries = {key: entry for key, entry in self._entries.items() if key not in keys}
        return ModelParameters({"parameters": entries}, self._repository, self._warn)

    def text(self, key: str) -> str | None:
        """The value; None when it is absent, empty or a placeholder that nobody filled."""
        value = str(self._entries.get(key, {}).get("string_value", "")).strip()
        return None if not value or _PLACEHOLDER.match(value) else value

    def integer(self, key: str) -> int | None:
        """The value as an integer."""
        return self._converted(key, int)

    def number(self, key: str) -> float | None:
        """The value as a float."""
        return self._converted(key, float)

    def switch(self, key: str) -> bool | None:
        """Core-model rule: `1` and `true` in any case are true, every other text is false."""
        value = self.text(key)
        return None if value is None else value.lower() in ("1", "true")

    def choice(self, key: str, *, default: bool) -> bool:
        """Tokenizer-model rule: true/1/t/y/yes and false/0/f/n/no in any case; other words give the default."""
        value = self.text(key)
        if value is None:
            return default
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        self._warn(f"Parameter {key} is {value!r}; expected true or false. Using {default}.")
        return default

    def word(self, key: str, words: Collection[str], *, default: str) -> str:
        """The value, one of `words`; any other gives the default, with a warning, as in NVIDIA's backend."""
        value = self.text(key)
        if value is None or value in words:
            return value or default
        self._warn(f"Parameter {key} is {value!r}; expected one of {', '.join(words)}. Using {default}.")
        return default

    def path(self, key: str) -> Path | None:
        """The value as a path; a relative one starts at the model repository."""
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
