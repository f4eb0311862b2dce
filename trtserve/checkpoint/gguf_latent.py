"""Latent attention in GGUF files: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, all `deepseek2` in llama.cpp.

Files since April 2025 have the keys and values of `kv_b_proj` apart, with the keys turned; older ones have the matrix.
Sources: llama.cpp's converter and its `deepseek2` loader, by what they write and expect; no code is theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.checkpoint.encodings import StoredTensor
from trtserve.checkpoint.gguf import GgufRows, HeadsJoined
from trtserve.checkpoint.gguf_metadata import AGAIN, OTHER, Metadata
from trtserve.errors import CorruptFileError, UnsupportedModelError

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's `expert_gating_func`
# Groups of experts, all and chosen ones, by layers and experts: files before the autumn of 2025 do not have them.
_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3), (61, 384): (1, 1)}  # DeepSeek V3, V2 and Kimi K2
_MOST_UNGROUPED = 128  # smaller models, such as V2-Lite, Moonlight and GLM-4.7-Flash, have one group


def latent_of(data: Metadata) -> dict[str, Any]:
    """Return the keys of a DeepSeek V2 or V3. Raises UnsupportedModelError for what the file does not say."""
    if data.get("attention.temperature_scale", float, 0.0):
        raise UnsupportedModelError(f"{data.file.path} scales its queries with their position.", hint=OTHER)
    rotated, rank = data.size("rope.dimension_count"), data.size("attention.kv_lora_rank")
    absorbed = data.get("attention.key_length_mla", int) is not None
    ending = "_mla" if absorbed else ""
    key, value = data.size(f"attention.key_length{ending}"), data.size(f"attention.value_length{ending}")
    if key <= rotated:
        raise CorruptFileError(
            f"{data.file.path}: deepseek2 has keys of {key} numbers, of which {rotated} are rotated.", hint=AGAIN
        )
    heads = data.size("attention.head_count")
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "partial_rotary_factor": None,
        "kv_lora_rank": rank,
        "q_lora_rank": data.get("attention.q_lora_rank", int) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_interleave": True,
        "attention_bias": False,
        **_experts(data),
    }


def _experts(data: Metadata) -> dict[str, Any]:
    count = data.size("expert_count")
    corrected = any(name.endswith(".exp_probs_b.bias") for name in data.file.entries)
    gate = data.get("expert_gating_func", int, _SIGMOID if corrected else _SOFTMAX)
    if gate not in (_SOFTMAX, _SIGMOID) or (gate == _SIGMOID) != corrected:
        raise UnsupportedModelError(
            f"{data.file.path}: deepseek2.expert_gating_func is {gate}, and the file has "
            f"{'' if corrected else 'no '}exp_probs_b; expected 1 (softmax) without it, or 2 (sigmoid) with it.",
            hint=OTHER,
        )
    groups, chosen = data.get("expert_group_count", int), data.get("expert_group_used_count", int)
    if not groups or not chosen:
        groups, chosen = _GROUPS.get((data.layers, count), (1, 1) if count <= _MOST_UNGROUPED else (None, None))
    if groups is None:
        raise UnsupportedModelError(
            f"{data.file.path} lacks deepseek2.expert_group_count and expert_group_used_count, and is none of the "
            "models for which they are known.",
            hint="Convert the model again with a current llama.cpp.",
        )
    v3 = gate == _SIGMOID
    return {
        "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "n_routed_experts": count,
        "n_shared_experts": data.size("expert_shared_count"),
        "num_experts_per_tok": data.size("expert_used_count"),
        "moe_intermediate_size": data.size("expert_feed_forward_length"),
        "first_k_dense_replace": data.whole("leading_dense_block_count"),
        "routed_scaling_factor": data.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": data.get("expert_weights_norm", bool, False),
        "n_group": groups,
        "topk_group": chosen,
        **({} if v3 else {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}),
    }


def yarn_of_latent(data: Metadata) -> dict[str, Any]:
    """Return what yarn has besides its factor: how the scores grow, which the file has times 0.1."""
    share = data.get("rope.scaling.yarn_log_multiplier", float)
    if data.get("tokenizer.ggml.pre", str) == "kimi-k2" and data.get("rope.scaling.yarn_beta_fast", float) is None:
        raise UnsupportedModelError(
            f"{data.file.path} lacks deepseek2.rope.scaling.yarn_beta_fast, which differs between releases of Kimi K2.",
            hint="Convert the model again with a current llama.cpp.",
        )
    # llama.cpp has one number for both, and so have all published models.
    return {} if share is None else dict.fromkeys(("mscale", "mscale_all_dim"), round(share / 0.1, 6))


def keys_and_values(keys: StoredTensor, values: StoredTensor, data: Metadata) -> HeadsJoined:
    """Return `kv_b_proj` of its parts. Raises CorruptFileError for shapes that do not fit the metadata."""
    found = latent_of(data)
    heads, rank = found["num_key_value_heads"], found["kv_lora_rank"]
    for stored, shape in (
        (keys, (heads, rank, found["qk_nope_head_dim"])),
        (values, (heads, found["v_head_dim"], rank)),
    ):
        if stored.entry.shape != shape:
            raise CorruptFileError(
                f"{stored.where} has {list(stored.entry.shape)}; expected {list(shape)}.", hint=AGAIN
            )
    return HeadsJoined(codes=keys, keys=_of_heads(keys), values=_of_heads(values))


def _of_heads(stored: StoredTensor) -> tuple[GgufRows, ...]:
    count, *shape = stored.entry.shape
    size = stored.entry.size // count
    entry = replace(stored.entry, shape=tuple(shape), size=size)
    return tuple(
        GgufRows(codes=replace(stored, entry=replace(entry, begin=entry.begin + head * size))) for head in range(count)
    )
