"""Leader mode: one tritonserver per GPU, of which rank 0 answers the clients."""

from __future__ import annotations

from trtserve.errors import UsageError
from trtserve.launch.base import Launch, Setup, under_mpirun, without_mpi
from trtserve.launch.rank_arguments import rank_arguments
from trtserve.releases.launcher import launcher_facts


def leader(setup: Setup, world_size: int) -> Launch:
    """`world_size` ranks under mpirun; a world of one is a plain process where the release has --no-mpi."""
    if world_size == 1 and launcher_facts(setup.release).no_mpi:
        return single(setup)
    groups = tuple(rank_arguments(setup, rank) for rank in range(world_size))
    return under_mpirun(setup, "leader", groups, {})


def single(setup: Setup) -> Launch:
    """One process without mpirun, as upstream's --no-mpi; UsageError for a release whose script cannot do so."""
    if not launcher_facts(setup.release).no_mpi:
        raise UsageError(
            f"--no-mpi came with TensorRT-LLM 0.19; this repository is served with {setup.release}.",
            hint="Leave it out: one rank is started under mpirun, as that release does.",
        )
    return without_mpi(setup, "single", rank_arguments(setup, 0), {})
