"""Differences in the config.json of checkpoints from release to release.

Read in the public sources (decision 0009); up to 0.17 they were compared with what upstream's own classes write.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from tests.support.families import FAMILIES
from tests.support.families.expected import RECORDED

NEWEST: dict[str, dict[str, Any]] = {
    name: {**RECORDED, "architecture": family.architecture, **family.expected} for name, family in FAMILIES.items()
}
"""What release 1.2 writes for each tiny model."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Keys added and removed in `release`: of all families, or `of` one config class or architecture."""

    release: str
    section: str | None = None
    of: str = ""
    came: tuple[str, ...] = ()
    went: dict[str, Any] = field(default_factory=dict)


CHANGES = (
    Change(
        release="1.2",
        section="mapping",
        came=("enable_attention_dp", "enable_lm_head_tp_in_adp"),
        went={"auto_parallel": False},
    ),
    Change(release="1.1", section="mapping", came=("cp_config",)),
    Change(release="1.1", section="quantization", came=("mamba_ssm_cache_dtype",)),
    Change(release="1.1", of="QWenConfig", came=("mlp_only_layers", "decoder_sparse_step")),
    Change(
        release="1.1", of="Gemma3ForCausalLM", came=("_sliding_window_pattern",), went={"sliding_window_pattern": 2}
    ),
    Change(release="0.20", section="mapping", came=("moe_cluster_size",)),
    Change(release="0.19", section="mapping", came=("attn_tp_size", "attn_cp_size")),
    Change(
        release="0.19",
        of="LLaMAConfig",
        came=(
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
            *("output_multiplier_scale", "has_partial_lora_mask"),
        ),
    ),
    Change(release="0.19", of="Phi3Config", came=("rotary_pct", "tie_word_embeddings")),
    Change(release="0.17", section="mapping", came=("auto_parallel",)),
    Change(release="0.16", came=("rotary_embedding_dim",), went={"share_embedding_table": False}),
    Change(release="0.16", of="LLaMAConfig", came=("tie_word_embeddings",)),
    Change(release="0.16", of="QWenConfig", came=("use_logn_attn", "seq_length")),
    Change(release="0.16", of="GemmaConfig", went={"share_embedding_table": True}),
    Change(
        release="0.16",
        section="moe",
        came=("shared_expert_intermediate_size",),
        went={"moe_intermediate_size": 0, "num_shared_experts": 0},
    ),
    Change(release="0.15", came=("runtime_defaults",)),
    Change(
        release="0.15",
        of="LLaMAConfig",
        came=(
            *("fc_after_embed", "use_input_layernorm_in_first_layer"),
            *("use_last_layernorm", "layer_idx_offset"),
        ),
    ),
    Change(release="0.15", of="QWenConfig", came=("num_labels", "tie_word_embeddings")),
    Change(release="0.15", of="FalconConfig", came=("num_ln_in_parallel_attn", "rotary_base")),
    Change(release="0.15", section="quantization", came=("use_meta_recipe",)),
    Change(
        release="0.15",
        section="moe",
        came=("device_limited_n_group", "device_limited_topk_group", "device_limited_routed_scaling_factor"),
    ),
    Change(release="0.14", section="moe", came=("moe_intermediate_size", "num_shared_experts")),
    Change(release="0.13", section="moe", came=("sparse_mixer_epsilon",)),
)
"""From the newest to the oldest."""


def before(version: str, release: str) -> bool:
    """Whether one release is older than another."""
    return [int(part) for part in version.split(".")] < [int(part) for part in release.split(".")]


def expected_config(family: str, release: str) -> dict[str, Any]:
    """config.json of a tiny model as a release writes it: that of 1.2 with everything undone that came later."""
    config, row = copy.deepcopy(NEWEST[family]), FAMILIES[family]
    for change in CHANGES:
        if before(release, change.release) and change.of in ("", row.config_class, row.architecture):
            part = config if change.section is None else config.get(change.section)
            if part is not None:
                for key in change.came:
                    del part[key]
                part.update(change.went)
    return config
