"""The command that installs an extra of trtserve, from where trtserve itself was installed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlparse


def install_command(extra: str | None = None) -> str:
    """Return `pip install` with the clone that trtserve came from, or with its name; `extra` is cpu, oracle …"""
    clone = _clone()
    place = "trtserve" if clone is None else "." if clone == Path.cwd() else str(clone)
    return f"pip install {shlex.quote(f'{place}[{extra}]' if extra else place)}"


def _clone() -> Path | None:
    """The folder that trtserve was installed from, or runs from, or None for an installation from a package index."""
    source = Path(__file__).parents[2]
    if (source / "pyproject.toml").is_file():
        return source
    from importlib import metadata

    try:
        origin = json.loads(metadata.distribution("trtserve").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = urlparse(str(origin.get("url", "")))
    folder = Path(unquote(url.path))
    return folder if url.scheme == "file" and (folder / "pyproject.toml").is_file() else None
