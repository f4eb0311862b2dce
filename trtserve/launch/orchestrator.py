"""Orchestrator mode: one tritonserver serves several models, whose workers it spawns or finds already running."""

from __future__ import annotations

from collections.abc import Sequence

from trtserve.errors import UsageError
from trtserve.launch.base import Launch, Setup, under_mpirun
from trtserve.launch.devices import require_own_devices, require_own_ranks, world_of
from trtserve.launch.rank_arguments import rank_arguments
from trtserve.releases.launcher import ORCHESTRATOR, SPAWN_PROCESSES, launcher_facts
from trtserve.triton.core_models import CoreModel


def orchestrator(
    setup: Setup, models: Sequence[CoreModel], *, spawn: bool = True, gpus: int = 0, nodes: int = 1
) -> Launch:
    """The orchestrator alone, which spawns its workers, or with `spawn` False all ranks: it and every worker.

    `gpus` is the number of GPUs of this machine, 0: not known. On several `nodes` the caller knows where each rank is,
    and asks `require_node_devices`. RepositoryError when the devices or ranks of the models collide, UsageError for a
    release whose workers cannot be started before.
    """
    facts = launcher_facts(setup.release)
    if not spawn and not facts.spawn_switch:
        raise UsageError(
            f"Workers can be started before the orchestrator from TensorRT-LLM 0.13 on; this is {setup.release}.",
            hint="Leave --disable-spawn-processes out.",
        )
    if nodes == 1:
        require_own_devices(models, gpus)
    if not spawn:
        require_own_ranks(models)
    ranks = 1 if spawn else world_of(models)
    groups = tuple(rank_arguments(setup, rank, pools=gpus if spawn else None) for rank in range(ranks))
    environment = {ORCHESTRATOR: "1"}
    if facts.spawn_switch:
        environment[SPAWN_PROCESSES] = "1" if spawn else "0"
    return under_mpirun(setup, "orchestrator", groups, environment)
