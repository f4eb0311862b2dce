"""Answers of a hub, checked where they come in: a mirror, or anyone between it and this machine, may have made them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trtserve.errors import NetworkError
from trtserve.files import is_below
from trtserve.store.hub.calls import endpoint

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A commit as git names it: SHA-1 or SHA-256."""

_REPOSITORY = re.compile(r"[\w.-]{1,128}(/[\w.-]{1,128})?")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Line ends and terminal commands would change what a message shows; no hub lets them, or a backslash, into a name.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")
# A file system takes 255 bytes; `.unverified` is added while a file comes.
_LONGEST_PART = 240
_LONGEST_NAME = 1024
_LARGEST_SIZE = 2**63 - 1
# The hub itself advises against repositories of more files.
_MOST_FILES = 100_000


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
    """Return the size of the file `name`."""
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
    """Turn what the hub's client raises on an answer of another form into NetworkError; it checks no types."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError:  # about the request
        raise
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise lie(repository, f"what its client cannot read ({reason})", "the answers of a Hugging Face hub") from error


def lie(repository: str, answered: str, expected: str) -> NetworkError:
    """Return the error for an answer about `repository` that no hub gives."""
    return NetworkError(
        f"{endpoint()} answered {answered} for {repository}; expected {expected}.",
        hint="Nothing was pulled from this answer. Check that HF_ENDPOINT is the address of a hub or mirror that you "
        "trust, and that it begins with https://.",
    )


def _shown(answered: object) -> str:
    text = repr(answered)
    return text if len(text) <= 80 else f"{text[:77]}…"
