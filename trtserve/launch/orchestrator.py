"""Orchestrator mode: one tritonserver serves several models, whose workers it spawns or finds already running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trtserve.errors import RepositoryError, UsageError
from trtserve.launch.base import Launch, Setup, under_mpirun
from trtserve.launch.core_models import CoreModel
from trtserve.launch.rank_arguments import rank_arguments
from trtserve.releases.launcher import ORCHESTRATOR, SPAWN_PROCESSES, launcher_facts


def orchestrator(setup: Setup, models: Mapping[str, CoreModel], *, spawn: bool = True, gpus: int = 0) -> Launch:
    """The orchestrator alone, which spawns its workers, or with `spawn` False all ranks: it and every worker.

    `gpus` is the number of GPUs of this machine. RepositoryError when the devices or ranks of the models collide.
    """
    facts = launcher_facts(setup.release)
    if not spawn and not facts.spawn_switch:
        raise UsageError(
            f"Workers can be started before the orchestrator from TensorRT-LLM 0.13 on; this is {setup.release}.",
            hint="Leave --disable-spawn-processes out.",
        )
    require_own_devices(models, gpus)
    if not spawn:
        require_own_ranks(models)
    ranks = 1 if spawn else 1 + sum(model.processes for model in models.values())
    pools = gpus if spawn and facts.memory_pools else None
    groups = tuple(rank_arguments(setup, rank, pools=pools) for rank in range(ranks))
    environment = {ORCHESTRATOR: "1"}
    if facts.spawn_switch:
        environment[SPAWN_PROCESSES] = "1" if spawn else "0"
    return under_mpirun(setup, "orchestrator", groups, environment)


def require_own_devices(models: Mapping[str, CoreModel], gpus: int) -> None:
    """RepositoryError unless every instance of every model has as many GPUs as ranks, and none that another has.

    `gpus` 0 means: not known, so that their numbers are not checked.
    """
    used: dict[int, str] = {}
    several = len(models) > 1 or any(model.instances > 1 for model in models.values())
    for name, model in models.items():
        if not model.gpu_device_ids:
            if several:
                raise RepositoryError(
                    f"The model {name} has no gpu_device_ids: each of several models needs GPUs of its own.",
                    hint=f"Set them: trtserve repo … --set {name}.gpu_device_ids=0,1",
                )
            continue
        _require_groups(name, "gpu_device_ids", model.device_groups, model)
        for device in (device for group in model.device_groups for device in group):
            if device in used:
                raise RepositoryError(
                    f"GPU {device} is in gpu_device_ids of both {used[device]} and {name}"
                    if used[device] != name
                    else f"GPU {device} is twice in gpu_device_ids of {name}",
                    hint="Give every instance of every model GPUs of its own; ids count from 0.",
                )
            if gpus and device >= gpus:
                raise RepositoryError(
                    f"{name} wants GPU {device}; this machine has {gpus}, numbered 0 … {gpus - 1}.",
                    hint=f"Set {name}.gpu_device_ids to GPUs that are there.",
                )
            used[device] = name


def require_own_ranks(models: Mapping[str, CoreModel]) -> None:
    """RepositoryError unless the participant_ids of all models are the ranks 1 … ΣN, each once."""
    wanted = range(1, 1 + sum(model.processes for model in models.values()))
    for name, model in models.items():
        if model.backend == "python":
            raise RepositoryError(
                f"{name} uses the python backend, which cannot find workers that were started before.",
                hint="Leave --disable-spawn-processes out, or make the repository with the C++ backend.",
            )
        _require_groups(name, "participant_ids", model.participant_groups, model)
    given = Counter(rank for model in models.values() for group in model.participant_groups for rank in group)
    if 0 in given:
        raise RepositoryError(
            "participant_ids hold rank 0, which is the orchestrator.", hint=f"Use the ranks {_span(wanted)}."
        )
    if given != Counter(wanted):
        wrong = sorted(rank for rank in {*given, *wanted} if given[rank] != int(rank in wanted))
        raise RepositoryError(
            f"participant_ids of all models together must be the ranks {_span(wanted)}, each once; "
            f"wrong: {', '.join(map(str, wrong))}.",
            hint="Set participant_ids of each model, such as 1,2 and 3,4.",
        )


def _require_groups(name: str, key: str, groups: tuple[tuple[int, ...], ...], model: CoreModel) -> None:
    if model.backend == "python" and len(groups) > 1:
        raise RepositoryError(f"{key} of {name} has several groups, which the python backend does not understand.")
    if len(groups) != model.instances:
        raise RepositoryError(
            f"{key} of {name} has {len(groups)} group(s) for {model.instances} instance(s) of its instance_group.",
            hint="One group per instance, separated by a semicolon: 0,1;2,3 for a count of 2.",
        )
    short = next((group for group in groups if len(group) != model.world_size), None)
    if short is not None:
        raise RepositoryError(
            f"{key} of {name} has {len(short)} number(s) in a group; its engine has {model.world_size} rank(s).",
            hint="One number per rank of the engine.",
        )


def _span(ranks: range) -> str:
    return f"{ranks[0]} … {ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
