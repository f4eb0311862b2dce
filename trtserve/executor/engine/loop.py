"""The executor's loop: take new requests, plan a step, run it, deliver the responses; sleep when there is no work."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from trtserve.executor.engine.admission import Admission
from trtserve.executor.engine.batch import Batch
from trtserve.executor.engine.guided import UNGUIDED, CompiledGuide
from trtserve.executor.engine.kv_cache import KvCache
from trtserve.executor.engine.limits import CapacitySchedulerPolicy, EngineLimits, EngineOptions
from trtserve.executor.engine.lora import AdapterCache, NotCachedError
from trtserve.executor.engine.model import ChoosingModel, FatalModelError, ModelRunner, StatefulModel
from trtserve.executor.engine.outputs import Mailbox, ended_response, error_response, next_responses
from trtserve.executor.engine.recorder import IterationRecord, Recorder, RequestsRecord
from trtserve.executor.engine.requests import FinishReason, GenerationRequest, RequestOutput
from trtserve.executor.engine.scheduler import Scheduler, StepPlan, insert_by_priority
from trtserve.executor.engine.sequence import Sequence
from trtserve.executor.engine.step import PostProcessors, RunningStep, StepOutcome, Stepper

logger = logging.getLogger(__name__)

# After this many failed steps in a row, the requests are not at fault. Memory is different: a client may
# ask again and again for more than fits.
_FAILED_STEPS = 3
_STEPS_WITHOUT_MEMORY = 30


@dataclass(frozen=True)
class _Arrived:
    """A request whose guide is being compiled."""

    request: GenerationRequest
    arrival: float


class Records(Protocol):
    """The records of an engine until they are fetched."""

    def drain_iterations(self) -> list[IterationRecord]: ...

    def drain_requests(self) -> list[RequestsRecord]: ...


@runtime_checkable
class RequestEngine(Protocol):
    """An engine of another project that answers requests, with the methods of `EngineLoop`."""

    @property
    def mailbox(self) -> Mailbox: ...

    @property
    def recorder(self) -> Records: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def kv_cache_tokens(self) -> int: ...

    def run(self) -> None: ...

    def enqueue(self, requests: list[GenerationRequest]) -> list[int]: ...

    def cancel(self, id_: int) -> None: ...

    def hang(self) -> str | None: ...

    def terminate(self) -> None: ...


class EngineLoop:
    """The queue of waiting requests, the scheduler with the active ones, and the model.

    `run` is the loop, in a thread of its own: it takes requests from the queue, plans a step, runs it, and delivers its
    outputs. `enqueue`, `cancel`, `terminate` and `hang` are for other threads.
    """

    def __init__(
        self,
        model: ModelRunner,
        limits: EngineLimits,
        options: EngineOptions,
        *,
        blocks: int,
        free_memory: int,
        states: int = 0,
    ) -> None:
        """Make a loop over a model with `blocks` blocks of KV cache and `states` rows of states."""
        self.mailbox = Mailbox()
        self.cache = KvCache(
            blocks=blocks,
            tokens_per_block=model.tokens_per_block,
            max_rows=limits.max_rows,
            max_tokens=limits.max_seq_len,
            copy_block=model.copy_block,
            reuse=options.kv_cache.reuse and limits.paged_context,
            partial_reuse=options.kv_cache.partial_reuse,
            copy_on_partial_reuse=options.kv_cache.copy_on_partial_reuse,
            copy_states=model.copy_states if states and isinstance(model, StatefulModel) else None,
            kept_states=states - limits.max_rows,
        )
        adapters = AdapterCache(model.lora, options.adapters, free_memory=free_memory)
        costs = model.step_costs if options.ngram_max_draft_len else ()
        self.scheduler = Scheduler(
            limits,
            self.cache,
            policy=CapacitySchedulerPolicy.STATIC_BATCH if options.static_batching else options.policy,
            chunking=options.chunking,
            fits=adapters.fits,
            max_draft_len=options.ngram_max_draft_len,
            step_costs=costs,
            plain_costs=model.plain_costs if costs and isinstance(model, ChoosingModel) else (),
            brief_tokens=model.brief_tokens if isinstance(model, ChoosingModel) else 0,
        )
        self.recorder = Recorder(self.scheduler, options, drafts=bool(limits.max_draft_len or costs))
        self._admission = Admission(model, limits, options, adapters)
        self._stepper = Stepper(
            model,
            Batch(limits, self.cache, None if model.lora is None else adapters, states=bool(states)),
            self.cache,
            normalize_log_probs=options.normalize_log_probs,
            post_process=PostProcessors(options.batched_post_processor).apply,
        )
        self._running: deque[RunningStep] = deque()  # the oldest first
        self._finished = 0.0
        self._max_queue_size = options.max_queue_size or None
        # Requests are checked under this lock only, so that a long prompt does not block the loop.
        self._enqueue_lock = threading.Lock()
        self._wake = threading.Condition()
        self.waiting: deque[Sequence] = deque()
        self._compiling: dict[int, _Arrived] = {}  # changed under both locks
        self._cancelled: set[int] = set()
        self._timed: list[Sequence] = []
        self._next_id = 1
        self._terminating = False
        self._failure: str | None = None
        self._failed_steps = 0  # since the last one that succeeded
        self._without_memory = 0

    def run(self) -> None:
        """Work until terminated. If the loop or the model fails for good, every open request gets an error response."""
        try:
            while self._collect():
                self._step()
        except BaseException as error:
            logger.critical("The executor has stopped: %r", error, exc_info=error)
            cause = str(error) if isinstance(error, FatalModelError) else f"{type(error).__name__}: {error}"
            message = f"The executor has stopped working: {cause}"
            with self._enqueue_lock:  # no request is half enqueued
                self._failure = message
                self.waiting.clear()
                self._compiling.clear()
                self.mailbox.fail(message)
        else:
            self.mailbox.close()
        finally:
            self._admission.close()

    def _collect(self) -> bool:
        """Take new requests and cancellations, or sleep while there is no work.

        Returns False when the thread should end.
        """
        with self._wake:
            while not (self.waiting or self.scheduler.active):
                self._cancelled &= self._compiling.keys()  # the others have ended
                if self._terminating and not self._compiling:
                    return False
                self._wake.wait()
            while self.waiting and (sequence := self.scheduler.take(self.waiting)) is not None:
                self.scheduler.add(sequence)
                self.recorder.became_active(sequence)
                if sequence.deadline is not None:
                    self._timed.append(sequence)
            cancelled = self._take_cancelled() if self._cancelled else []
        if cancelled:
            self._end_early(cancelled, FinishReason.CANCELLED)
        if self._timed:
            now, active = time.monotonic(), set(map(id, self.scheduler.active))
            self._timed = [sequence for sequence in self._timed if id(sequence) in active]
            late = [sequence for sequence in self._timed if sequence.deadline is not None and sequence.deadline <= now]
            self._timed = [sequence for sequence in self._timed if sequence not in late]
            self._end_early(late, FinishReason.TIMED_OUT)
        return True

    def _step(self) -> None:
        """Run one step of the active sequences. An exception ends them with an error; the executor goes on.

        Raises FatalModelError when the model cannot go on, or when too many steps have failed in a row.
        """
        if not self.scheduler.active:
            self._record_if_idle()
            return
        try:
            self._run_step()
        except FatalModelError:
            raise
        except Exception as error:
            logger.exception("A step failed")
            self._count_failure(error)
            self.cache.steps_failed()
            while self._running:
                self._stepper.abandon(self._running.popleft())
            finished: list[Sequence] = []
            responses: list[RequestOutput] = []
            text = f"the step failed: {error}"
            self._fail([(sequence, text) for sequence in self.scheduler.active], finished, responses)
            self._end(finished, responses, trusted=False)
            self._record_if_idle()

    def _run_step(self) -> None:
        """Run a step, or, where steps overlap, start one and then finish the one before it."""
        running = self._running
        if running and (running[-1].plan.drafts or not self.scheduler.can_plan_ahead()):
            self._finish(running.popleft())
            if not self.scheduler.active:
                return
        plan = self.scheduler.plan_step()
        if plan:
            running.append(self._stepper.start(plan, self.recorder.iteration + len(running)))
        elif not running:
            raise RuntimeError("no active request can be scheduled")
        if len(running) > self._stepper.overlaps or not plan:
            self._finish(running.popleft())
        if running and not self.scheduler.active:  # all of its sequences have ended meanwhile
            self._stepper.abandon(running.popleft())
        for step in running:
            self._stepper.choose(step)

    def _finish(self, running: RunningStep) -> None:
        """Finish a step and deliver its responses."""
        outcome = self._stepper.finish(running, self.recorder.iteration)
        self._failed_steps = self._without_memory = 0
        for drafted, accepted in outcome.drafts:
            self.recorder.verified(drafted, accepted)
        now = time.perf_counter()
        seconds, self._finished = now - max(running.begin, self._finished), now
        self.recorder.record(running.plan, seconds=seconds, queue=self.waiting)
        self._deliver(outcome)

    def _deliver(self, outcome: StepOutcome) -> None:
        """Deliver the responses of a step with a single notification."""
        responses: list[RequestOutput] = []
        finished: list[Sequence] = []
        for sequence, reason in outcome.advanced:
            if reason is FinishReason.NOT_FINISHED and not sequence.streaming:
                continue
            responses += next_responses(sequence, reason)
            if reason is not FinishReason.NOT_FINISHED:
                finished.append(sequence)
        if outcome.failed:
            self._fail(outcome.failed, finished, responses)
        if finished:
            self._end(finished, responses, trusted=not outcome.failed)
            self._record_if_idle()
        elif responses:
            self.mailbox.deliver(responses)

    def _take_cancelled(self) -> list[Sequence]:
        """Return the active sequences that were cancelled; cancellations of queued ones are kept."""
        active = [sequence for sequence in self.scheduler.active if sequence.id in self._cancelled]
        self._cancelled &= {sequence.id for sequence in self.waiting} | self._compiling.keys()
        return active

    def _end_early(self, sequences: list[Sequence], reason: FinishReason) -> None:
        if sequences:
            self._end(sequences, [ended_response(sequence, reason) for sequence in sequences])

    def _fail(
        self, failed: list[tuple[Sequence, str]], finished: list[Sequence], responses: list[RequestOutput]
    ) -> None:
        """Add an error response per request of `failed`, and all sequences of these requests to `finished`."""
        for sequence, text in failed:
            if not sequence.group.failed:
                logger.error("Request %d: %s", sequence.id, text)
                responses.append(error_response(sequence, f"Encountered an error in forwardAsync function: {text}"))
        groups = {id(sequence.group) for sequence, _ in failed}
        with self._wake:
            if any(sequence.group.size > 1 for sequence, _ in failed):
                self.waiting = deque(each for each in self.waiting if id(each.group) not in groups)
        ending = set(finished)
        finished += [each for each in self.scheduler.active if id(each.group) in groups and each not in ending]

    def _end(self, sequences: list[Sequence], responses: list[RequestOutput], *, trusted: bool = True) -> None:
        """End sequences. Their blocks are freed first, so that a reader of the last response finds them free."""
        self.scheduler.remove(sequences, trusted=trusted)
        self.recorder.completed(sequences)
        self._admission.release(sequences)
        self.mailbox.deliver(responses)

    def _record_if_idle(self) -> None:
        """Write the closing record when the last request has ended."""
        if not self.scheduler.active:
            self.recorder.record(StepPlan(), seconds=0.0, queue=self.waiting)

    def _count_failure(self, error: Exception) -> None:
        """Count a step that failed. Raises FatalModelError after too many without one that succeeded."""
        self._failed_steps += not isinstance(error, MemoryError)
        self._without_memory += isinstance(error, MemoryError)
        if self._failed_steps >= _FAILED_STEPS or self._without_memory >= _STEPS_WITHOUT_MEMORY:
            count = self._failed_steps + self._without_memory
            last = f"{type(error).__name__}: {error}"
            raise FatalModelError(f"{count} steps in a row have failed, the last one with {last}") from error

    def hang(self) -> str | None:
        """Return a message with the seconds that a step has been stuck on its device, or None. For other threads."""
        seconds = self._stepper.hung()
        return None if seconds is None else f"A step has not come back from its device for {seconds:.0f} s"

    def enqueue(self, requests: list[GenerationRequest]) -> list[int]:
        """Queue `requests`.

        Raises RuntimeError when the queue cannot take all. Invalid requests get an error response. One whose guide has
        to be compiled joins the queue after that.
        """
        with self._enqueue_lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._terminating:
                raise RuntimeError("Shutdown called")
            limit = self._max_queue_size
            waiting = [*requests, *(each.request for each in self._compiling.values())]
            if limit is not None and len(self.waiting) + sum(each.num_sequences for each in waiting) > limit:
                raise RuntimeError(f"Maximum queue size of {limit} has been reached, please try again later")
            ids = list(range(self._next_id, self._next_id + len(requests)))
            self._next_id += len(requests)
            self.mailbox.expect({id_: request.client_id for request, id_ in zip(requests, ids, strict=True)})
            now = time.monotonic()
            checked = [
                self._admit_or_compile(id_, _Arrived(each, now)) for each, id_ in zip(requests, ids, strict=True)
            ]
            with self._wake:
                self._add(checked)
            self._refuse(checked)
        return ids

    def _admit_or_compile(self, id_: int, arrived: _Arrived) -> list[Sequence] | RequestOutput:
        """Admit a request whose guide is ready. Otherwise start to compile it; `_compiled` admits the request later."""
        guide = self._admission.guide(arrived.request)
        if guide is None:
            with self._wake:
                self._compiling[id_] = arrived
            try:
                self._admission.compile_guide(
                    arrived.request, partial(self._compiled, id_), lambda: id_ in self._compiling
                )
            except RuntimeError as error:
                guide = CompiledGuide(error=str(error))
                with self._wake:
                    del self._compiling[id_]
            else:
                return []
        return self._admit(id_, arrived, guide)

    def _compiled(self, id_: int, guide: CompiledGuide) -> None:
        """Admit a request whose guide has been compiled, or is not needed any more."""
        with self._enqueue_lock:
            arrived = self._compiling.get(id_)
            if arrived is None:  # it was cancelled, or the executor has failed
                return
            checked = self._admit(id_, arrived, guide)
            with self._wake:
                del self._compiling[id_]
                self._add([checked])
            self._refuse([checked])

    def _admit(self, id_: int, arrived: _Arrived, guide: CompiledGuide) -> list[Sequence] | RequestOutput:
        request = arrived.request
        try:
            return self._admission.admit(request, id_, guide, arrival=arrived.arrival)
        except NotCachedError as error:  # clients recognise exactly this text and send the weights
            return RequestOutput(request_id=id_, client_id=request.client_id, error=str(error))
        except RuntimeError as error:
            message = f"Encountered an error when fetching new request: {error}"
            return RequestOutput(request_id=id_, client_id=request.client_id, error=message)

    def _add(self, checked: SequenceOf[list[Sequence] | RequestOutput]) -> None:
        """Queue what was admitted; the caller holds `_wake`."""
        for each in checked:
            for sequence in each if isinstance(each, list) else ():
                insert_by_priority(self.waiting, sequence)
        self._wake.notify()

    def _refuse(self, checked: SequenceOf[list[Sequence] | RequestOutput]) -> None:
        refused = [each for each in checked if isinstance(each, RequestOutput)]
        if refused:
            self.mailbox.deliver(refused)

    def cancel(self, id_: int) -> None:
        """Cancel a request; a queued one ends when it becomes active, unknown ids are ignored."""
        with self._wake:
            compiling = id_ in self._compiling
            self._cancelled.add(id_)
            self._wake.notify()
        if compiling:
            self._compiled(id_, UNGUIDED)  # it becomes active, and ends

    def terminate(self) -> None:
        """Let `run` return when all queued requests have ended."""
        with self._enqueue_lock, self._wake:
            self._terminating = True
            self._wake.notify()
