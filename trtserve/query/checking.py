"""`--check-output`: is the answer the expected one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.errors import AnswerMismatchError, UsageError
from trtserve.query.attachments import read_token_ids
from trtserve.query.generation import GeneratedSequence


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Expected answers, one per sequence: token ids, or texts. `threshold` is the share that must be equal, 0 … 1."""

    token_ids: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    threshold: float = 1.0

    def check(self, sequences: Sequence[GeneratedSequence]) -> str:
        """Say that the answers are right; AnswerMismatchError names the first that is not."""
        wanted: Sequence[Any] = self.token_ids or self.texts
        if len(wanted) != len(sequences):
            raise AnswerMismatchError(f"FAIL: {len(sequences)} answers came; {len(wanted)} were expected.")
        rates = []
        for number, (expected, sequence) in enumerate(zip(wanted, sequences, strict=True)):
            got = sequence.token_ids if self.token_ids else sequence.text
            if got is None:
                raise UsageError(
                    "There are no token ids to compare: this model answers with text.",
                    hint="Compare texts with --expected-output, or ask the core model: --model tensorrt_llm.",
                )
            rates.append(_matching(expected, got))
            if rates[-1] < self.threshold:
                raise AnswerMismatchError(
                    f"FAIL: answer {number} matches at a rate of {rates[-1]:.4f}; {self.threshold:g} was asked for."
                    f" Expected {list(expected) if self.token_ids else expected!r}, got {got!r}."
                )
        return f"PASS: {len(rates)} as expected, matching rate {min(rates):.4f}"


def expectation(wanted: bool, tokens: str | None, texts: Sequence[str], threshold: float) -> Expectation | None:
    """What `--check-output` compares with; UsageError where there is nothing, or something and no `--check-output`."""
    if not wanted:
        if tokens is not None or texts:
            raise UsageError("--output-tokens-csv and --expected-output say what --check-output compares with: add it.")
        return None
    if not 0 <= threshold <= 1:
        raise UsageError(f"--correctness-threshold is {threshold}; it must be 0 … 1.")
    if (tokens is None) == (not texts):
        raise UsageError("--check-output needs --output-tokens-csv or --expected-output: one of them.")
    if tokens is not None:
        return Expectation(token_ids=read_token_ids(tokens, "--output-tokens-csv"), threshold=threshold)
    return Expectation(texts=tuple(texts), threshold=threshold)


def _matching(expected: Any, got: Any) -> float:
    """Share of places with equal tokens (texts: characters); places beyond the shorter one are not equal."""
    places = max(len(expected), len(got))
    equal = sum(one == other for one, other in zip(expected, got, strict=False))
    return equal / places if places else 1.0
