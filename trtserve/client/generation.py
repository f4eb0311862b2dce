"""The answer to a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

OutputKey = tuple[str, int, int]
"""(name of the output, prompt, sequence)"""


@dataclass(kw_only=True)
class GeneratedSequence:
    """One generated sequence."""

    prompt: int  # prompt, sequence (sample) and beam count from 0
    sequence: int
    beam: int
    text: str | None = None
    """Text without the prompt (unless requested) and without leading spaces, or None where only token ids are known."""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    cum_log_prob: float | None = None
    log_probs: list[float] | None = None
    """One value per generated token."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The answer to one request."""

    sequences: tuple[GeneratedSequence, ...]
    model: str
    request_id: str
    streamed: bool
    responses: int
    """Number of responses that carried text or tokens."""
    latency: float
    """Seconds from sending the request to its last response."""
    time_to_first_token: float | None = None
    """Seconds from sending the request to the first token, or None unless the answer was streamed."""
    output_tokens: int | None = None
    input_tokens: int | None = None
    stopped: bool = False
    """Whether --stop-after-ms ended the request."""
    outputs: dict[OutputKey, npt.NDArray[Any]] = field(default_factory=dict)
    """All other arrays: logits, performance metrics and further outputs that the model declares."""

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.sequences[0].text or "" if self.sequences else ""

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of latency, or None when the number of tokens is unknown."""
        return self.output_tokens / self.latency if self.output_tokens and self.latency > 0 else None
