"""The token ids under which a word can stand in a text: they depend on whether a space stands before it."""

from __future__ import annotations

from collections.abc import Callable

Encode = Callable[[str], list[int]]

# Something that joins with no word and after which a text goes on: behind it, a tokenizer adds no space of its own.
_ANCHOR = "\n"


class Spellings:
    """Finds the spellings of words.

    The core model compares ids. Most tokenizers have one id for a word behind a space and another one for the same
    letters behind anything else, and a client cannot know which of them a text will hold.
    """

    def __init__(self, encode: Encode) -> None:
        """`encode` adds no special tokens."""
        self._encode = encode
        self._anchor = encode(_ANCHOR)

    def of(self, word: str) -> list[list[int]]:
        """Ids of `word` as it is, and with and without a leading space; each once, none empty."""
        bare = word.removeprefix(" ")
        found = [self._encode(word)]
        if bare and not bare[0].isspace():
            found += [self._continued(bare), self._continued(f" {bare}")]
        unique = dict.fromkeys(tuple(ids) for ids in found if ids)
        return [list(ids) for ids in unique]

    def _continued(self, text: str) -> list[int]:
        """Ids of `text` in the middle of another one; [] where the tokenizer joins it with what stands before."""
        ids = self._encode(_ANCHOR + text)
        known = len(self._anchor)
        return ids[known:] if ids[:known] == self._anchor else []
