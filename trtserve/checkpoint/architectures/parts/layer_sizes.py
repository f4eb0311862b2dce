"""Sizes that differ between the layers of a model, in a checkpoint's config: see `CheckpointConfig.of_layer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.checkpoint.architectures.base import HfConfig, WrongConfigError, require_sizes
from trtserve.errors import UnsupportedModelError


def full_heads(hf: HfConfig, kinds: list[str]) -> dict[str, int]:
    """Return the sizes of layers without a window; transformers 5 saves them for each of these."""
    plain = {
        "head_dim": hf["global_head_dim"],
        "num_key_value_heads": (hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None)
        or hf["num_key_value_heads"],
    }
    if (saved := hf.get("per_layer_config")) is not None:
        full = {str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention"}
        usual = {"head_dim": hf.get("head_dim"), "num_key_value_heads": hf["num_key_value_heads"]}
        each = list(saved.values()) if isinstance(saved, Mapping) else []
        if not each or saved.keys() != full or not isinstance(each[0], Mapping) or any(one != each[0] for one in each):
            raise WrongConfigError(
                "config.json has a per_layer_config of this Gemma 4 that is not the same object for each layer without "
                "a window, and for no other."
            )
        plain = {**usual, **each[0]}
    if unknown := sorted(plain.keys() - {"head_dim", "num_key_value_heads"}):
        raise UnsupportedModelError(f"config.json has per_layer_config with {', '.join(unknown)}.")
    require_sizes(plain, *plain)
    return {"full_head_size": plain["head_dim"], "full_num_key_value_heads": plain["num_key_value_heads"]}


def shared_keys(hf: HfConfig, kinds: list[str]) -> dict[str, Any]:
    """Return how many of the last layers use the keys and values of earlier ones, and whether their MLPs are wider."""
    count = hf["num_kv_shared_layers"]
    if not 0 <= count < len(kinds) or set(kinds[: len(kinds) - count]) != set(kinds):
        raise WrongConfigError(
            f"config.json has num_kv_shared_layers = {count} of {len(kinds)} layers; expected a layer of each kind "
            "before them."
        )
    return {"shared_key_layers": count, "shared_wide_mlp": bool(hf.get("use_double_wide_mlp") and count)}
