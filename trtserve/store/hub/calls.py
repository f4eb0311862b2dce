"""Calls of the hub's client: its errors become trtserve's, and a hub that is busy is asked again."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from trtserve.errors import AccessDeniedError, TrtserveError
from trtserve.store.hub.failures import explain

P = ParamSpec("P")
R = TypeVar("R")

# Too many requests, and faults of a server or of a proxy in front of it (RFC 9110, RFC 6585).
_BUSY = frozenset({429, 500, 502, 503, 504})
_DELAYS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt; a hub may ask for longer ones, up to the last value here times four."""


def endpoint() -> str:
    """Return the address of the hub: $HF_ENDPOINT as it is now, else the client's default."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Call again when the hub is busy, then turn the client's error into one of trtserve's.

    The function's first argument is the repository, or has it as `repository`.
    """

    @functools.wraps(function)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> R:
        from huggingface_hub.errors import HFValidationError

        subject = arguments[0]
        repository = str(getattr(subject, "repository", subject))
        _require_sendable(options.get("token"))
        for least in (*_DELAYS, None):
            try:
                with _quiet_client():
                    return function(*arguments, **options)
            except TrtserveError:
                raise
            except (transport_error(), OSError, HFValidationError) as error:
                delay = None if least is None else _delay(error, least)
                if delay is None:
                    raise explain(error, repository, endpoint()) from error
            time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    return wrapper


def _require_sendable(given: object) -> None:
    """Raise AccessDeniedError for a token that no header can carry: the client's own errors would show it."""
    from huggingface_hub import get_token

    token = given if isinstance(given, str) else get_token() or ""
    if not (token.isascii() and token.isprintable()):
        raise AccessDeniedError(
            "The token of the hub has characters that no token has.",
            hint="Set HF_TOKEN again, or run `hf auth login`.",
        )


def _delay(error: Exception, least: float) -> float | None:
    """Return the seconds to wait before the next attempt, or None for an error that will come again.

    There is no other attempt if the connection was refused, or if the hub asks for a longer wait than a user accepts.
    """
    response: Any = getattr(error, "response", None)
    if response is None:
        lost = isinstance(error, transport_error()) and "Connect" not in type(error).__name__
        return least if lost else None
    if response.status_code not in _BUSY:
        return None
    asked = response.headers.get("Retry-After", "")
    seconds = max(least, float(asked)) if asked.isascii() and asked.isdigit() else least
    return seconds if seconds <= 4 * _DELAYS[-1] else None


def transport_error() -> type[Exception]:
    """Return the base class of transport errors; the client's library changed twice (requests, httpx, httpx2)."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Keep the client's own bars and warnings off stderr: trtserve reports progress and errors itself."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    if bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()
