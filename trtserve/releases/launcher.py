"""What launch_triton_server.py does in each release, as facts that a launch here follows.

Source: scripts/launch_triton_server.py of the tagged releases of the backend, later triton_backend/scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.releases import normalize_release, order

TRITONSERVER = "/opt/tritonserver/bin/tritonserver"
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
"""What an orchestrator spawns where the repository does not say it; the C++ backend has no other default."""
LLMAPI_LAUNCH = "trtllm-llmapi-launch"

GRPC_PORT, HTTP_PORT, METRICS_PORT = 8001, 8000, 8002
CORE_MODEL = "tensorrt_llm"

ORCHESTRATOR = "TRTLLM_ORCHESTRATOR"
"""Environment: 1 in orchestrator mode."""

SPAWN_PROCESSES = "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"
"""Environment: 1 when the orchestrator spawns its workers, 0 when they are started before."""


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """How the command of one release is composed, and where its examples lie.

    `ports_twice`: the three port arguments stand right after the repository and again at their old place.
    `no_mpi`: a world of one rank may be started without mpirun. `llmapi_launch`: trtllm-llmapi-launch exists.
    `exit_timeout`: --exit-timeout-secs is passed on, right after the repository. `spawn_switch`: workers may be
    started before the orchestrator (--disable-spawn-processes). `memory_pools`: rank 0 may get a CUDA pool, and
    orchestrator mode empties the pools. `examples` is a folder in the containers, where guides before 0.17 mount a
    checkout.
    """

    ports_twice: bool
    no_mpi: bool
    llmapi_launch: bool
    exit_timeout: bool
    spawn_switch: bool
    memory_pools: bool
    examples: str


def launcher_facts(release: str) -> LauncherFacts:
    """The facts of a release; UsageError for one that the tables lack. Paths are those inside its containers."""
    wanted = normalize_release(release)
    since = order(wanted)
    top = "/app" if since >= (0, 17) else "/tensorrtllm_backend"
    return LauncherFacts(
        ports_twice=since >= (0, 19),
        no_mpi=since >= (0, 19),
        llmapi_launch=since >= (1, 0),
        exit_timeout=since >= (1, 0),
        spawn_switch=since >= (0, 13),
        memory_pools=since >= (0, 13),
        examples=f"{top}/examples" if wanted in ("0.17", "0.18") else f"{top}/tensorrt_llm/examples",
    )
