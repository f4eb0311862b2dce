"""`--check-output`: compare the answer with the expected one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.client.file_inputs import read_token_ids
from trtserve.client.generation import GeneratedSequence
from trtserve.errors import AnswerMismatchError, UsageError


@dataclass(frozen=True, kw_only=True)
class ExpectedAnswer:
    """Expected answers, one per sequence, as token ids or as texts."""

    token_ids: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    threshold: float = 1.0
    """Share of tokens (characters of a text) that must be equal, 0 … 1."""

    def check(self, sequences: Sequence[GeneratedSequence]) -> str:
        """Return a line that reports success; AnswerMismatchError names the first answer that differs."""
        wanted: Sequence[Any] = self.token_ids or self.texts
        if len(wanted) != len(sequences):
            raise AnswerMismatchError(f"FAIL: got {len(sequences)} answers; expected {len(wanted)}.")
        rates = []
        for number, (expected, sequence) in enumerate(zip(wanted, sequences, strict=True)):
            got = sequence.token_ids if self.token_ids else sequence.text
            if got is None:
                raise UsageError(
                    "There are no token ids to compare: this model answers with text.",
                    hint="Compare texts with --expected-output, or query the core model: --model tensorrt_llm.",
                )
            positions = max(len(expected), len(got))  # positions beyond the shorter answer count as different
            equal = sum(one == other for one, other in zip(expected, got, strict=False))
            rates.append(equal / positions if positions else 1.0)
            if rates[-1] < self.threshold:
                raise AnswerMismatchError(
                    f"FAIL: answer {number} matches at a rate of {rates[-1]:.4f}; required: {self.threshold:g}."
                    f" Expected {list(expected) if self.token_ids else expected!r}, got {got!r}."
                )
        return f"PASS: {len(rates)} as expected, matching rate {min(rates):.4f}"


def expected_answer(check: bool, tokens: str | None, texts: Sequence[str], threshold: float) -> ExpectedAnswer | None:
    """Return what `--check-output` compares with.

    Raises UsageError if it is missing, or given without `--check-output`.
    """
    if not check:
        if tokens is not None or texts:
            raise UsageError("--output-tokens-csv and --expected-output have no effect without --check-output: add it.")
        return None
    if not 0 <= threshold <= 1:
        raise UsageError(f"--correctness-threshold is {threshold}; it must be 0 … 1.")
    if (tokens is None) == (not texts):
        raise UsageError("--check-output needs either --output-tokens-csv or --expected-output.")
    if tokens is not None:
        return ExpectedAnswer(token_ids=read_token_ids(tokens, "--output-tokens-csv"), threshold=threshold)
    return ExpectedAnswer(texts=tuple(texts), threshold=threshold)
