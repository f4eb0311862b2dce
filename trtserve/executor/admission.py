"""How a request becomes a sequence: the checks that belong to one request alone, and their messages."""

from __future__ import annotations

import logging

from trtserve.executor.limits import Limits
from trtserve.executor.requests import Request
from trtserve.executor.sampling import SamplingParameters
from trtserve.executor.sequence import NO_END, Sequence, as_prompt
from trtserve.executor.unbuilt import refuse_unbuilt

logger = logging.getLogger(__name__)


def admit(request: Request, id: int, limits: Limits) -> Sequence:  # noqa: A002 - the interface's name
    """The sequence of `request`; RuntimeError with the message of its error Response when it cannot be served.

    `max_tokens` that would pass max_seq_len is reduced with a warning.
    """
    sampling = request.sampling_config
    _check_sampling(request, limits)
    refuse_unbuilt(request)
    prompt = as_prompt(request.input_token_ids)
    _check_prompt(int(prompt.min()), int(prompt.max()), len(prompt), limits)
    return Sequence(
        id=id,
        prompt=prompt,
        max_tokens=_reduced_max_tokens(request.max_tokens, len(prompt), limits),
        end_id=_end_id(request.end_id, limits),
        stop_words=tuple(tuple(word) for word in request.stop_words or () if word),
        sampling=SamplingParameters.of(sampling),
        streaming=request.streaming,
        return_all=request.return_all_generated_tokens,
        exclude_input=request.output_config.exclude_input_from_output,
        client_id=request.client_id,
    )


def _check_sampling(request: Request, limits: Limits) -> None:
    problems = request.sampling_config.problems()
    if problems:
        raise RuntimeError("; ".join(problems))
    width = request.sampling_config.beam_width
    if width > limits.max_beam_width:
        raise RuntimeError(
            f"Requested beam width {width} is larger than configured max beam width {limits.max_beam_width}"
        )


def _check_prompt(lowest: int, highest: int, length: int, limits: Limits) -> None:
    if length > limits.max_input_len:
        raise RuntimeError(f"Prompt length ({length}) exceeds maximum input length ({limits.max_input_len}).")
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RuntimeError(f"Token id {wrong} of the prompt is outside the vocabulary of {limits.vocab_size}")


def _end_id(end_id: int | None, limits: Limits) -> int:
    if end_id is None:
        return NO_END
    if not NO_END <= end_id < limits.vocab_size:
        raise RuntimeError(f"EndId ({end_id}) is not within acceptable range [{NO_END}, {limits.vocab_size})")
    return end_id


def _reduced_max_tokens(max_tokens: int, prompt_length: int, limits: Limits) -> int:
    room = limits.max_seq_len - prompt_length
    if max_tokens > room:
        logger.warning(
            "max_tokens (%d) is reduced to %d: the prompt has %d tokens and max_seq_len is %d",
            max_tokens,
            room,
            prompt_length,
            limits.max_seq_len,
        )
    return min(max_tokens, room)
