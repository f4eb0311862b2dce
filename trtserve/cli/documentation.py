"""The documentation that travels with the package: its pages and sections."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "docs"
_UNLISTED = ("changelog.md", "index.md", "performance-history.md")
_MOST_SECTIONS, _OFTEN = 25, 3  # a word of more sections is telling only where it is said often


@dataclass(frozen=True)
class PageSection:
    """A part of a page below one heading."""

    page: str
    """Name below the folder of the documentation, such as how-to/serve.md."""
    title: str
    heading: str
    """Empty for what stands below the title."""
    words: frozenset[str]
    """Words of its text that tell it from other sections."""


def page_text(name: str) -> str | None:
    """Return the Markdown of a page by its name: `how-to/serve`, `docs/how-to/serve.md`, `serve.md`."""
    wanted = name.removeprefix("docs/").removesuffix(".md")
    if name == wanted and "/" not in name:
        return None  # a word, not a page
    pages = sorted(_FOLDER.rglob("*.md"), key=lambda page: (len(page.parts), page))
    names = {page.stem: page for page in reversed(pages)} | {
        str(page.relative_to(_FOLDER).with_suffix("")): page for page in pages
    }
    return names[wanted].read_text(encoding="utf-8") if wanted in names else None


def sections() -> Iterator[PageSection]:
    """Yield the sections of all pages but decisions, commands and what tells of the past."""
    found: list[tuple[str, str, str, Counter[str]]] = []
    for page in sorted({*_FOLDER.glob("*.md"), *_FOLDER.glob("*/*.md")} - {_FOLDER / name for name in _UNLISTED}):
        if page.parent.name == "decisions":
            continue
        outside_code = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).replace("`", "")
        _, *parts = re.split(r"^#+ (.+)$", outside_code, flags=re.MULTILINE)
        for heading, text in zip(parts[::2], parts[1::2], strict=True):
            words = Counter(re.findall(r"[a-z][a-z0-9]+", re.sub(r"\]\(.*?\)", "", text).lower()))
            found.append((str(page.relative_to(_FOLDER)), parts[0], "" if heading is parts[0] else heading, words))
    spread = Counter(word for *_, words in found for word in words)
    for name, title, heading, words in found:
        telling = (word for word, times in words.items() if spread[word] <= _MOST_SECTIONS or times >= _OFTEN)
        yield PageSection(name, title, heading, frozenset(telling))
