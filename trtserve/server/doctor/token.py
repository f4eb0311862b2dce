"""The token of the hub: where it is stored and who may read it. Its value is never shown."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import TrtserveError
from trtserve.server.doctor.findings import CheckResult, report_for
from trtserve.store import hub

# In the order in which the hub's client reads them.
_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_READERS = stat.S_IRGRP | stat.S_IROTH
_report = report_for("hub")
_SHAPE = re.compile(r"hf_[A-Za-z0-9]{10,}")


@dataclass(frozen=True, kw_only=True)
class _Token:
    """A token and where it was found; `repr` does not show the token."""

    place: str
    text: str
    file: Path | None = None

    def __repr__(self) -> str:
        return f"_Token({self.place})"


def check_token(*, online: bool = False) -> Iterator[CheckResult]:
    """Check the token's place, shape and permissions; with `online` also whether the hub accepts it."""
    token = _find()
    if hub.is_offline():
        yield _report("network", "ok", "HF_HUB_OFFLINE is set: only files on this machine are used")
    if token is None:
        yield _report(
            "token",
            "failed",
            f"none in {' or '.join(_VARIABLES)}, nor in {_file()}",
            "Gated and private models need one: `hf auth login`.",
        )
        return
    yield _described(token)
    if online and not hub.is_offline():
        try:
            hub.require_token(token.text)
        except TrtserveError as error:
            yield _report("hub", "warning", error.message.rstrip("."), error.hint or "")
        else:
            yield _report("hub", "ok", f"{hub.endpoint()} accepts the token")


def _find() -> _Token | None:
    for name in _VARIABLES:
        text = os.environ.get(name, "").strip()
        if text:
            return _Token(place=f"variable {name}", text=text)
    path = _file()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return _Token(place=f"file {path}", text=text, file=path) if text else None


def _file() -> Path:
    """Return where `hf auth login` stores it: $HF_TOKEN_PATH, else `token` in $HF_HOME."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or cache)
    return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").expanduser()


def _described(token: _Token) -> CheckResult:
    mode = stat.S_IMODE(token.file.stat().st_mode) if token.file else 0
    evidence = f"{token.place}{f', mode {mode:04o}' if token.file else ''}"
    if mode & _READERS:
        return _report("token", "warning", f"{evidence}: other users can read it", f"chmod 600 {token.file}")
    if _SHAPE.fullmatch(token.text) is None:
        fix = "A token is one word that begins with hf_: set it again (`hf auth login`)."
        return _report("token", "warning", f"{evidence}: does not look like a token", fix)
    return _report("token", "ok", evidence)
