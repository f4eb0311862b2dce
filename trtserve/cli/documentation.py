"""The documentation that travels with the package: its pages, and the search of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trtserve.errors import listing

_FOLDER = Path(__file__).parents[1] / "docs"
_UNLISTED = ("changelog.md", "index.md", "performance-history.md")
_MOST_PAGES, _MOST_HEADINGS = 6, 3
# How much more a word says in a heading, or in the title of a page, than in its text.
_IN_HEADING, _IN_TITLE = 6, 2
_EXACT = 4  # factor of a section whose heading is what was asked for, and no more
_PLACES = {"questions": 1.2, "how-to": 1.0, "tutorials": 1.0, "getting-started": 1.0, "security": 1.0}
_OTHERS = 0.5  # factor of all other pages: they explain or list, and rarely say how
_LEAST = 0.12  # of the best score
_QUESTIONS = "questions.md"
_ANSWERED = 0.5  # share of the asked words, weighed by how rare they are, that the heading of an answer has


@dataclass(frozen=True)
class PageSection:
    """A part of a page below one heading."""

    page: str
    """Name below the folder of the documentation, such as how-to/serve.md."""
    title: str
    heading: str
    """Empty for what stands below the title."""
    text: str
    """Markdown without code blocks."""
    words: Counter[str]
    """Words of the text, with how often each occurs."""


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


@cache
def sections() -> Sequence[PageSection]:
    """Return the sections of all pages but decisions, commands and what tells of the past."""
    found = []
    for page in sorted({*_FOLDER.glob("*.md"), *_FOLDER.glob("*/*.md")} - {_FOLDER / name for name in _UNLISTED}):
        if page.parent.name == "decisions":
            continue
        outside_code = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        _, *parts = re.split(r"^#+ (.+)$", outside_code, flags=re.MULTILINE)
        headings = [heading.replace("`", "") for heading in parts[::2]]
        for place, text in enumerate(parts[1::2]):
            words = Counter(re.findall(r"[a-z0-9]{2,}", re.sub(r"\]\(.*?\)", "", text).lower()))
            name, heading = str(page.relative_to(_FOLDER)), headings[place] if place else ""
            found.append(PageSection(name, headings[0], heading, text.strip(), words))
    return found


@dataclass(frozen=True)
class PagesFound:
    """What the documentation says about some words."""

    pages: list[tuple[str, str]]
    """Pages, best first: their names, and their title with the headings."""
    answer: PageSection | None
    """The question whose words were asked, with its answer."""
    about_all: bool = False
    """Whether that question has all of the words."""


def about(parts: Sequence[str], command: str = "") -> PagesFound:
    """Return what the pages say about some words.

    `parts` are expressions for single words, which may be in any order. Rare words count more, a word that no page
    has does not count. With `command`, its name is one more word.
    """
    every = sections()
    patterns = [beginning(part) for part in (*parts, *filter(None, [command]))]
    counts = [[_counts(pattern, section) for pattern in patterns] for section in every]
    spread = [sum(any(row[place]) for row in counts) for place in range(len(patterns))]
    if not any(spread[: len(parts)]):
        return PagesFound([], None)
    rarity = [math.log(1 + len(every) / times) if times else 0.0 for times in spread]
    exact = beginning(r"[\W_]+".join(parts) + "s?")
    pages: dict[tuple[str, str], list[tuple[float, str]]] = {}
    best, answer = (_ANSWERED, 0.0, 0.0), None
    for section, row in zip(every, counts, strict=True):
        weighted = list(zip(rarity, row, strict=True))
        score = sum(
            rare * (_IN_HEADING * in_heading + _IN_TITLE * in_title + math.log2(1 + in_text))
            for rare, (in_heading, in_title, in_text) in weighted
        )
        score *= (sum(rare for rare, count in weighted if any(count)) / sum(rarity)) ** 2
        score *= _PLACES.get(re.split(r"[/.]", section.page)[0], _OTHERS)
        score *= _EXACT if exact.fullmatch(section.heading or section.title) else 1
        if score > 0:
            pages.setdefault((section.page, section.title), []).append((score, section.heading))
        if section.page == _QUESTIONS and section.heading:  # of two, the shorter is more about the words
            asked = [rare for rare, (in_heading, _, _) in weighted if in_heading]
            rank = (sum(asked) / sum(rarity), len(asked) / len(section.heading.split()), score)
            if rank > best:
                best, answer = rank, section
    ranked = sorted(pages.items(), key=lambda item: -max(item[1])[0])[:_MOST_PAGES]
    kept = [(place, found) for place, found in ranked if max(found)[0] >= _LEAST * max(ranked[0][1])[0]]
    return PagesFound([_entry(*place, found) for place, found in kept], answer, about_all=best[0] == 1)


def rendered(page: str, width: int) -> str:
    """Return a page of Markdown as a terminal of `width` columns shows it."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=width, force_terminal=True)
    with console.capture() as shown:
        console.print(Markdown(page, hyperlinks=False))
    return shown.get()


def plain(text: str) -> str:
    """Return the Markdown of an answer as a terminal shows it: the page of a link stands behind its words."""
    linked = re.sub(r"\[([^]]+)\]\(([^)#]+)[^)]*\)", r"\1 (\2)", " ".join(text.split()))
    return linked.replace("**", "")


def beginning(expression: str) -> re.Pattern[str]:
    """Return a pattern of what begins a word."""
    return re.compile(rf"(?<![^\W_]){expression}", re.IGNORECASE)


def _counts(pattern: re.Pattern[str], section: PageSection) -> tuple[bool, bool, int]:
    """Return whether heading and title have a word, and how often the text has it."""
    times = sum(count for word, count in section.words.items() if pattern.match(word))
    return bool(pattern.search(section.heading or section.title)), bool(pattern.search(section.title)), times


def _entry(page: str, title: str, found: Sequence[tuple[float, str]]) -> tuple[str, str]:
    best = max(found)[0]
    headings = [heading for score, heading in sorted(found, key=lambda each: -each[0]) if heading and 2 * score >= best]
    return page, f"{title}: {listing(headings, most=_MOST_HEADINGS)}" if headings else title
