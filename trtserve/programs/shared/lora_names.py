"""The named LoRA adapters of a repository: `lora.json` and the files that it lists."""

from __future__ import annotations

import threading
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import decoded, read_array
from .files import read_json

NOT_CACHED = "not found in cache"  # part of the core model's error for a task id whose adapter is not in its cache


def name_of(value: NDArray[Any] | None) -> str | None:
    """Return the name in the tensor `lora_name`, or None when it is absent or empty.

    Raises ValueError when rows differ.
    """
    names = set() if value is None else {decoded(name, "lora_name") for name in value.reshape(-1)}
    if len(names) > 1:
        given = ", ".join(repr(name) for name in sorted(names))
        raise ValueError(f"lora_name differs between the rows of one batch ({given}); send one request per adapter.")
    return next(iter(names), None) or None


class LoraNames:
    """Adapter name → task id and tensors; thread-safe.

    `lora.json` is `{"adapters": {name: {"task_id": number, "folder": relative path}}}`; without the file there are no
    named adapters. A table that is replaced is read again. One that is broken then changes nothing.
    """

    def __init__(self, repository: Path, table: str = "lora.json") -> None:
        """Read the table; the adapters are read on first use. Raises ValueError for a broken file."""
        self._repository, self._path = repository, repository / table
        self._written = _written(self._path)
        self._adapters = _adapters(self._path)
        self._tensors: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._lock = threading.Lock()

    @property
    def table(self) -> str:
        """Name of the table's file."""
        return self._path.name

    @property
    def names(self) -> tuple[str, ...]:
        self._look()
        return tuple(sorted(self._adapters))

    def _look(self) -> None:
        """Read the table again if it was replaced."""
        if (written := _written(self._path)) == self._written:
            return
        with self._lock:
            self._written = written
            try:
                adapters = _adapters(self._path)
            except ValueError:
                return
            known = self._adapters
            self._tensors = {name: each for name, each in self._tensors.items() if adapters.get(name) == known[name]}
            self._adapters = adapters

    def task_id(self, name: str) -> int:
        """Return the id under which the core model caches the adapter; ValueError lists the known names."""
        self._look()
        if name not in self._adapters:
            known = f"it has {', '.join(self.names)}" if self._adapters else "it has none"
            raise ValueError(f"lora_name is {name!r}, which this repository does not know; {known}.")
        return int(self._adapters[name]["task_id"])

    def tensors(self, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return weights FP16 [1, rows, width] and config INT32 [1, rows, 3].

        Raises ValueError for unreadable files.
        """
        self.task_id(name)
        with self._lock:
            if name not in self._tensors:
                self._tensors[name] = self._read(name)
            return self._tensors[name]

    def _read(self, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        folder = self._repository / str(self._adapters[name]["folder"])
        try:
            weights = read_array(folder / "model.lora_weights.npy")
            config = read_array(folder / "model.lora_config.npy")
        except ValueError as error:
            raise ValueError(f"The files of the LoRA adapter {name} cannot be read: {error}") from error
        return weights.astype(np.float16, copy=False), config.astype(np.int32, copy=False)


def _written(path: Path) -> tuple[int, int]:
    """Return what changes when a file is replaced."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _adapters(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        adapters = read_json(path)["adapters"]
        found = {str(name): {"task_id": int(entry["task_id"]), **entry} for name, entry in adapters.items()}
        outside = [name for name, entry in found.items() if {"..", "/"} & set(PurePosixPath(entry["folder"]).parts)]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a table of LoRA adapters: {error!r}") from error
    if outside:
        raise ValueError(f"{path.name} has the adapter {outside[0]!r} in a folder that is not below the repository.")
    return found
