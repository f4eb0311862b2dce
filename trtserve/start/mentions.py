"""Places outside a model repository that its files name, and that a container must see too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_STRING = re.compile(r"""string_value:\s*["'](/[^"']+)["']""")
_YAML = re.compile(r"""^(?:model|tokenizer):\s*["']?(/[^"'\s#]+)""", re.MULTILINE)


def named_paths(repository: Path) -> tuple[Path, ...]:
    """Absolute paths in the configurations that exist on this machine and lie outside the repository, each once."""
    return tuple(path for path in _outside(repository) if path.exists())


def unseen_paths(repository: Path) -> tuple[Path, ...]:
    """Those that are not on this machine."""
    return tuple(path for path in _outside(repository) if not path.exists())


def _outside(repository: Path) -> Iterator[Path]:
    texts = [(path, _STRING) for path in repository.glob("*/config.pbtxt")]
    texts += [(path, _YAML) for path in repository.glob("*/1/model.yaml")]
    named = (Path(text) for path, pattern in texts for text in pattern.findall(path.read_text(encoding="utf-8")))
    # Files of the image keep their meaning there, also where this machine has them too.
    own = (repository.absolute(), Path("/opt/tritonserver"))
    yield from dict.fromkeys(path for path in named if not any(path.is_relative_to(folder) for folder in own))


def hub_cache() -> Path | None:
    """The folder of the Hugging Face hub's downloads, for models that are named by their id; None without one."""
    folder = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return folder if folder.is_dir() else None
