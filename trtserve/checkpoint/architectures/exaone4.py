"""EXAONE 4: norms after attention and MLP and over each head; layers without a window have no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, WrongConfigError
from trtserve.checkpoint.architectures.olmo2 import BRANCH_NORMS
from trtserve.checkpoint.architectures.parts.positions import layer_kinds, windows_of
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the windows, and the layers without rotation: those without a window, if any has one."""
    name = "K-EXAONE" if hf["architectures"][0] == "ExaoneMoeForCausalLM" else "EXAONE 4"
    window, pattern = hf.get("sliding_window", 4096), hf.get("sliding_window_pattern", 4)
    layers = range(int(hf["num_hidden_layers"]))
    kinds = layer_kinds(hf)
    if kinds is None and window is not None:
        if not isinstance(pattern, int) or pattern < 1:
            raise WrongConfigError(
                f"config.json has sliding_window_pattern = {pattern!r:.40} and no layer_types; expected a number."
            )
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    windows = windows_of(kinds or ["full_attention"] * len(layers), window)
    config = llama.own_config(hf, name, defaults={"rms_norm_eps": 1e-5}, windows=windows)
    return config | ({} if window is None else {"unrotated_layers": [each is None for each in windows]})


def names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), norms=BRANCH_NORMS, head_norms=HEAD_NORMS)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), block="branch", qk_norm="heads")
