"""A folder as a tree of text lines."""

from __future__ import annotations

from pathlib import Path


def tree(path: Path) -> str:
    """The folder as a tree of text lines, directories first."""
    return "\n".join([f"{path.name}/", *_branches(path, "")])


def _branches(folder: Path, indent: str) -> list[str]:
    entries = sorted(
        (entry for entry in folder.iterdir() if not entry.name.startswith(".")),
        key=lambda entry: (not entry.is_dir(), entry.name),
    )
    lines = []
    for number, entry in enumerate(entries, start=1):
        last = number == len(entries)
        lines.append(f"{indent}{'└── ' if last else '├── '}{entry.name}{'/' if entry.is_dir() else ''}")
        if entry.is_dir():
            lines += _branches(entry, indent + ("    " if last else "│   "))
    return lines
