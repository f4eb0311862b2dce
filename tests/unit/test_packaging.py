"""What an installed wheel must hold: every module, and every file that is data to the product."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# pytest brings tomli where Python has no reader.
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trtserve"


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["trtserve"]
    data = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    modules = {path for path in PACKAGE.rglob("*.py") if _is_package(path.parent)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert sorted(str(path.relative_to(ROOT)) for path in files - data - modules) == []


def test_every_pattern_of_package_data_finds_something() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for pattern in project["tool"]["setuptools"]["package-data"]["trtserve"]:
        assert list(PACKAGE.glob(pattern)), pattern


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_lock_file_satisfies_every_requirement(python: str) -> None:
    """Fails when a requirement of pyproject.toml was added or changed without `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    machine = {"python_version": python, "python_full_version": f"{python}.9", "platform_machine": "x86_64"}
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras["cpu"], *extras["dev"])]
    locked: dict[str, str] = {}
    for entry in (ROOT / ".ci" / "lock.txt").read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        requirement, *hashes = entry.split("--hash=sha256:")
        if requirement.startswith("#"):
            continue
        found = Requirement(requirement)
        assert hashes, f"{found.name} has no hash"
        if found.marker is None or found.marker.evaluate(machine):
            locked[canonicalize_name(found.name)] = str(found.specifier).removeprefix("==")
    unmet = [
        str(each)
        for each in wanted
        if each.marker is None or each.marker.evaluate(machine)
        if (version := locked.get(canonicalize_name(each.name))) is None or not each.specifier.contains(version)
    ]
    assert unmet == [], "run `make lock`"


def _is_package(folder: Path) -> bool:
    """True when `folder` and all above it, up to the package, have an `__init__.py`."""
    above = [folder, *folder.parents]
    return all((level / "__init__.py").exists() for level in above[: above.index(PACKAGE) + 1])
