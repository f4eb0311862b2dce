"""The executor's loop: take new requests, plan a step, run it, hand out what is due; asleep when there is nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from trtserve.executor.admission import Admission
from trtserve.executor.answers import fail, give_up, respond
from trtserve.executor.batch import Batch
from trtserve.executor.checks import sequence_count
from trtserve.executor.configs import ExecutorConfig, PeftCacheConfig
from trtserve.executor.enums import BatchingType, CapacitySchedulerPolicy, ContextChunkingPolicy, FinishReason
from trtserve.executor.kv_cache import KvCache
from trtserve.executor.limits import Limits
from trtserve.executor.lora import AdapterCache, NotCachedError
from trtserve.executor.mailbox import Mailbox
from trtserve.executor.model import Model
from trtserve.executor.post_processing import PostProcessors
from trtserve.executor.recorder import Recorder
from trtserve.executor.requests import Request
from trtserve.executor.results import Response
from trtserve.executor.scheduler import Plan, Scheduler, insert
from trtserve.executor.sequence import Sequence
from trtserve.executor.step import Outcome, Stepper

logger = logging.getLogger(__name__)


class Worker:
    """Queue, scheduler and model of one executor; `run` is the body of its thread, the rest is called from outside."""

    def __init__(self, model: Model, limits: Limits, config: ExecutorConfig, *, blocks: int, free_memory: int) -> None:
        self.mailbox = Mailbox()
        caching = config.kv_cache_config
        self.cache = KvCache(
            blocks=blocks,
            tokens_per_block=model.tokens_per_block,
            max_rows=limits.max_rows,
            max_tokens=limits.max_seq_len,
            copy_block=model.copy_block,
            reuse=caching.enable_block_reuse and limits.paged_context,
            partial_reuse=caching.enable_partial_reuse,
            copy_on_partial_reuse=caching.copy_on_partial_reuse,
        )
        adapters = AdapterCache(model.lora, config.peft_cache_config or PeftCacheConfig(), free_memory=free_memory)
        post_processors = PostProcessors(config)
        self.scheduler = _scheduler(limits, self.cache, config, adapters)
        self.recorder = Recorder(self.scheduler, config)
        self._admission = Admission(model, limits, config, adapters=adapters, post_processors=post_processors)
        self._stepper = Stepper(
            model,
            Batch(limits, self.cache, None if model.lora is None else adapters),
            self.cache,
            normalize_log_probs=config.normalize_log_probs,
            post_process=post_processors.apply,
        )
        self._max_queue_size = config.max_queue_size or None
        # Requests are checked under the entrance alone, so that a long prompt does not hold up the loop.
        self._entrance = threading.Lock()
        self._wake = threading.Condition()
        self._queue: deque[Sequence] = deque()
        self._cancelled: set[int] = set()
        self._timed: list[Sequence] = []
        self._next_id = 1
        self._terminating = False
        self._failure: str | None = None

    def enqueue(self, requests: list[Request]) -> list[int]:
        """Queue `requests`; RuntimeError when the queue cannot take all of them. Refused ones are answered at once."""
        with self._entrance:
            self._require_room(sum(map(sequence_count, requests)))
            self._admission.require_post_processors(requests)
            ids = list(range(self._next_id, self._next_id + len(requests)))
            self._next_id += len(requests)
            self.mailbox.expect({id_: request.client_id for request, id_ in zip(requests, ids, strict=True)})
            checked = [self._admit(request, id_) for request, id_ in zip(requests, ids, strict=True)]
            with self._wake:
                for each in checked:
                    for sequence in each if isinstance(each, list) else ():
                        insert(self._queue, sequence)
                self._wake.notify()
            refused = [each for each in checked if isinstance(each, Response)]
            if refused:
                self.mailbox.deliver(refused)
        return ids

    def _require_room(self, count: int) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self._terminating:
            raise RuntimeError("Shutdown called")
        limit = self._max_queue_size
        if limit is not None and len(self._queue) + count > limit:
            raise RuntimeError(f"Maximum queue size of {limit} has been reached, please try again later")

    def _admit(self, request: Request, id_: int) -> list[Sequence] | Response:
        try:
            return self._admission.admit(request, id_)
        except NotCachedError as error:  # clients look for this very text and send the weights then
            return Response(id_, str(error), request.client_id)
        except RuntimeError as error:
            return Response(id_, f"Encountered an error when fetching new request: {error}", request.client_id)

    def cancel(self, id_: int) -> None:
        """Ask for the end of a request; a queued one ends when it becomes active, an unknown one is ignored."""
        with self._wake:
            self._cancelled.add(id_)
            self._wake.notify()

    def terminate(self) -> None:
        """Let `run` return when everything that was queued has ended."""
        with self._entrance, self._wake:
            self._terminating = True
            self._wake.notify()

    def run(self) -> None:
        """Work until terminated; however that ends, every request is answered and nobody is left waiting."""
        try:
            while self._collect():
                self._step()
        except BaseException as error:
            logger.critical("The executor has stopped: %r", error, exc_info=error)
            self._die(f"The executor has stopped working: {type(error).__name__}: {error}")
        else:
            self.mailbox.close()

    def _die(self, message: str) -> None:
        """Refuse what comes from now on and answer what is here."""
        with self._entrance:  # no request is half enqueued
            self._failure = message
            self._queue.clear()
            self.mailbox.fail(message)

    def _collect(self) -> bool:
        """Take new requests and cancels, sleeping while there is nothing to do; False when it is time to return."""
        with self._wake:
            while not (self._queue or self.scheduler.active):
                self._cancelled.clear()  # their requests have ended
                if self._terminating:
                    return False
                self._wake.wait()
            if self._queue:
                self._take_new()
            cancelled = self._take_cancelled() if self._cancelled else []
        if cancelled:
            self._give_up(cancelled, FinishReason.CANCELLED)
        if self._timed:
            self._give_up(self._take_late(), FinishReason.TIMED_OUT)
        return True

    def _take_new(self) -> None:
        """Make queued sequences active as long as there is room."""
        while self._queue and (sequence := self.scheduler.take(self._queue)) is not None:
            self.scheduler.add(sequence)
            self.recorder.became_active(sequence)
            if sequence.deadline is not None:
                self._timed.append(sequence)

    def _take_cancelled(self) -> list[Sequence]:
        """Active sequences that somebody cancelled; cancels of queued ones are kept."""
        active = [sequence for sequence in self.scheduler.active if sequence.id in self._cancelled]
        self._cancelled &= {sequence.id for sequence in self._queue}
        return active

    def _take_late(self) -> list[Sequence]:
        """Active sequences that have had their time."""
        now, active = time.monotonic(), set(map(id, self.scheduler.active))
        self._timed = [sequence for sequence in self._timed if id(sequence) in active]
        late = [sequence for sequence in self._timed if sequence.deadline is not None and sequence.deadline <= now]
        self._timed = [sequence for sequence in self._timed if sequence not in late]
        return late

    def _give_up(self, sequences: list[Sequence], reason: FinishReason) -> None:
        if sequences:
            self._end(sequences, [give_up(sequence, reason) for sequence in sequences])

    def _step(self) -> None:
        """Run one step of the active sequences; whatever it raises is answered, and the executor goes on."""
        if not self.scheduler.active:
            self._record_if_idle()
            return
        try:
            self._forward()
        except Exception as error:  # noqa: BLE001
            self._fail_all(error)

    def _forward(self) -> None:
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        if not plan:
            raise RuntimeError("no active request can be scheduled")
        outcome = self._stepper.run(plan, self.recorder.iteration)
        for drafted, accepted in outcome.drafts:
            self.recorder.verified(drafted, accepted)
        self._record(plan, time.perf_counter() - begin)
        self._hand_out(outcome)

    def _hand_out(self, outcome: Outcome) -> None:
        """Deliver what is due, all with one notification."""
        responses, finished = [], []
        for sequence, reason in outcome.advanced:
            if reason is FinishReason.NOT_FINISHED and not sequence.streaming:
                continue
            response = respond(sequence, reason)
            if response is not None:
                responses.append(response)
            if reason is not FinishReason.NOT_FINISHED:
                finished.append(sequence)
        if outcome.failed:
            self._fail(outcome.failed, finished, responses)
        if finished:
            self._end(finished, responses, trusted=not outcome.failed)
            self._record_if_idle()
        elif responses:
            self.mailbox.deliver(responses)

    def _fail(self, failed: list[tuple[Sequence, str]], finished: list[Sequence], responses: list[Response]) -> None:
        """Answer the requests of sequences that have failed; what else belongs to them ends without a word."""
        for sequence, text in failed:
            if not sequence.family.failed:
                logger.error("Request %d: %s", sequence.id, text)
                responses.append(fail(sequence, f"Encountered an error in forwardAsync function: {text}"))
        families = {id(sequence.family) for sequence, _ in failed}
        with self._wake:
            if any(sequence.family.size > 1 for sequence, _ in failed):
                self._queue = deque(each for each in self._queue if id(each.family) not in families)
        ending = set(finished)
        finished += [each for each in self.scheduler.active if id(each.family) in families and each not in ending]

    def _end(self, sequences: list[Sequence], responses: list[Response], *, trusted: bool = True) -> None:
        """Take the blocks back first: who reads the last response finds them free."""
        self.scheduler.remove(sequences, trusted=trusted)
        self.recorder.completed(sequences)
        self._admission.release(sequences)
        self.mailbox.deliver(responses)

    def _record(self, plan: Plan, seconds: float) -> None:
        self.recorder.record(plan, seconds=seconds, queue=self._queue)

    def _record_if_idle(self) -> None:
        """Write the closing record when the last request has ended."""
        if not self.scheduler.active:
            self._record(Plan(), 0.0)

    def _fail_all(self, error: Exception) -> None:
        """Answer every active request with the error of a step that failed."""
        logger.error("A step failed: %s", error, exc_info=error)
        finished: list[Sequence] = []
        responses: list[Response] = []
        self._fail([(sequence, str(error)) for sequence in self.scheduler.active], finished, responses)
        self._end(finished, responses, trusted=False)
        self._record_if_idle()


def _scheduler(limits: Limits, cache: KvCache, config: ExecutorConfig, adapters: AdapterCache) -> Scheduler:
    """The scheduler of `config`; static batching takes requests batch by batch."""
    scheduling = config.scheduler_config
    static = config.batching_type is BatchingType.STATIC
    return Scheduler(
        limits,
        cache,
        policy=CapacitySchedulerPolicy.STATIC_BATCH if static else scheduling.capacity_scheduler_policy,
        chunking=scheduling.context_chunking_policy or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        fits=adapters.fits,
    )
