"""What launch_triton_server.py does in each release, as facts that a launch here follows.

Source: scripts/launch_triton_server.py of the tagged releases of the backend, later triton_backend/scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.releases import normalize_release, order

TRITONSERVER = "/opt/tritonserver/bin/tritonserver"
LLMAPI_LAUNCH = "trtllm-llmapi-launch"

GRPC_PORT, HTTP_PORT, METRICS_PORT = 8001, 8000, 8002
CORE_MODEL = "tensorrt_llm"

ORCHESTRATOR = "TRTLLM_ORCHESTRATOR"
"""Environment: 1 in orchestrator mode."""

SPAWN_PROCESSES = "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"
"""Environment: 1 when the orchestrator spawns its workers, 0 when they are started before."""


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """How the command of one release is composed, and where its tools lie.

    `ports_twice`: the three port arguments stand right after the repository and again at their old place.
    `log_after_ports`: the log arguments of rank 0 follow the first group of ports instead of the repository.
    `no_mpi`: a world of one rank may be started without mpirun. `llmapi_launch`: trtllm-llmapi-launch exists.
    `exit_timeout`: --exit-timeout-secs is passed on, right after the repository. `spawn_switch`: workers may be
    started before the orchestrator (--disable-spawn-processes). `memory_pools`: rank 0 may get a CUDA pool, and
    orchestrator mode empties the pools. `oversubscribe`: mpirun may be told to oversubscribe. `scripts`, `templates`,
    `tools` and `examples` are folders in the containers, where guides before 0.17 mount a checkout.
    """

    release: str
    ports_twice: bool
    log_after_ports: bool
    no_mpi: bool
    llmapi_launch: bool
    exit_timeout: bool
    spawn_switch: bool
    memory_pools: bool
    oversubscribe: bool
    scripts: str
    templates: str
    tools: str
    examples: str


def launcher_facts(release: str) -> LauncherFacts:
    """The facts of a release; UsageError for one that the tables lack. Paths are those inside its containers."""
    wanted = normalize_release(release)
    since = order(wanted)
    top = "/app" if since >= (0, 17) else "/tensorrtllm_backend"
    return LauncherFacts(
        release=wanted,
        ports_twice=since >= (0, 19),
        log_after_ports=since >= (0, 19),
        no_mpi=since >= (0, 19),
        llmapi_launch=since >= (1, 0),
        exit_timeout=since >= (1, 0),
        spawn_switch=since >= (0, 13),
        memory_pools=since >= (0, 13),
        oversubscribe=since >= (0, 11),
        scripts=f"{top}/scripts",
        templates=f"{top}/all_models/inflight_batcher_llm",
        tools=f"{top}/tools",
        examples=f"{top}/examples" if wanted in ("0.17", "0.18") else f"{top}/tensorrt_llm/examples",
    )
