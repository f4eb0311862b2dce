"""A model repository as a short tree: one line per model."""

from __future__ import annotations

from pathlib import Path

from trtserve.repository.parameters import CLASSES_FILE
from trtserve.repository.programs import PACKAGE

# Parts of a program that are not worth listing.
_CODE = (PACKAGE, CLASSES_FILE, "__pycache__")
_MOST_RANKS = 4


def tree(path: Path) -> str:
    """Return the repository as lines of text: models first, each with its files; code modules are left out."""
    entries = sorted(
        (entry for entry in path.iterdir() if _is_shown(entry)), key=lambda entry: (not entry.is_dir(), entry.name)
    )
    width = max((len(entry.name) for entry in entries if entry.is_dir()), default=0)
    lines = [f"{path.name}/"]
    for entry in entries:
        branch = "└── " if entry is entries[-1] else "├── "
        files = f"{'':{width - len(entry.name)}}  {', '.join(_contents(entry))}" if entry.is_dir() else ""
        lines.append(f"{branch}{entry.name}{'/' if entry.is_dir() else ''}{files}".rstrip())
    return "\n".join(lines)


def _is_shown(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.name not in _CODE


def _contents(model: Path) -> list[str]:
    """Return the files of a model and of its version folders; many ranks are shortened."""
    found = []
    for entry in sorted(filter(_is_shown, model.iterdir()), key=lambda entry: (entry.is_dir(), entry.name)):
        inner = sorted(each for each in entry.iterdir() if _is_shown(each)) if entry.is_dir() else []
        found += [f"{entry.name}/{each.name}{'/' if each.is_dir() else ''}" for each in inner]
        if not inner:
            found.append(f"{entry.name}{'/' if entry.is_dir() else ''}")
    ranks = [name for name in found if Path(name).name.startswith("rank")]
    if len(ranks) > _MOST_RANKS:
        others = [name for name in found if name not in ranks]
        found = [*others, f"{ranks[0]} and {len(ranks) - 1} more of its kind"]
    return found
