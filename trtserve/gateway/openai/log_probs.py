"""Log-probabilities of generated tokens and of their alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenText = Callable[[int], str]

_LOWEST = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """One token, its log-probability, and the likeliest tokens in its place."""

    text: str
    log_prob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    tops: tuple[tuple[str, float], ...] = ()
    special: bool = False
    """Whether it is a special token of the prompt, which is not part of the text."""

    def chat(self) -> dict[str, Any]:
        """Return the entry of `choices[].logprobs.content`."""
        tops = [_entry(text, log_prob) for text, log_prob in self.tops]
        assert self.log_prob is not None  # chats have no echo
        return {**_entry(self.text, self.log_prob), "top_logprobs": tops}


def _entry(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


def completion_log_probs(tokens: Sequence[TokenLogProb], start: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `start` is the length of the text before these tokens."""
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += 0 if token.special else len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": [dict(token.tops) or None for token in tokens] if any(token.tops for token in tokens) else None,
        "text_offset": offsets,
    }


def token_log_probs(
    outputs: Mapping[str, NDArray[Any]], ids: Sequence[int], *, before: int, tops: int, text: TokenText
) -> list[TokenLogProb]:
    """Return the entries of new tokens, of which `before` came earlier in the same stream.

    With `tops` all values come from the logits. Otherwise they are the engine's, whose responses repeat those of
    earlier tokens.
    """
    if not ids:
        return []
    if tops:
        logits = outputs["generation_logits"]
        rows = logits.reshape(-1, logits.shape[-1])[: len(ids)].astype(np.float64)
        return [_with_tops(row, token, tops, text) for row, token in zip(rows, ids, strict=True)]
    values = outputs["output_log_probs"].reshape(-1).tolist()
    new = values[before : before + len(ids)] or values[: len(ids)]
    return [
        TokenLogProb(text=text(token), log_prob=max(value, _LOWEST)) for token, value in zip(ids, new, strict=False)
    ]


def prompt_log_probs(logits: NDArray[Any], ids: Sequence[int], *, tops: int, text: TokenText) -> list[TokenLogProb]:
    """Return the entries of a prompt; the row of a token in `logits` [..., token, vocabulary] is for the next one."""
    rows = logits.reshape(-1, logits.shape[-1])
    rest = [_with_tops(row.astype(np.float64), token, tops, text) for row, token in zip(rows, ids[1:], strict=False)]
    return [TokenLogProb(text=text(ids[0]), log_prob=None), *rest]


def _with_tops(logits: NDArray[np.float64], token: int, tops: int, text: TokenText) -> TokenLogProb:
    highest = float(logits.max())
    log_probs = np.maximum(logits - highest - np.log(np.exp(logits - highest).sum()), _LOWEST)
    best = np.argsort(-log_probs, kind="stable")[:tops] if tops else ()
    return TokenLogProb(
        text=text(token),
        log_prob=float(log_probs[token]),
        tops=tuple((text(int(each)), float(log_probs[each])) for each in best),
    )
