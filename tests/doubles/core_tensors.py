"""Tensors of a core model's config.pbtxt by release, and the parameters that came later than 0.12.

Read by a protobuf parser from all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt of tensorrtllm_backend v0.12.0
… v0.19.0 and branch r25.05 (the container of 0.19 already has the names of 0.20), and of TensorRT-LLM 0c8de69a for the
token counters. Upstream's backend ignores a tensor that it does not know; here it is an error.
"""

from __future__ import annotations

from typing import Any

from tests.doubles.flags import Release
from tests.doubles.model_configs import LoadError, Model

# in/out, name, type, dims, flags (o optional, r ragged, s reshape to []), first release, first release without it.
_TABLE = """
in input_ids INT32 -1 r 0.12 0.15
in input_lengths INT32 1 s 0.12 -
in request_output_len INT32 1 s 0.12 -
in draft_input_ids INT32 -1 or 0.12 -
in decoder_input_ids INT32 -1 or 0.12 -
in decoder_input_lengths INT32 1 os 0.12 -
in draft_logits LOGITS -1x-1 or 0.12 -
in draft_acceptance_threshold FP32 1 os 0.12 -
in end_id INT32 1 os 0.12 -
in pad_id INT32 1 os 0.12 -
in stop_words_list INT32 2x-1 or 0.12 -
in bad_words_list INT32 2x-1 or 0.12 -
in embedding_bias FP32 -1 or 0.12 -
in beam_width INT32 1 os 0.12 -
in temperature FP32 1 os 0.12 -
in runtime_top_k INT32 1 os 0.12 -
in runtime_top_p FP32 1 os 0.12 -
in runtime_top_p_min FP32 1 os 0.12 -
in runtime_top_p_decay FP32 1 os 0.12 -
in runtime_top_p_reset_ids INT32 1 os 0.12 -
in len_penalty FP32 1 os 0.12 -
in early_stopping BOOL 1 os 0.12 -
in repetition_penalty FP32 1 os 0.12 -
in min_length INT32 1 os 0.12 0.20
in beam_search_diversity_rate FP32 1 os 0.12 -
in presence_penalty FP32 1 os 0.12 -
in frequency_penalty FP32 1 os 0.12 -
in random_seed UINT64 1 os 0.12 0.20
in return_log_probs BOOL 1 os 0.12 -
in return_context_logits BOOL 1 os 0.12 -
in return_generation_logits BOOL 1 os 0.12 -
in stop BOOL 1 os 0.12 -
in streaming BOOL 1 os 0.12 -
in prompt_embedding_table TABLE -1x-1 or 0.12 -
in prompt_vocab_size INT32 1 os 0.12 -
in lora_task_id UINT64 1 os 0.12 -
in lora_weights FP16 -1x-1 or 0.12 -
in lora_config INT32 -1x3 or 0.12 -
out output_ids INT32 -1x-1 - 0.12 -
out sequence_length INT32 -1 - 0.12 -
out cum_log_probs FP32 -1 - 0.12 -
out output_log_probs FP32 -1x-1 - 0.12 -
out context_logits LOGITS -1x-1 - 0.12 -
out generation_logits LOGITS -1x-1x-1 - 0.12 -
out batch_index INT32 1 - 0.12 -
in prompt_table_extra_ids UINT64 -1 or 0.13 -
in num_return_sequences INT32 1 os 0.14 -
in exclude_input_in_output BOOL 1 os 0.14 -
in context_phase_params UINT8 -1 or 0.14 -
out sequence_index INT32 1 - 0.14 -
out context_phase_params UINT8 -1 - 0.14 -
in input_ids INT32 -1 or 0.15 -
in encoder_input_features FEATURES -1x-1 or 0.15 -
in encoder_output_lengths INT32 1 os 0.15 -
in cross_attention_mask BOOL -1x-1 or 0.15 -
in return_kv_cache_reuse_stats BOOL 1 os 0.16 0.19
in skip_cross_attn_blocks BOOL 1 or 0.16 -
out kv_cache_alloc_new_blocks INT32 1 - 0.16 -
out kv_cache_reused_blocks INT32 1 - 0.16 -
out kv_cache_alloc_total_blocks INT32 1 - 0.16 -
in retention_token_range_starts INT32 -1 or 0.17 -
in retention_token_range_ends INT32 -1 or 0.17 -
in retention_token_range_priorities INT32 -1 or 0.17 -
in retention_token_range_durations_ms INT32 -1 or 0.17 -
in retention_decode_priority INT32 1 or 0.17 -
in retention_decode_duration_ms INT32 1 or 0.17 -
in return_perf_metrics BOOL 1 os 0.19 -
in mrope_rotary_cos_sin FP32 -1 o 0.19 -
in mrope_position_deltas INT64 1 o 0.19 -
in guided_decoding_guide_type STRING 1 or 0.19 -
in guided_decoding_guide STRING 1 or 0.19 -
in lookahead_window_size INT32 1 or 0.19 -
in lookahead_ngram_size INT32 1 or 0.19 -
in lookahead_verification_set_size INT32 1 or 0.19 -
out arrival_time_ns INT64 1 - 0.19 -
out first_scheduled_time_ns INT64 1 - 0.19 -
out first_token_time_ns INT64 1 - 0.19 -
out last_token_time_ns INT64 1 - 0.19 -
out acceptance_rate FP32 1 - 0.19 -
out total_accepted_draft_tokens INT32 1 - 0.19 -
out total_draft_tokens INT32 1 - 0.19 -
in min_tokens INT32 1 os 0.19 -
in seed UINT64 1 os 0.19 -
in return_num_input_tokens BOOL 1 os 1.0 -
in return_num_output_tokens BOOL 1 os 1.0 -
out num_input_tokens INT32 1 - 1.0 -
out num_output_tokens INT32 1 - 1.0 -
in no_repeat_ngram_size INT32 1 os 0.12 -
"""
_PARAMETERS = """
0.13: participant_ids
0.14: cross_kv_cache_fraction
0.15: cuda_graph_cache_size cuda_graph_mode speculative_decoding_fast_logits
0.16: eagle_choices
0.19: guided_decoding_backend lookahead_ngram_size lookahead_verification_set_size lookahead_window_size
  lora_prefetch_dir num_nodes tokenizer_dir xgrammar_tokenizer_info_path
"""
# Types that are chosen when a template is filled.
_TYPES = {
    "LOGITS": {"TYPE_FP32", "TYPE_FP16"},
    "FEATURES": {"TYPE_FP16", "TYPE_BF16"},
    "TABLE": {"TYPE_FP16", "TYPE_BF16", "TYPE_FP32"},
}
_LOGITS_CHOSEN: Release = (0, 17)
_TABLE_CHOSEN: Release = (0, 20)
_NEEDED = {"in": {"input_ids", "input_lengths", "request_output_len"}, "out": {"output_ids", "sequence_length"}}


def _release(text: str) -> Release:
    major, minor = text.split(".")
    return int(major), int(minor)


def _known(release: Release) -> dict[tuple[str, str], tuple[str, str, str]]:
    """(in/out, name) → type, dims, flags of one release."""
    known: dict[tuple[str, str], tuple[str, str, str]] = {}
    for line in _TABLE.split("\n"):
        if not line:
            continue
        direction, name, kind, dims, flags, since, until = line.split()
        if _release(since) <= release and (until == "-" or release < max(_release(until), _last(name))):
            known[direction, name] = kind, dims, flags
    return known


def _last(name: str) -> Release:
    """A repository for 0.19 may still have the names that 0.20 replaced, since its container has the new ones."""
    return (0, 20) if name in {"min_length", "random_seed"} else (0, 0)


def _types(kind: str, release: Release) -> set[str]:
    if kind == "LOGITS" and release < _LOGITS_CHOSEN:
        return {"TYPE_FP32"}
    if kind == "TABLE" and release < _TABLE_CHOSEN:
        return {"TYPE_FP16"}
    return _TYPES.get(kind, {f"TYPE_{kind}"})


def _problem(tensor: Any, entry: tuple[str, str, str], direction: str, release: Release) -> str | None:
    kind, dims, flags = entry
    values = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    name = values[tensor.data_type].name
    if name not in _types(kind, release):
        return f"{name} instead of {' or '.join(sorted(_types(kind, release)))}"
    if "x".join(str(extent) for extent in tensor.dims) != dims:
        return f"dims {list(tensor.dims)} instead of {dims}"
    if tensor.HasField("reshape") != ("s" in flags):
        return "reshape" if "s" not in flags else "no reshape"
    if direction == "in" and tensor.optional and "o" not in flags:
        return "optional"
    if direction == "in" and tensor.allow_ragged_batch != ("r" in flags):
        return "ragged" if "r" not in flags else "not ragged"
    return None


def check_tensors(model: Model, release: Release) -> None:
    """LoadError for a tensor that the release does not know, or knows in another form, and for one that is missing."""
    known = _known(release)
    given = [("in", tensor) for tensor in model.config.input] + [("out", tensor) for tensor in model.config.output]
    for direction, tensor in given:
        entry = known.get((direction, tensor.name))
        if entry is None:
            raise LoadError(f"{model.name}: (strict double) {direction}put '{tensor.name}' is not of this release")
        if problem := _problem(tensor, entry, direction, release):
            raise LoadError(f"{model.name}: (strict double) {direction}put '{tensor.name}' has {problem}")
    for direction, needed in _NEEDED.items():
        if missing := needed - {tensor.name for side, tensor in given if side == direction}:
            raise LoadError(f"{model.name}: (strict double) no {direction}put {', '.join(sorted(missing))}")


def check_parameter_names(model: Model, release: Release) -> None:
    """LoadError for a parameter with a value that only a later release reads."""
    for line in _PARAMETERS.replace("\n  ", " ").split("\n"):
        since, _, names = line.partition(":")
        if since and release < _release(since):
            for name in names.split():
                if model.parameter(name) is not None and name != "tokenizer_dir":
                    raise LoadError(f"{model.name}: (strict double) nobody reads {name} before {since}")
