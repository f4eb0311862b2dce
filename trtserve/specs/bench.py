"""What `bench` is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtserve.errors import UsageError
from trtserve.specs.fields import require_above_zero, require_choice, require_positive


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What a benchmark sends: token counts are means and standard deviations of a normal distribution.

    `request_rate` (requests/s) makes an open loop, whose arrivals follow a schedule; None makes a closed loop, in which
    `concurrency` users send their next request when the last is answered. In an open loop `concurrency` caps the
    requests in flight (None: no cap). `timeout` bounds the measured window in seconds. `vocab_size`, `max_input_len`
    and `max_seq_len` replace what the engine's config says.

    With `dataset` the prompts are those of a file, `num_requests` at most, and answers get `op_tokens_per_word` tokens
    for each word of the file's. `tokenizer` is a folder in place of the server's. `ignore_eos`: an answer goes on after
    its end token, so that it has the length that was asked for.
    """

    input_mean: float = 128
    input_stdev: float = 16
    output_mean: float = 32
    output_stdev: float = 4
    num_requests: int = 100
    request_rate: float | None = None
    concurrency: int | None = None
    arrivals: Literal["exponential", "constant"] = "exponential"
    seed: int = 0
    warmup_requests: int = 10
    model: str = "tensorrt_llm"
    timeout: float = 600.0
    vocab_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    dataset: Path | None = None
    op_tokens_per_word: float = 1.3
    tokenizer: Path | None = None
    ignore_eos: bool = True

    @property
    def traffic(self) -> str:
        """The kind of traffic, as the subcommand of `bench` is called."""
        return "token-norm-dist" if self.dataset is None else "dataset"

    def __post_init__(self) -> None:
        require_above_zero(self, "input_mean", "output_mean", "request_rate", "timeout", "op_tokens_per_word")
        require_positive(self, "input_mean", "output_mean", "num_requests", "concurrency", "vocab_size")
        require_positive(self, "max_input_len", "max_seq_len")
        require_choice("--arrivals", self.arrivals, ("exponential", "constant"))
        for name in ("input_stdev", "output_stdev", "warmup_requests", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative.")
