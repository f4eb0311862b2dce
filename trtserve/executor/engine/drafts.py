"""Draft tokens: verify those of a request or of its own text, and guess the latter from n-grams.

Verification: without draft logits each token is chosen as usual and compared, so that the output equals that of plain
decoding. With draft logits: speculative sampling (Chen et al., Accelerating large language model decoding with
speculative sampling, 2023) as in TensorRT-LLM's kernel: draft token t is accepted when p(t) > threshold * q(t), with p
the target's and q the draft's probability; the first rejected token is replaced by a sample from max(p - q, 0).

N-gram drafting, also known as prompt lookup decoding: the last tokens of prompt and answer are looked up in prompt and
answer, and what came after them is guessed to come again. `NgramDrafter` guesses for one sequence;
`best_draft_lengths` divides the room of a step, whose cost is known, among the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.requests import FinishReason
from trtserve.executor.engine.sampling import UNDEFINED, Choice, SamplingRow, choose_tokens, log_softmax, uniform

Doubles = npt.NDArray[np.float64]

_ACCEPTANCE_STREAM = 0x5DEECE66D
"""Added to a seed, because accepting a token must not depend on the random number that would choose it."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftLogits:
    """The logits of the draft model."""

    logits: npt.NDArray[np.float32]  # f32[k, V]
    threshold: float | None = None  # acceptance threshold; None draws one for each token


@dataclass(slots=True)
class VerifiedDraft:
    """Result of verifying draft tokens."""

    reason: FinishReason
    accepted: int  # number of accepted draft tokens
    token: int  # the last token; negative if none could be chosen


def verify_draft(
    logits: npt.NDArray[Any],
    row: SamplingRow,
    draft: SequenceOf[int],
    draft_logits: DraftLogits | None,
    accept: Callable[[Choice], FinishReason],
    *,
    normalize_log_probs: bool = True,
    chosen: SequenceOf[Choice] | None = None,
    before: Callable[[npt.NDArray[Any]], None] | None = None,
) -> VerifiedDraft:
    """Verify `draft` with `logits` f32[k + 1, V], those of the last context token and of the draft tokens.

    `chosen` are the tokens of the rows, if the model chose them. Calls `accept` with the draft tokens up to the first
    rejected one, and with one more token. Calls `before` with each row f32[1, V] that a token will be chosen from; it
    may change the row.
    """
    at_once = chosen
    if at_once is None and row.argmax_only and before is None:
        at_once = choose_tokens(logits, [row] * len(logits))
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


# What a match of 0, 1, 2, … tokens is worth before anything is known of a request; longer ones count as the longest.
_FIRST_CHANCES = (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
_LONGEST = len(_FIRST_CHANCES) - 1
_LEARNING_RATE = 0.125
_CANDIDATES = 8  # earlier places of the last two tokens that a look-up compares
_REQUIRED_GAIN = 1.02  # drafts must promise this much more speed than the step has without them: the costs are measured


class NgramDrafter:
    """The tokens of one sequence, and where each pair of neighbours stood last. A new token costs a bounded time.

    As long as the guessed tokens are right, the place that they come from moves along; after a wrong one the last
    tokens are looked up again. `chances[n]` is how often the token after a match of n tokens was right; it is learnt
    from every token that comes, whether or not the model was asked to verify a draft.
    """

    def __init__(self, tokens: SequenceOf[int], *, vocab_size: int) -> None:
        """`tokens` is the prompt. Ids from `vocab_size` on are rows of a prompt table, which no answer contains."""
        self.chances = list(_FIRST_CHANCES)
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        # The place after the last occurrence of each pair, and for each place the one before it with the same pair.
        self._places: dict[tuple[int, int], int] = {}
        self._earlier = [0, 0]
        self._source = self._matched = 0
        for token in tokens:
            self._append(token)
        self._look_up()

    def accept(self, token: int) -> None:
        """Append the token that was chosen, and learn whether it was the guessed one."""
        if self._matched:
            right = self._tokens[self._source] == token
            level = min(self._matched, _LONGEST)
            self.chances[level] += (right - self.chances[level]) * _LEARNING_RATE
            self._matched = self._matched + 1 if right else 0
            self._source += 1
        self._append(token)
        if not self._matched:
            self._look_up()

    def draft(self, length: int) -> list[int]:
        """Return up to `length` tokens that may follow; a source that ends at the last token goes on with the draft."""
        if not self._matched:
            return []
        known, begin = self._tokens, self._source
        period = len(known) - begin
        draft = [known[begin + number % period] for number in range(length)]
        outside = next((number for number, token in enumerate(draft) if not 0 <= token < self._vocab_size), length)
        return draft[:outside]

    def gains(self, length: int) -> list[float]:
        """Return for each of the next `length` tokens how likely it is that it and those before it are right."""
        if not self._matched:
            return []
        gains, gain = [], 1.0
        for number in range(length):
            gain *= self.chances[min(self._matched + number, _LONGEST)]
            gains.append(gain)
        return gains

    def _append(self, token: int) -> None:
        tokens = self._tokens
        tokens.append(token)
        if len(tokens) > 1:
            pair, place = (tokens[-2], token), len(tokens)
            self._earlier.append(self._places.get(pair, 0))
            self._places[pair] = place

    def _look_up(self) -> None:
        """Find the latest of the places with the longest match of the last tokens."""
        tokens, end = self._tokens, len(self._tokens)
        self._matched, place = 0, self._earlier[end]
        for _ in range(_CANDIDATES):
            if not place or self._matched == _LONGEST:
                return
            matched, longest = 2, min(_LONGEST, place)
            while matched < longest and tokens[place - matched - 1] == tokens[end - matched - 1]:
                matched += 1
            if matched > self._matched:
                self._matched, self._source = matched, place
            place = self._earlier[place]


def best_draft_lengths(
    gains: SequenceOf[SequenceOf[float]],
    tokens: int,
    step_costs: SequenceOf[float],
    plain_costs: SequenceOf[float] = (),
) -> list[int]:
    """Return how many draft tokens each sequence should have, so that the step yields most tokens for its time.

    `gains` are those of `NgramDrafter.gains`, `tokens` the step's without drafts, and `step_costs[n]` is the time of a
    step of n + 1 tokens; there are never more than it knows. `plain_costs` are those of steps without drafts where they
    differ.
    """
    room = len(step_costs) - tokens
    likeliest = sorted(
        ((gain, number) for number, each in enumerate(gains) for gain in each), key=lambda each: -each[0]
    )
    lengths, best, expected = [0] * len(gains), 0, float(tokens)
    if room <= 0:
        return lengths
    highest = _REQUIRED_GAIN * tokens / (plain_costs or step_costs)[tokens - 1]
    for count, (gain, _) in enumerate(likeliest[:room], start=1):
        expected += gain
        rate = expected / step_costs[tokens + count - 1]
        if rate > highest:
            best, highest = count, rate
    for _, number in likeliest[:best]:
        lengths[number] += 1
    return lengths
