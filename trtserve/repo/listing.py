"""A folder as a tree of text lines."""

from __future__ import annotations

from pathlib import Path


def tree(path: Path) -> str:
    """The folder as a tree of text lines, directories first; the modules beside a `model.py` are counted, not named."""
    return "\n".join([f"{path.name}/", *_branches(path, "")])


def _branches(folder: Path, indent: str) -> list[str]:
    entries = sorted(
        (entry for entry in folder.iterdir() if not entry.name.startswith(".")),
        key=lambda entry: (not entry.is_dir(), entry.name),
    )
    modules = [entry for entry in entries if entry.suffix == ".py" and entry.name != "model.py"]
    shown = [entry for entry in entries if entry not in modules]
    lines = []
    for number, entry in enumerate(shown, start=1):
        last = number == len(shown)
        more = f" (and {len(modules)} modules)" if entry.name == "model.py" and modules else ""
        lines.append(f"{indent}{'└── ' if last else '├── '}{entry.name}{'/' if entry.is_dir() else ''}{more}")
        if entry.is_dir():
            lines += _branches(entry, indent + ("    " if last else "│   "))
    return lines
