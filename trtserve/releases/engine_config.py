"""Which keys an engine's config.json has in each release, beside those of its checkpoint.

Source: BuildConfig in tensorrt_llm/builder.py and PluginConfig in tensorrt_llm/plugin/plugin.py, see build_flags. Every
config.json has `version`, `pretrained_config` and `build_config`; `plugin_config` is a key of `build_config`.
"""

from __future__ import annotations

from trtserve.releases import Row, normalize_release
from trtserve.releases.build_flags import BUILD_FLAGS

# Key, since, until (- for still there).
_BUILD = """
max_input_len                    0.12 -
max_seq_len                      0.12 -
opt_batch_size                   0.12 -
max_batch_size                   0.12 -
max_beam_width                   0.12 -
max_num_tokens                   0.12 -
opt_num_tokens                   0.12 -
max_prompt_embedding_table_size  0.12 -
kv_cache_type                    0.13 -
gather_context_logits            0.12 -
gather_generation_logits         0.12 -
strongly_typed                   0.12 -
builder_opt                      0.12 0.13
force_num_profiles               0.12 -
profiling_verbosity              0.12 -
enable_debug_output              0.12 -
max_draft_len                    0.12 -
speculative_decoding_mode        0.12 -
use_refit                        0.12 -
input_timing_cache               0.12 -
output_timing_cache              0.12 -
lora_config                      0.12 -
auto_parallel_config             0.12 1.1
weight_sparsity                  0.12 -
weight_streaming                 0.12 -
plugin_config                    0.12 -
use_strip_plan                   0.12 -
max_encoder_input_len            0.12 -
use_fused_mlp                    0.12 -
monitor_memory                   0.15 -
use_mrope                        0.16 -
"""

# Plugins that no flag sets: the kind of quantisation switches them on.
_INNER_PLUGINS = """
dtype                                      0.12 -
smooth_quant_gemm_plugin                   0.12 -
identity_plugin                            0.12 -
layernorm_quantization_plugin              0.12 -
rmsnorm_quantization_plugin                0.12 -
weight_only_groupwise_quant_matmul_plugin  0.12 -
weight_only_quant_matmul_plugin            0.12 -
quantize_per_token_plugin                  0.12 -
quantize_tensor_plugin                     0.12 -
manage_weights                             0.13 -
qserve_gemm_plugin                         0.15 -
smooth_quant_plugins                       0.15 -
"""

SPECULATIVE_MODES = (
    "none",
    "draft_tokens_external",
    "medusa",
    "lookahead_decoding",
    "explicit_draft_tokens",
    "eagle",
)
"""`speculative_decoding_mode` is a number with one bit for each: 1 for the first, 2, 4, 8 …"""


def _keys(table: str, release: str) -> tuple[str, ...]:
    wanted = normalize_release(release)
    rows = (line.split() for line in table.strip().splitlines())
    return tuple(
        key for key, since, until in rows if Row(since=since, until=None if until == "-" else until).within(wanted)
    )


def build_config_keys(release: str) -> tuple[str, ...]:
    """The keys of `build_config`; UsageError for a release that the tables lack."""
    return _keys(_BUILD, release)


def plugin_config_keys(release: str) -> tuple[str, ...]:
    """The keys of `plugin_config`: what flags set and what quantisation sets."""
    wanted = normalize_release(release)
    flags = [flag.name.removeprefix("--") for flag in BUILD_FLAGS if flag.plugin and flag.within(wanted)]
    return (*_keys(_INNER_PLUGINS, wanted), *flags)
