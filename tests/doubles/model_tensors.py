"""Tensors of the models around the core model by release: pre- and postprocessing, ensemble, BLS, and the LLM API's.

Read from NVIDIA's templates, independently of the product. The core model has its own table, core_tensors.py. The token
counters have the release of the core model's, which a commit dates. Tensors without a known release are left out. The
prompt table of ensemble and BLS is FP16 in every file that was read (2a9abd95, 0193dbd4), whatever
the core model takes.
"""

from __future__ import annotations

# name, type, dims, flags (o optional, r ragged, s reshape to []), first release, first release without it.
PREPROCESSING_INPUTS = """
QUERY STRING 1 - 0.12 -
DECODER_QUERY STRING 1 o 0.12 -
IMAGE_BYTES UINT8 -1x-1x-1x-1 o 0.15 -
IMAGE_URL STRING 1 o 0.15 -
VIDEO_BYTES UINT8 -1x-1x-1x-1 o 0.16 -
REQUEST_OUTPUT_LEN INT32 1 - 0.12 -
BAD_WORDS_DICT STRING -1 o 0.12 -
STOP_WORDS_DICT STRING -1 o 0.12 -
EMBEDDING_BIAS_WORDS STRING -1 o 0.12 -
EMBEDDING_BIAS_WEIGHTS FP32 -1 o 0.12 -
END_ID INT32 1 o 0.12 -
PAD_ID INT32 1 o 0.12 -
PROMPT_TABLE_EXTRA_ID UINT64 1 o 0.13 -
IMAGE FP16 3x224x224 o 0.12 0.13
PROMPT_EMBEDDING_TABLE FP16 -1x-1 or 0.12 0.13
IMAGES STRING -1 o 0.20 -
"""
PREPROCESSING_OUTPUTS = """
INPUT_ID INT32 -1 - 0.12 -
REQUEST_INPUT_LEN INT32 1 - 0.12 -
DECODER_INPUT_ID INT32 -1 - 0.12 -
REQUEST_DECODER_INPUT_LEN INT32 1 - 0.12 -
BAD_WORDS_IDS INT32 2x-1 - 0.12 -
STOP_WORDS_IDS INT32 2x-1 - 0.12 -
EMBEDDING_BIAS FP32 -1 - 0.12 -
REQUEST_OUTPUT_LEN INT32 -1 - 0.12 -
OUT_END_ID INT32 1 - 0.12 -
OUT_PAD_ID INT32 1 - 0.12 -
OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1 - 0.13 -
PIXEL_VALUES FP16 -1x-1x-1x-1 - 0.15 -
ASPECT_RATIO_IDS INT64 -1 - 0.15 -
ASPECT_RATIO_MASK INT64 -1x-1 - 0.15 -
CROSS_ATTENTION_MASK INT64 -1x-1x-1 - 0.15 -
IMAGE_SIZES INT64 2 - 0.16 0.20
IMAGE_SIZES INT64 -1x2 - 0.20 -
IS_VIDEO_INPUT BOOL 1 - 0.16 -
ATTENTION_MASK INT64 -1 - 0.19 -
IMAGE_GRID_THW INT64 3 - 0.19 -
VISION_INPUT_ID INT32 -1 - 0.19 -
OUT_PROMPT_EMBEDDING_TABLE FP16 -1x-1 - 0.12 0.13
"""
POSTPROCESSING_INPUTS = """
TOKENS_BATCH INT32 -1x-1 - 0.12 -
SEQUENCE_LENGTH INT32 -1 - 0.12 -
CUM_LOG_PROBS FP32 -1 o 0.12 0.14
OUTPUT_LOG_PROBS FP32 -1x-1 o 0.12 0.14
CONTEXT_LOGITS FP32 -1x-1 o 0.12 0.14
GENERATION_LOGITS FP32 -1x-1x-1 o 0.12 0.14
BATCH_INDEX INT32 1 o 0.12 0.14
"""
POSTPROCESSING_OUTPUTS = """
OUTPUT STRING -1 - 0.12 -
OUT_CUM_LOG_PROBS FP32 -1 - 0.12 0.14
OUT_OUTPUT_LOG_PROBS FP32 -1x-1 - 0.12 0.14
OUT_CONTEXT_LOGITS FP32 -1x-1 - 0.12 0.14
OUT_GENERATION_LOGITS FP32 -1x-1x-1 - 0.12 0.14
OUT_BATCH_INDEX INT32 1 - 0.12 0.14
"""
ENSEMBLE_INPUTS = """
text_input STRING 1 - 0.12 -
decoder_text_input STRING 1 o 0.12 -
max_tokens INT32 1 - 0.12 -
num_return_sequences INT32 1 o 0.14 -
bad_words STRING -1 o 0.12 -
stop_words STRING -1 o 0.12 -
exclude_input_in_output BOOL 1 o 0.16 -
end_id INT32 1 o 0.12 -
pad_id INT32 1 o 0.12 -
top_k INT32 1 o 0.12 -
top_p FP32 1 o 0.12 -
temperature FP32 1 o 0.12 -
length_penalty FP32 1 o 0.12 -
repetition_penalty FP32 1 o 0.12 -
min_length INT32 1 o 0.12 0.20
min_tokens INT32 1 o 0.20 -
presence_penalty FP32 1 o 0.12 -
frequency_penalty FP32 1 o 0.12 -
random_seed UINT64 1 o 0.12 0.20
seed UINT64 1 o 0.20 -
return_log_probs BOOL 1 o 0.12 -
return_context_logits BOOL 1 o 0.12 -
return_generation_logits BOOL 1 o 0.12 -
return_perf_metrics BOOL 1 o 0.19 -
beam_width INT32 1 o 0.12 -
stream BOOL 1 o 0.12 -
prompt_embedding_table FP16 -1x-1 o 0.12 -
prompt_table_extra_id UINT64 1 o 0.13 -
prompt_vocab_size INT32 1 o 0.12 -
embedding_bias_words STRING -1 o 0.12 -
embedding_bias_weights FP32 -1 o 0.12 -
lora_task_id UINT64 1 o 0.15 -
lora_weights FP16 -1x-1 or 0.15 -
lora_config INT32 -1x3 or 0.15 -
guided_decoding_guide_type STRING 1 or 0.19 -
guided_decoding_guide STRING 1 or 0.19 -
image_input FP16 3x224x224 o 0.12 0.13
return_kv_cache_reuse_stats BOOL 1 o 0.16 0.19
return_num_input_tokens BOOL 1 o 1.0 -
return_num_output_tokens BOOL 1 o 1.0 -
"""
ENSEMBLE_OUTPUTS = """
text_output STRING -1 - 0.12 -
cum_log_probs FP32 -1 - 0.12 -
output_log_probs FP32 -1x-1 - 0.12 -
context_logits FP32 -1x-1 - 0.12 0.17
context_logits LOGITS -1x-1 - 0.17 -
generation_logits FP32 -1x-1x-1 - 0.12 0.17
generation_logits LOGITS -1x-1x-1 - 0.17 -
batch_index INT32 1 - 0.12 -
sequence_index INT32 1 - 0.14 -
kv_cache_alloc_new_blocks INT32 1 - 0.16 -
kv_cache_reused_blocks INT32 1 - 0.16 -
kv_cache_alloc_total_blocks INT32 1 - 0.16 -
kv_cache_alloc_total_blocks INT32 1 - 0.19 -
arrival_time_ns INT64 1 - 0.19 -
first_scheduled_time_ns INT64 1 - 0.19 -
first_token_time_ns INT64 1 - 0.19 -
last_token_time_ns INT64 1 - 0.19 -
acceptance_rate FP32 1 - 0.19 -
total_accepted_draft_tokens INT32 1 - 0.19 -
total_draft_tokens INT32 1 - 0.19 -
num_input_tokens INT32 1 - 1.0 -
num_output_tokens INT32 1 - 1.0 -
"""
BLS_INPUTS = """
text_input STRING 1 - 0.12 -
decoder_text_input STRING 1 o 0.12 -
image_input FP16 3x224x224 o 0.12 0.13
image_input FP16 3x-1x-1 o 0.13 0.15
image_input FP16 -1x3x-1x-1 o 0.15 -
image_bytes_input UINT8 -1x-1x-1x-1 o 0.16 -
image_url_input STRING 1 o 0.16 -
video_bytes_input UINT8 -1x-1x-1x-1 o 0.16 -
max_tokens INT32 1 - 0.12 -
bad_words STRING -1 o 0.12 -
stop_words STRING -1 o 0.12 -
exclude_input_in_output BOOL 1 o 0.16 -
end_id INT32 1 o 0.12 -
pad_id INT32 1 o 0.12 -
top_k INT32 1 o 0.12 -
top_p FP32 1 o 0.12 -
temperature FP32 1 o 0.12 -
length_penalty FP32 1 o 0.12 -
repetition_penalty FP32 1 o 0.12 -
min_length INT32 1 o 0.12 0.20
min_tokens INT32 1 o 0.20 -
presence_penalty FP32 1 o 0.12 -
frequency_penalty FP32 1 o 0.12 -
random_seed UINT64 1 o 0.12 0.20
seed UINT64 1 o 0.20 -
return_log_probs BOOL 1 os 0.12 -
return_context_logits BOOL 1 os 0.12 -
return_generation_logits BOOL 1 os 0.12 -
num_return_sequences INT32 1 os 0.14 -
beam_width INT32 1 o 0.12 -
stream BOOL 1 o 0.12 -
prompt_embedding_table FP16 -1x-1 o 0.12 -
prompt_vocab_size INT32 1 o 0.12 -
prompt_table_extra_id UINT64 1 o 0.13 -
embedding_bias_words STRING -1 o 0.12 -
embedding_bias_weights FP32 -1 o 0.12 -
num_draft_tokens INT32 1 o 0.12 -
use_draft_logits BOOL 1 os 0.12 -
lora_task_id UINT64 1 os 0.15 -
lora_weights FP16 -1x-1 or 0.15 -
lora_config INT32 -1x3 or 0.15 -
return_perf_metrics BOOL 1 os 0.19 -
guided_decoding_guide_type STRING 1 o 0.19 -
guided_decoding_guide STRING 1 o 0.19 -
return_kv_cache_reuse_stats BOOL 1 os 0.16 0.19
return_num_input_tokens BOOL 1 os 1.0 -
return_num_output_tokens BOOL 1 os 1.0 -
"""
BLS_OUTPUTS = """
text_output STRING -1 - 0.12 -
cum_log_probs FP32 -1 - 0.12 -
output_log_probs FP32 -1x-1 - 0.12 -
context_logits FP32 -1x-1 - 0.12 0.17
context_logits LOGITS -1x-1 - 0.17 -
generation_logits FP32 -1x-1x-1 - 0.12 0.17
generation_logits LOGITS -1x-1x-1 - 0.17 -
batch_index INT32 1 - 0.12 -
sequence_index INT32 1 - 0.14 -
kv_cache_alloc_new_blocks INT32 1 - 0.16 -
kv_cache_reused_blocks INT32 1 - 0.16 -
kv_cache_alloc_total_blocks INT32 1 - 0.16 -
arrival_time_ns INT64 1 - 0.19 -
first_scheduled_time_ns INT64 1 - 0.19 -
first_token_time_ns INT64 1 - 0.19 -
last_token_time_ns INT64 1 - 0.19 -
acceptance_rate FP32 1 - 0.19 -
total_accepted_draft_tokens INT32 1 - 0.19 -
total_draft_tokens INT32 1 - 0.19 -
num_input_tokens INT32 1 - 1.0 -
num_output_tokens INT32 1 - 1.0 -
"""
LLMAPI_INPUTS = """
text_input STRING -1 - 0.19 -
streaming BOOL 1 o 0.19 -
sampling_param_beam_width INT32 1 o 0.19 0.20
sampling_param_best_of INT32 1 o 0.20 -
sampling_param_temperature FP32 1 o 0.19 -
sampling_param_top_p FP32 1 o 0.19 -
sampling_param_frequency_penalty FP32 1 o 0.19 -
sampling_param_presence_penalty FP32 1 o 0.19 -
sampling_param_top_k INT32 1 o 0.19 -
sampling_param_max_tokens INT32 1 o 0.19 -
sampling_param_stop STRING -1 o 0.19 -
sampling_param_seed UINT64 1 o 0.19 -
sampling_param_exclude_input_from_output BOOL 1 o 0.19 -
sampling_param_return_perf_metrics BOOL 1 o 1.0 -
return_finish_reason BOOL 1 o 0.19 -
return_stop_reason BOOL 1 o 0.19 -
return_cumulative_logprob BOOL 1 o 0.19 -
stop BOOL 1 o 1.0 -
lora_id UINT64 1 o 1.0 -
lora_name STRING 1 o 1.0 -
lora_path STRING 1 o 1.0 -
lora_ckpt_source STRING 1 o 1.0 -
"""
LLMAPI_OUTPUTS = """
text_output STRING -1 - 0.19 -
finish_reason STRING -1 - 0.19 -
stop_reason STRING -1 - 0.19 -
cumulative_logprob FP32 -1 - 0.19 -
kv_cache_reused_block INT32 -1 - 1.0 -
kv_cache_missed_block INT32 -1 - 1.0 -
kv_cache_alloc_new_blocks INT32 -1 - 1.0 -
kv_cache_alloc_total_blocks INT32 -1 - 1.0 -
kv_cache_hit_rate FP32 -1 - 1.0 -
arrival_time_ns INT64 1 - 1.0 -
first_scheduled_time_ns INT64 1 - 1.0 -
first_token_time_ns INT64 1 - 1.0 -
last_token_time_ns INT64 1 - 1.0 -
acceptance_rate FP32 1 - 1.0 -
total_accepted_draft_tokens INT32 1 - 1.0 -
total_draft_tokens INT32 1 - 1.0 -
"""
