"""Where a result comes from: versions, command, prompts, model and machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtserve._version import __version__
from trtserve.artifacts import Manifest
from trtserve.bench.requests import TrafficRequest
from trtserve.errors import ArtifactError

_PACKAGES = ("grpcio", "httptools", "uvloop", "numpy", "tritonclient")
_CPU_INFO = Path("/proc/cpuinfo")


def prompts_hash(requests: Iterable[TrafficRequest]) -> str:
    """Return the SHA-256 of all prompts and output lengths."""
    found = hashlib.sha256()
    for request in requests:
        found.update(request.token_ids.tobytes() + request.output_len.to_bytes(4, "little"))
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of this program and of what sends its requests."""
    found = {"trtserve": __version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in _PACKAGES}


def machine() -> dict[str, Any]:
    """Describe this machine."""
    import psutil

    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": model or platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
    }


def command() -> str:
    """Return the command line of this process."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def fingerprint(folder: Path | None) -> str | None:
    """Return the fingerprint of a repository or an engine, or None when it has no manifest."""
    if folder is None:
        return None
    try:
        return Manifest.read(folder).fingerprint
    except ArtifactError:
        return None
