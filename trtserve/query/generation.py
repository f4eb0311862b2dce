"""What came back for a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

OutputKey = tuple[str, int, int]
"""(name of the output, prompt, sequence)"""


@dataclass(kw_only=True)
class GeneratedSequence:
    """One generated sequence; `prompt`, `sequence` (sample) and `beam` count from 0.

    `text` is without the prompt (unless it was asked for) and without leading spaces, which tokenizers put before a
    first word; None where only ids are known. `log_probs` has one value per generated token.
    """

    prompt: int
    sequence: int
    beam: int
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    cum_log_prob: float | None = None
    log_probs: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The answer to one request. Times are seconds since it was sent.

    `responses` counts those that carried text or tokens; `time_to_first_token` is None unless the answer came as a
    stream. `outputs` are all other arrays: logits, performance metrics and whatever else the model declares.
    `stopped`: the request was ended by --stop-after-ms.
    """

    sequences: tuple[GeneratedSequence, ...]
    model: str
    request_id: str
    streamed: bool
    responses: int
    latency: float
    time_to_first_token: float | None = None
    output_tokens: int | None = None
    input_tokens: int | None = None
    stopped: bool = False
    outputs: dict[OutputKey, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.sequences[0].text or "" if self.sequences else ""

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of latency; None when the server does not count them."""
        return self.output_tokens / self.latency if self.output_tokens and self.latency > 0 else None
