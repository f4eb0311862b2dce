"""Orchestrator mode: one tritonserver serves several models, whose workers it spawns or finds running."""

from __future__ import annotations

from collections.abc import Sequence

from trtserve.errors import UsageError
from trtserve.host.gpus import count_gpus
from trtserve.nvidia.releases.launcher import ORCHESTRATOR, SPAWN_PROCESSES, launcher_facts
from trtserve.repository.core_models import CoreModel
from trtserve.repository.preflight import Served
from trtserve.server.launch.base import Launch, Setup, under_mpirun
from trtserve.server.launch.devices import (
    require_engines_here,
    require_own_devices,
    require_own_ranks,
    world_of,
)
from trtserve.server.launch.rank_arguments import rank_arguments
from trtserve.specs import ServerSpec

NAME = "orchestrator"


def serves(served: Served, spec: ServerSpec) -> bool:
    """Return whether engines are to be served with --multi-model."""
    return not served.uses_llmapi and spec.multi_model


def check(served: Served, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
    """Raise UsageError for an engine of the embedded executor, RepositoryError for one that is not on this machine."""
    del spec, on_this_machine
    if served.embedded:
        raise UsageError(
            f"--multi-model is for engines of TensorRT-LLM; this repository's is for the {served.runtime} runtime.",
            hint="Start one server for each model, with --gpus and --auto-ports.",
        )
    require_engines_here(served.core_models)


def ranks(served: Served, spec: ServerSpec) -> int:
    """Return 1 for an orchestrator that spawns its workers, else the number of all processes."""
    return 1 if spec.spawn_processes else world_of(served.core_models)


def compose(setup: Setup, served: Served, spec: ServerSpec, *, nodes: int | None = None) -> Launch:
    """Return the launch of the orchestrator, and of its workers when it does not spawn them."""
    gpus = (len(spec.gpus) or count_gpus()) if nodes is None else 0
    return orchestrator(setup, served.core_models, spawn=spec.spawn_processes, gpus=gpus, nodes=nodes or 1)


def orchestrator(
    setup: Setup, models: Sequence[CoreModel], *, spawn: bool = True, gpus: int = 0, nodes: int = 1
) -> Launch:
    """Return the orchestrator alone, which spawns its workers, or with `spawn` False all ranks.

    `gpus` is the number of GPUs of this machine, 0 when unknown. On several `nodes` the caller knows where each rank
    runs, and checks its GPUs (`require_node_devices`). Raises RepositoryError when the devices or ranks of the models
    collide and UsageError for a release whose workers cannot be started beforehand.
    """
    facts = launcher_facts(setup.release)
    if not spawn and not facts.spawn_switch:
        raise UsageError(
            f"Workers can be started before the orchestrator since TensorRT-LLM 0.13; this is {setup.release}.",
            hint="Leave --disable-spawn-processes out.",
        )
    if nodes == 1:
        require_own_devices(models, gpus)
    if not spawn:
        require_own_ranks(models)
    size = 1 if spawn else world_of(models)
    groups = tuple(rank_arguments(setup, rank, emptied_pools=gpus if spawn else None) for rank in range(size))
    environment = {ORCHESTRATOR: "1"}
    if facts.spawn_switch:
        environment[SPAWN_PROCESSES] = "1" if spawn else "0"
    return under_mpirun(setup, NAME, groups, environment)
