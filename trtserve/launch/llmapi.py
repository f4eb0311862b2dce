"""The LLM API behind Triton: one process, or ranks that trtllm-llmapi-launch makes workers of rank 0."""

from __future__ import annotations

from trtserve.errors import UsageError
from trtserve.launch.base import Launch, Setup, under_mpirun, without_mpi
from trtserve.launch.rank_arguments import rank_arguments
from trtserve.releases.launcher import LLMAPI_LAUNCH, launcher_facts


def llmapi(setup: Setup, world_size: int) -> Launch:
    """One node: a plain process for one GPU, and before 1.0, where the LLM API starts its own workers; else mpirun.

    trtllm-llmapi-launch runs tritonserver on rank 0 and a worker of TensorRT-LLM on every other rank.
    """
    if world_size == 1 or not launcher_facts(setup.release).llmapi_launch:
        return without_mpi(setup, "llmapi", rank_arguments(setup, 0), {})
    _require_no_blanks(setup)
    groups = tuple((LLMAPI_LAUNCH, *rank_arguments(setup, rank)) for rank in range(world_size))
    return under_mpirun(setup, "llmapi", groups, {})


def task(setup: Setup) -> tuple[str, ...]:
    """What every task of srun runs: rank 0 alone starts tritonserver, so all have rank 0's arguments.

    trtllm-llmapi-launch hides SLURM_ and OMPI_ variables from tritonserver: nothing in here may refer to them.
    """
    _require_no_blanks(setup)
    return (LLMAPI_LAUNCH, *rank_arguments(setup, 0))


def _require_no_blanks(setup: Setup) -> None:
    """The script takes its command apart at blanks."""
    wrong = next((word for word in rank_arguments(setup, 0) if any(sign.isspace() for sign in word)), None)
    if wrong is not None:
        raise UsageError(
            f"{LLMAPI_LAUNCH} takes its command apart at blanks, and there is one in {wrong!r}.",
            hint="Move the repository to a path without blanks.",
        )
