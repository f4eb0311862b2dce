"""Facts about each release of TensorRT-LLM: containers, build flags, converters, launcher. One YAML file per subject.

A release is `major.minor` ("0.18", "1.2"): patch releases changed nothing that is recorded here.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.errors import UsageError

RELEASES = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20", "0.21", "1.0", "1.1", "1.2")
NEWEST = RELEASES[-1]  # the newest supported release
LAST_WITH_ENGINES = "1.2"  # the last release with `trtllm-build`, converters and Triton's C++ backend


def order(release: str) -> tuple[int, int]:
    """`0.18.2` → (0, 18)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def release_of(version: str) -> str:
    """`1.0.3.2510` → `1.0`, `0.17.0.post1` → `0.17`, supported or not. Raises UsageError for anything else."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:[.\-+]?[0-9A-Za-z]+)*", version.strip())
    if found is None:
        raise UsageError(f"{version!r} is not a version of TensorRT-LLM.", hint=f"Versions look like {NEWEST}.0.")
    return f"{int(found[1])}.{int(found[2])}"


def normalize_release(text: str, *, option: str = "--release") -> str:
    """`0.18.2` → `0.18`; UsageError, naming `option`, for an unsupported release."""
    release = ".".join(text.strip().removeprefix("v").split(".")[:2])
    if release not in RELEASES:
        raise UsageError(
            f"{option} is {text!r}; supported are {RELEASES[0]} … {NEWEST}.", hint=f"Use one of {', '.join(RELEASES)}."
        )
    return release


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something that exists from release `since` to release `until` (None: still there)."""

    since: str = RELEASES[0]
    until: str | None = None

    def within(self, release: str) -> bool:
        """Return whether the row is part of `release`."""
        return order(self.since) <= order(release) and (self.until is None or order(release) <= order(self.until))


@functools.cache
def load_table(subject: str) -> Any:
    """Return the parsed content of `<subject>.yaml`."""
    import yaml

    text = Path(__file__).with_name(f"{subject}.yaml").read_text(encoding="utf-8")
    # The C loader is ten times as fast; some builds of PyYAML lack it.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
