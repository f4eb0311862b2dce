"""When all instances of a server are ready; until then, which rank ended or keeps the others waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from trtserve.errors import PortInUseError, ServerStartError
from trtserve.launch.container import explained
from trtserve.launch.ranks import describe_ranks, kept_waiting, rank_processes
from trtserve.process import Identity
from trtserve.servers import Server
from trtserve.start.plan import InstancePlan, Plan
from trtserve.triton import server_log
from trtserve.triton.launch import came_up, opened_all_ports, pause, start_error, timeout_error

# mpirun ends a job within a moment of a rank that fails; one that ends with code 0 it lets go.
_RANK_INTERVAL = 1.0
_LET_GO = 3.0
_PAUSE = 0.1
# Triton opens its ports within a moment, and that of the metrics last.
_LAST_PORT = 2.0
_GIVEN_UP = "error: creating server: "


def wait_for_all(server: Server, plan: Plan, *, timeout: float, interrupted: Callable[[], int]) -> None:
    """Wait until every model of every instance is ready; KeyboardInterrupt when `interrupted` counts a signal.

    ServerStartError when an instance or one of its ranks ends, and after `timeout` seconds, with the rank that is
    missing.
    """
    deadline = time.monotonic() + timeout
    pairs = zip(server.instances, plan.instances, strict=True)
    waiting = [_Waiting(instance.identity, planned) for instance, planned in pairs]
    while True:
        waiting = [one for one in waiting if not one.ready()]
        if not waiting:
            return
        pause(interrupted)
        if time.monotonic() > deadline:
            raise waiting[0].timeout_error(timeout)


def require_ranks(server: Server, plan: Plan) -> None:
    """ServerStartError when a rank ended as the server became ready and mpirun goes on: nobody would miss it later.

    A server whose mpirun ends for it has died like any other. Of ranks in a container nothing is seen here.
    """
    for instance, planned in zip(server.instances, plan.instances, strict=True):
        found, ranks = rank_processes(instance.identity), planned.launch.ranks
        missing = [rank for rank in range(ranks) if rank not in found]
        if ranks > 1 and found and missing and _goes_on(instance.identity):
            raise ServerStartError(
                f"Rank {missing[0]} of {ranks} has ended as the server became ready.\n"
                f"{describe_ranks(found, ranks, server_log.read(planned.log))}",
                log=planned.log,
            )


def _goes_on(root: Identity) -> bool:
    """Whether a process is there after the moment within which mpirun ends a job."""
    deadline = time.monotonic() + _LET_GO
    while root.alive() and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return root.alive()


class _Waiting:
    """One instance on its way, with the ranks that it was seen to have."""

    def __init__(self, root: Identity, planned: InstancePlan) -> None:
        self.root = root
        self.planned = planned
        self._seen: dict[int, Identity] = {}
        self._looked = time.monotonic()
        self._lost_since: float | None = None
        self._ready_since: float | None = None

    def ready(self) -> bool:
        """Whether it is up; ServerStartError when it never will be."""
        if self._came_up():
            return self._has_all_ports()
        # trtllm-llmapi-launch waits for ever for a leader whose tritonserver has failed.
        if self.planned.launch.mode == "llmapi" and _GIVEN_UP in server_log.read(self.planned.log):
            raise start_error(self.root, self.planned.log)
        if self.planned.launch.ranks > 1 and time.monotonic() - self._looked > _RANK_INTERVAL:
            self._look_for_ranks()
        return False

    def _has_all_ports(self) -> bool:
        """A moment later at the latest: metrics may be switched off."""
        self._ready_since = self._ready_since or time.monotonic()
        if opened_all_ports(self.root, self.planned.address, contained=self.planned.box is not None):
            return True
        return time.monotonic() - self._ready_since > _LAST_PORT

    def _came_up(self) -> bool:
        planned = self.planned
        try:
            return came_up(self.root, planned.address, planned.log, contained=planned.box is not None)
        except ServerStartError as error:
            reason = explained(server_log.read(planned.log)) if planned.box is not None else None
            raise reason or error from error

    def _look_for_ranks(self) -> None:
        self._looked = time.monotonic()
        self._seen |= rank_processes(self.root)
        lost = [rank for rank, process in self._seen.items() if not process.alive()]
        if not lost or not self.root.alive():
            self._lost_since = None
            return
        self._lost_since = self._lost_since or self._looked
        if self._looked - self._lost_since >= _LET_GO:
            raise ServerStartError(
                f"Rank {lost[0]} of {self.planned.launch.ranks} has ended before the server was ready, and mpirun does "
                f"not end the others.{self._report()}",
                log=self.planned.log,
            )

    def timeout_error(self, timeout: float) -> ServerStartError | PortInUseError:
        """What is to be said after the deadline."""
        if self.planned.launch.ranks == 1:
            return timeout_error(timeout, self.planned.log)
        if not self.root.alive():
            return start_error(self.root, self.planned.log)
        return timeout_error(timeout, self.planned.log, self._report())

    def _report(self) -> str:
        ranks = self.planned.launch.ranks
        processes = {rank: each for rank, each in rank_processes(self.root).items() if rank < ranks}
        text = server_log.read(self.planned.log)
        return f" {kept_waiting(processes, ranks, text)}\n{describe_ranks(processes, ranks, text)}"
