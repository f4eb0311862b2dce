"""A launch as a value: the command, the arguments of each rank in it, and the names of its shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trtserve.process import Command
from trtserve.releases import NEWEST
from trtserve.releases.launcher import CORE_MODEL, TRITONSERVER
from trtserve.triton.server import EXIT_TIMEOUT, Address

Mode = Literal["single", "leader", "orchestrator", "llmapi"]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every launch of one server is made of.

    `executable` is tritonserver, `release` the one of TensorRT-LLM whose launch script is followed. `shm_prefix` is
    this launch's own; each rank gets a name of its own behind it. `core_models` are what ranks other than 0 load,
    `gpus` the devices that the processes may see (empty: all). `pool_bytes` is the CUDA pool of GPU 0 on rank 0.
    `arguments` go to tritonserver, behind all others.
    """

    executable: str = TRITONSERVER
    repository: Path
    address: Address
    release: str = NEWEST
    shm_prefix: str
    core_models: tuple[str, ...] = (CORE_MODEL,)
    gpus: tuple[int, ...] = ()
    backends: Path | None = None
    pool_bytes: int = 0
    exit_timeout: int = EXIT_TIMEOUT
    oversubscribe: bool = False
    mpirun: str = "mpirun"
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def rank_prefix(self, rank: int) -> str:
        """Prefix of the shared-memory regions of one rank; upstream's is the same for every server of a machine."""
        return f"{self.shm_prefix}r{rank}_"

    @property
    def devices(self) -> dict[str, str]:
        """Environment that shows the processes their GPUs."""
        return {VISIBLE_DEVICES: ",".join(map(str, self.gpus))} if self.gpus else {}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of one server.

    `groups` holds the command line of each rank, so that another launcher (srun, a container, Kubernetes) can start
    the same ranks; `command` starts them all here. `environment` is what the mode sets, a part of the command's.
    """

    mode: Mode
    command: Command
    groups: tuple[tuple[str, ...], ...]
    shm_prefixes: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Processes that MPI starts; 1 without MPI."""
        return len(self.groups)


def under_mpirun(
    setup: Setup, mode: Mode, groups: tuple[tuple[str, ...], ...], environment: Mapping[str, str]
) -> Launch:
    """All `groups` as one job: `-n 1 GROUP :` for each, a colon behind the last one too, as upstream's script has it.

    --tag-output puts the rank in front of every line of its output, so that one log tells them apart.
    """
    prefix = (setup.mpirun, "--allow-run-as-root", *(("--oversubscribe",) if setup.oversubscribe else ()))
    ranks = (part for group in groups for part in ("-n", "1", *group, ":"))
    return _launch(setup, mode, (*prefix, "--tag-output", *ranks), groups, environment)


def without_mpi(setup: Setup, mode: Mode, group: tuple[str, ...], environment: Mapping[str, str]) -> Launch:
    """One process: no mpirun, no -n, no colon."""
    return _launch(setup, mode, group, (group,), environment)


def _launch(
    setup: Setup, mode: Mode, argv: tuple[str, ...], groups: tuple[tuple[str, ...], ...], own: Mapping[str, str]
) -> Launch:
    environment = {**setup.devices, **own}
    return Launch(
        mode=mode,
        command=Command(argv=argv, env={**setup.environment, **environment}, cwd=setup.repository.absolute()),
        groups=groups,
        shm_prefixes=tuple(setup.rank_prefix(rank) for rank in range(len(groups))),
        environment=environment,
    )
