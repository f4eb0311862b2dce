"""Errors of the hub's client, of the network and of the disk, turned into errors of trtserve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtserve.errors import (
    AccessDeniedError,
    ModelNotFoundError,
    NetworkError,
    TrtserveError,
)
from trtserve.files import writing_error


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
