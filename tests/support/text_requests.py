"""Text requests to the BLS model and the ensemble, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.model_server import ModelServer, Tensors, flags, floats, integers, texts

# Of the engine behind `features`. A request for ENDLESS tokens runs for ten seconds on a fast machine: a slow test
# still finds it running when it stops it.
MAX_SEQ_LEN = 16_384
ENDLESS = 16_000

_KINDS: tuple[tuple[type, Callable[..., Any]], ...] = (
    (bool, flags),
    (int, integers),
    (float, floats),
    (str, texts),
)
_UNSIGNED = ("seed", "random_seed", "lora_task_id", "prompt_table_extra_id")


def request(prompt: str, count: int, **options: Any) -> Tensors:
    """Tensors of one prompt; options are values, lists of words, or arrays as they are."""
    return {"text_input": texts(prompt), "max_tokens": integers(count)} | {
        name: _tensor(name, value) for name, value in options.items()
    }


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list):
        return np.array([[word.encode() for word in value]], dtype=np.object_)
    if name in _UNSIGNED:
        return np.array([[value]], dtype=np.uint64)
    return next(make for kind, make in _KINDS if isinstance(value, kind))(value)


def answers(server: ModelServer, model: str, tensors: Tensors, request_id: str = "") -> list[Tensors]:
    """Every answer with tensors, of a decoupled model."""
    with server.stream() as stream:
        return stream.all(model, tensors, request_id)


def ask(server: ModelServer, model: str, prompt: str, count: int, **options: Any) -> Tensors:
    """The only answer to a request that does not stream."""
    (answer,) = answers(server, model, request(prompt, count, **options))
    return answer


def text_of(answer: Tensors) -> str:
    """The text of the only beam."""
    text: str = answer["text_output"].item().decode("utf-8")
    return text


def is_idle(server: ModelServer) -> bool:
    """Whether the core models work on nothing and hold no block for a request."""
    return (
        server.metric("nv_trt_llm_request_metrics", 'request_type="active"') == 0
        and server.metric("nv_trt_llm_kv_cache_block_metrics", 'kv_cache_block_type="used"') == 0
    )


def word_in(text: str, *, start: int, size: int = 3) -> str:
    """A piece of `text` of `size` printable characters that begins at `start` at the earliest, and nowhere before."""
    for at in range(start, len(text) - size):
        word = text[at : at + size]
        if word.isprintable() and "\N{REPLACEMENT CHARACTER}" not in word and text.find(word) == at:
            return word
    raise AssertionError(f"{text!r} has no such word")
