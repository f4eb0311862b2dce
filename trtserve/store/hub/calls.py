"""Calls of the hub's client: bounded in time and size, with failures explained."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from trtserve.errors import AccessDeniedError, ModelNotFoundError, NetworkError, TrtserveError
from trtserve.files import writing_error
from trtserve.host.proxies import is_here, proxied

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
        _take_no_proxy_to_this_machine(urlsplit(endpoint()).hostname or "")
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


def _take_no_proxy_to_this_machine(host: str) -> None:
    """Except a hub at this machine, such as a mirror, from the proxies that the client reads from the environment."""
    if is_here(host) and proxied(host):
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))


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


def offline(repository: str) -> NetworkError:
    """Return the error for a request that needs the network while HF_HUB_OFFLINE forbids it."""
    return NetworkError(
        f"{repository} is not on this machine, and HF_HUB_OFFLINE forbids the network.",
        hint="Unset HF_HUB_OFFLINE, or give a local folder.",
    )


def explain(error: Exception, repository: str, endpoint: str) -> TrtserveError:
    """Return trtserve's error for a failed call to the hub at `endpoint` about `repository`."""
    from huggingface_hub.errors import HFValidationError

    if isinstance(error, OSError):
        place = Path(error.filename) if error.filename else Path(f"The download of {repository}")
        if (refused := writing_error(error, place)) is not None:
            return refused
    if isinstance(error, HFValidationError):
        return ModelNotFoundError(
            f"{repository!r} cannot be the name of a repository: {str(error)[:300]}",
            hint="Check the spelling: org/name, of letters, digits, '.', '_' and '-'.",
        )
    response = getattr(error, "response", None)
    if response is None:
        return NetworkError(
            f"{endpoint} cannot be reached: {type(error).__name__}: {error}".rstrip(": ") + ".",
            hint="Check the network, proxy settings and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what is on this machine.\n"
            "`trtserve import demo` needs no network.",
        )
    return _explain_status(error, repository, response, endpoint)


def _explain_status(error: Exception, repository: str, response: Any, endpoint: str) -> TrtserveError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = response.status_code
    if isinstance(error, GatedRepoError):
        return AccessDeniedError(
            f"{repository} is gated, and this machine's token has no access (HTTP {status}).",
            hint=f"Accept the conditions on {endpoint}/{repository}, then set HF_TOKEN or run `hf auth login`.",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{repository} has no such revision.", hint="Name a branch, tag or commit after '@'.")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"The hub has no {repository}, or it is private and hidden from this token (HTTP {status}).",
            hint="Check the spelling; for a private model set HF_TOKEN or run `hf auth login`.",
        )
    if status in (401, 403):
        return AccessDeniedError(
            f"The hub refuses access to {repository} (HTTP {status}): the token is not valid or lacks the permission.",
            hint=f"Check HF_TOKEN, or make a token with read access at {endpoint}/settings/tokens.",
        )
    if status == 404:
        return ModelNotFoundError(f"The hub has no such file or repository: {repository} (HTTP 404).")
    reason = str(error).splitlines()[0]
    wait = response.headers.get("Retry-After")
    hint = "Try again later." if wait is None else f"The hub asks to wait (Retry-After: {wait}), then try again."
    return NetworkError(f"The hub answered HTTP {status} for {repository}: {reason}", hint=hint)
