"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig
from trtserve.checkpoint.architectures.parts.positions import layer_kinds, window_keys, windows_of

# transformers' default for an absent key; null in the config disables the window.
_DEFAULT_WINDOW = 4096


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the windows; with `layer_types` transformers computes a Mistral as a Ministral."""
    window, kinds = hf.get("sliding_window", _DEFAULT_WINDOW), layer_kinds(hf)
    windows = [window] if kinds is None else windows_of(kinds, window)
    return llama.checkpoint_config({**hf, "layer_types": None}) | window_keys(windows)
