"""What a field of a spec must be, told with the flag that gives it: UsageError otherwise; None passes as not given."""

from __future__ import annotations

import math

from trtserve.errors import UsageError

# Triton's configuration and TensorRT-LLM's SizeType32 are 32-bit numbers.
_LARGEST = 2**31 - 1


def require_positive(owner: object, *names: str) -> None:
    """For numbers of at least 1."""
    for name in names:
        value = getattr(owner, name)
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value < 1:
            raise UsageError(f"{flag} is {value}; it must be at least 1.")
        if value > _LARGEST:
            raise UsageError(f"{flag} is {value}; it must be at most {_LARGEST}.")


def require_not_negative(owner: object, *names: str) -> None:
    """For numbers of at least 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 <= value <= _LARGEST:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be 0 … {_LARGEST}.")


def require_above_zero(owner: object, *names: str) -> None:
    """For real numbers: NaN and infinity come through every parser of numbers, and mean nothing here."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be above 0.")


def require_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """For words of a list."""
    if value not in choices:
        raise UsageError(f"{flag} is {value!r}; expected one of {', '.join(choices)}.")
