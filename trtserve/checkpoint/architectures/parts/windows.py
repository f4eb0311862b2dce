"""Sliding attention windows: read from Hugging Face configs, recorded in the checkpoint's config.

TensorRT-LLM's converters drop them, so users must repeat them at start (`max_attention_window_size`). Upstream's place
for them, `runtime_defaults`, does not work: its builder fails to save such an engine (TensorRT-LLM issue 2912).
Our checkpoints record windows in an extra key, `max_attention_window`; TensorRT-LLM's loader ignores unknown keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import HfConfig, require_sizes
from trtserve.errors import UnsupportedModelError

_KEY = "max_attention_window"
_KINDS = ("sliding_attention", "full_attention")


def window_keys(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the checkpoint config's keys for `windows` (see Decoder.windows), or empty without windows.

    Raises UnsupportedModelError when a window is not a positive number of tokens.
    """
    for window in windows:
        if window is not None:
            require_sizes({"sliding_window": window}, "sliding_window")
    return {} if all(window is None for window in windows) else {_KEY: list(windows)}


def uniform_window(hf: HfConfig, window: int | None) -> dict[str, Any]:
    """Return the keys for a family with one window for all layers, as transformers computes it.

    Other programs follow a `layer_types` there, so one that says otherwise raises UnsupportedModelError.
    """
    kinds = set(layer_kinds(hf) or ())
    if kinds - {"full_attention" if window is None else "sliding_attention"}:
        raise UnsupportedModelError(
            f"config.json has sliding_window = {window} and, in layer_types, {' and '.join(sorted(kinds))}. For "
            f"{hf.get('model_type', 'this family')} transformers ignores layer_types, and other programs follow it.",
            hint="Make the two agree: remove layer_types, or set sliding_window to null if no layer has a window.",
        )
    return window_keys([window])


def attention_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """Return the windows (see Decoder.windows) in a checkpoint's config or in its `runtime_defaults`."""
    if config.max_attention_window:
        return config.max_attention_window
    longest = config.max_position_embeddings or math.inf
    windows = config.runtime_defaults.max_attention_window
    return tuple(window if window < longest else None for window in windows)


def layer_kinds(hf: HfConfig) -> list[str] | None:
    """Return `layer_types` of a Hugging Face config, one per layer, or None."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    unknown = sorted(set(kinds) - set(_KINDS))
    if unknown or len(kinds) != hf["num_hidden_layers"]:
        raise UnsupportedModelError(
            f"config.json's layer_types has {len(kinds)} entries ({', '.join(sorted(set(kinds)))}); "
            f"expected {hf['num_hidden_layers']} entries, {' or '.join(_KINDS)}."
        )
    return list(kinds)


def windows_of(kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Return one window per layer: `window` for sliding attention, None for full attention."""
    return [window if kind == "sliding_attention" else None for kind in kinds]
