"""The executor: any thread may enqueue requests and fetch responses; a worker thread runs the steps."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence as SequenceOf
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from trtserve.executor.engine.limits import EngineLimits, fit_to_cache, kv_cache_blocks, resolve_limits, state_rows
from trtserve.executor.engine.loop import EngineLoop, RequestEngine
from trtserve.executor.engine.model import Follower, ModelRunner, StatefulModel
from trtserve.executor.interface.configs import ExecutorConfig, ModelType
from trtserve.executor.interface.convert import (
    engine_options,
    engine_request,
    post_processors,
    refuse_unsupported_config,
    warn_about_decoding_mode,
    warn_about_ignored,
)
from trtserve.executor.interface.requests import Request
from trtserve.executor.interface.results import (
    DebugTensorsPerIteration,
    IterationStats,
    RequestStatsPerIteration,
    Response,
    iteration_stats,
    request_stats,
    response_of,
)
from trtserve.executor.loaders import load_model, read_engine_config

logger = logging.getLogger(__name__)


class Executor:
    """Serves the engine of one folder to many requests at once.

    Raises RuntimeError when the configuration requires more than the engine or this runtime supports. Leaving the
    `with` block, `shutdown` and the destructor finish all enqueued requests first.

    Where the ranks of an engine are processes of their own, only rank 0 takes requests. On the others `shutdown`
    computes what rank 0 asks for until that ends.
    """

    _loop: EngineLoop | RequestEngine | None
    _follower: Follower | None = None

    def __init__(
        self, model_path: str | Path, model_type: ModelType, executor_config: ExecutorConfig, **other: Any
    ) -> None:
        if other:
            raise RuntimeError(f"{', '.join(other)}: this runtime only loads engines from folders")
        if model_type is not ModelType.DECODER_ONLY:
            raise RuntimeError(f"{model_type}: this runtime only serves decoder-only models")
        refuse_unsupported_config(executor_config)
        engine, options = Path(model_path), engine_options(executor_config)
        content = read_engine_config(engine)
        warn_about_ignored(executor_config, content.trtserve.device)
        limits = resolve_limits(content, options)
        model = load_model(engine, options)
        if isinstance(model, Follower):
            self._follower = model
            self._loop = None
        elif isinstance(model, RequestEngine):
            self._post_processors = post_processors(executor_config)
            self.limits = model.limits
            self.kv_cache_tokens = model.kv_cache_tokens
            self._run(model)
        else:
            self._start(model, limits, executor_config)

    @classmethod
    def from_model(cls, model: ModelRunner, limits: EngineLimits, config: ExecutorConfig) -> Executor:
        """Make an executor for a loaded model of any framework."""
        executor = cls.__new__(cls)
        refuse_unsupported_config(config)
        executor._start(model, limits, config)  # noqa: SLF001 - an object of this class
        return executor

    def _start(self, model: ModelRunner, limits: EngineLimits, config: ExecutorConfig) -> None:
        warn_about_decoding_mode(config)
        options, self._post_processors = engine_options(config), post_processors(config)
        memory = model.free_memory()
        states = 0
        if isinstance(model, StatefulModel):
            fraction = options.kv_cache.free_fraction or model.kv_memory_fraction
            states = state_rows(
                limits,
                bytes_per_state=model.bytes_per_state,
                memory=int(fraction * memory),
                reuse=options.kv_cache.reuse,
            )
            memory -= states * model.bytes_per_state
        blocks = kv_cache_blocks(
            options.kv_cache,
            limits,
            tokens_per_block=model.tokens_per_block,
            bytes_per_block=model.bytes_per_block,
            free_memory=memory,
            default_fraction=model.kv_memory_fraction,
        )
        self.kv_cache_tokens = blocks * model.tokens_per_block
        self.kv_cache_bytes = blocks * model.bytes_per_block
        self.limits = fit_to_cache(
            limits,
            cache_tokens=self.kv_cache_tokens,
            tokens_per_block=model.tokens_per_block,
            fail=options.refuse_long_sequences,
        )
        model.allocate(blocks)
        if states and isinstance(model, StatefulModel):
            model.allocate_states(states)
        model.warm_up()
        if options.ngram_max_draft_len and states:
            logger.info("Steps get no drafts from n-grams: a model's states cannot go back to before a wrong guess")
        elif options.ngram_max_draft_len and not model.step_costs:
            logger.info("Steps get no drafts from n-grams: the times of small steps are not known for this model")
        self._run(EngineLoop(model, self.limits, options, blocks=blocks, free_memory=memory, states=states))

    def _run(self, loop: EngineLoop | RequestEngine) -> None:
        self._loop = loop
        self._thread = threading.Thread(target=loop.run, name="executor", daemon=True)
        self._thread.start()

    def enqueue_request(self, request: Request) -> int:
        """Queue one request and return its id without waiting. Raises RuntimeError when the queue is full."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: SequenceOf[Request]) -> list[int]:
        """Queue requests and return their ids in order; RuntimeError, without queueing any, when the queue is too full.

        A request that cannot be served gets an error Response.
        """
        if not all(isinstance(request, Request) for request in requests):
            raise TypeError("enqueue takes Request objects")
        loop = self._running()
        return loop.enqueue([engine_request(request, self._post_processors) for request in requests])

    def await_responses(
        self,
        id: int | list[int] | timedelta | float | None = None,  # noqa: A002 - the interface's name
        timeout: timedelta | float | None = None,
        *,
        ids: list[int] | None = None,
    ) -> list[Response] | list[list[Response]]:
        """Return ready responses, waiting up to `timeout` (a timedelta, or seconds; None: no limit).

        Without an id: responses of any request. With `id`: of that request. With a list of ids: one list per id, in
        order; the timeout is for all of them together. An empty list when the time is over. A single positional
        timedelta or float is a timeout, as in upstream's overloads.
        """
        mailbox = self._running().mailbox
        if isinstance(id, (timedelta, float)):
            id, timeout = None, id  # noqa: A001
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if ids is not None or isinstance(id, (list, tuple)):
            wanted: list[int] = list(id) if ids is None else ids  # type: ignore[arg-type]
            return [list(map(response_of, outputs)) for outputs in mailbox.fetch_each(wanted, seconds)]
        return list(map(response_of, mailbox.fetch(id, seconds)))

    def hang(self) -> str | None:
        """Return why no step is made although requests are open, when that is certain, or None. Thread-safe."""
        loop = self._loop
        return None if loop is None else loop.hang()

    def get_num_responses_ready(self, id: int | None = None) -> int:  # noqa: A002 - the interface's name
        """Return the number of ready responses, of one request or of all."""
        return self._running().mailbox.count(id)

    def cancel_request(self, id: int) -> None:  # noqa: A002 - the interface's name
        """Stop a request within one step; its last response is empty and final. Finished requests are ignored."""
        if not isinstance(id, int):
            raise TypeError(f"cancel_request(): expected an id, got {type(id).__name__}")
        self._running().cancel(id)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return the iteration records since the last call."""
        return [iteration_stats(each, self.limits) for each in self._running().recorder.drain_iterations()]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Return the per-request records since the last call; none unless request_stats_max_iterations is above 0."""
        return [request_stats(each) for each in self._running().recorder.drain_requests()]

    def get_latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """Return nothing: this runtime keeps no debug tensors."""
        self._running()
        return []

    def get_kv_cache_event_manager(self) -> None:
        """Return None, as upstream does without an event buffer."""
        self._running()

    def can_enqueue_requests(self) -> bool:
        """Return whether this process is the leader, rank 0."""
        if self._follower is not None:
            return False
        self._running()
        return True

    def shutdown(self) -> None:
        """Finish all enqueued requests, then stop. Further calls do nothing."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.follow()
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.terminate()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Executor:
        self._running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ may have failed early
            if self._follower is None:
                self.shutdown()

    def _running(self) -> EngineLoop | RequestEngine:
        if self._loop is None:
            raise RuntimeError("Shutdown called")
        return self._loop
