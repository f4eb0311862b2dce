"""Python packages: whether those that trtserve needs are installed, and whether the installed ones are compatible."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from trtserve.host.install_command import install_command
from trtserve.server.doctor.findings import EVERY, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_PACKAGE = "trtserve"
_SHOWN = 4


def check_packages(extra: str = "") -> Finding:
    """Check what trtserve requires, with one of its extras; another version than required is a warning."""
    try:
        distribution = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        return Finding(
            group="python",
            name="packages",
            state="warning",
            evidence=f"{_PACKAGE} runs from its source tree, so its requirements are unknown",
            fix=install_command(extra or "cpu"),
        )
    installed = _installed()
    wanted = list(_requirements(distribution, extra))
    wrong = [each for each in wanted if not _fits(each, installed)]
    missing = any(_key(each.name) not in installed for each in wrong)
    words = [_words(each, installed) for each in wrong]
    return Finding(
        group="python",
        name="packages",
        state="failed" if missing else "warning" if wrong else "ok",
        evidence=_joined(words) if words else f"{len(wanted)} required, all installed",
        fix=install_command(extra) if wrong else "",
        needed_by=EVERY,
    )


def check_conflicts() -> Finding:
    """Check for incompatible packages in this environment, as `pip check` does."""
    installed = _installed()
    wrong = [
        f"{distribution.name} {distribution.version}: {_words(each, installed)}"
        for distribution in metadata.distributions()
        for each in _requirements(distribution, "")
        if _key(each.name) in installed and not _fits(each, installed)
    ]
    return Finding(
        group="python",
        name="conflicts",
        state="warning" if wrong else "ok",
        evidence=_joined(list(dict.fromkeys(wrong))) if wrong else f"none among {len(installed)} packages",
        fix="Install trtserve in a separate virtual environment." if wrong else "",
    )


def _installed() -> dict[str, str]:
    """Return versions by normalised name; of several, the first one on sys.path, which Python imports."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:
            found.setdefault(_key(name), version)
    return found


def _requirements(distribution: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of an old package, which pip could not install either
            continue
        markers = requirement.marker
        if markers is None or markers.evaluate({"extra": ""}) or (extra and markers.evaluate({"extra": extra})):
            yield requirement


def _fits(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    version = installed.get(_key(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _words(requirement: Requirement, installed: Mapping[str, str]) -> str:
    here = installed.get(_key(requirement.name), "missing")
    return f"{requirement.name} {here} (wanted {requirement.specifier or 'any'})"


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _joined(parts: list[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more
