"""The packages of the lock files; run as a program, print which of them are installed in another version."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / ".ci"
LOCK = FOLDER / "lock.txt"  # of `make test`
ORACLE = FOLDER / "lock-oracle.txt"  # what `make test-oracle` and `make site` need besides, without PyTorch


def locked_packages(*files: Path, python: str = f"{sys.version_info[0]}.{sys.version_info[1]}") -> dict[str, str]:
    """Return the locked version of every package by its canonical name, for Linux on x86-64."""
    machine = {"python_version": python, "python_full_version": f"{python}.9", "platform_machine": "x86_64"}
    found: dict[str, str] = {}
    for file in files:
        for entry in file.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
            if entry.startswith("#"):
                continue
            text, *hashes = entry.split("--hash=sha256:")
            requirement = Requirement(text)
            if not hashes:
                raise ValueError(f"{file} has no hash of {requirement.name}.")
            if requirement.marker is None or requirement.marker.evaluate(machine):
                found[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return found


def main() -> None:
    """Print the packages whose installed version is not the locked one."""
    locked = locked_packages(LOCK, ORACLE)
    installed: dict[str, str] = {canonicalize_name(each.name): each.version for each in metadata.distributions()}
    for name in sorted(locked.keys() | installed.keys()):
        before, now = locked.get(name, "-"), installed.get(name, "-")
        if before != now:
            sys.stdout.write(f"{name:30} locked {before:15} here {now}\n")


if __name__ == "__main__":
    main()
