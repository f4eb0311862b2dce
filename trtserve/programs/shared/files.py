"""Read the small files of a repository, which may come from strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_TABLE = 16 << 20  # bytes of a configuration or table
MOST_TOKENIZER = 64 << 20  # bytes of a tokenizer's file; the largest known one has 34 MB


def read_text(path: Path, most: int = MOST_TABLE) -> str:
    """Return the text in a regular file of at most `most` bytes. Raises ValueError for any other, and OSError."""
    if path.exists() and not path.is_file():  # a pipe would block, a device never end
        raise ValueError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most >> 20} MiB, which is the most that is read")
    return content.decode()


def read_json(path: Path, most: int = MOST_TABLE) -> Any:
    """Return the JSON in a regular file. Raises ValueError for anything else, and OSError."""
    try:
        return json.loads(read_text(path, most))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


def read_object(path: Path, most: int = MOST_TABLE) -> dict[str, Any]:
    """Return the JSON object in a regular file, or an empty one where there is no file. Raises ValueError, OSError."""
    content = read_json(path, most) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")  # noqa: TRY004 - whoever loads a model reports ValueError
    return content
