"""Join tokens of a stream that wait to be sent: a response costs Triton the same with one token as with several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# So many answers at once show that Triton is behind.
MOST_WAITING = 32


def joined(answers: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Return answers, each with the tokens of the answers before it in the same stream, which are left out.

    Nothing is joined up to MOST_WAITING answers, nor answers that hold more than the tokens of one sequence, such as
    log-probabilities or beams.
    """
    if len(answers) <= MOST_WAITING:
        return [(answer, []) for answer in answers]
    kept: dict[int, tuple[Any, list[int]]] = {}
    waiting: dict[int, tuple[int, int]] = {}  # executor id → sequence, and number in `kept`
    for number, answer in enumerate(answers):
        earlier: list[int] = []
        sequence = _sequence_of_tokens(answer)
        before = waiting.pop(answer.request_id, None)
        if sequence is not None:
            if before is not None and before[0] == sequence:
                previous, tokens = kept.pop(before[1])
                earlier = [*tokens, *previous.result.output_token_ids[0]]
            waiting[answer.request_id] = sequence, number
        kept[number] = answer, earlier
    return list(kept.values())


def _sequence_of_tokens(answer: Any) -> int | None:
    """Return the number of the sequence whose tokens are all that an answer holds, or None."""
    if answer.has_error():
        return None
    result = answer.result
    others = result.cum_log_probs, result.log_probs, result.context_logits, result.generation_logits
    if len(result.output_token_ids) != 1 or any(other is not None for other in others):
        return None
    return int(getattr(result, "sequence_index", 0))  # 0.12 and 0.13 have one sequence
