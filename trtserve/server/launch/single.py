"""One process on the CPU: it merges the shards of a checkpoint, however many there are."""

from __future__ import annotations

from pathlib import Path

from trtserve.errors import UsageError
from trtserve.repository.preflight import Served
from trtserve.server.launch.base import Launch, Setup
from trtserve.server.triton.installation import Triton
from trtserve.server.triton.tritonserver import server_command
from trtserve.specs import ServerSpec

NAME = "single"


def serves(served: Served, spec: ServerSpec) -> bool:
    """Return whether Triton and Python of this machine can serve the repository without a GPU."""
    del spec
    return served.runtime is None or served.merges_ranks  # None means a plain Triton model


def check(served: Served, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
    """Raise UsageError for options of GPU engines."""
    del served, on_this_machine
    given = {
        "--instances": spec.instances > 1,
        "--multi-model": spec.multi_model,
        "--gpus": bool(spec.gpus),
        "--container": spec.container is not None,
    }
    flag = next((flag for flag, is_given in given.items() if is_given), None)
    if flag is not None:
        raise UsageError(
            f"{flag} is for engines on GPUs; this repository is served by one process on the CPU.",
            hint=f"Leave {flag} out.",
        )


def ranks(served: Served, spec: ServerSpec) -> int:
    """Return the number that --world-size gives, since one process serves any number of shards."""
    return spec.world_size or served.world_size


def compose(setup: Setup, served: Served, spec: ServerSpec, *, nodes: int | None = None) -> Launch:
    """Return the launch of one tritonserver, without MPI and without GPUs."""
    del served, spec, nodes
    executable = Path(setup.executable)
    backends = setup.backends or executable.parent.parent / "backends"
    command = server_command(
        Triton(executable=executable, backends=backends),
        setup.repository,
        setup.address,
        backends=backends,
        shm_prefix=setup.shm_prefix,
        python=setup.python,
        extra_arguments=setup.arguments,
    )
    return Launch(mode=NAME, command=command, groups=(command.argv,), shm_prefixes=(setup.shm_prefix,))
