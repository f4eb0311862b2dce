"""The LLM API behind Triton: one process, or ranks of which trtllm-llmapi-launch makes workers of rank 0."""

from __future__ import annotations

from trtserve.errors import UsageError
from trtserve.nvidia.releases.launcher import LLMAPI_LAUNCH, launcher_facts
from trtserve.repository.preflight import Served
from trtserve.server.launch.base import (
    Launch,
    Setup,
    under_mpirun,
    without_mpi,
)
from trtserve.server.launch.rank_arguments import rank_arguments
from trtserve.specs import ServerSpec

NAME = "llmapi"


def serves(served: Served, spec: ServerSpec) -> bool:
    """Return whether the repository runs the LLM API."""
    del spec
    return served.uses_llmapi


def check(served: Served, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
    """Raise UsageError for --multi-model, which is for TensorRT engines."""
    del served, on_this_machine
    if spec.multi_model:
        raise UsageError(
            "--multi-model is for TensorRT engines; the LLM API starts its own workers.",
            hint="Leave --multi-model out.",
        )


def ranks(served: Served, spec: ServerSpec) -> int:
    """Return the world size that model.yaml asks for."""
    del spec
    return served.world_size


def mpi_ranks(served: Served) -> int:
    """Return the ranks that trtllm-llmapi-launch joins: 1 for several LLMs, which start workers of their own."""
    several = len(served.core_models) > 1 or served.core_models[0].instances > 1
    return 1 if several else served.world_size


def compose(setup: Setup, served: Served, spec: ServerSpec, *, nodes: int | None = None) -> Launch:
    """Return the launch of tritonserver and of the workers that MPI starts."""
    del spec, nodes
    return llmapi(setup, mpi_ranks(served))


def llmapi(setup: Setup, world_size: int) -> Launch:
    """Return a plain process for one GPU and for releases before 1.0, else ranks under mpirun.

    trtllm-llmapi-launch runs tritonserver on rank 0 and a worker of TensorRT-LLM on every other rank. Before 1.0 the
    LLM API starts its own workers.
    """
    if world_size == 1 or not launcher_facts(setup.release).llmapi_launch:
        return without_mpi(setup, NAME, rank_arguments(setup, 0))
    _require_no_blanks(setup)
    groups = tuple((LLMAPI_LAUNCH, *rank_arguments(setup, rank)) for rank in range(world_size))
    return under_mpirun(setup, NAME, groups)


def slurm_task(setup: Setup) -> tuple[str, ...]:
    """Return the command of every task of srun. All have rank 0's arguments, since rank 0 alone starts tritonserver.

    trtllm-llmapi-launch hides SLURM_ and OMPI_ variables from tritonserver, so the command must not refer to them.
    """
    _require_no_blanks(setup)
    return (LLMAPI_LAUNCH, *rank_arguments(setup, 0))


def _require_no_blanks(setup: Setup) -> None:
    wrong = next((word for word in rank_arguments(setup, 0) if any(sign.isspace() for sign in word)), None)
    if wrong is not None:
        raise UsageError(
            f"{LLMAPI_LAUNCH} splits its command at spaces, and {wrong!r} contains one.",
            hint="Move the repository to a path without spaces.",
        )
