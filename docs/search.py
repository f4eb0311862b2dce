"""A hook of MkDocs: the search of the site puts guides before reference, and leaves out what tells of the past."""

from __future__ import annotations

from typing import Any

_PAST = ("decisions/", "changelog.md", "performance-history.md")
_FIRST = ("questions.md", "getting-started.md", "how-to/", "tutorials/")


def on_page_markdown(_: str, *, page: Any, **__: Any) -> None:
    place = page.file.src_uri
    if place.startswith(_PAST):
        page.meta["search"] = {"exclude": True}
    elif place.startswith(_FIRST):
        page.meta["search"] = {"boost": 20 if place == "questions.md" else 2}
