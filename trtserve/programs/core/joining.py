"""Join tokens of a stream that wait to be sent: a response costs Triton the same with one token as with several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

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


def joined_responses(first: Any, second: Any) -> Any:
    """Return one response with the tokens of two, or None unless both hold only tokens, and of the same sequence."""
    before, after = _tokens(first), _tokens(second)
    if before is None or after is None or before.keys() != after.keys():
        return None
    joined = {
        "output_ids": np.concatenate([before["output_ids"], after["output_ids"]], axis=2),
        "sequence_length": before["sequence_length"] + after["sequence_length"],
    }
    if any(before[name] != after[name] for name in before.keys() - joined.keys()):
        return None
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, value) for name, value in (before | joined).items()]
    )


def _tokens(response: Any) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of a response that holds only the tokens of one sequence and which it is, or None."""
    if response is None or response.has_error():
        return None
    arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    others = arrays.keys() - {"output_ids", "sequence_length", "batch_index", "sequence_index"}
    if hasattr(response, "parameters") and response.parameters() not in ("", "{}"):  # 24.10 has none
        return None
    return None if others or arrays["sequence_length"].size > 1 else arrays
