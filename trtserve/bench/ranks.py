"""Workers on several machines: the ranks of the user's own `mpirun` or `srun`, through mpi4py."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import MissingDependencyError
from trtserve.host.install_command import install_command

if TYPE_CHECKING:
    from trtserve.bench.worker import Sent

# Set by Open MPI, by MPICH and Slurm, and by PMIx for each process that they start.
_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_EXCHANGES = 50
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Containers of one machine can have clocks of their own (time_namespaces(7)).
_TIME_NAMESPACE = Path("/proc/self/ns/time")


class Ranks:
    """The world of one process, which asks nobody."""

    number = 0
    count = 1

    def compare_clocks(self) -> int:
        """Return how far this machine's clock is ahead of the first rank's, in ns."""
        return 0

    def agree(self, value: Any) -> Any:
        """Return the first rank's value."""
        return value

    def any(self, value: bool) -> bool:
        """Return whether a rank has True."""
        return value

    def adjust_clock(self, parts: Sequence[Sent], offset: int) -> None:
        """Express the times of this rank's records by the first rank's clock."""

    def gather(self, parts: list[Sent]) -> list[Sent] | None:
        """Return the parts of all ranks on the first one, elsewhere None."""
        return parts


class MpiRanks(Ranks):
    """The processes that mpirun or srun started."""

    def __init__(self, communicator: Any) -> None:
        self._world = communicator
        self.number, self.count = communicator.Get_rank(), communicator.Get_size()
        self._same_clock = len(set(communicator.allgather(_clock() or str(self.number)))) == 1

    def compare_clocks(self) -> int:
        """Return the offset of the exchange with the shortest round trip; processes of one machine have one clock."""
        self._wait_for_all()
        if self._same_clock:
            return 0
        if self.number == 0:
            for other in range(1, self.count):
                for _ in range(_EXCHANGES):
                    self._world.recv(source=other)
                    self._world.send(time.monotonic_ns(), dest=other)
            return 0
        exchanges = []
        for _ in range(_EXCHANGES):
            sent = time.monotonic_ns()
            self._world.send(None, dest=0)
            theirs = self._world.recv(source=0)
            ended = time.monotonic_ns()
            exchanges.append((ended - sent, (sent + ended) // 2 - theirs))
        return int(min(exchanges)[1])

    def _wait_for_all(self) -> None:
        """Wait without using a core, as MPI's own barrier does: ranks on this machine may still send."""
        arrived = self._world.Ibarrier()
        while not arrived.Test():
            time.sleep(0.002)

    def agree(self, value: Any) -> Any:
        return self._world.bcast(value, root=0)

    def any(self, value: bool) -> bool:
        return any(self._world.allgather(value))

    def adjust_clock(self, parts: Sequence[Sent], offset: int) -> None:
        """Compare the clocks again and spread the drift over the run."""
        drift = self.compare_clocks() - offset
        times = [record.sent_ns for part in parts for record in part.records if record.sent_ns is not None]
        begin, span = (min(times), max(1, time.monotonic_ns() - min(times))) if times else (0, 1)

        def adjusted(moment: int) -> int:
            return moment - offset - drift * (moment - begin) // span

        for part in parts:
            part.health.clock_offset_ns, part.health.clock_drift_ns = offset, drift
            if not offset and not drift:
                continue
            for record in part.records:
                if record.sent_ns is None:
                    continue
                record.intended_ns, record.sent_ns = adjusted(record.intended_ns), adjusted(record.sent_ns)
                record.ended_ns = adjusted(record.ended_ns)
                record.arrivals = [(adjusted(moment), tokens) for moment, tokens in record.arrivals]
                record.responses = [replace(each, time_ns=adjusted(each.time_ns)) for each in record.responses]

    def gather(self, parts: list[Sent]) -> list[Sent] | None:
        gathered = self._world.gather(parts, root=0)
        return None if gathered is None else [part for rank in gathered for part in rank]


def _clock() -> str | None:
    """Return a name of the clock that this process reads, or None if it is not known."""
    try:
        return f"{_BOOT.read_text()}{_TIME_NAMESPACE.readlink() if _TIME_NAMESPACE.is_symlink() else ''}"
    except OSError:
        return None


def find_ranks() -> Ranks:
    """Return the ranks among which this process was started. Raises MissingDependencyError without mpi4py."""
    if not any(name in os.environ for name in _VARIABLES):
        return Ranks()
    try:
        from mpi4py import MPI
    except ImportError:
        raise MissingDependencyError(
            "Several processes of `bench` under mpirun or srun need mpi4py.",
            hint=f"Install it on every machine: {install_command('cpu')}, or pip install mpi4py.",
        ) from None
    return MpiRanks(MPI.COMM_WORLD) if MPI.COMM_WORLD.Get_size() > 1 else Ranks()
