"""Sliding windows of attention: where Hugging Face configs declare them and where a checkpoint keeps them.

TensorRT-LLM's converters drop them, and the windows are to be given again at start (`max_attention_window_size`). The
place that its configs have for them, `runtime_defaults`, cannot be used: its builder fails to save an engine that has
any (TensorRT-LLM issue 2912). So our checkpoints have one key more than upstream's where there are windows,
`max_attention_window`; its loader keeps unknown keys and does nothing with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtserve.architectures.base import CheckpointConfig, HfConfig, require_sizes
from trtserve.errors import UnsupportedModelError

_KEY = "max_attention_window"
_KINDS = ("sliding_attention", "full_attention")


def window_keys(windows: Sequence[int | None]) -> dict[str, Any]:
    """Keys of a checkpoint's config for `windows` (see Decoder); none for none.

    UnsupportedModelError for a window that is no positive number of tokens.
    """
    for window in windows:
        if window is not None:
            require_sizes({"sliding_window": window}, "sliding_window")
    return {} if all(window is None for window in windows) else {_KEY: list(windows)}


def attention_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """Windows of the layers (see Decoder) by a checkpoint's config, `runtime_defaults` of another tool's included."""
    if config.get(_KEY):
        return tuple(config[_KEY])
    longest = config.get("max_position_embeddings") or math.inf
    windows = (config.get("runtime_defaults") or {}).get(_KEY) or ()
    return tuple(window if window < longest else None for window in windows)


def layer_kinds(hf: HfConfig) -> list[str] | None:
    """`layer_types` of a Hugging Face config, one kind per layer; None when it has none."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    unknown = sorted(set(kinds) - set(_KINDS))
    if unknown or len(kinds) != hf["num_hidden_layers"]:
        raise UnsupportedModelError(
            f"layer_types of config.json names {len(kinds)} layers and the kinds {', '.join(sorted(set(kinds)))}; "
            f"expected {hf['num_hidden_layers']} layers of {' and '.join(_KINDS)}."
        )
    return list(kinds)


def windows_of(kinds: Sequence[str], window: int | None) -> list[int | None]:
    """The windows of layers of these kinds."""
    return [window if kind == "sliding_attention" else None for kind in kinds]
