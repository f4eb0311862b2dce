"""Read the prompts of `trtserve query`: from words, options, a file or stdin."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trtserve.errors import UsageError
from trtserve.files import is_unicode, parse_json

Prompts = tuple[str, ...]
TokenIds = tuple[tuple[int, ...], ...]

_STDIN = Path("-")
# Start of a JSON list; "[INST] …" is a prompt.
_LIST = re.compile(r"""\s*\[\s*["{]""")


def read_prompts(
    words: Sequence[str] | None, *, prompts: Sequence[str] | None, file: Path | None, tokens: str | None
) -> tuple[Prompts, TokenIds]:
    """Return prompts as texts or as token ids. Raises UsageError when they come from two places."""
    ways = {"the words": words, "--prompt": prompts, "--input-file": file, "--input-tokens-csv": tokens}
    used = [name for name, value in ways.items() if value]
    if len(used) > 1:
        raise UsageError(f"Prompts come from {' and '.join(used)}; use one of them.")
    if tokens is not None:
        from trtserve.client.file_inputs import read_token_ids

        return (), read_token_ids(tokens, "--input-tokens-csv")
    if prompts:
        return tuple(_decoded(os.fsencode(prompt)) for prompt in prompts), ()
    if file is not None:
        return _of_file(file), ()
    # An unquoted prompt arrives as several arguments.
    prompt = " ".join(words) if words else None
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("There is no prompt.", hint='Give one: trtserve query "What is ML?"')
    return (_decoded(_stdin().rstrip(b"\r\n") if prompt is None or prompt == "-" else os.fsencode(prompt)),), ()


def as_utf8(text: str, flag: str) -> str:
    """Return an argument as UTF-8, which models expect, whatever this terminal's encoding is."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} is not UTF-8 text: {error.reason} at byte {error.start}.") from None


def _stdin() -> bytes:
    # sys.stdin is None when it was closed (`<&-`).
    return b"" if sys.stdin is None else sys.stdin.buffer.read()


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The prompt is not UTF-8 text: {error.reason} at byte {error.start}.",
            hint="Convert it, for example: iconv -f latin1 -t utf-8 FILE | trtserve query",
        ) from None


def _of_file(path: Path) -> Prompts:
    """Return the texts of a JSON list, or the non-empty lines of any other file."""
    try:
        text = _decoded(_stdin() if path == _STDIN else path.read_bytes())
    except OSError as error:
        raise UsageError(f"--input-file: {path} cannot be read: {error.strerror}.") from None
    prompts = _json_texts(text, path)
    if prompts is None:
        prompts = tuple(line for line in text.splitlines() if line.strip())
    if not prompts:
        raise UsageError(f"--input-file: {path} holds no prompt.")
    return prompts


def _json_texts(text: str, path: Path) -> Prompts | None:
    """Return the texts of a JSON list, or None for lines, which may begin with a bracket too ("[INST] …")."""
    if not text.lstrip().startswith("["):
        return None
    try:
        content = parse_json(text)
    except ValueError as error:
        if not _LIST.match(text):
            return None
        raise UsageError(
            f"--input-file: {path} looks like a JSON list but is not: {error}.",
            hint="Fix the list; for one prompt per line, put another line first.",
        ) from None
    wrong = [item for item in content if not isinstance(item, str) or not is_unicode(item)]
    if wrong:
        raise UsageError(f"--input-file: {path} is a JSON list with {json.dumps(wrong[0])} in it; expected only texts.")
    return tuple(content)
