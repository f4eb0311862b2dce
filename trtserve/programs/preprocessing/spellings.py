"""The token ids that a word can have in a text, with and without a space before it."""

from __future__ import annotations

from collections.abc import Callable

Encode = Callable[[str], list[int]]

# Never joins with a word; after it a tokenizer does not add the space that it adds at the start of a text.
_ANCHOR = "\n"


class Spellings:
    """Finds the spellings of words.

    The core model compares ids. Most tokenizers have different ids for a word after a space and the same letters after
    anything else, and a client cannot know which of them a text will contain.
    """

    def __init__(self, encode: Encode) -> None:
        """`encode` adds no special tokens."""
        self._encode = encode
        self._anchor = encode(_ANCHOR)

    def of(self, word: str) -> list[list[int]]:
        """Return the distinct, non-empty ids of `word` as given, with a leading space, and without one."""
        bare = word.removeprefix(" ")
        found = [self._encode(word)]
        if bare and not bare[0].isspace():
            found += [self._continued(bare), self._continued(f" {bare}")]
        unique = dict.fromkeys(tuple(ids) for ids in found if ids)
        return [list(ids) for ids in unique]

    def _continued(self, text: str) -> list[int]:
        """Return the ids of `text` inside another text, or [] when the tokenizer joins it with what comes before."""
        ids = self._encode(_ANCHOR + text)
        known = len(self._anchor)
        return ids[known:] if ids[:known] == self._anchor else []
