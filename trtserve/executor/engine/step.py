"""Run one step: compute the logits, choose tokens, and find out which sequences have ended and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.batch import Batch, BatchedStep, Span
from trtserve.executor.engine.drafts import verify_draft
from trtserve.executor.engine.kv_cache import KvCache
from trtserve.executor.engine.model import ChoosingModel, Chosen, Draws, FatalModelError, ModelRunner, PendingStep
from trtserve.executor.engine.requests import FinishReason, PostProcessor
from trtserve.executor.engine.sampling import EXHAUSTED, UNDEFINED, Choice, choose_tokens
from trtserve.executor.engine.scheduler import StepPlan
from trtserve.executor.engine.sequence import Sequence

Logits = npt.NDArray[np.float32]

# A device is hung when a step takes longer than both this and _SLOWER times the longest wait so far.
_LONGEST_WAIT = 20.0
_SLOWER = 10.0
_NO_LOGITS = np.zeros((0, 0), dtype=np.float32)


@dataclass(slots=True)
class StepOutcome:
    """Result of a step."""

    advanced: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    """Sequences with new tokens and why they ended (NOT_FINISHED: they go on)."""
    failed: list[tuple[Sequence, str]] = field(default_factory=list)  # sequences that failed and the error message
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """(draft tokens, accepted tokens) of each sequence that had draft tokens."""


@dataclass(slots=True)
class RunningStep:
    """A step that the model computes or has computed."""

    plan: StepPlan
    step: BatchedStep
    begin: float  # from time.perf_counter
    logits: Logits  # of all rows, from a model that does not choose tokens
    pending: PendingStep | None = None
    drawn: list[Sequence] = field(default_factory=list)  # sequences whose tokens the model chooses
    drafted: list[Span] = field(default_factory=list)  # rows of drafts whose tokens it chooses too
    guided: list[Sequence] = field(default_factory=list)  # those of them with guides that the model has yet to be told


class Stepper:
    """Runs steps on `model`; `post_process` changes logits in place and returns the sequences that it failed for.

    overlaps: the next step can be started before the last one is finished.
    """

    def __init__(
        self,
        model: ModelRunner,
        batch: Batch,
        cache: KvCache,
        *,
        normalize_log_probs: bool = True,
        post_process: Callable[[list[tuple[Sequence, Logits]]], dict[Sequence, str]],
    ) -> None:
        self._model = model
        self._choosing: ChoosingModel | None = model if isinstance(model, ChoosingModel) else None
        self.overlaps = self._choosing is not None
        self._batch = batch
        self._cache = cache
        self._normalize = normalize_log_probs
        self._post_process = post_process
        self._failures: dict[Sequence, str] = {}
        self._awaited_since: float | None = None
        self._longest_wait = 0.0

    def start(self, plan: StepPlan, iteration: int) -> RunningStep:
        """Start the step; exceptions of the model are not caught. A model that does not choose tokens computes it."""
        begin = time.perf_counter()
        step = self._batch.fill(plan)
        for sequence, _ in plan.chunks:
            if sequence.metrics is not None and sequence.metrics.first_iteration is None:
                sequence.metrics.first_iteration = iteration
                sequence.metrics.first_scheduled = time.monotonic()
        if self._choosing is None:
            running = RunningStep(plan, step, begin, self._model.forward(step.inputs))
        else:
            running = self._send(self._choosing, plan, step, begin)
        self._cache.step_started()
        for sequence, size in plan.chunks:
            sequence.computed += size
        for sequence in plan.generations:
            sequence.computed += 1
        if self._cache.reuse:  # blocks that prompts fill now are available to other sequences
            for sequence, _ in plan.chunks:
                self._cache.register_full_blocks(sequence.slots[0], sequence.context[: sequence.computed])
                if not (sequence.draft and sequence.generating):  # the state has seen the draft too
                    self._cache.keep_state(sequence.slots[0], sequence.computed)
        return running

    def _send(self, model: ChoosingModel, plan: StepPlan, step: BatchedStep, begin: float) -> RunningStep:
        """Send the step to a model that chooses the tokens of most sequences."""
        draws = Draws(normalize_log_probs=self._normalize)

        def draw(number: int, sequence: Sequence, ahead: int, *, begins: bool) -> None:
            draws.numbers.append(number)
            draws.rows.append(sequence.row)
            draws.slots.append(sequence.slots[0])
            draws.counts.append(len(sequence.generated) + ahead)
            draws.begins.append(begins)

        drawn = [sequence for sequence in step.sampled if sequence.drawn]
        for number, sequence in enumerate(step.sampled):
            if sequence.drawn:
                draw(number, sequence, sequence.ahead, begins=number < step.begins)
        drafted = [span for span in step.spans if span.sequence in plan.drafts and span.sequence.drawn]
        for span in drafted:
            for ahead in range(span.count):
                draw(span.first + ahead, span.sequence, ahead, begins=False)
        pending = model.start(draws, step.inputs)
        for number, sequence in enumerate(step.sampled):
            sequence.ahead += 1
            sequence.place = number
        for span in step.spans:
            span.sequence.ahead += 1
        guided = [sequence for sequence in drawn if sequence.row.processor.guide is not None]
        return RunningStep(plan, step, begin, _NO_LOGITS, pending, drawn, drafted, guided)

    def choose(self, running: RunningStep) -> None:
        """Tell the model what the guides of a step allow; the steps before it are finished."""
        guided, running.guided = running.guided, []
        if guided and running.pending is not None:
            nothing = np.zeros(-(-self._model.vocab_size // 32), np.uint32)
            guides = [sequence.row.processor.guide if sequence.slots else None for sequence in guided]
            running.pending.choose(np.stack([nothing if guide is None else guide.allowed() for guide in guides]))

    def finish(self, running: RunningStep, iteration: int) -> StepOutcome:
        """Wait for a step and choose its tokens. Sequences that have ended since its start are left out."""
        step, logits, outcome = running.step, running.logits, StepOutcome()
        sampled, drawn = step.sampled, running.drawn
        chosen, choices = None, list[Choice]()
        if running.pending is not None:
            chosen = self._await(running.pending)
            logits = chosen.logits
            for sequence in [*step.sampled, *(span.sequence for span in step.spans)]:
                sequence.ahead -= 1
            sampled = [sequence for sequence in step.sampled if not sequence.drawn]
        self._copy_and_process_logits(step, sampled, logits, drawn=len(drawn))
        if self._cache.reuse:
            self._register_blocks(running.plan.generations)
        if chosen is not None:
            log_probs = chosen.log_probs.tolist()
            choices = [Choice(token, *log_probs[number]) for number, token in enumerate(chosen.tokens)]
            self._accept(drawn, choices[: len(drawn)], outcome)
        self._sample(sampled, logits, outcome)
        taken = len(drawn)  # rows whose tokens the model chose, which are not among the logits
        for span in step.spans:
            own, first = None, span.first - taken
            if span in running.drafted:
                own = choices[taken : taken + span.count]
                taken += span.count
            if span.sequence.slots:
                rows = logits[first : first + span.count]
                draft = running.plan.drafts.get(span.sequence)
                if draft is not None:
                    self._verify_ngrams(span.sequence, rows, draft, own, outcome)
                else:
                    (self._verify if span.sequence.search is None else self._search)(span.sequence, rows, outcome)
        _note_metrics(outcome, iteration)
        self._cache.step_finished()
        return outcome

    def abandon(self, running: RunningStep) -> None:
        """Wait for a step whose sequences have ended. Raises FatalModelError; its other results are dropped."""
        try:
            if running.pending is not None:
                self.choose(running)
                self._await(running.pending)
        except FatalModelError:
            raise
        except Exception:  # noqa: BLE001 - see above
            self._cache.steps_failed()
        else:
            self._cache.step_finished()

    def hung(self) -> float | None:
        """Return for how many seconds a device has owed a step, if that is longer than any step takes. Thread-safe.

        Only the wait for a device counts: what the host does itself, such as compiling a kernel or computing a long
        prompt, may take as long as it takes. Steps over ever more context become slower little by little.
        """
        since = self._awaited_since
        seconds = 0.0 if since is None else time.monotonic() - since
        return seconds if seconds > max(_LONGEST_WAIT, _SLOWER * self._longest_wait) else None

    def _await(self, pending: PendingStep) -> Chosen:
        """Wait for a step, and note since when and how long."""
        self._awaited_since = begin = time.monotonic()
        try:
            return pending.result()
        finally:
            self._awaited_since = None
            self._longest_wait = max(self._longest_wait, time.monotonic() - begin)

    def _register_blocks(self, generations: list[Sequence]) -> None:
        """Make blocks that generated tokens have filled available to other sequences."""
        size = self._cache.tokens_per_block
        for sequence in generations:
            known = sequence.prompt_length + len(sequence.generated)
            if known % size == 0 and sequence.search is None and sequence.slots:
                self._cache.register_full_blocks(sequence.slots[0], sequence.cached_tokens())

    def _copy_and_process_logits(
        self, step: BatchedStep, sampled: list[Sequence], logits: Logits, *, drawn: int
    ) -> None:
        """Copy the logits that requests asked for, then let post-processors change them.

        `logits` has the rows of `sampled` and of the spans, without those of the `drawn` sequences before the spans.
        """
        for span in step.contexts:
            assert span.sequence.logits is not None
            kept = span.sequence.logits.context
            assert kept is not None
            first = span.first - drawn
            kept[span.past : span.past + span.count] = logits[first : first + span.count]
        special = [(sequence, logits[row : row + 1]) for row, sequence in enumerate(sampled) if sequence.uses_logits]
        special += [
            (span.sequence, logits[span.first - drawn : span.first - drawn + span.count])
            for span in step.spans
            if span.sequence.uses_logits and (span.sequence.single_step or span.sequence.search is not None)
        ]
        self._failures = {}
        self._process_logits([(sequence, rows) for sequence, rows in special if sequence.slots])

    def _process_logits(self, special: list[tuple[Sequence, Logits]]) -> None:
        for sequence, rows in special:
            if sequence.logits is None or sequence.logits.generation is None:
                continue
            generation = sequence.logits.generation
            if sequence.search is not None:  # one entry per step of a beam search, else one per token
                generation.append(rows.copy())
            else:
                generation.extend(rows[number : number + 1].copy() for number in range(len(rows)))
        if special:
            self._failures |= self._post_process(special)

    def _sample(self, sequences: list[Sequence], logits: Logits, outcome: StepOutcome) -> None:
        """Choose one token for each sequence of width 1."""
        if not sequences:
            return
        rows = [sequence.row for sequence in sequences]
        choices = choose_tokens(logits[: len(rows)], rows, normalize_log_probs=self._normalize)
        self._accept(sequences, choices, outcome)

    def _accept(self, sequences: list[Sequence], choices: list[Choice], outcome: StepOutcome) -> None:
        advanced = outcome.advanced
        for sequence, choice in zip(sequences, choices, strict=True):
            if not sequence.slots:
                continue
            sequence.iterations += 1
            if choice.token < 0:
                self._fail(sequence, choice.token, outcome)
            else:
                advanced.append((sequence, sequence.accept(choice)))

    def _verify(self, sequence: Sequence, logits: Logits, outcome: StepOutcome) -> None:
        """Verify draft tokens; the sequence always ends after this step."""
        sequence.iterations += 1
        verification = verify_draft(
            logits,
            sequence.row,
            sequence.draft,
            sequence.draft_logits,
            sequence.accept,
            normalize_log_probs=self._normalize,
        )
        sequence.computed += verification.accepted
        self._note_draft(sequence, len(sequence.draft), verification.accepted, outcome)
        if verification.token < 0:
            self._fail(sequence, verification.token, outcome)
            return
        ended = verification.reason is not FinishReason.NOT_FINISHED
        outcome.advanced.append((sequence, verification.reason if ended else FinishReason.LENGTH))

    def _verify_ngrams(
        self, sequence: Sequence, logits: Logits, draft: list[int], chosen: list[Choice] | None, outcome: StepOutcome
    ) -> None:
        """Verify guessed tokens. Every row is treated as a step of its own would, up to the first wrong guess.

        `chosen`: the tokens of the rows, if the model chose them.
        """
        sequence.iterations += 1
        verification = verify_draft(
            logits,
            sequence.row,
            draft,
            None,
            sequence.accept,
            normalize_log_probs=self._normalize,
            chosen=chosen,
            before=(lambda row: self._process_logits([(sequence, row)])) if sequence.uses_logits else None,
        )
        size, computed = self._cache.tokens_per_block, sequence.computed
        sequence.computed += verification.accepted
        if self._cache.reuse and sequence.computed // size > computed // size:
            self._cache.register_full_blocks(sequence.slots[0], sequence.cached_tokens()[: sequence.computed])
        self._note_draft(sequence, len(draft), verification.accepted, outcome)
        if verification.token >= 0 or verification.accepted:
            outcome.advanced.append((sequence, verification.reason))
        if verification.token < 0:
            self._fail(sequence, verification.token, outcome)

    def _note_draft(self, sequence: Sequence, drafted: int, accepted: int, outcome: StepOutcome) -> None:
        outcome.drafts.append((drafted, accepted))
        if sequence.metrics is not None:
            sequence.metrics.drafted += drafted
            sequence.metrics.accepted += accepted

    def _search(self, sequence: Sequence, logits: Logits, outcome: StepOutcome) -> None:
        """Run one step of a beam search and rearrange the blocks of the beams."""
        search = sequence.search
        assert search is not None
        sequence.iterations += 1
        first = not search.beams[0].tokens
        log_probs = search.log_probs(logits)
        if np.isnan(log_probs).any():
            self._fail(sequence, UNDEFINED, outcome)
            return
        parents, _ = search.step(log_probs)
        if search.done:
            ranked = search.ranked()
            if ranked:
                outcome.advanced.append((sequence, ranked[0].reason))
            else:
                self._fail(sequence, EXHAUSTED, outcome)
            return
        if first:
            self._cache.fork(sequence.slots, sequence.computed)
        else:
            # Slots of ended beams follow the last beam, so that all slots hold the same number of tokens.
            self._cache.reorder(
                sequence.slots, [*parents, *parents[-1:] * (sequence.width - len(parents))], sequence.computed
            )
        sequence.capacity = 0
        outcome.advanced.append((sequence, FinishReason.NOT_FINISHED))

    def _fail(self, sequence: Sequence, token: int, outcome: StepOutcome) -> None:
        """End a sequence for which no token could be chosen. What gave undefined logits is not kept for others."""
        outcome.failed.append((sequence, self._failure_reason(token, sequence)))
        if token != EXHAUSTED and sequence.slots:
            self._cache.distrust(sequence.slots[0])

    def _failure_reason(self, token: int, sequence: Sequence) -> str:
        """Return why no token could be chosen for this sequence; the rest of the batch is not affected."""
        if sequence in self._failures:
            return self._failures[sequence]
        search = sequence.search
        place = f"token {1 + (len(sequence.generated) if search is None else search.longest)} of the answer"
        if token != EXHAUSTED:
            return f"the logits for {place} are not finite"
        reason = sequence.row.processor.failure or "bad words, bans, bias or guide exclude all of them"
        return f"no token is allowed as {place}: {reason}"


def _note_metrics(outcome: StepOutcome, iteration: int) -> None:
    """Record times and iterations of the sequences that asked for metrics."""
    for sequence, _ in outcome.advanced:
        if sequence.metrics is not None:
            sequence.metrics.last_token = time.monotonic()
            sequence.metrics.first_token = sequence.metrics.first_token or sequence.metrics.last_token
            sequence.metrics.last_iteration = iteration


class PostProcessors:
    """Calls the logits post-processors of a step.

    A post-processor is called with (request id, logits f32[n, beams, V] to change in place, tokens per beam, None as
    the stream, client id), the batched one with lists of these; n is 1 except for draft tokens.
    """

    def __init__(self, batched: PostProcessor | None = None) -> None:
        self._batched = batched

    def apply(self, rows: list[tuple[Sequence, Logits]]) -> dict[Sequence, str]:
        """Let the post-processors of the sequences change their rows f32[r, V]; return error messages by sequence.

        The rows of a post-processor that raises become NaN.
        """
        failures: dict[Sequence, str] = {}
        batched: list[tuple[Sequence, Logits]] = []
        for sequence, logits in rows:
            if sequence.post_processor is None:
                continue
            if sequence.post_processor is self._batched:
                batched.append((sequence, logits))
            else:
                self._call(sequence.post_processor, _arguments(sequence, logits), [(sequence, logits)], failures)
        if batched and self._batched is not None:
            columns = zip(*(_arguments(sequence, logits) for sequence, logits in batched), strict=True)
            ids, logits_of, tokens, _, clients = (list(column) for column in columns)
            self._call(self._batched, (ids, logits_of, tokens, None, clients), batched, failures)
        return failures

    def _call(
        self,
        processor: PostProcessor,
        arguments: tuple[Any, ...],
        rows: list[tuple[Sequence, Logits]],
        failures: dict[Sequence, str],
    ) -> None:
        try:
            processor(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            for sequence, logits in rows:
                logits[:] = np.nan
                failures[sequence] = f"the logits post-processor failed: {type(error).__name__}: {error}"


def _arguments(sequence: Sequence, logits: Logits) -> tuple[Any, ...]:
    prompt, search = sequence.prompt.tolist(), sequence.search
    answers = [sequence.generated] if search is None else [beam.tokens for beam in search.beams]
    rows = logits.reshape(-1, 1 if search is None else len(logits), logits.shape[1])
    return sequence.id, rows, [[*prompt, *answer] for answer in answers], None, sequence.client_id
