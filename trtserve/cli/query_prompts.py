"""Where `trtserve query` takes its prompts from: words, options, a file, stdin."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trtserve.errors import UsageError

Prompts = tuple[str, ...]
TokenIds = tuple[tuple[int, ...], ...]

_STDIN = Path("-")
# How a list of texts begins; "[INST] …" is a prompt.
_LIST = re.compile(r"""\s*\[\s*["{]""")


def read_prompts(
    words: Sequence[str] | None, *, prompts: Sequence[str] | None, file: Path | None, tokens: str | None
) -> tuple[Prompts, TokenIds]:
    """Prompts as texts or as token ids, from whichever way was used; UsageError for two ways at once."""
    ways = {"the words": words, "--prompt": prompts, "--input-file": file, "--input-tokens-csv": tokens}
    used = [name for name, value in ways.items() if value]
    if len(used) > 1:
        raise UsageError(f"Prompts come from {' and '.join(used)}; use one of them.")
    if tokens is not None:
        from trtserve.query.attachments import read_token_ids

        return (), read_token_ids(tokens, "--input-tokens-csv")
    if prompts:
        return tuple(_decoded(os.fsencode(prompt)) for prompt in prompts), ()
    if file is not None:
        return _of_file(file), ()
    # A list, since an unquoted prompt comes as several arguments.
    return (_read_prompt(" ".join(words) if words else None),), ()


def as_utf8(text: str, flag: str) -> str:
    """An argument's bytes as UTF-8, which is what models are asked in, whatever this terminal's encoding is."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} is not UTF-8 text: {error.reason} at byte {error.start}.") from None


def _read_prompt(prompt: str | None) -> str:
    """The prompt's bytes as UTF-8, which is what models are asked in, whatever this terminal's encoding is."""
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("There is no prompt.", hint='Give one: trtserve query "What is ML?"')
    return _decoded(_stdin().rstrip(b"\r\n") if prompt is None or prompt == "-" else os.fsencode(prompt))


def _stdin() -> bytes:
    """All of it; nothing where it was closed (`<&-`)."""
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
    """The texts of a JSON list, else the lines that are not empty."""
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
    """The texts of a JSON list; None for lines, of which the first may begin with a bracket too ("[INST] …")."""
    if not text.lstrip().startswith("["):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not _LIST.match(text):
            return None
        raise UsageError(
            f"--input-file: {path} looks like a JSON list and is none: {error}.",
            hint="Mend the list; for one prompt on each line, begin with another line.",
        ) from None
    wrong = [item for item in content if not isinstance(item, str)]
    if wrong:
        raise UsageError(
            f"--input-file: {path} is a JSON list with {json.dumps(wrong[0])} in it; expected texts alone."
        )
    return tuple(content)
