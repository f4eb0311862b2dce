"""Calls of the hub's client, bounded in time and size, and its answers, checked where they come in."""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Event
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urljoin, urlsplit

from trtserve.errors import AccessDeniedError, ModelNotFoundError, NetworkError, TrtserveError, UsageError
from trtserve.files import is_below, writing_error
from trtserve.host.ports import is_here, proxied, within

P = ParamSpec("P")
R = TypeVar("R")

# Too many requests, and faults of a server or of a proxy in front of it (RFC 9110, RFC 6585).
_BUSY = frozenset({429, 500, 502, 503, 504})
_DELAYS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt; a hub may ask for longer ones, up to the last value here times four."""
# 100,000 files with their hashes take about 25 MB.
_LARGEST_ANSWER = 32 * 2**20
_LONGEST_ANSWER = 300.0  # seconds
_LONGEST_HEADERS = 60.0  # seconds until a file begins to come
_BOUNDED = ContextVar("bounded", default=False)
_BEGUN = ContextVar[Event | None]("begun", default=None)
_NO_HUB = (
    "Nothing was pulled from this answer. Check that HF_ENDPOINT is the address of a hub or mirror that you trust, and "
    "that it begins with https://."
)


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
        _require_address()
        _take_no_proxy_to_this_machine(urlsplit(endpoint()).hostname or "")
        for least in (*_DELAYS, None):
            try:
                with _quiet_client(), _bounded_answers():
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


@contextmanager
def _bounded_answers() -> Iterator[None]:
    """Have the client read its API's answers and errors through `_read_bounded`: it has no limits of its own.

    The session belongs to the whole program, so the limits hold for this call only.
    """
    from huggingface_hub import get_session

    session: Any = get_session()
    hooks = session.event_hooks if hasattr(session, "event_hooks") else session.hooks  # httpx, requests
    if _read_bounded not in hooks["response"]:
        hooks["response"].append(_read_bounded)
    token = _BOUNDED.set(True)
    try:
        yield
    finally:
        _BOUNDED.reset(token)


def _read_bounded(response: Any, **_: object) -> None:
    """Read an answer of the API, or an error, whole, as the client would. Raises NetworkError at the limit."""
    if not _BOUNDED.get():
        return
    # After 429 the client waits as long as the hub asks for.
    if (response.status_code < 300 or response.status_code == 429) and (begun := _BEGUN.get()) is not None:
        begun.set()
    api = (urlsplit(endpoint()).path + "/api/", "/api/")
    if response.status_code < 400 and not urlsplit(str(response.url)).path.startswith(api):
        return
    target = urlsplit(urljoin(str(response.url), response.headers.get("Location", ""))).path
    if 300 <= response.status_code < 400 and not target.startswith(api):
        raise NetworkError(
            f"{endpoint()} leads from its API to {_shown(target)}; expected another path below /api/.", hint=_NO_HUB
        )
    body = bytearray()
    pieces = response.iter_bytes if hasattr(response, "iter_bytes") else response.iter_content
    for piece in pieces(1 << 16):
        body += piece
        if len(body) > _LARGEST_ANSWER:
            response.close()
            raise NetworkError(
                f"{endpoint()} sent an answer of more than {_LARGEST_ANSWER >> 20} MiB, where a hub lists files.",
                hint=_NO_HUB,
            )
    response._content = bytes(body)  # noqa: SLF001 - where both libraries keep what was read


def _require_address() -> None:
    """Raise UsageError for an HF_ENDPOINT that cannot be the address of a hub, which no attempt would change."""
    try:
        address = urlsplit(endpoint())
        right = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:
        right = False
    if not right or not endpoint().isprintable():
        raise UsageError(
            f"HF_ENDPOINT is {endpoint()[:200]!r}; expected an address that begins with https:// or http://.",
            hint="Unset it for the hub itself.",
        )


def _require_sendable(given: object) -> None:
    """Raise AccessDeniedError for a token that no header can carry: the client's own errors would show it."""
    from huggingface_hub import get_token

    token = given if isinstance(given, str) else get_token() or ""
    if not (token.isascii() and token.isprintable()):
        raise AccessDeniedError(
            "The token of the hub has characters that no token has.", hint="Set HF_TOKEN again, or run `hf auth login`."
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


COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # a commit as git names it: SHA-1 or SHA-256

_REPOSITORY = re.compile(r"[\w.-]{1,128}(/[\w.-]{1,128})?")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Line ends and terminal commands would change what a message shows; no hub lets them, or a backslash, into a name.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")
# A file system takes 255 bytes; `.unverified` is added while a file comes.
_LONGEST_PART = 240
_LONGEST_NAME = 1024
_LARGEST_SIZE = 2**63 - 1
_MOST_FILES = 100_000  # the hub itself advises against repositories of more files


def repository_id(repository: str, answered: object) -> str:
    """Return the id that the hub gave `repository`, which may be a newer one."""
    if isinstance(answered, str) and _REPOSITORY.fullmatch(answered) and ".." not in answered:
        return answered
    raise lie(repository, f"the id {_shown(answered)}", "a name such as org/model")


def commit(repository: str, answered: object) -> str:
    """Return the commit that the hub named."""
    if isinstance(answered, str) and COMMIT.fullmatch(answered):
        return answered
    raise lie(repository, f"the commit {_shown(answered)}", "40 or 64 digits of 0-9a-f")


def siblings(repository: str, answered: object) -> list[Any]:
    """Return the entries of the files that the hub listed."""
    listed = [] if answered is None else answered
    if isinstance(listed, list) and len(listed) <= _MOST_FILES:
        return listed
    found = f"{len(listed):,} files" if isinstance(listed, list) else f"the files {_shown(listed)}"
    raise lie(repository, found, f"a list of at most {_MOST_FILES:,}")


def file_name(repository: str, answered: object) -> str:
    """Return the name of a file, which leads to a place below the folder that it is put into."""
    if (
        isinstance(answered, str)
        and len(answered) <= _LONGEST_NAME
        and not _FORBIDDEN.search(answered)
        and is_below(answered)
        and all(len(part.encode()) <= _LONGEST_PART for part in answered.split("/"))
    ):
        return answered
    raise lie(repository, f"the file name {_shown(answered)}", "a path below the repository's folder, such as a/b.json")


def size(repository: str, name: str, answered: object) -> int:
    if isinstance(answered, int) and not isinstance(answered, bool) and 0 <= answered <= _LARGEST_SIZE:
        return answered
    raise lie(repository, f"the size {_shown(answered)} for {name}", "a number of bytes")


def digest(repository: str, name: str, scheme: str, answered: object) -> str:
    """Return the hash of the file `name` with its scheme: `sha256`, or `git` for a blob's SHA-1."""
    wanted = {"sha256": _SHA256, "git": _SHA1}[scheme]
    if isinstance(answered, str) and wanted.fullmatch(answered):
        return f"{scheme}:{answered}"
    digits = 64 if scheme == "sha256" else 40
    raise lie(repository, f"the hash {_shown(answered)} for {name}", f"{digits} digits of 0-9a-f")


@contextmanager
def understood(repository: str) -> Iterator[None]:
    """Turn the errors that the client raises on malformed answers into NetworkError; the client checks no types."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError:  # about the request
        raise
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise lie(repository, f"what its client cannot read ({reason})", "the answers of a Hugging Face hub") from error


def asked(repository: str, call: Callable[[], R]) -> R:
    """Return the hub's answer to a question. Raises NetworkError for one that the client cannot read or never ends."""

    def bounded() -> R:
        with _bounded_answers():  # older clients have a session for each thread
            return call()

    with understood(repository):
        return within(_LONGEST_ANSWER, bounded)


def downloaded(repository: str, call: Callable[[], None]) -> None:
    """Download a file of the hub. Raises NetworkError if it does not begin in time; then it may take any time.

    The client waits for as long as single bytes of headers come. Twice HF_HUB_DOWNLOAD_TIMEOUT is in time too, once for
    a redirect.
    """
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    begun, longest = Event(), max(_LONGEST_HEADERS, 2.0 * HF_HUB_DOWNLOAD_TIMEOUT)

    def bounded() -> None:
        _BEGUN.set(begun)  # in a thread of its own, like the session of older clients
        with _bounded_answers():
            call()

    with understood(repository):
        try:
            within(longest, bounded, begun=begun.is_set)
        except TimeoutError:
            raise NetworkError(
                f"{endpoint()} began to send no file of {repository} within {longest:g} s.",
                hint="Try again; for a slow mirror set HF_HUB_DOWNLOAD_TIMEOUT to more seconds.",
            ) from None


def lie(repository: str, answered: str, expected: str) -> NetworkError:
    """Return the error for an answer about `repository` that no hub gives."""
    return NetworkError(f"{endpoint()} answered {answered} for {repository}; expected {expected}.", hint=_NO_HUB)


def _shown(answered: object) -> str:
    text = repr(answered)
    return text if len(text) <= 80 else f"{text[:77]}…"
