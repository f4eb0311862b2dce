"""Which GPU each rank takes: claims in the configurations of core models, and the GPUs per node that engines state.

TensorRT-LLM's executor gives rank i the GPU number i % `gpus_per_node` (or the i-th of gpu_device_ids, modulo their
number), and reads `gpus_per_node` from `pretrained_config.mapping` of the engine's config.json; the default is 8
(GptJsonConfig, WorldConfig). trtllm-build up to 1.1 writes the value of its own flag there, not the checkpoint's.
Nothing else in an engine depends on it, so it is set for the nodes that will serve, in the repository's own copy.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.artifacts import accept_change
from trtserve.errors import RepositoryError, counted
from trtserve.files import read_json_object, write_whole
from trtserve.progress import Progress
from trtserve.repository.served import CoreModel, Groups

_DEFAULT = 8


def world_of(models: Sequence[CoreModel]) -> int:
    """Return the ranks of an orchestrator and of every rank of every instance of its models."""
    return 1 + sum(model.world_size * model.instances for model in models)


def claimed_gpus(models: Sequence[CoreModel]) -> set[int]:
    """Return the numbers in the gpu_device_ids of all models."""
    return {device for model in models for group in model.gpu_device_ids for device in group}


def require_engines_here(models: Iterable[CoreModel]) -> None:
    """Raise RepositoryError for a model whose engine is not on this machine, so that its ranks are unknown."""
    unknown = next((model for model in models if not model.config), None)
    if unknown is not None:
        raise RepositoryError(
            f"The engine of {unknown.name} is not on this machine, so its number of ranks is unknown.",
            hint="Make the repository with the engine inside: trtserve repo ENGINE --tokenizer FOLDER",
        )


def require_own_devices(models: Sequence[CoreModel], gpus: int) -> None:
    """Raise RepositoryError unless every instance of every model has one GPU per rank, shared with no other instance.

    With `gpus` 0 the number of GPUs is unknown, and device numbers are not checked. A single instance may see all GPUs.
    """
    several = sum(model.instances for model in models) > 1
    for model in models:
        if model.gpu_device_ids:
            _require_groups("gpu_device_ids", model.gpu_device_ids, model)
        elif several:
            raise RepositoryError(
                f"The model {model.name} has no gpu_device_ids: each of several models needs GPUs of its own.",
                hint=f"Set them: trtserve repo … --set {model.name}.gpu_device_ids=0,1",
            )
    owners: dict[int, str] = {}
    for model in models:
        for device in (device for group in model.gpu_device_ids for device in group):
            _require_exists(device, model.name, gpus)
            if device in owners:
                raise _claimed_twice(device, owners[device], model.name)
            owners[device] = model.name


def require_leader_devices(models: Sequence[CoreModel], visible: int | None) -> None:
    """Raise RepositoryError for gpu_device_ids that leader mode cannot give: a rank has one GPU for every model.

    `visible` is the number of GPUs that --gpus shows to the launch, 0 when it shows all; they are numbered from 0 then.
    With None the ranks run on other machines, and `require_node_devices` checks the numbers.
    """
    chosen = {model.name: model.gpu_device_ids for model in models if model.gpu_device_ids}
    if len(set(chosen.values())) > 1 or any(len(groups) > 1 for groups in chosen.values()):
        listed = "; ".join(
            f"{name} {';'.join(','.join(map(str, group)) for group in groups)}" for name, groups in chosen.items()
        )
        raise RepositoryError(
            f"gpu_device_ids place models or instances on different GPUs ({listed}), which leader mode cannot do.",
            hint="Serve them in orchestrator mode: --multi-model. Or remove gpu_device_ids, and choose with --gpus.",
        )
    for model in models:
        if model.gpu_device_ids and visible is not None:
            (group,) = model.gpu_device_ids
            _require_groups("gpu_device_ids", (group,), replace(model, instances=1))
            for device in group:
                _require_exists(device, model.name, visible, "--gpus shows the launch")


def require_node_devices(models: Sequence[CoreModel], nodes: Sequence[int], gpus: int, *, shared: bool) -> None:
    """Raise RepositoryError unless every rank of every model has a GPU of its node that no other rank has.

    `nodes` holds the node of each MPI rank; the GPUs of a node are numbered 0 … `gpus` - 1. Rank i of a model takes the
    i-th of its gpu_device_ids (modulo their number), or without them the i-th GPU of a node, whose number of GPUs its
    engine must say. With `shared` all models run on the same ranks and GPUs, as in leader mode.
    """
    owners: dict[tuple[int, int], str] = {}
    for model in models:
        if shared:
            owners.clear()
        for instance in range(1 if shared else model.instances):
            ranks = model.participant_ids[instance] if model.participant_ids else tuple(range(model.world_size))
            given = model.gpu_device_ids[instance] if model.gpu_device_ids else ()
            _require_spread(model, given, len(set(nodes)))
            for position, rank in enumerate(ranks):
                device = given[position % len(given)] if given else position % gpus
                _require_exists(device, model.name, gpus, "each node has" if max(nodes) else "the job has")
                place = nodes[rank], device
                if place in owners:
                    raise _claimed_twice(device, owners[place], model.name)
                owners[place] = model.name


def _require_spread(model: CoreModel, devices: Sequence[int], nodes: int) -> None:
    """TensorRT-LLM takes one GPU number for each rank, or the same numbers on every node."""
    if not devices or len(devices) == model.world_size or len(devices) * nodes == model.world_size:
        return
    each = model.world_size // nodes
    raise RepositoryError(
        f"gpu_device_ids of {model.name} has {counted(len(devices), 'number')}; its engine has "
        f"{counted(model.world_size, 'rank')} on {counted(nodes, 'node')}.",
        hint=f"Name the GPUs of one node; every node uses the same numbers: {','.join(map(str, range(each)))}",
    )


def require_own_ranks(models: Sequence[CoreModel]) -> None:
    """Raise RepositoryError unless the participant_ids of all models are the ranks 1 … ΣN, each once."""
    for model in models:
        if model.backend == "python":
            raise RepositoryError(
                f"{model.name} uses the python backend, which cannot find workers that were started before.",
                hint="Leave --disable-spawn-processes out, or make the repository with the C++ backend.",
            )
        _require_groups("participant_ids", model.participant_ids, model)
    wanted = range(1, world_of(models))
    given = Counter(rank for model in models for group in model.participant_ids for rank in group)
    if given == Counter(wanted):
        return
    span = f"{wanted[0]} … {wanted[-1]}" if len(wanted) > 1 else "1"
    if 0 in given:
        raise RepositoryError(
            "participant_ids contain rank 0, which is the orchestrator.", hint=f"Use the ranks {span}."
        )
    wrong = sorted(rank for rank in {*given, *wanted} if given[rank] != int(rank in wanted))
    raise RepositoryError(
        f"participant_ids of all models together must be the ranks {span}, each once; "
        f"missing, unknown or repeated: {', '.join(map(str, wrong))}.",
        hint="Set participant_ids of each model, such as 1,2 and 3,4.",
    )


def _require_exists(device: int, name: str, gpus: int, where: str = "this machine has") -> None:
    if gpus and device >= gpus:
        raise RepositoryError(
            f"{name} wants GPU {device}; {where} {gpus}, numbered 0 … {gpus - 1}.",
            hint=f"Set {name}.gpu_device_ids to GPUs that exist.",
        )


def _claimed_twice(device: int, first: str, second: str) -> RepositoryError:
    where = f"is twice in gpu_device_ids of {first}" if first == second else f"is claimed by both {first} and {second}"
    return RepositoryError(
        f"GPU {device} {where}.", hint="Give every instance of every model GPUs of its own; ids count from 0."
    )


def _require_groups(key: str, groups: Groups, model: CoreModel) -> None:
    """Require one group for each instance, with one number for each rank; the python backend takes only one group."""
    if model.backend == "python" and len(groups) > 1:
        raise RepositoryError(
            f"{key} of {model.name} has several groups; the python backend understands one.",
            hint="Give one group, or make the repository with the C++ backend.",
        )
    if len(groups) != model.instances:
        raise RepositoryError(
            f"{key} of {model.name} has {counted(len(groups), 'group')}; its instance_group has "
            f"{counted(model.instances, 'instance')}.",
            hint="One group per instance, separated by a semicolon: 0,1;2,3 for a count of 2.",
        )
    wrong = next((group for group in groups if len(group) != model.world_size), None)
    if wrong is not None:
        raise RepositoryError(
            f"{key} of {model.name} has {counted(len(wrong), 'number')} in a group; its engine has "
            f"{counted(model.world_size, 'rank')}.",
            hint="One number per rank of the engine.",
        )


@dataclass(frozen=True, kw_only=True)
class EngineNodes:
    """A change of the config.json of an engine in a repository."""

    config: Path
    gpus_per_node: int

    def write(self) -> None:
        """Write the number into a new file: the present one may be a link to that of the engine it came from."""
        content = read_json_object(self.config, RepositoryError)
        content["pretrained_config"].setdefault("mapping", {})["gpus_per_node"] = self.gpus_per_node
        made = self.config.with_name(f".{self.config.name}.{os.getpid()}")
        write_whole(made, json.dumps(content, indent=4))
        made.replace(self.config)
        accept_change(self.config)


def fit_engines(
    repository: Path, models: Sequence[CoreModel], progress: Progress, *, nodes: int = 1, gpus: int = 0
) -> Sequence[EngineNodes]:
    """Return the engines that must state another number before `gpus` on each of `nodes` can serve their models.

    On one node any number that is large enough will do. Raises RepositoryError when such an engine is outside the
    repository, where it is not changed.
    """
    found = []
    for core in models:
        stated = core.config.mapping.gpus_per_node
        if nodes > 1:
            wanted = gpus
        else:
            wanted = max(stated, core.world_size, *(device + 1 for group in core.gpu_device_ids for device in group), 1)
        if core.engine is None or core.uses_llmapi or core.embedded or stated == wanted:
            continue
        config = core.engine / "config.json"
        text = f"The engine of {core.name} states gpus_per_node {stated}, from which a rank finds its GPU"
        if not config.absolute().is_relative_to(repository.absolute()):
            raise RepositoryError(
                f"{text}; these nodes need {wanted}. The engine is outside the repository: {config}.",
                hint=f"Write {wanted} for pretrained_config.mapping.gpus_per_node there, or make a repository with the "
                "engine inside: trtserve repo ENGINE",
            )
        progress.step(f"{text}; setting it to {wanted} in the repository.")
        found.append(EngineNodes(config=config, gpus_per_node=wanted))
    return found
