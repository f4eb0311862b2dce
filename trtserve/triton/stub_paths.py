"""Which folders Triton's Python backend can start models from.

It starts each stub by a line of bash in which no path is quoted, and the Python inside reads ASCII file names alone,
whatever the locale says (seen on Triton 24.10). A link to a folder helps against the former, not against the latter.
"""

from __future__ import annotations

import re
from pathlib import Path

from trtserve.errors import RepositoryError

WANTED = "ASCII letters, digits and . _ - only"
_FIT = re.compile(r"[A-Za-z0-9_./+,:@%=-]")


def is_fit(path: Path) -> bool:
    """Whether models below `path` can be started."""
    return not _unfit_characters(path)


def unfit(path: Path) -> str:
    """What is wrong with a path that is not fit."""
    found = " and ".join(map(repr, sorted(_unfit_characters(path))))
    return f"Triton's Python backend starts no model from {path.resolve()}: {found} in a path stop it"


def _unfit_characters(path: Path) -> set[str]:
    beyond_ascii = {character for character in str(path.resolve()) if not character.isascii()}
    return beyond_ascii | {character for character in str(path) if not _FIT.fullmatch(character)}


def require_stub_path(repository: Path) -> None:
    """RepositoryError for a repository in a folder from which no Python model can be started."""
    if not is_fit(repository):
        raise RepositoryError(
            f"{unfit(repository)}.",
            hint=f"Move it to a folder whose path has {WANTED}, and start it by --model-repo; for imports, set "
            "TRTSERVE_HOME to such a folder.",
        )
