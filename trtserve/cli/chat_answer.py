"""How `trtserve chat` prints an answer while it comes."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_FENCES = ("```", "~~~")


class PlainAnswer:
    """Prints text as it comes."""

    def __enter__(self) -> PlainAnswer:
        """Begin."""
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """End the line."""
        self.add("\n")

    def add(self, piece: str) -> None:
        """Print the next piece."""
        sys.stdout.write(piece)
        sys.stdout.flush()


class MarkdownAnswer:
    """Prints Markdown: blocks that are complete stay as they are, the last one is drawn again while it grows.

    Drawing the whole answer again would flicker, and cannot reach what has left the screen.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._text = ""
        self._live = Live(console=console, refresh_per_second=12, vertical_overflow="visible")

    def __enter__(self) -> MarkdownAnswer:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Leave the last block on the screen."""
        self._live.update(_markdown(self._text), refresh=True)
        self._live.stop()

    def add(self, piece: str) -> None:
        """Add the next piece."""
        self._text += piece
        end = complete_blocks(self._text)
        if end:
            self._live.console.print(_markdown(self._text[:end]))
            self._text = self._text[end:]
        self._live.update(_markdown(self._text))


def _markdown(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text)


def complete_blocks(text: str) -> int:
    """Return the length of the complete blocks at the beginning of `text`: up to the last blank line outside code."""
    end = at = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if fence:
            fence = "" if bare == fence else fence
        elif bare.startswith(_FENCES):
            fence = bare[:3]
        elif not bare and line.endswith("\n"):
            end = at + len(line)
        at += len(line)
    return end
