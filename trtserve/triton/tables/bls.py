"""Tensors and parameters of `tensorrt_llm_bls`."""

from __future__ import annotations

INPUTS = """
text_input                   STRING   1            -                0.12
decoder_text_input           STRING   1            optional         0.12
image_input                  FP16     3,224,224    optional         0.12  0.12
image_input                  FP16     3,-1,-1      optional         0.13  0.14
image_input                  FP16     -1,3,-1,-1   optional         0.15
image_bytes_input            UINT8    -1,-1,-1,-1  optional         0.16
image_url_input              STRING   1            optional         0.16
video_bytes_input            UINT8    -1,-1,-1,-1  optional         0.16
max_tokens                   INT32    1            -                0.12
bad_words                    STRING   -1           optional         0.7
stop_words                   STRING   -1           optional         0.7
exclude_input_in_output      BOOL     1            optional         0.16
end_id                       INT32    1            optional         0.7
pad_id                       INT32    1            optional         0.7
top_k                        INT32    1            optional         0.7
top_p                        FP32     1            optional         0.7
temperature                  FP32     1            optional         0.7
length_penalty               FP32     1            optional         0.7
repetition_penalty           FP32     1            optional         0.7
min_length                   INT32    1            optional         0.7   0.19
min_tokens                   INT32    1            optional         0.20
presence_penalty             FP32     1            optional         0.7
frequency_penalty            FP32     1            optional         0.8
random_seed                  UINT64   1            optional         0.7   0.19
seed                         UINT64   1            optional         0.20
return_log_probs             BOOL     1            optional,scalar  0.9
return_context_logits        BOOL     1            optional,scalar  0.8
return_generation_logits     BOOL     1            optional,scalar  0.8
return_kv_cache_reuse_stats  BOOL     1            optional,scalar  0.16  0.18
return_perf_metrics          BOOL     1            optional,scalar  0.19
return_num_input_tokens      BOOL     1            optional,scalar  0.20
return_num_output_tokens     BOOL     1            optional,scalar  0.20
num_return_sequences         INT32    1            optional,scalar  0.14
beam_width                   INT32    1            optional         0.7
stream                       BOOL     1            optional         0.7
prompt_embedding_table       FP16     -1,-1        optional         0.7   0.19
prompt_embedding_table       $prompt  -1,-1        optional         0.20
prompt_vocab_size            INT32    1            optional         0.7
prompt_table_extra_id        UINT64   1            optional         0.13
embedding_bias_words         STRING   -1           optional         0.7
embedding_bias_weights       FP32     -1           optional         0.7
num_draft_tokens             INT32    1            optional         0.9
use_draft_logits             BOOL     1            optional,scalar  0.9
lora_task_id                 UINT64   1            optional,scalar  0.15
lora_weights                 $lora    -1,-1        optional,ragged  0.15
lora_config                  INT32    -1,3         optional,ragged  0.15
guided_decoding_guide_type   STRING   1            optional         0.19
guided_decoding_guide        STRING   1            optional         0.19
"""

UNION_INPUTS = """
return_finish_reason         BOOL     1            optional,scalar  1.2
draft_acceptance_threshold   FP32     1            optional,scalar  1.2
lora_name                    STRING   1            optional         1.2
"""

OUTPUTS = """
text_output                  STRING   -1        -  0.7
cum_log_probs                FP32     -1        -  0.7
output_log_probs             FP32     -1,-1     -  0.7
context_logits               FP32     -1,-1     -  0.8   0.16
context_logits               $logits  -1,-1     -  0.17
generation_logits            FP32     -1,-1,-1  -  0.8   0.16
generation_logits            $logits  -1,-1,-1  -  0.17
batch_index                  INT32    1         -  0.12
sequence_index               INT32    1         -  0.14
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
