"""Which keys a checkpoint's config.json has in each release, beside those that all of them have.

Sources: `to_dict` of PretrainedConfig, QuantConfig, MoeConfig, Mapping and of each family's config in the public
sources: up to 0.17 at the development snapshots nearest to the tags; from 0.19 on in single versions of these files,
dated by the pull requests that changed them (2990 Phi-4-mini: 0.19; 3641 clusters of experts, 4399 layers of stages:
0.20; 6816 Helix, 6470 Qwen3-MoE: 1.1; 8329 no auto-parallel: 1.2). 0.18 is 0.17 with other dependencies. A config.json
of an engine of 0.13.0 and one of 0.17.0 that people published agree.

The loaders of all releases hand `mapping`, `quantization` and `moe` on as keyword arguments: a key that a release lacks
stops it. Other keys that it does not know become attributes of its config, with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.releases import Row, order

Section = Literal["model", "mapping", "quantization", "moe"]

STRICT: tuple[Section, ...] = ("mapping", "quantization", "moe")
"""Sections in which a loader refuses a key that its release lacks."""

# Section, who has it, key, since, until (- for still there), and the value that means nothing (* for any value): with
# another one, a model cannot be expressed in a release that lacks the key.
_TABLE = """
model        all    runtime_defaults                       0.15 -    *
model        all    rotary_embedding_dim                   0.16 -    *
model        llama  fc_after_embed                         0.15 -    *
model        llama  use_input_layernorm_in_first_layer     0.15 -    *
model        llama  use_last_layernorm                     0.15 -    *
model        llama  layer_idx_offset                       0.15 -    *
model        llama  tie_word_embeddings                    0.16 -    *
model        llama  embedding_multiplier                   0.19 -    1.0
model        llama  attention_multiplier                   0.19 -    1.0
model        llama  residual_multiplier                    0.19 -    1.0
model        llama  output_multiplier_scale                0.19 -    1.0
model        llama  has_partial_lora_mask                  0.19 -    *
model        qwen   num_labels                             0.15 -    1
model        qwen   tie_word_embeddings                    0.15 -    *
model        qwen   use_logn_attn                          0.16 -    false
model        qwen   seq_length                             0.16 -    *
model        qwen   mlp_only_layers                        1.1  -    []
model        qwen   decoder_sparse_step                    1.1  -    1
model        gemma3 sliding_window_pattern                 0.19 1.0  *
model        gemma3 _sliding_window_pattern                1.1  -    *
model        falcon num_ln_in_parallel_attn                0.15 -    null
model        falcon rotary_base                            0.15 -    10000.0
model        phi3   rotary_pct                             0.19 -    1.0
model        phi3   tie_word_embeddings                    0.19 -    *
mapping      all    auto_parallel                          0.17 1.1  *
mapping      all    attn_tp_size                           0.19 -    *
mapping      all    attn_cp_size                           0.19 -    *
mapping      all    moe_cluster_size                       0.20 -    *
mapping      all    cp_config                              1.1  -    *
mapping      all    enable_attention_dp                    1.2  -    *
mapping      all    enable_lm_head_tp_in_adp               1.2  -    *
quantization all    use_meta_recipe                        0.15 -    false
quantization all    mamba_ssm_cache_dtype                  1.1  -    *
moe          all    sparse_mixer_epsilon                   0.13 -    *
moe          all    moe_intermediate_size                  0.14 0.15 *
moe          all    num_shared_experts                     0.14 0.15 *
moe          all    device_limited_n_group                 0.15 -    *
moe          all    device_limited_topk_group              0.15 -    *
moe          all    device_limited_routed_scaling_factor   0.15 -    *
moe          all    shared_expert_intermediate_size        0.16 -    *
"""

# Config classes of TensorRT-LLM by the architectures that they serve; others have no rows of their own.
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Gemma3ForCausalLM": "gemma3",
    "FalconForCausalLM": "falcon",
    "RWForCausalLM": "falcon",
    "Phi3ForCausalLM": "phi3",
}

SHARED_TABLE_UNTIL = "0.15"
"""The last release whose configs have `share_embedding_table`; with it a checkpoint has no lm_head.weight."""

EVEN_STAGES_UNTIL = "0.19"
"""The last release that does not give the layers left over to the first pipeline stages, one to each."""

_NO_SMOOTHQUANT_UNTIL = "0.12"


@dataclass(frozen=True, kw_only=True)
class _Key(Row):
    section: Section
    owner: str
    name: str
    neutral: str

    def may_be_dropped(self, value: object) -> bool:
        return self.neutral == "*" or json.loads(self.neutral) == value


def _key(line: str) -> _Key:
    section, owner, name, since, until, neutral = line.split()
    return _Key(
        section=section,  # type: ignore[arg-type]  # one of the table's first column
        owner=owner,
        name=name,
        since=since,
        until=None if until == "-" else until,
        neutral=neutral,
    )


_KEYS = tuple(_key(line) for line in _TABLE.strip().splitlines())


def keys_of_release(
    section: Section, keys: Mapping[str, Any], *, architecture: str, release: str | None
) -> dict[str, Any]:
    """Those of `keys` that `release` has; without a release those that the loaders of all releases take.

    UnsupportedModelError when the model needs one that the release lacks.
    """
    owners = ("all", _CLASSES.get(architecture))
    lacking = {row.name: row for row in _KEYS if row.section == section and row.owner in owners}
    if release is None:
        return {key: value for key, value in keys.items() if section not in STRICT or key not in lacking}
    lacking = {name: row for name, row in lacking.items() if not row.within(release)}
    for key, row in lacking.items():
        if key in keys and order(release) < order(row.since) and not row.may_be_dropped(keys[key]):
            raise UnsupportedModelError(
                f"TensorRT-LLM {release} has no place for {key} = {keys[key]} of this model; {row.since} is the first "
                "release that has.",
                hint=f"Use TensorRT-LLM {row.since} or newer (--trtllm-version {row.since}).",
            )
    return {key: value for key, value in keys.items() if key not in lacking}


def foreign_keys(config: Mapping[str, Any], release: str) -> list[str]:
    """Keys of a checkpoint's config, such as `mapping.cp_config`, at which the loader of a release stops."""
    return [
        f"{row.section}.{row.name}"
        for row in _KEYS
        if row.section in STRICT and row.name in (config.get(row.section) or {}) and not row.within(release)
    ]


def smoothquant_val(architecture: str, release: str | None) -> float | None:
    """`smoothquant_val` of a model that is not smoothed: 0.12 and the Gemma script leave it null."""
    first = release is not None and order(release) <= order(_NO_SMOOTHQUANT_UNTIL)
    return None if first or architecture.startswith("Gemma") else 0.5


def shares_head(architecture: str) -> bool:
    """Whether a model's head is its embedding table where configs have `share_embedding_table`: only Gemma's is."""
    return architecture.startswith("Gemma")


def shares_table(release: str | None) -> bool:
    """Whether the release's configs say that head and embedding are one table (`share_embedding_table`)."""
    return release is not None and order(release) <= order(SHARED_TABLE_UNTIL)


def require_stages(release: str, architecture: str, layers: int, pp_size: int) -> None:
    """UsageError for pipeline stages that the loader of a release would not make of these layers."""
    if layers % pp_size and order(release) <= order(EVEN_STAGES_UNTIL):
        fitting = ", ".join(str(size) for size in range(1, layers + 1) if layers % size == 0)
        raise UsageError(
            f"--pp-size {pp_size} does not divide the {layers} layers of this model: TensorRT-LLM {release} would "
            "load other layers than the checkpoint has in its stages.",
            hint=f"Sizes that fit: {fitting}; or choose a release after {EVEN_STAGES_UNTIL}.",
        )
    if pp_size > 1 and shares_table(release) and shares_head(architecture):
        raise UsageError(
            f"--pp-size {pp_size}: TensorRT-LLM {release} has no pipeline stages for this model, whose head is its "
            "embedding table.",
            hint=f"Use --tp-size, or a release after {SHARED_TABLE_UNTIL}.",
        )
