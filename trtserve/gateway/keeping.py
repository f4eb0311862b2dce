"""Many models within a budget of memory: each is loaded at its first request, and unloaded when others need room.

Nothing here knows what a model is: `OneModel.load` starts one, and `RunningModel.stop` ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trtserve.errors import TrtserveError
from trtserve.gateway.asgi import RefusedError, looking_again
from trtserve.gateway.triton import TritonHttp
from trtserve.host.machine import format_bytes

_LOG = logging.getLogger(__name__)
_SWEEP = 1.0
# A request waits this long until other models end their requests and make room.
_ROOM_SECONDS = 60.0
# A model that could not be loaded is not tried again for so long: clients repeat what was answered with 503.
_FAILED_SECONDS = 5.0

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]


class RunningModel(Protocol):
    """A model that is loaded."""

    http: TritonHttp
    """Where its requests go."""

    def alive(self) -> bool:
        """Return whether it still runs."""

    async def stop(self) -> None:
        """End it, and return when its memory is free again."""


@dataclass(eq=False, kw_only=True)
class OneModel:
    """One of the models, loaded or not."""

    name: str
    memory: int
    """Bytes that it takes while it is loaded, as `plan` says."""
    load: Callable[[], Awaitable[RunningModel]]
    """Starts it. Raises TrtserveError."""
    exclusive: bool = False
    """Whether it takes a device for itself: no other such model is loaded beside it."""
    adapters: Callable[[], Sequence[str]] = tuple
    """Names of its adapters."""
    state: ModelState = "unloaded"
    running: RunningModel | None = None
    users: int = 0
    """Requests that it has now."""
    used_at: float = 0.0
    """When the last of them ended."""
    leaving: bool = False
    """Whether it is unloaded as soon as its requests have ended: new ones wait and have it loaded again."""
    loads: int = 0
    """How often it was loaded."""
    failure: tuple[float, str] | None = None
    """When and why it could not be loaded the last time."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    """What loads or unloads it now."""

    @property
    def ready(self) -> bool:
        """Whether a request is answered at once."""
        return self.state == "loaded" and not self.leaving and self.running is not None and self.running.alive()


class ModelKeeper:
    """Loads and unloads models, for one event loop."""

    def __init__(
        self,
        models: Sequence[OneModel],
        *,
        budget: int,
        idle: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`budget` is in bytes. A model without requests for `idle` seconds is unloaded; 0: only for want of room.

        `changed` is called whenever the state of a model has changed.
        """
        self.models = {model.name: model for model in models}
        self.budget, self._idle, self._tell = budget, idle, changed
        self._turn = asyncio.Lock()
        """Whoever needs room waits for those that came before."""
        self._event = asyncio.Event()

    @property
    def held(self) -> list[OneModel]:
        """The models that take memory."""
        return [each for each in self.models.values() if each.state != "unloaded"]

    @asynccontextmanager
    async def use(self, model: OneModel) -> AsyncIterator[RunningModel]:
        """Yield a model that is loaded, and that stays so until the end of the block.

        Raises RefusedError when it cannot be loaded.
        """
        while True:
            while model.leaving:
                await self._event.wait()
            model.users += 1
            try:
                if (running := await self._loaded(model)) is not None:
                    yield running
                    return
            finally:
                model.users -= 1
                model.used_at = time.monotonic()
                self._wake()

    async def _loaded(self, model: OneModel) -> RunningModel | None:
        """Return the model when it is loaded, and None if it has to leave first."""
        while model.running is None or model.state != "loaded" or not model.running.alive():
            if model.task is None and model.state == "loaded":
                self._unload(model)  # it has ended by itself, and something may be left of it
            if model.task is None:
                if model.failure is not None and time.monotonic() - model.failure[0] < _FAILED_SECONDS:
                    raise _refused(model.failure[1])
                model.task = asyncio.create_task(self._load(model))
                model.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
            await asyncio.shield(model.task)
            if model.leaving:
                return None
        return model.running

    async def _load(self, model: OneModel) -> None:
        try:
            async with self._turn:
                await self._make_room(model)
                self._change(model, "loading")
            _LOG.info("loading %s (%s)", model.name, format_bytes(model.memory))
            began = time.monotonic()
            model.running = await model.load()
            model.loads += 1
            model.failure, model.used_at = None, time.monotonic()
            _LOG.info("%s is loaded after %.1f s", model.name, time.monotonic() - began)
            self._change(model, "loaded")
        except (TrtserveError, OSError) as error:  # a full disk, no more processes
            why = error.message if isinstance(error, TrtserveError) else error.strerror or error
            model.failure = time.monotonic(), f"the model {model.name} could not be loaded: {why}"
            _LOG.error("%s", model.failure[1])
            raise _refused(model.failure[1]) from error
        finally:
            model.task = None
            if model.state == "loading":
                self._change(model, "unloaded")

    async def _make_room(self, model: OneModel) -> None:
        """Unload what was used least recently. Raises RefusedError when the others do not end their requests in time.

        One that has requests is asked to leave: it gets no new ones, so that it cannot stay for ever.
        """
        if model.memory > self.budget:
            raise _refused(
                f"{model.name} needs {format_bytes(model.memory)} of memory, and all models together may take "
                f"{format_bytes(self.budget)}"
            )
        deadline = time.monotonic() + _ROOM_SECONDS
        try:
            while not self._fits(model):
                others = [each for each in self.held if each.state == "loaded"]
                if model.exclusive and any(each.exclusive for each in others):
                    others = [each for each in others if each.exclusive]
                idle = [each for each in others if not each.users]
                if idle:
                    await self._unload(min(idle, key=lambda each: each.used_at))
                    continue
                if others and not any(each.leaving for each in others):
                    min(others, key=lambda each: each.used_at).leaving = True
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._event.wait(), max(0.0, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    names = ", ".join(each.name for each in self.held)
                    raise _refused(f"there is no room for {model.name}: {names} are answering")
        finally:
            for each in self.models.values():
                each.leaving = False
            self._wake()

    def _fits(self, model: OneModel) -> bool:
        held = self.held
        if model.exclusive and any(each.exclusive for each in held):
            return False
        return sum(each.memory for each in held) + model.memory <= self.budget

    def _unload(self, model: OneModel) -> asyncio.Task[None]:
        self._change(model, "unloading")
        model.task = asyncio.create_task(self._end(model))
        return model.task

    async def _end(self, model: OneModel) -> None:
        assert model.running is not None
        _LOG.info("unloading %s", model.name)
        try:
            await model.running.stop()
        except TrtserveError as error:
            _LOG.error("%s: %s", model.name, error.message)
        finally:
            model.running = model.task = None
            self._change(model, "unloaded")

    async def sweep(self) -> None:
        """Unload models that have had no request for long, or have ended by themselves, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            with looking_again():
                now = time.monotonic()
                for each in self.models.values():
                    if each.state != "loaded" or each.task is not None or each.users:
                        continue
                    tired = self._idle and now - each.used_at > self._idle
                    if tired or (each.running is not None and not each.running.alive()):
                        self._unload(each)

    async def close(self) -> None:
        """Unload all models, also those that are being loaded."""
        tasks = {each.task: each for each in self.models.values() if each.task is not None}
        for task, model in tasks.items():
            if model.state != "unloading":
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(each) for each in self.models.values() if each.state == "loaded"))

    def _change(self, model: OneModel, state: ModelState) -> None:
        model.state = state
        self._wake()
        self._tell()

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


def _refused(reason: str) -> RefusedError:
    return RefusedError(503, reason, headers={"retry-after": "5"})
