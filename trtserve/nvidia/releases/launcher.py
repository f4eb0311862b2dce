"""How launch_triton_server.py composes its command in each release (`launcher.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.nvidia.releases import Row, normalize_release
from trtserve.nvidia.releases.tables import load_table

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
