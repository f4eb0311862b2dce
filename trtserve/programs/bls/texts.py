"""The text of the core model's answers: streamed pieces of whole characters or full texts, cut at stop words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..shared.arrays import Tensors, encoded

Decode = Callable[[Sequence[list[int]]], list[str]]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalText:
    """The text of one sequence, piece by piece.

    `decode` turns rows of ids into texts. A piece is the difference between two decodings of a short window: the ids
    of the last piece, and the same followed by the new ids. A window whose text ends in U+FFFD may end inside a
    character, so its piece is held back until the character is complete, or until `finish`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._fresh: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete, or "" when they end inside a character."""
        self._fresh += ids
        return self._piece(complete_only=True)

    def finish(self) -> str:
        """Return what was held back."""
        return self._piece(complete_only=False)

    def _piece(self, *, complete_only: bool) -> str:
        if not self._fresh:
            return ""
        window = self._context + self._fresh
        known, text = self._decode([self._context, window]) if self._context else ("", self._decode([window])[0])
        if complete_only and text.endswith(_REPLACEMENT):
            return ""
        self._context, self._fresh = self._fresh, []
        return text[len(known) :]


class AccumulatedText:
    """The text so far each time, as with the parameter accumulate_tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._sent = ""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text of all ids so far, without an incomplete character at the end."""
        self._ids += ids
        self._sent = self._decode([self._ids])[0].rstrip(_REPLACEMENT)
        return self._sent

    def finish(self) -> str:
        """Return the text of all ids, or "" when it was sent already."""
        text = self._decode([self._ids])[0]
        return "" if text == self._sent else text


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items at the beginning of both are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


class StopWords:
    """The words of one batch row; empty words are ignored."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = tuple(word for word in words if word)
        self.longest = max(map(len, self._words), default=0)

    def __bool__(self) -> bool:
        return bool(self._words)

    def end(self, text: str, start: int = 0) -> int | None:
        """Return the index after the word that is completed first in `text[start:]`, or None without a word."""
        ends = [at + len(word) for word in self._words if (at := text.find(word, start)) >= 0]
        return min(ends, default=None)


class StoppedText:
    """Pieces of a growing text, cut after the first stop word; later pieces are empty."""

    def __init__(self, words: StopWords) -> None:
        self._words = words
        self._tail = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return the part of the next piece that belongs to the text."""
        if self.stopped:
            return ""
        if not self._words:
            return piece
        window = self._tail + piece
        end = self._words.end(window)
        if end is None:
            # A word may begin in this piece and end in a later one.
            self._tail = window[max(0, len(window) - self._words.longest + 1) :] if self._words.longest > 1 else ""
            return piece
        self.stopped = True
        return piece[: end - len(self._tail)]


_ALWAYS = frozenset({"output_ids", "sequence_length", "batch_index", "sequence_index"})
_STOPPED = b"stop_words"
Key = tuple[int, int]  # batch row and number of the sequence


def key_of(result: Tensors) -> Key:
    """Return the sequence of an answer."""
    return _index(result, "batch_index"), _index(result, "sequence_index")


def rows_of(result: Tensors) -> list[list[int]]:
    """Return the ids of each beam, cut to their lengths."""
    ids, lengths = result["output_ids"], result["sequence_length"].reshape(-1)
    return [row[:length].tolist() for row, length in zip(ids.reshape(lengths.size, -1), lengths, strict=True)]


class FullTexts:
    """The text of every beam, cut after the first stop word that follows the prompt."""

    def __init__(self, decode: Decode, words: Sequence[StopWords], prompts: Sequence[list[int]] | None) -> None:
        """`prompts` are the ids of each batch row if the answers begin with them, else None."""
        self._decode = decode
        self._words = words
        self._prompts = prompts
        self.stopped: set[Key] = set()
        """Sequences whose beams all contain a stop word."""

    def add(self, result: Tensors) -> Tensors:
        """Return the answer to send."""
        key, rows = key_of(result), rows_of(result)
        words = self._words[key[0]]
        if not words:
            return {"text_output": encoded(self._decode(rows)), **result}
        texts, cut = self._cut(rows, self._prompts[key[0]] if self._prompts else [], words)
        if all(cut):
            self.stopped.add(key)
        return {"text_output": encoded(texts), **_with_reasons(result, cut)}

    def finish(self) -> Iterator[tuple[Key, str]]:
        """Yield nothing: no text is held back."""
        return iter(())

    def _cut(self, rows: list[list[int]], prompt: list[int], words: StopWords) -> tuple[list[str], list[bool]]:
        known, *texts = self._decode([prompt, *rows])
        ends = [
            words.end(text, common_length(known, text) if row[: len(prompt)] == prompt else 0)
            for row, text in zip(rows, texts, strict=True)
        ]
        return [text[:end] for text, end in zip(texts, ends, strict=True)], [end is not None for end in ends]


class StreamedTexts:
    """Pieces of streamed sequences, or their text so far, or empty after a stop word."""

    def __init__(self, decode: Decode, words: Sequence[StopWords], *, accumulate: bool) -> None:
        self._kind = _Accumulated if accumulate else _Pieces
        self._words = words
        self._decode = decode
        self._states: dict[Key, _Pieces | _Accumulated] = {}

    @property
    def stopped(self) -> set[Key]:
        """Sequences with a stop word."""
        return {key for key, state in self._states.items() if state.stopped}

    def add(self, result: Tensors) -> Tensors | None:
        """Return the answer to send, or None when it would be empty."""
        key, (ids,) = key_of(result), rows_of(result)
        begun = key in self._states
        if not begun:
            self._states[key] = self._kind(self._words[key[0]], self._decode)
        if begun and not ids and result.keys() <= _ALWAYS:
            return None  # the closing result of a request that ended on its end id
        state = self._states[key]
        # The finish reason comes with the last result of a sequence, and must be sent with the end of the text.
        text = state.add_last(ids) if "finish_reason" in result else state.add(ids)
        return {"text_output": encoded([text]), **_with_reasons(result, [state.stopped])}

    def finish(self) -> Iterator[tuple[Key, str]]:
        """Yield what was held back, by sequence."""
        for key, state in self._states.items():
            if rest := state.finish():
                yield key, rest


class _Pieces:
    def __init__(self, words: StopWords, decode: Decode) -> None:
        self._text, self._cut = IncrementalText(decode), StoppedText(words)

    @property
    def stopped(self) -> bool:
        return self._cut.stopped

    def add(self, ids: Sequence[int]) -> str:
        return "" if self.stopped else self._cut.add(self._text.add(ids))

    def add_last(self, ids: Sequence[int]) -> str:
        return self.add(ids) + self.finish()

    def finish(self) -> str:
        return "" if self.stopped else self._cut.add(self._text.finish())


class _Accumulated:
    def __init__(self, words: StopWords, decode: Decode) -> None:
        self._text, self._words, self._last = AccumulatedText(decode), words, ""
        self.stopped = self._ended = False

    def add(self, ids: Sequence[int]) -> str:
        # Clients overwrite the text that they have, so a stopped text is sent again.
        return self._last if self.stopped else self._cut(self._text.add(ids))

    def add_last(self, ids: Sequence[int]) -> str:
        text = self.add(ids)
        return self.finish() or text

    def finish(self) -> str:
        if self.stopped or self._ended:
            return ""
        self._ended = True
        rest = self._text.finish()
        return self._cut(rest) if rest else ""

    def _cut(self, text: str) -> str:
        end = self._words.end(text)
        self.stopped, self._last = end is not None, text[:end]
        return self._last


def _with_reasons(result: Tensors, cut: Sequence[bool]) -> Tensors:
    """Set the finish reason of texts that were cut here."""
    reasons = result.get("finish_reason")
    if reasons is None or not any(cut):
        return result
    flat = [_STOPPED if was_cut else reason for reason, was_cut in zip(reasons.reshape(-1), cut, strict=True)]
    return {**result, "finish_reason": np.array(flat, dtype=np.object_).reshape(reasons.shape)}


def _index(result: Tensors, name: str) -> int:
    value = result.get(name)
    return 0 if value is None else int(value.reshape(-1)[0])
