"""The core model's tensors for bad words, stop words and logit bias, and the ids that a word can have in a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

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


Spell = Callable[[str], list[list[int]]]


def word_list(rows: Sequence[Sequence[str]], spell: Spell) -> NDArray[np.int32]:
    """Return TensorRT-LLM's word list INT32 [batch, 2, n], with n = max(1, most ids in a row).

    `spell` returns the ids of each spelling of a word. [row, 0] holds the ids of all spellings, padded with 0;
    [row, 1] the end offset of each spelling, padded with -1. Words without ids, such as "", and repeated spellings are
    left out.
    """
    encoded = [list(dict.fromkeys(tuple(ids) for word in row for ids in spell(word))) for row in rows]
    width = max([1, *(sum(map(len, words)) for words in encoded)])
    result = np.zeros((len(rows), 2, width), dtype=np.int32)
    result[:, 1, :] = -1
    for index, words in enumerate(encoded):
        if words:
            flat = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in words])
            result[index, 0, : flat.size] = flat
            result[index, 1, : len(words)] = np.cumsum([len(ids) for ids in words])
    return result


def empty_word_list(batch: int) -> NDArray[np.int32]:
    """Return [batch, 2, 0], which means that there are no words."""
    return np.zeros((batch, 2, 0), dtype=np.int32)


def embedding_bias(
    words: Sequence[Sequence[str]], weights: NDArray[np.float32], encode: Encode, vocab_size: int
) -> NDArray[np.float32]:
    """Return the bias per token, FP32 [batch, vocab_size]: each id of each word adds the word's weight.

    `encode` adds no special tokens; NVIDIA's model adds them and so biases BOS with every word. Raises ValueError when
    a row has more or fewer weights than words, a weight is not finite, or a word has a token outside the vocabulary.
    """
    result = np.zeros((len(words), vocab_size), dtype=np.float32)
    for index, (row, values) in enumerate(zip(words, weights, strict=True)):
        if len(row) != len(values):
            raise ValueError(
                f"embedding_bias_words has {len(row)} words and embedding_bias_weights has {len(values)} weights; "
                "both must have the same length."
            )
        if not np.isfinite(values).all():
            raise ValueError(f"embedding_bias_weights has {values[~np.isfinite(values)][0]}; expected finite numbers.")
        for word, weight in zip(row, values, strict=True):
            ids = encode(word)
            if ids and max(ids) >= vocab_size:
                raise ValueError(
                    f"embedding_bias_words: {word!r} has token {max(ids)}, outside the vocabulary of {vocab_size}."
                )
            np.add.at(result[index], ids, weight)
    return result
