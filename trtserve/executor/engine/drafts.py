"""Verify draft tokens of a request: how many the model accepts, and the token after them.

Without draft logits each token is chosen as usual and compared, so that the output equals that of plain decoding. With
draft logits: speculative sampling (Chen et al., Accelerating large language model decoding with speculative sampling,
2023) as in TensorRT-LLM's kernel: draft token t is accepted when p(t) > threshold * q(t), with p the target's and q the
draft's probability; the first rejected token is replaced by a sample from max(p - q, 0).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.requests import FinishReason
from trtserve.executor.engine.sampling import (
    UNDEFINED,
    Choice,
    SamplingRow,
    choose_tokens,
    log_softmax,
    uniform,
)

Doubles = npt.NDArray[np.float64]

_ACCEPTANCE_STREAM = 0x5DEECE66D
"""Added to a seed, because accepting a token must not depend on the random number that would choose it."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftLogits:
    """The logits of the draft model."""

    logits: npt.NDArray[np.float32]
    """f32[k, V]"""
    threshold: float | None = None
    """Acceptance threshold; None draws one for each token."""


@dataclass(slots=True)
class VerifiedDraft:
    """Result of verifying draft tokens."""

    reason: FinishReason
    accepted: int
    """Number of accepted draft tokens."""
    token: int
    """The last token; negative if none could be chosen."""


def verify_draft(
    logits: npt.NDArray[Any],
    row: SamplingRow,
    draft: SequenceOf[int],
    draft_logits: DraftLogits | None,
    accept: Callable[[Choice], FinishReason],
    *,
    normalize_log_probs: bool = True,
    before: Callable[[npt.NDArray[Any]], None] | None = None,
) -> VerifiedDraft:
    """Verify `draft` with `logits` f32[k + 1, V], those of the last context token and of the draft tokens.

    Calls `accept` with the draft tokens up to the first rejected one, and with one more token. Calls `before` with each
    row f32[1, V] that a token will be chosen from; it may change the row.
    """
    at_once = choose_tokens(logits, [row] * len(logits)) if row.argmax_only and before is None else None
    accepted = 0
    for number in range(len(draft) + 1):
        if before is not None:
            before(logits[number : number + 1])
        given = draft[number] if number < len(draft) else None
        if at_once is not None:
            choice = at_once[number]
        elif draft_logits is not None and given is not None:
            choice = _choose_by_logits(logits[number], row, given, draft_logits, number)
        else:
            (choice,) = choose_tokens(logits[number : number + 1], [row], normalize_log_probs=normalize_log_probs)
        if choice.token < 0:
            return VerifiedDraft(FinishReason.NOT_FINISHED, accepted, choice.token)
        reason = accept(choice)
        accepted += choice.token == given
        if choice.token != given or reason is not FinishReason.NOT_FINISHED:
            return VerifiedDraft(reason, accepted, choice.token)
    raise AssertionError("the token after the draft ends the loop")


def _choose_by_logits(
    logits: npt.NDArray[Any], row: SamplingRow, given: int, draft: DraftLogits, number: int
) -> Choice:
    """Return the draft token if it is accepted, else another one."""
    processed = row.processor.process(logits, row.generated)
    if not np.isfinite(processed.max()):
        return Choice(UNDEFINED)
    target = distribution(processed, row)
    proposal = np.exp(log_softmax(draft.logits[number : number + 1])[0].astype(np.float64))
    limit = _random(row, _ACCEPTANCE_STREAM) if draft.threshold is None else draft.threshold
    token = given if target[given] > limit * proposal[given] else _choose_other(target, proposal, row)
    if not row.log_prob:
        return Choice(token)
    log_prob = float(log_softmax(processed[None])[0, token])
    return Choice(token, log_prob, log_prob)


def _choose_other(target: Doubles, proposal: Doubles, row: SamplingRow) -> int:
    """Sample from the positive part of target - proposal."""
    rest = np.maximum(target - proposal, 0.0)
    sums = np.cumsum(rest if rest.any() else target)
    return int(np.searchsorted(sums, _random(row) * sums[-1], side="right"))


def distribution(processed: npt.NDArray[Any], row: SamplingRow) -> Doubles:
    """Return the probabilities f64[V] with which the sampler chooses each token of a processed row."""
    result = np.zeros(len(processed))
    if row.parameters.greedy:
        result[processed.argmax()] = 1.0
        return result
    order = np.argsort(-processed, kind="stable")[: row.parameters.top_k or len(processed)]
    weights = np.exp((processed[order] - processed[order[0]]).astype(np.float64))
    sums = np.cumsum(weights)
    reached = np.minimum(sums, row.processor.top_p * sums[-1])
    result[order] = np.diff(reached, prepend=0.0) / reached[-1]
    return result


def _random(row: SamplingRow, stream: int = 0) -> float:
    """Return the random number of the row's seed and position."""
    seed = (row.parameters.seed + stream) % 2**64
    numbers = uniform(np.array([seed], dtype=np.uint64), np.array([len(row.generated)], dtype=np.uint64))
    return float(numbers[0])
