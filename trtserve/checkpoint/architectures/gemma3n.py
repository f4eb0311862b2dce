"""Gemma 3n (text model): four states of each token, of which layers see one, and an input to each layer.

The last layers use the keys and values of earlier ones, and the first MLPs count only what is far above the mean of
their gates. The halves for images and sound are not read.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import gemma3, gemma4
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    SourceNames,
    Streams,
    WrongConfigError,
    require_sizes,
    required,
    superset,
)
from trtserve.checkpoint.architectures.gemma import gemma_config
from trtserve.checkpoint.architectures.parts.layer_sizes import shared_keys
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, beyond_rotary, window_keys, windows_of

# Defaults of transformers' Gemma3nTextConfig; the published `text_config` omits default values.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "laurel_rank": 64,
}
_PATTERN = 5
_SPARSE, _SPARSE_LAYERS = 0.95, 10


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return GemmaConfig's keys, and ours of the states, the inputs of layers and the shared keys."""
    softcap = hf.get("final_logit_softcapping", 30.0)  # null: none
    hf = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
    layers = required(hf, "num_hidden_layers")["num_hidden_layers"]
    hf["intermediate_size"] = _one_width(hf["intermediate_size"], layers)
    require_sizes(hf, "hidden_size_per_layer_input", "altup_num_inputs", "laurel_rank", "vocab_size_per_layer_input")
    if not hf["altup_correct_scale"] or hf["altup_active_idx"] >= hf["altup_num_inputs"]:
        raise WrongConfigError(
            f"config.json has altup_correct_scale = {hf['altup_correct_scale']} and altup_active_idx = "
            f"{hf['altup_active_idx']} of {hf['altup_num_inputs']}; expected true and one of them."
        )
    if hf["vocab_size_per_layer_input"] > hf["vocab_size"]:
        raise WrongConfigError(
            f"config.json has vocab_size_per_layer_input = {hf['vocab_size_per_layer_input']} and vocab_size = "
            f"{hf['vocab_size']}; expected at most as many."
        )
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % _PATTERN)
    base, scaling, local_base = gemma3.rotations(hf)
    activation = hf.get("hidden_activation", "gelu_pytorch_tanh")
    return {
        **gemma_config({**hf, "rope_parameters": None}, activation=activation, kv_heads=2, longest=32768),
        "use_parallel_embedding": False,
        "rotary_base": base,
        "rotary_scaling": None,
        "rope_local_base_freq": local_base,
        **({gemma3.FULL_ATTENTION_SCALING: scaling} if scaling else {}),
        "final_logit_softcapping": softcap,
        **shared_keys(hf, kinds),
        "layer_input_size": hf["hidden_size_per_layer_input"],
        "layer_input_vocab": hf["vocab_size_per_layer_input"],
        "streams": hf["altup_num_inputs"],
        "active_stream": hf["altup_active_idx"],
        "stream_rank": hf["laurel_rank"],
        "gate_sparsity": _sparsity(hf.get("activation_sparsity_pattern"), layers),
        **window_keys(windows_of(kinds, hf["sliding_window"])),
        **superset("the family Gemma 3n", *beyond_rotary(scaling)),
    }


def _one_width(width: object, layers: int) -> object:
    """Return the width of all MLPs, which config.json may have for each layer."""
    if not isinstance(width, list):
        return width
    if len(width) != layers or len(set(width)) != 1:
        raise WrongConfigError(
            f"config.json has intermediate_size = {width!r:.80}; expected the same size for each of {layers} layers."
        )
    return width[0]


def _sparsity(shares: object, layers: int) -> list[float]:
    """Return the share of each layer's gate that does not count."""
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    found = [_SPARSE] * sparse + [0.0] * (layers - sparse) if shares is None else shares
    if (
        not isinstance(found, list)
        or len(found) != layers
        or not all(isinstance(share, float | int) and 0 <= share < 1 for share in found)
    ):
        raise WrongConfigError(
            f"config.json has activation_sparsity_pattern = {shares!r:.80}; expected a number from 0 to below 1 for "
            f"each of {layers} layers."
        )
    return [float(share) for share in found]


def names(config: CheckpointConfig) -> SourceNames:
    plain = gemma4.names(config)
    own = {"post_beside_layernorm": "laurel.post_laurel_norm", "streams_layernorm": "altup.router_norm"}
    return replace(plain, norms={**plain.norms, **own}, layer_scale=None)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        gemma3.decoder(config),
        block="streamed",
        value_norm=True,
        attention_scale=1.0,
        windows=config.max_attention_window,
        key_layers=tuple(config.key_layer(layer) for layer in range(config.num_hidden_layers)),
        layer_inputs=config.layer_input_size,
        streams=Streams(count=config.streams, active=config.own("active_stream", 0)),
        gate_thresholds=tuple(NormalDist().inv_cdf(share) if share else None for share in config.gate_sparsity),
    )
