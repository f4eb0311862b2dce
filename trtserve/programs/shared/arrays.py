"""Arrays in .npy files, which may come from strangers, and the numbers of TensorRT-LLM's performance metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]  # arrays by name; a BF16 input, which NumPy cannot hold, stays a `pb_utils.Tensor`


MOST_BYTES = 8 << 20  # bytes of a text, where nobody says how many tokens fit
_MOST_WORDS, _LONGEST_WORD = 1024, 1024  # words of a row, and bytes of a word


def words_of(row: NDArray[Any], name: str) -> list[str]:
    """Return the words of one row of the request's tensor `name`.

    Raises ValueError for more or longer ones than the bounds allow, and for one that is not UTF-8.
    """
    if row.size > _MOST_WORDS:
        raise ValueError(f"{name} has {row.size} words; at most {_MOST_WORDS} are allowed.")
    if (longest := max(map(len, row.reshape(-1)), default=0)) > _LONGEST_WORD:
        raise ValueError(f"{name} has a word of {longest} bytes; at most {_LONGEST_WORD} are allowed.")
    return [decoded(word, name) for word in row.reshape(-1)]


def decoded(text: bytes, name: str) -> str:
    """Return a text of the request's tensor `name`. Raises ValueError when it is not UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}.") from error


def encoded(texts: Sequence[str]) -> NDArray[Any]:
    """Return the texts as a BYTES array."""
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)


def read_array(path: Path) -> NDArray[Any]:
    """Return the array in an .npy file. Raises ValueError, which names the file, for anything else.

    Python objects are refused, and a shape that the file is too small for before memory is taken for it.
    """
    try:
        return np.array(np.lib.format.open_memmap(path, mode="r"))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # NumPy passes on what Python's tokenizer and parser raise for a damaged header
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"{path} is not an .npy file of plain numbers: {reason:.200}") from error


def performance(metrics: Any, blocks: Mapping[str, str]) -> Tensors:
    """Return the performance metrics of a request as arrays [1]; `blocks` has output → count of the KV cache."""
    cache, timing = metrics.kv_cache_metrics, metrics.timing_metrics
    arrays: Tensors = {name: np.array([getattr(cache, count)], dtype=np.int32) for name, count in blocks.items()}
    for name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"):
        arrays[f"{name}_ns"] = np.array([_nanoseconds(getattr(timing, name))], dtype=np.int64)
    if (draft := getattr(metrics, "speculative_decoding", None)) is not None:
        arrays["acceptance_rate"] = np.array([draft.acceptance_rate], dtype=np.float32)
        for name in ("total_accepted_draft_tokens", "total_draft_tokens"):
            arrays[name] = np.array([getattr(draft, name)], dtype=np.int32)
    return arrays


def _nanoseconds(duration: timedelta) -> int:
    """Return exact nanoseconds; `total_seconds()` would round."""
    return ((duration.days * 86_400 + duration.seconds) * 1_000_000 + duration.microseconds) * 1_000
