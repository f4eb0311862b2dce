"""Checks of a single request; the RuntimeErrors become its error Response."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.model import ModelRunner
from trtserve.executor.engine.requests import GenerationRequest, PromptTable
from trtserve.executor.engine.sequence import NO_END

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 1024
"""Most sequences of one request, the number of beams that TensorRT-LLM allows: each uses memory while it waits."""

_FINITE = (
    "temperature",
    "beam_search_diversity_rate",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)


def check_sampling(request: GenerationRequest, limits: EngineLimits) -> None:
    """Check the numbers of sequences and beams, and that all figures are finite."""
    # NaN or infinity would leave no valid logits, and no valid order of the queue.
    figures = {"priority": request.priority} | {name: getattr(request.sampling, name) for name in _FINITE}
    for name, value in figures.items():
        if not math.isfinite(value):
            raise RuntimeError(f"{name} is {value}; expected a finite number")
    if request.num_sequences > MOST_SEQUENCES:
        raise RuntimeError(
            f"num_return_sequences ({request.num_sequences}) exceeds {MOST_SEQUENCES}, the most sequences of a request"
        )
    if request.sampling.beam_width > limits.max_beam_width:
        raise RuntimeError(
            f"Requested beam width {request.sampling.beam_width} is larger than configured max beam width "
            f"{limits.max_beam_width}"
        )


def check_prompt(
    request: GenerationRequest, prompt: npt.NDArray[np.int64], model: ModelRunner, limits: EngineLimits, *, reuse: bool
) -> None:
    """Check the length, the token ids, the positions, and the prompt table that ids above the vocabulary refer to."""
    length = len(prompt)
    if length > limits.max_input_len:
        raise RuntimeError(f"Prompt length ({length}) exceeds maximum input length ({limits.max_input_len}).")
    rows = 0
    if request.prompt_table is not None:
        rows = _check_prompt_table(request.prompt_table, length, model, limits, reuse=reuse)
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= limits.vocab_size + rows:
        wrong = lowest if lowest < 0 else highest
        table = f" and the {rows} rows of the prompt table" if rows else ""
        raise RuntimeError(f"Token id {wrong} of the prompt is outside the vocabulary of {limits.vocab_size}{table}")
    if request.position_ids is not None:
        if len(request.position_ids) != length:
            raise RuntimeError(f"Got {len(request.position_ids)} position ids for a prompt of {length} tokens")
        if min(request.position_ids) < 0 or max(request.position_ids) >= model.max_position:
            raise RuntimeError(f"Position ids must be in 0 … {model.max_position - 1}")


def _check_prompt_table(
    table: PromptTable, length: int, model: ModelRunner, limits: EngineLimits, *, reuse: bool
) -> int:
    """Check the prompt table and return its number of rows."""
    rows, hidden = table.rows.shape
    most = limits.max_prompt_embedding_table_size
    if rows > most:
        built = "without a prompt table" if most == 0 else f"for {most} rows"
        raise RuntimeError(
            f"The prompt embedding table has {rows} rows, but the engine was built {built} "
            "(max_prompt_embedding_table_size)"
        )
    if hidden != model.hidden_size:
        raise RuntimeError(f"The prompt embedding table has hidden size {hidden}; the model has {model.hidden_size}")
    if not np.isfinite(table.rows.astype(np.float32, copy=False)).all():
        raise RuntimeError("The prompt embedding table has values that are not finite")
    extra_ids = table.extra_ids
    if reuse and extra_ids is None:
        raise RuntimeError("Input token extra ids must be provided when enabling kv cache reuse with prompt table")
    if extra_ids is not None and len(extra_ids) != length:
        raise RuntimeError(
            f"inputTokenExtraIds vector size ({len(extra_ids)}) must be the same as input token vector size ({length})."
        )
    return rows


def check_outputs(request: GenerationRequest, limits: EngineLimits, *, generation_logits: bool) -> None:
    """Check that the engine was built to return the requested logits."""
    if request.return_context_logits and not limits.gather_context_logits:
        raise RuntimeError("return_context_logits needs an engine that was built with gather_context_logits")
    if request.return_generation_logits and not generation_logits:
        raise RuntimeError("return_generation_logits needs an engine that was built with gather_generation_logits")


def allowed_draft(request: GenerationRequest, limits: EngineLimits) -> tuple[int, ...]:
    """Return the draft tokens that fit after the prompt, or empty without a draft."""
    draft = request.draft
    if draft is None:
        return ()
    tokens, length = draft.tokens, len(request.tokens)
    if request.sampling.beam_width > 1:
        raise RuntimeError("Draft tokens need beam width 1")
    if len(tokens) > limits.max_draft_len:
        raise RuntimeError(
            f"Draft tokens length ({len(tokens)}) exceeds maximum draft tokens length ({limits.max_draft_len})."
        )
    _check_draft(draft.logits, tokens, limits.vocab_size)
    room = max(limits.max_input_len - length, 0)
    if len(tokens) > room:
        logger.warning(
            "Prompt length + number of draft tokens (%d + %d) exceeds maximum input length (%d): using %d draft tokens",
            length,
            len(tokens),
            limits.max_input_len,
            room,
        )
    return tuple(tokens[:room])


def _check_draft(logits: npt.NDArray[Any] | None, tokens: SequenceOf[int], vocab_size: int) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RuntimeError(f"A draft token is outside the vocabulary of {vocab_size}")
    if logits is None:
        return
    if logits.shape[1] != vocab_size:
        raise RuntimeError(f"The draft logits cover {logits.shape[1]} tokens; the vocabulary has {vocab_size}")
    # −∞ marks a token that the draft model must not choose; if it could choose none, there is no distribution.
    if not np.isfinite(logits.max(axis=1)).all():
        raise RuntimeError("The draft logits have NaN, +infinity, or a row without any finite value")


def allowed_max_tokens(request: GenerationRequest, prompt_length: int, draft_length: int, limits: EngineLimits) -> int:
    """Return `max_tokens`, reduced with a warning if the sequence would exceed max_seq_len."""
    room = max(limits.max_seq_len - prompt_length - draft_length, 1)
    if request.max_tokens > room:
        logger.warning(
            "max_tokens (%d) is reduced to %d: the prompt has %d tokens and max_seq_len is %d",
            request.max_tokens,
            room,
            prompt_length + draft_length,
            limits.max_seq_len,
        )
    return min(request.max_tokens, room)


def allowed_end_id(end_id: int | None, limits: EngineLimits) -> int:
    """Return the end token; −1 for none."""
    if end_id is None:
        return NO_END
    if not NO_END <= end_id < limits.vocab_size:
        raise RuntimeError(f"EndId ({end_id}) is not within acceptable range [{NO_END}, {limits.vocab_size})")
    return end_id


def allowed_bias(bias: npt.NDArray[Any] | None, limits: EngineLimits) -> npt.NDArray[np.float32] | None:
    """Return the bias to add to the logits, f32[vocab_size]; −∞ bans a token."""
    if bias is None or bias.size == 0:
        return None
    if bias.shape != (limits.vocab_size,):
        raise RuntimeError(
            f"The embedding bias has {bias.size} entries; expected as many as the vocabulary has ({limits.vocab_size})"
        )
    if bias.dtype not in (np.float32, np.float16):
        raise RuntimeError(f"The embedding bias has type {bias.dtype}; expected float32 or float16")
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise RuntimeError("The embedding bias has NaN or +infinity; use finite numbers, or -infinity to ban a token")
    return bias.astype(np.float32)
