"""Gemma 3n's text model: several states of each token, sparse gates, and otherwise much of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.families import gemma4
from tests.support.families.expected import LAYER_WINDOWS, ROPE_BASE
from tests.support.families.family import Config, Family, Shapes
from tests.support.families.gemma4 import GEMMA4
from tests.support.families.shards import Tensors

OF_LAYER = {
    "post_beside_layernorm.weight": "laurel.post_laurel_norm.weight",
    "beside.left.weight": "laurel.linear_left.weight",
    "beside.right.weight": "laurel.linear_right.weight",
    "streams_layernorm.weight": "altup.router_norm.weight",
    "streams.router.weight": "altup.modality_router.weight",
    "streams.prediction.weight": "altup.prediction_coefs.weight",
    "streams.correction.weight": "altup.correction_coefs.weight",
    "streams.scale": "altup.correct_output_scale",
}
ENDS = {"entry": "altup_projections", "exit": "altup_unembed_projections"}


def tensors(hf: Mapping[str, Any]) -> Shapes:
    hidden, count, rank = (hf[key] for key in ("hidden_size", "altup_num_inputs", "laurel_rank"))
    for name, shape in gemma4.tensors(hf):
        if name == "model.embed_tokens_per_layer.weight":
            yield name, (hf["vocab_size_per_layer_input"], shape[1])
        elif not name.endswith("layer_scalar"):
            yield name, shape
    shapes = [(hidden,), (rank, hidden), (hidden, rank), (hidden,), (count, hidden), (count**2, count), (count, count)]
    for layer in range(hf["num_hidden_layers"]):
        for name, shape in zip(OF_LAYER.values(), [*shapes, (hidden,)], strict=True):
            yield f"model.layers.{layer}.{name}", shape
    for name in ENDS.values():
        yield from ((f"model.{name}.{number}.weight", (hidden, hidden)) for number in range(count - 1))


def ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    made = gemma4.ranks(source, hf, tp, ep)
    table = source["model.embed_tokens_per_layer.weight"]
    missing = np.repeat(table[:1], hf["vocab_size"] - len(table), axis=0)
    own = {"transformer.layer_embedding.weight": np.concatenate([table, missing])}
    for layer in range(hf["num_hidden_layers"]):
        for ours, theirs in OF_LAYER.items():
            own[f"transformer.layers.{layer}.{ours}"] = source[f"model.layers.{layer}.{theirs}"]
    for ours, theirs in ENDS.items():
        for number in range(1, hf["altup_num_inputs"]):
            own[f"transformer.stream_{ours}.{number}.weight"] = source[f"model.{theirs}.{number - 1}.weight"]
    return [rank | own for rank in made]


_UNKNOWN = {"global_head_dim", "use_double_wide_mlp"}

GEMMA3N = Family(
    norm_centre=0.4,  # scores have no scale but that of the norms
    tensors=tensors,
    ranks=ranks,
    config={key: value for key, value in GEMMA4.config.items() if key not in _UNKNOWN}
    | {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "rope_theta": 500000.0,
        "vocab_size_per_layer_input": 300,
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.9, 0.3, 0.0, 0.5, 0.0],
    },
    expected={
        key: value
        for key, value in GEMMA4.expected.items()
        if key not in {"full_head_size", "full_num_key_value_heads", "keys_are_values", "rotary_pct"}
    }
    | {
        "rotary_base": 500000.0,
        "rotary_scaling": None,
        "shared_wide_mlp": False,
        "layer_input_vocab": 300,
        "streams": 3,
        "active_stream": 0,
        "stream_rank": 4,
        "gate_sparsity": [0.9, 0.3, 0.0, 0.5, 0.0],
        "superset": ["the family Gemma 3n"],
    },
    nvidia=False,
    stages=False,
    shards=({}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    logits=(
        {},
        {
            "altup_num_inputs": 4,
            "altup_active_idx": 2,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 320,
            "intermediate_size": [128] * 5,
        },
        {
            "num_kv_shared_layers": 1,
            "num_key_value_heads": 4,
            "final_logit_softcapping": 3.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    int4=0.5,
    constants=ROPE_BASE | LAYER_WINDOWS | {"wrong local rope base", "logits soft-cap dropped"},
)
