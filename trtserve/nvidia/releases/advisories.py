"""Known security faults of Triton, by container (`advisories.yaml`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.errors import listing
from trtserve.nvidia.releases.tables import load_table

EMBEDDED_TAG = "24.10"
"""The container with the Triton of the package nvidia-pytriton, 2.51."""


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """One security bulletin of NVIDIA."""

    bulletin: str  # its number
    fixed: str  # tag of the first container without the faults
    what: str
    cves: tuple[str, ...]


def advisories_of(tag: str) -> tuple[Advisory, ...]:
    """Return the bulletins whose faults the Triton of a container has, oldest first."""
    rows = load_table("advisories")["advisories"]
    return tuple(Advisory(**{**row, "cves": tuple(row["cves"])}) for row in rows if tag < row["fixed"])


def known_faults(tag: str) -> str | None:
    """Return a sentence about the known faults of a container's Triton, or None when there are none."""
    found: Sequence[Advisory] = advisories_of(tag)
    if not found:
        return None
    cves = [cve for advisory in found for cve in advisory.cves]
    harm = "; ".join(dict.fromkeys(advisory.what for advisory in found))
    fixed = max(advisory.fixed for advisory in found)
    return f"Triton {tag} has {len(cves)} known faults ({listing(cves)}): {harm}. Fixed in {fixed}."
