"""Tensors and steps of `ensemble`."""

from __future__ import annotations

INPUTS = """
text_input                   STRING   1          -                0.12
decoder_text_input           STRING   1          optional         0.12
image_input                  FP16     3,224,224  optional         0.12  0.12
max_tokens                   INT32    1          -                0.12
num_return_sequences         INT32    1          optional         0.14
bad_words                    STRING   -1         optional         0.6
stop_words                   STRING   -1         optional         0.6
exclude_input_in_output      BOOL     1          optional         0.16
end_id                       INT32    1          optional         0.7
pad_id                       INT32    1          optional         0.7
top_k                        INT32    1          optional         0.7
top_p                        FP32     1          optional         0.5
temperature                  FP32     1          optional         0.5
length_penalty               FP32     1          optional         0.5
repetition_penalty           FP32     1          optional         0.5
min_length                   INT32    1          optional         0.7   0.19
min_tokens                   INT32    1          optional         0.20
presence_penalty             FP32     1          optional         0.5
frequency_penalty            FP32     1          optional         0.8
random_seed                  UINT64   1          optional         0.5   0.19
seed                         UINT64   1          optional         0.20
return_log_probs             BOOL     1          optional         0.6
return_context_logits        BOOL     1          optional         0.8
return_generation_logits     BOOL     1          optional         0.8
return_kv_cache_reuse_stats  BOOL     1          optional         0.16  0.18
return_perf_metrics          BOOL     1          optional         0.19
return_num_input_tokens      BOOL     1          optional         0.20
return_num_output_tokens     BOOL     1          optional         0.20
beam_width                   INT32    1          optional         0.7
stream                       BOOL     1          optional         0.5
prompt_embedding_table       FP16     -1,-1      optional         0.6   0.19
prompt_embedding_table       $prompt  -1,-1      optional         0.20
prompt_table_extra_id        UINT64   1          optional         0.13
prompt_vocab_size            INT32    1          optional         0.7
embedding_bias_words         STRING   -1         optional         0.6
embedding_bias_weights       FP32     -1         optional         0.6
lora_task_id                 UINT64   1          optional         0.15
lora_weights                 $lora    -1,-1      optional,ragged  0.15
lora_config                  INT32    -1,3       optional,ragged  0.15
guided_decoding_guide_type   STRING   1          optional,ragged  0.19
guided_decoding_guide        STRING   1          optional,ragged  0.19
"""

UNION_INPUTS = """
return_finish_reason         BOOL     1          optional         1.2
lora_name                    STRING   1          optional         1.2
"""

# kv_cache_alloc_total_blocks stands twice in NVIDIA's file; Triton reads it once, and so do we.
OUTPUTS = """
text_output                  STRING   -1        -  0.6
cum_log_probs                FP32     -1        -  0.6
output_log_probs             FP32     -1,-1     -  0.6
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

# Columns: tensor of the step's model, tensor of the ensemble, first release, last release.
PREPROCESSING_INPUT_MAP = """
QUERY                   text_input              0.5
DECODER_QUERY           decoder_text_input      0.11
IMAGE                   image_input             0.12  0.12
REQUEST_OUTPUT_LEN      max_tokens              0.5
BAD_WORDS_DICT          bad_words               0.5
STOP_WORDS_DICT         stop_words              0.5
EMBEDDING_BIAS_WORDS    embedding_bias_words    0.6
EMBEDDING_BIAS_WEIGHTS  embedding_bias_weights  0.6
END_ID                  end_id                  0.8
PAD_ID                  pad_id                  0.8
PROMPT_EMBEDDING_TABLE  prompt_embedding_table  0.12  0.12
PROMPT_TABLE_EXTRA_ID   prompt_table_extra_id   0.13
"""

UNION_PREPROCESSING_INPUT_MAP = """
LORA_NAME     lora_name     1.2
LORA_TASK_ID  lora_task_id  1.2
LORA_WEIGHTS  lora_weights  1.2
LORA_CONFIG   lora_config   1.2
"""

PREPROCESSING_OUTPUT_MAP = """
REQUEST_INPUT_LEN           _REQUEST_INPUT_LEN           0.5
INPUT_ID                    _INPUT_ID                    0.5
REQUEST_DECODER_INPUT_LEN   _REQUEST_DECODER_INPUT_LEN   0.11
DECODER_INPUT_ID            _DECODER_INPUT_ID            0.11
REQUEST_OUTPUT_LEN          _REQUEST_OUTPUT_LEN          0.5
STOP_WORDS_IDS              _STOP_WORDS_IDS              0.6
BAD_WORDS_IDS               _BAD_WORDS_IDS               0.6
EMBEDDING_BIAS              _EMBEDDING_BIAS              0.6
OUT_END_ID                  _PREPROCESSOR_END_ID         0.8
OUT_PAD_ID                  _PREPROCESSOR_PAD_ID         0.8
OUT_PROMPT_EMBEDDING_TABLE  out_prompt_embedding_table   0.12  0.12
OUT_PROMPT_TABLE_EXTRA_IDS  _OUT_PROMPT_TABLE_EXTRA_IDS  0.13
"""

UNION_PREPROCESSING_OUTPUT_MAP = """
OUT_LORA_TASK_ID  _LORA_TASK_ID  1.2
OUT_LORA_WEIGHTS  _LORA_WEIGHTS  1.2
OUT_LORA_CONFIG   _LORA_CONFIG   1.2
"""

CORE_INPUT_MAP = """
input_ids                    _INPUT_ID                    0.5
input_lengths                _REQUEST_INPUT_LEN           0.5
request_output_len           _REQUEST_OUTPUT_LEN          0.5
decoder_input_ids            _DECODER_INPUT_ID            0.11
decoder_input_lengths        _REQUEST_DECODER_INPUT_LEN   0.11
num_return_sequences         num_return_sequences         0.14
exclude_input_in_output      exclude_input_in_output      0.16
end_id                       _PREPROCESSOR_END_ID         0.8
pad_id                       _PREPROCESSOR_PAD_ID         0.8
embedding_bias               _EMBEDDING_BIAS              0.6
runtime_top_k                top_k                        0.5
runtime_top_p                top_p                        0.5
temperature                  temperature                  0.5
len_penalty                  length_penalty               0.5
repetition_penalty           repetition_penalty           0.5
min_length                   min_length                   0.5   0.19
min_tokens                   min_tokens                   0.20
presence_penalty             presence_penalty             0.5
frequency_penalty            frequency_penalty            0.8
random_seed                  random_seed                  0.5   0.19
seed                         seed                         0.20
return_log_probs             return_log_probs             0.6
return_context_logits        return_context_logits        0.8
return_generation_logits     return_generation_logits     0.8
return_kv_cache_reuse_stats  return_kv_cache_reuse_stats  0.16  0.18
return_perf_metrics          return_perf_metrics          0.19
return_num_input_tokens      return_num_input_tokens      0.20
return_num_output_tokens     return_num_output_tokens     0.20
beam_width                   beam_width                   0.5
streaming                    stream                       0.5
prompt_embedding_table       out_prompt_embedding_table   0.12  0.12
prompt_embedding_table       prompt_embedding_table       0.13
prompt_table_extra_ids       _OUT_PROMPT_TABLE_EXTRA_IDS  0.13
prompt_vocab_size            prompt_vocab_size            0.6
stop_words_list              _STOP_WORDS_IDS              0.6
bad_words_list               _BAD_WORDS_IDS               0.6
lora_task_id                 lora_task_id                 0.15
lora_weights                 lora_weights                 0.15
lora_config                  lora_config                  0.15
guided_decoding_guide_type   guided_decoding_guide_type   0.19
guided_decoding_guide        guided_decoding_guide        0.19
"""

# An adapter comes from preprocessing, which knows the names and hands on what the client sent itself.
UNION_CORE_INPUT_MAP = """
return_finish_reason  return_finish_reason  1.2
lora_task_id          _LORA_TASK_ID         1.2
lora_weights          _LORA_WEIGHTS         1.2
lora_config           _LORA_CONFIG          1.2
"""

CORE_OUTPUT_MAP = """
output_ids                   _TOKENS_BATCH                0.5
sequence_length              _SEQUENCE_LENGTH             0.6
cum_log_probs                _CUM_LOG_PROBS               0.6   0.13
cum_log_probs                cum_log_probs                0.14
output_log_probs             _OUTPUT_LOG_PROBS            0.6   0.13
output_log_probs             output_log_probs             0.14
context_logits               _CONTEXT_LOGITS              0.8   0.13
context_logits               context_logits               0.14
generation_logits            _GENERATION_LOGITS           0.8   0.13
generation_logits            generation_logits            0.14
batch_index                  _BATCH_INDEX                 0.12  0.13
batch_index                  batch_index                  0.14
sequence_index               sequence_index               0.14
kv_cache_alloc_new_blocks    kv_cache_alloc_new_blocks    0.16
kv_cache_reused_blocks       kv_cache_reused_blocks       0.16
kv_cache_alloc_total_blocks  kv_cache_alloc_total_blocks  0.16
arrival_time_ns              arrival_time_ns              0.19
first_scheduled_time_ns      first_scheduled_time_ns      0.19
first_token_time_ns          first_token_time_ns          0.19
last_token_time_ns           last_token_time_ns           0.19
acceptance_rate              acceptance_rate              0.19
total_accepted_draft_tokens  total_accepted_draft_tokens  0.19
total_draft_tokens           total_draft_tokens           0.19
num_input_tokens             num_input_tokens             0.20
num_output_tokens            num_output_tokens            0.20
"""

UNION_CORE_OUTPUT_MAP = """
finish_reason  finish_reason  1.2
"""

POSTPROCESSING_INPUT_MAP = """
TOKENS_BATCH       _TOKENS_BATCH       0.5
CUM_LOG_PROBS      _CUM_LOG_PROBS      0.6   0.13
OUTPUT_LOG_PROBS   _OUTPUT_LOG_PROBS   0.6   0.13
SEQUENCE_LENGTH    _SEQUENCE_LENGTH    0.6
CONTEXT_LOGITS     _CONTEXT_LOGITS     0.8   0.13
GENERATION_LOGITS  _GENERATION_LOGITS  0.8   0.13
BATCH_INDEX        _BATCH_INDEX        0.12  0.13
"""

POSTPROCESSING_OUTPUT_MAP = """
OUTPUT                 text_output        0.5
OUT_OUTPUT_LOG_PROBS   output_log_probs   0.6   0.13
OUT_CUM_LOG_PROBS      cum_log_probs      0.6   0.13
OUT_CONTEXT_LOGITS     context_logits     0.8   0.13
OUT_GENERATION_LOGITS  generation_logits  0.8   0.13
OUT_BATCH_INDEX        batch_index        0.12  0.13
"""
