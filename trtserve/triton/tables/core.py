"""Tensors and parameters of the core model `tensorrt_llm`."""

from __future__ import annotations

INPUTS = """
input_ids                          INT32     -1     ragged           0.6   0.14
input_ids                          INT32     -1     optional,ragged  0.15
encoder_input_features             $encoder  -1,-1  optional,ragged  0.15
encoder_output_lengths             INT32     1      optional,scalar  0.15
input_lengths                      INT32     1      scalar           0.5
request_output_len                 INT32     1      scalar           0.12
num_return_sequences               INT32     1      optional,scalar  0.14
draft_input_ids                    INT32     -1     optional,ragged  0.7
decoder_input_ids                  INT32     -1     optional,ragged  0.11
decoder_input_lengths              INT32     1      optional,scalar  0.11
draft_logits                       FP32      -1,-1  optional,ragged  0.9   0.16
draft_logits                       $logits   -1,-1  optional,ragged  0.17
draft_acceptance_threshold         FP32      1      optional,scalar  0.10
end_id                             INT32     1      optional,scalar  0.7
pad_id                             INT32     1      optional,scalar  0.7
stop_words_list                    INT32     2,-1   optional,ragged  0.6
bad_words_list                     INT32     2,-1   optional,ragged  0.6
embedding_bias                     FP32      -1     optional,ragged  0.6
beam_width                         INT32     1      optional,scalar  0.7
temperature                        FP32      1      optional,scalar  0.5
runtime_top_k                      INT32     1      optional,scalar  0.7
runtime_top_p                      FP32      1      optional,scalar  0.5
runtime_top_p_min                  FP32      1      optional,scalar  0.10
runtime_top_p_decay                FP32      1      optional,scalar  0.10
runtime_top_p_reset_ids            INT32     1      optional,scalar  0.10
len_penalty                        FP32      1      optional,scalar  0.5
early_stopping                     BOOL      1      optional,scalar  0.10
repetition_penalty                 FP32      1      optional,scalar  0.5
min_length                         INT32     1      optional,scalar  0.7   0.19
min_tokens                         INT32     1      optional,scalar  0.20
beam_search_diversity_rate         FP32      1      optional,scalar  0.10
presence_penalty                   FP32      1      optional,scalar  0.5
frequency_penalty                  FP32      1      optional,scalar  0.8
random_seed                        UINT64    1      optional,scalar  0.5   0.19
seed                               UINT64    1      optional,scalar  0.20
return_log_probs                   BOOL      1      optional,scalar  0.6
return_context_logits              BOOL      1      optional,scalar  0.8
return_generation_logits           BOOL      1      optional,scalar  0.8
return_kv_cache_reuse_stats        BOOL      1      optional,scalar  0.16  0.18
return_perf_metrics                BOOL      1      optional,scalar  0.19
return_num_input_tokens            BOOL      1      optional,scalar  0.20
return_num_output_tokens           BOOL      1      optional,scalar  0.20
exclude_input_in_output            BOOL      1      optional,scalar  0.14
stop                               BOOL      1      optional,scalar  0.12
streaming                          BOOL      1      optional,scalar  0.12
prompt_embedding_table             FP16      -1,-1  optional,ragged  0.6   0.19
prompt_embedding_table             $prompt   -1,-1  optional,ragged  0.20
prompt_table_extra_ids             UINT64    -1     optional,ragged  0.13
prompt_vocab_size                  INT32     1      optional,scalar  0.7
cross_attention_mask               BOOL      -1,-1  optional,ragged  0.15
mrope_rotary_cos_sin               FP32      -1     optional         0.19
mrope_position_deltas              INT64     1      optional         0.19
lora_task_id                       UINT64    1      optional,scalar  0.9
lora_weights                       $lora     -1,-1  optional,ragged  0.8
lora_config                        INT32     -1,3   optional,ragged  0.8
context_phase_params               UINT8     -1     optional,ragged  0.14
skip_cross_attn_blocks             BOOL      1      optional,ragged  0.16
retention_token_range_starts       INT32     -1     optional,ragged  0.17
retention_token_range_ends         INT32     -1     optional,ragged  0.17
retention_token_range_priorities   INT32     -1     optional,ragged  0.17
retention_token_range_durations_ms INT32     -1     optional,ragged  0.17
retention_decode_priority          INT32     1      optional,ragged  0.17
retention_decode_duration_ms       INT32     1      optional,ragged  0.17
guided_decoding_guide_type         STRING    1      optional,ragged  0.19
guided_decoding_guide              STRING    1      optional,ragged  0.19
lookahead_window_size              INT32     1      optional,ragged  0.19
lookahead_ngram_size               INT32     1      optional,ragged  0.19
lookahead_verification_set_size    INT32     1      optional,ragged  0.19
"""

UNION_INPUTS = """
return_finish_reason               BOOL      1      optional,scalar  1.2
"""

OUTPUTS = """
output_ids                   INT32    -1,-1     -  0.5
sequence_length              INT32    -1        -  0.6
cum_log_probs                FP32     -1        -  0.6
output_log_probs             FP32     -1,-1     -  0.6
context_logits               FP32     -1,-1     -  0.8   0.16
context_logits               $logits  -1,-1     -  0.17
generation_logits            FP32     -1,-1,-1  -  0.8   0.16
generation_logits            $logits  -1,-1,-1  -  0.17
batch_index                  INT32    1         -  0.12
sequence_index               INT32    1         -  0.14
context_phase_params         UINT8    -1        -  0.14
kv_cache_alloc_new_blocks    INT32    1         -  0.16
kv_cache_reused_blocks       INT32    1         -  0.16
kv_cache_alloc_total_blocks  INT32    1         -  0.16
arrival_time_ns              INT64    1         -  0.19
first_scheduled_time_ns      INT64    1         -  0.19
first_token_time_ns          INT64    1         -  0.19
last_token_time_ns           INT64    1         -  0.19
acceptance_rate              FP32     1         -  0.19
total_accepted_draft_tokens  INT32    1         -  0.19
total_draft_tokens           INT32    1         -  0.19
num_input_tokens             INT32    1         -  0.20
num_output_tokens            INT32    1         -  0.20
"""

UNION_OUTPUTS = """
finish_reason                STRING   -1        -  1.2
"""
