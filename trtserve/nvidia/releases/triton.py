"""How NVIDIA's scripts launch Triton in each release, and its known security faults.

Tables: `launcher.yaml`, `advisories.yaml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.errors import listing
from trtserve.nvidia.releases import Row, load_table, normalize_release

TRITONSERVER = "/opt/tritonserver/bin/tritonserver"
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
"""Program that an orchestrator spawns unless the repository names one; the C++ backend's only default."""
LLMAPI_LAUNCH = "trtllm-llmapi-launch"

CORE_MODEL = "tensorrt_llm"

ORCHESTRATOR = "TRTLLM_ORCHESTRATOR"
"""Environment: 1 in orchestrator mode."""

SPAWN_PROCESSES = "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"
"""Environment: 1 when the orchestrator spawns its workers, 0 when they are started before."""


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """What the launcher of one release does; `launcher.yaml` explains the switches."""

    ports_twice: bool
    no_mpi: bool
    llmapi_launch: bool
    exit_timeout: bool
    spawn_switch: bool
    memory_pools: bool
    examples: str  # folder of the examples inside the containers


@dataclass(frozen=True, kw_only=True)
class _Examples(Row):
    folder: str


def launcher_facts(release: str) -> LauncherFacts:
    """Return the facts of a release. Raises UsageError for an unsupported one."""
    wanted = normalize_release(release)
    table = load_table("launcher")
    switches = {name: Row(since=first).within(wanted) for name, first in table["since"].items()}
    examples = (_Examples(**row) for row in table["examples"])
    return LauncherFacts(**switches, examples=next(each.folder for each in examples if each.within(wanted)))


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
