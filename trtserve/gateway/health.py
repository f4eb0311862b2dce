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
from trtserve.gateway.triton import TritonHttp, TritonPath
from trtserve.process import ProcessId, arguments, tree

_LOG = logging.getLogger(__name__)
_INTERVAL = 0.5
_STUB = "triton_python_backend_stub"


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
        self._lost: dict[str, str] = {}
        self._ailing: dict[str, str] = {}

    async def problem(self, target: TritonPath) -> str | None:
        """Return why the server, or a model, does not live or is not ready; None when it is."""
        if self._process is not None and not self._process.alive():
            return "tritonserver has ended"
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
        """Raise RefusedError when a process of one of these models has ended."""
        if (reason := self._reason(needed)) is not None:
            raise _unavailable(reason)

    async def watch(self) -> None:
        """Look for stubs that have ended, until cancelled; requests that need them are ended with an error."""
        if self._process is None:
            return
        while not await self._triton.is_ready():
            await asyncio.sleep(_INTERVAL)
        self._stubs = await asyncio.to_thread(_stubs_of, self._process)
        expected = Counter(self._stubs.values())
        while True:
            await asyncio.sleep(_INTERVAL)
            self._listen()
            if self._lost or not all(stub.alive() for stub in self._stubs):
                self._stubs = await asyncio.to_thread(_stubs_of, self._process)
                present = Counter(self._stubs.values())
                await self._note([model for model, count in expected.items() if present[model] < count])

    def _listen(self) -> None:
        """Look which executors have stopped working although their processes live; their requests are ended."""
        beats = [] if self._run_folder is None else read_heartbeats(self._run_folder)
        ailing = {each.model: f"{each.model}: {each.ailment}" for each in beats if each.ailment}
        for name in ailing.keys() - self._ailing.keys():
            _LOG.error(ailing[name])
            self._gate.end_all(_unavailable(ailing[name]), needing=name)
        self._ailing = ailing

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


def _stubs_of(process: ProcessId) -> dict[ProcessId, str]:
    """Return the Python stubs of a server with the names of their models, from their command lines."""
    stubs = {}
    for member in tree(process):
        words = arguments(member)
        if len(words) > 1 and Path(words[0]).name == _STUB:
            stubs[member] = Path(words[1]).parents[1].name
    return stubs
