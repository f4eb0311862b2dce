"""Whether Triton and its models can answer: also when Triton 2.51, which does not notice a dead stub, says so."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from trtserve.client.metrics import read_heartbeats
from trtserve.gateway.admission import Gate
from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.standstill import GatewayBeat, Halts, Hangs, python_stubs, tritonservers
from trtserve.gateway.triton import TritonHttp, TritonPath
from trtserve.process import ProcessId

_LOG = logging.getLogger(__name__)
_INTERVAL = 0.5
# Seconds until a process that a signal has stopped counts as one that does not work, and one that hangs.
_HALTED = 1.0
_HUNG = 5.0


class TritonHealth:
    """The state of one Triton server and its processes, looked at every half second."""

    def __init__(
        self, triton: TritonHttp, gate: Gate, process: ProcessId | None, run_folder: Path | None = None
    ) -> None:
        self._triton = triton
        self._gate = gate
        self._process = process
        self._run_folder = run_folder
        self._stubs: dict[ProcessId, str] = {}
        self._servers: set[ProcessId] = set()
        self._halts = Halts(_HALTED)
        self._hangs = Hangs(_HUNG)
        self._lost: dict[str, str] = {}
        self._ailing: dict[str, str] = {}
        self._halted: str | None = None

    async def problem(self, target: TritonPath) -> str | None:
        """Return why the server, or a model, does not live or is not ready; None when it is."""
        if self._process is not None and not self._process.alive():
            return "tritonserver has ended"
        if self._halted is not None:
            return self._halted
        if target.operation == "ready":
            if self._gate.draining:
                return "the server is stopping"
            needed = {*self._lost, *self._ailing} if target.model is None else await self._needed(target.model)
            if (reason := self._reason(needed)) is not None:
                return reason
        if await self._triton.is_ready(target.path):
            return None
        return "Triton is not ready" if target.operation == "ready" else "Triton does not answer"

    def require(self, needed: Iterable[str]) -> None:
        """Raise RefusedError when a process of one of these models has ended or stands still."""
        if (reason := self._halted or self._reason(needed)) is not None:
            raise _unavailable(reason)

    async def watch(self) -> None:
        """Look for processes that have ended or stand still, until cancelled.

        Requests that need them are ended with an error.
        """
        if self._process is None:
            return
        while not await self._triton.is_ready():
            await asyncio.sleep(_INTERVAL)
        self._stubs = await asyncio.to_thread(python_stubs, self._process)
        self._servers = {self._process, *await asyncio.to_thread(tritonservers, self._process)}
        expected = Counter(self._stubs.values())
        while True:
            await asyncio.sleep(_INTERVAL)
            await self._listen(self._process)
            if self._lost or not all(stub.alive() for stub in self._stubs):
                self._stubs = await asyncio.to_thread(python_stubs, self._process)
                present = Counter(self._stubs.values())
                await self._note([model for model, count in expected.items() if present[model] < count])

    async def show_life(self) -> None:
        """Show the supervisor that the event loop turns, until cancelled."""
        if self._run_folder is None:
            return
        gateway = GatewayBeat(self._run_folder)
        while True:
            gateway.beat()
            await asyncio.sleep(_INTERVAL)

    async def _listen(self, root: ProcessId) -> None:
        """Look who has stopped working although its process lives; the requests that need it are ended."""
        beats = [] if self._run_folder is None else read_heartbeats(self._run_folder)
        hung = await asyncio.to_thread(self._hangs.among, beats, root)
        ailing = {model: f"{model}: its executor {why}" for model, why in hung.items()}
        ailing |= {each.model: f"{each.model}: {each.ailment}" for each in beats if each.ailment}
        halted = self._halts.lasting([*self._servers, *self._stubs])
        ailing |= {
            model: f"{model}: its process {stub.pid} has been stopped by a signal"
            for stub, model in self._stubs.items()
            if stub in halted
        }
        servers = [
            f"tritonserver (pid {each.pid}) has been stopped by a signal" for each in halted if each in self._servers
        ]
        for name in ailing.keys() - self._ailing.keys():
            _LOG.error(ailing[name])
            self._gate.end_all(_unavailable(ailing[name]), needing=name)
        self._ailing, self._halted = ailing, next(iter(servers), None)

    async def _note(self, lacking: Iterable[str]) -> None:
        """Remember the models that lack processes. One that was unloaded lacks nothing: Triton says so itself."""
        lost = [name for name in lacking if await self._triton.is_ready(f"/v2/models/{quote(name, safe='')}/ready")]
        new = [name for name in lost if name not in self._lost]
        self._lost = {name: f"a process of the model {name} has ended; start the server again" for name in lost}
        for name in new:
            _LOG.error(self._lost[name])
            self._gate.end_all(_unavailable(self._lost[name]), needing=name)

    def _reason(self, needed: Iterable[str]) -> str | None:
        known = self._ailing | self._lost
        return next((known[name] for name in needed if name in known), None)

    async def _needed(self, model: str) -> Iterable[str]:
        try:
            return (await self._triton.model(model)).needs
        except RefusedError:
            return (model,)  # Triton itself says what is wrong with it


def _unavailable(reason: str) -> RefusedError:
    return RefusedError(503, reason, headers={"retry-after": "1"})
