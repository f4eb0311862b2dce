"""Leader mode: one tritonserver per GPU, of which rank 0 answers clients."""

from __future__ import annotations

from trtserve.errors import RepositoryError, UsageError, counted
from trtserve.nvidia.releases.launcher import launcher_facts
from trtserve.repository.preflight import Served
from trtserve.server.launch import single
from trtserve.server.launch.base import (
    Launch,
    Setup,
    under_mpirun,
    without_mpi,
)
from trtserve.server.launch.devices import require_engines_here, require_leader_devices
from trtserve.server.launch.rank_arguments import rank_arguments
from trtserve.specs import ServerSpec

NAME = "leader"


def serves(served: Served, spec: ServerSpec) -> bool:
    """Return whether an engine is to be served without an orchestrator."""
    return not served.uses_llmapi and not spec.multi_model


def check(served: Served, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
    """Raise UsageError for engines of different world sizes, RepositoryError for GPUs that this mode cannot assign."""
    require_engines_here(served.core_models)
    if served.embedded:
        _require_own_processes(served, spec, on_this_machine=on_this_machine)
    sizes = {model.name: model.world_size for model in served.core_models}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(
            f"The engines of this repository have different world sizes ({listed}); leader mode needs one size.",
            hint="Serve them in orchestrator mode: --multi-model, with gpu_device_ids of each model.",
        )
    visible = served.world_size if spec.instances > 1 else len(spec.gpus)
    require_leader_devices(served.core_models, visible if on_this_machine else None)


def _require_own_processes(served: Served, spec: ServerSpec, *, on_this_machine: bool) -> None:
    """Raise an error unless each rank of the embedded executor can be one process of a Python that has trtserve."""
    if on_this_machine and spec.container is not None:
        raise UsageError(
            f"--container runs NVIDIA's images, which lack trtserve; the {served.runtime} runtime needs it.",
            hint="Leave it out, or run trtserve itself in a container (docs/how-to/gpus.md).",
        )
    if spec.gpus and not served.needs_gpus:
        raise UsageError("--gpus does not apply: the engine was built for the CPU.", hint="Leave --gpus out.")
    models = sum(model.instances for model in served.core_models)
    if served.world_size > 1 and models > 1:
        raise RepositoryError(
            f"The repository has {counted(models, 'instance')} of models with {served.world_size} ranks; the "
            f"{served.runtime} runtime serves one of them per launch, because each rank is one process.",
            hint="Start one server for each, with --gpus and --auto-ports; --instances starts several of one model.",
        )


def ranks(served: Served, spec: ServerSpec) -> int:
    """Return the world size of the engine."""
    del spec
    return served.world_size


def compose(setup: Setup, served: Served, spec: ServerSpec, *, nodes: int | None = None) -> Launch:
    """Return the launch of all ranks of the engine."""
    del spec, nodes
    return leader(setup, served.world_size)


def leader(setup: Setup, world_size: int) -> Launch:
    """Return `world_size` ranks under mpirun; one rank is a plain process where the release has --no-mpi."""
    if world_size == 1 and launcher_facts(setup.release).no_mpi:
        return without_mpi(setup, single.NAME, rank_arguments(setup, 0))
    return under_mpirun(setup, NAME, tuple(rank_arguments(setup, rank) for rank in range(world_size)))
