"""One step of the sequences in a plan: run the model, choose tokens, say which sequences have ended and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import numpy.typing as npt

from trtserve.executor.batch import Batch, Step
from trtserve.executor.drafts import verify_draft
from trtserve.executor.enums import FinishReason
from trtserve.executor.kv_cache import KvCache
from trtserve.executor.model import Model
from trtserve.executor.results import RequestPerfMetrics
from trtserve.executor.sampling import EXHAUSTED, UNDEFINED, choose_tokens
from trtserve.executor.scheduler import Plan
from trtserve.executor.sequence import Sequence

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class Outcome:
    """Sequences that have got something with the reason of their end (or NOT_FINISHED), and those that failed.

    `drafts` holds (draft tokens, accepted ones) of each sequence that had some.
    """

    advanced: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)


class Stepper:
    """Runs plans on `model`; `post_process` changes logits in place first, and says which sequences it failed for."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        cache: KvCache,
        *,
        normalize_log_probs: bool = True,
        post_process: Callable[[list[tuple[Sequence, Logits]]], dict[Sequence, str]],
    ) -> None:
        self._model = model
        self._batch = batch
        self._cache = cache
        self._normalize = normalize_log_probs
        self._post_process = post_process
        self._failures: dict[Sequence, str] = {}

    def run(self, plan: Plan, iteration: int) -> Outcome:
        """Compute the step; whatever the model raises goes through."""
        step = self._batch.fill(plan)
        for sequence, _ in plan.chunks:
            if sequence.metrics is not None and sequence.metrics.first_iter is None:
                sequence.metrics.first_iter = iteration
                sequence.metrics.timing_metrics.first_scheduled_time = _now()
        logits = self._model.forward(**step.inputs)
        self._keep_logits(step, logits)
        for sequence, size in plan.chunks:
            sequence.computed += size
        for sequence in plan.generations:
            sequence.computed += 1
        if self._cache.reuse:
            self._announce(plan)
        outcome = Outcome()
        self._sample(step.sampled, logits, outcome)
        for span in step.spans:
            rows = logits[span.first : span.first + span.count]
            (self._verify if span.sequence.search is None else self._search)(span.sequence, rows, outcome)
        _note_metrics(outcome, iteration)
        return outcome

    def _announce(self, plan: Plan) -> None:
        """Let other sequences use the blocks that are full now."""
        size = self._cache.tokens_per_block
        for sequence, _ in plan.chunks:
            self._cache.filled(sequence.slots[0], sequence.context[: sequence.computed])
        for sequence in plan.generations:
            if sequence.computed % size == 0 and sequence.search is None:
                self._cache.filled(sequence.slots[0], sequence.cached_tokens()[: sequence.computed])

    def _keep_logits(self, step: Step, logits: Logits) -> None:
        """Copy what requests want of the model's logits, then let post-processors change them."""
        for span in step.contexts:
            sequence = span.sequence
            assert sequence.logits is not None
            kept = sequence.logits.context
            assert kept is not None
            first = sequence.computed
            kept[first : first + span.count] = logits[span.first : span.first + span.count]
        special = [(sequence, logits[row : row + 1]) for row, sequence in enumerate(step.sampled) if sequence.special]
        special += [
            (span.sequence, logits[span.first : span.first + span.count])
            for span in step.spans
            if span.sequence.special
        ]
        for sequence, rows in special:
            if sequence.logits is not None and sequence.logits.generation is not None:
                _keep_generation(sequence, sequence.logits.generation, rows)
        self._failures = self._post_process(special) if special else {}

    def _sample(self, sequences: list[Sequence], logits: Logits, outcome: Outcome) -> None:
        """One token for each sequence of width 1."""
        if not sequences:
            return
        rows = [sequence.row for sequence in sequences]
        choices = choose_tokens(logits[: len(rows)], rows, normalize_log_probs=self._normalize)
        advanced = outcome.advanced
        for sequence, choice in zip(sequences, choices, strict=True):
            sequence.iterations += 1
            if choice.token < 0:
                outcome.failed.append((sequence, self._no_token(choice.token, sequence)))
            else:
                advanced.append((sequence, sequence.accept(choice)))

    def _verify(self, sequence: Sequence, logits: Logits, outcome: Outcome) -> None:
        """Draft tokens: the sequence ends after this step, whatever the model thinks of them."""
        sequence.iterations += 1
        verdict = verify_draft(
            logits,
            sequence.row,
            sequence.draft,
            sequence.draft_logits,
            sequence.accept,
            normalize_log_probs=self._normalize,
        )
        sequence.computed += verdict.accepted
        drafted = len(sequence.draft)
        outcome.drafts.append((drafted, verdict.accepted))
        if sequence.metrics is not None:
            figures = sequence.metrics.speculative_decoding
            figures.total_draft_tokens, figures.total_accepted_draft_tokens = drafted, verdict.accepted
            figures.acceptance_rate = verdict.accepted / drafted if drafted else 0.0
        if verdict.token < 0:
            outcome.failed.append((sequence, self._no_token(verdict.token, sequence)))
            return
        ended = verdict.reason is not FinishReason.NOT_FINISHED
        outcome.advanced.append((sequence, verdict.reason if ended else FinishReason.LENGTH))

    def _search(self, sequence: Sequence, logits: Logits, outcome: Outcome) -> None:
        """One step of a beam search, and the blocks of the new beams."""
        search = sequence.search
        assert search is not None
        sequence.iterations += 1
        first = not search.beams[0].tokens
        log_probs = search.log_probs(logits)
        if np.isnan(log_probs).any():
            outcome.failed.append((sequence, self._no_token(UNDEFINED, sequence)))
            return
        parents, _ = search.step(log_probs)
        if search.done:
            ranked = search.ranked()
            if ranked:
                outcome.advanced.append((sequence, ranked[0].reason))
            else:
                outcome.failed.append((sequence, self._no_token(EXHAUSTED, sequence)))
            return
        if first:
            self._cache.fork(sequence.slots, sequence.computed)
        else:
            # Slots of beams that are no more follow the last one, so that all hold the same number of tokens.
            self._cache.reorder(
                sequence.slots, [*parents, *parents[-1:] * (sequence.width - len(parents))], sequence.computed
            )
        sequence.capacity = 0
        outcome.advanced.append((sequence, FinishReason.NOT_FINISHED))

    def _no_token(self, token: int, sequence: Sequence) -> str:
        """Why no token could be chosen; the neighbours in the batch are not concerned."""
        if sequence in self._failures:
            return self._failures[sequence]
        search = sequence.search
        place = f"token {1 + (len(sequence.generated) if search is None else search.longest)} of the answer"
        if token != EXHAUSTED:
            return f"the logits for {place} are not finite"
        reason = sequence.row.processor.failure or "bad words, bans, bias or guide exclude all of them"
        return f"no token is allowed as {place}: {reason}"


def _keep_generation(sequence: Sequence, kept: list[Logits], rows: Logits) -> None:
    """One entry per token of a single sequence, one per step of a beam search."""
    if sequence.search is not None:
        kept.append(rows.copy())
    else:
        kept.extend(rows[number : number + 1].copy() for number in range(len(rows)))


def _note_metrics(outcome: Outcome, iteration: int) -> None:
    """Times and iterations of the sequences that asked for metrics."""
    for sequence, _ in outcome.advanced:
        if sequence.metrics is not None:
            _note_token(sequence.metrics, iteration)


def _note_token(metrics: RequestPerfMetrics, iteration: int) -> None:
    timing, now = metrics.timing_metrics, _now()
    if timing.first_token_time == timedelta():
        timing.first_token_time = now
    timing.last_token_time = now
    metrics.iter = metrics.last_iter = iteration


def _now() -> timedelta:
    return timedelta(seconds=time.monotonic())
