"""Tensors of the model of TensorRT-LLM's LLM API, which has no batch axis."""

from __future__ import annotations

INPUTS = """
text_input                                STRING  -1  -         0.19
streaming                                 BOOL    1   optional  0.19
sampling_param_beam_width                 INT32   1   optional  0.19  0.19
sampling_param_best_of                    INT32   1   optional  0.20
sampling_param_temperature                FP32    1   optional  0.19
sampling_param_top_p                      FP32    1   optional  0.19
sampling_param_frequency_penalty          FP32    1   optional  0.19
sampling_param_presence_penalty           FP32    1   optional  0.19
sampling_param_top_k                      INT32   1   optional  0.19
sampling_param_max_tokens                 INT32   1   optional  0.19
sampling_param_stop                       STRING  -1  optional  0.19
sampling_param_seed                       UINT64  1   optional  0.19
sampling_param_exclude_input_from_output  BOOL    1   optional  0.19
sampling_param_return_perf_metrics        BOOL    1   optional  1.0
return_finish_reason                      BOOL    1   optional  0.19
return_stop_reason                        BOOL    1   optional  0.19
return_cumulative_logprob                 BOOL    1   optional  0.19
stop                                      BOOL    1   optional  1.0
lora_id                                   UINT64  1   optional  1.0
lora_name                                 STRING  1   optional  1.0
lora_path                                 STRING  1   optional  1.0
lora_ckpt_source                          STRING  1   optional  1.0
"""

OWN_INPUTS = """
sampling_param_repetition_penalty          FP32    1   optional  0.19
sampling_param_length_penalty              FP32    1   optional  0.19
sampling_param_min_tokens                  INT32   1   optional  0.19
sampling_param_end_id                      INT32   1   optional  0.19
sampling_param_pad_id                      INT32   1   optional  0.19
sampling_param_bad                         STRING  -1  optional  0.19
sampling_param_include_stop_str_in_output  BOOL    1   optional  0.19
return_num_input_tokens                    BOOL    1   optional  0.20
return_num_output_tokens                   BOOL    1   optional  0.20
stop                                       BOOL    1   optional  0.19  0.21
"""
"""What the BLS model needs beside NVIDIA's inputs: parameters of SamplingParams by their names, and counts."""

OUTPUTS = """
text_output                  STRING  -1  -  0.19
finish_reason                STRING  -1  -  0.19
stop_reason                  STRING  -1  -  0.19
cumulative_logprob           FP32    -1  -  0.19
kv_cache_reused_block        INT32   -1  -  1.0
kv_cache_missed_block        INT32   -1  -  1.0
kv_cache_alloc_new_blocks    INT32   -1  -  1.0
kv_cache_alloc_total_blocks  INT32   -1  -  1.0
kv_cache_hit_rate            FP32    -1  -  1.0
arrival_time_ns              INT64   1   -  1.0
first_scheduled_time_ns      INT64   1   -  1.0
first_token_time_ns          INT64   1   -  1.0
last_token_time_ns           INT64   1   -  1.0
acceptance_rate              FP32    1   -  1.0
total_accepted_draft_tokens  INT32   1   -  1.0
total_draft_tokens           INT32   1   -  1.0
"""

OWN_OUTPUTS = """
num_input_tokens   INT32  1  -  0.20
num_output_tokens  INT32  1  -  0.20
"""
"""Counts, the second one of all tokens so far."""
