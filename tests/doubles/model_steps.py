"""Steps of NVIDIA's ensemble and parameters of its models by release, as its templates have them.

Read from NVIDIA's templates, independently of the product.
"""

from __future__ import annotations

# model, map, tensor of the model, tensor of the ensemble, first release, first release without it.
STEPS = """
preprocessing in QUERY text_input 0.12 -
preprocessing in REQUEST_OUTPUT_LEN max_tokens 0.12 -
preprocessing in BAD_WORDS_DICT bad_words 0.12 -
preprocessing in STOP_WORDS_DICT stop_words 0.12 -
preprocessing in EMBEDDING_BIAS_WORDS embedding_bias_words 0.12 -
preprocessing in EMBEDDING_BIAS_WEIGHTS embedding_bias_weights 0.12 -
preprocessing in END_ID end_id 0.12 -
preprocessing in PAD_ID pad_id 0.12 -
preprocessing in DECODER_QUERY decoder_text_input 0.12 -
preprocessing in IMAGE image_input 0.12 0.13
preprocessing in PROMPT_EMBEDDING_TABLE prompt_embedding_table 0.12 0.13
preprocessing in PROMPT_TABLE_EXTRA_ID prompt_table_extra_id 0.13 -
preprocessing out REQUEST_INPUT_LEN _REQUEST_INPUT_LEN 0.12 -
preprocessing out INPUT_ID _INPUT_ID 0.12 -
preprocessing out REQUEST_OUTPUT_LEN _REQUEST_OUTPUT_LEN 0.12 -
preprocessing out STOP_WORDS_IDS _STOP_WORDS_IDS 0.12 -
preprocessing out BAD_WORDS_IDS _BAD_WORDS_IDS 0.12 -
preprocessing out EMBEDDING_BIAS _EMBEDDING_BIAS 0.12 -
preprocessing out OUT_END_ID _PREPROCESSOR_END_ID 0.12 -
preprocessing out OUT_PAD_ID _PREPROCESSOR_PAD_ID 0.12 -
preprocessing out REQUEST_DECODER_INPUT_LEN _REQUEST_DECODER_INPUT_LEN 0.12 -
preprocessing out DECODER_INPUT_ID _DECODER_INPUT_ID 0.12 -
preprocessing out OUT_PROMPT_EMBEDDING_TABLE out_prompt_embedding_table 0.12 0.13
preprocessing out OUT_PROMPT_TABLE_EXTRA_IDS _OUT_PROMPT_TABLE_EXTRA_IDS 0.13 -
tensorrt_llm in input_ids _INPUT_ID 0.12 -
tensorrt_llm in input_lengths _REQUEST_INPUT_LEN 0.12 -
tensorrt_llm in request_output_len _REQUEST_OUTPUT_LEN 0.12 -
tensorrt_llm in runtime_top_k top_k 0.12 -
tensorrt_llm in runtime_top_p top_p 0.12 -
tensorrt_llm in temperature temperature 0.12 -
tensorrt_llm in len_penalty length_penalty 0.12 -
tensorrt_llm in repetition_penalty repetition_penalty 0.12 -
tensorrt_llm in min_length min_length 0.12 0.20
tensorrt_llm in min_tokens min_tokens 0.20 -
tensorrt_llm in presence_penalty presence_penalty 0.12 -
tensorrt_llm in random_seed random_seed 0.12 0.20
tensorrt_llm in seed seed 0.20 -
tensorrt_llm in beam_width beam_width 0.12 -
tensorrt_llm in streaming stream 0.12 -
tensorrt_llm in embedding_bias _EMBEDDING_BIAS 0.12 -
tensorrt_llm in return_log_probs return_log_probs 0.12 -
tensorrt_llm in prompt_embedding_table prompt_embedding_table 0.13 -
tensorrt_llm in prompt_vocab_size prompt_vocab_size 0.12 -
tensorrt_llm in stop_words_list _STOP_WORDS_IDS 0.12 -
tensorrt_llm in bad_words_list _BAD_WORDS_IDS 0.12 -
tensorrt_llm in end_id _PREPROCESSOR_END_ID 0.12 -
tensorrt_llm in pad_id _PREPROCESSOR_PAD_ID 0.12 -
tensorrt_llm in frequency_penalty frequency_penalty 0.12 -
tensorrt_llm in return_context_logits return_context_logits 0.12 -
tensorrt_llm in return_generation_logits return_generation_logits 0.12 -
tensorrt_llm in decoder_input_ids _DECODER_INPUT_ID 0.12 -
tensorrt_llm in decoder_input_lengths _REQUEST_DECODER_INPUT_LEN 0.12 -
tensorrt_llm in prompt_embedding_table out_prompt_embedding_table 0.12 0.13
tensorrt_llm in prompt_table_extra_ids _OUT_PROMPT_TABLE_EXTRA_IDS 0.13 -
tensorrt_llm in num_return_sequences num_return_sequences 0.14 -
tensorrt_llm in lora_task_id lora_task_id 0.15 -
tensorrt_llm in lora_weights lora_weights 0.15 -
tensorrt_llm in lora_config lora_config 0.15 -
tensorrt_llm in exclude_input_in_output exclude_input_in_output 0.16 -
tensorrt_llm in return_kv_cache_reuse_stats return_kv_cache_reuse_stats 0.16 0.19
tensorrt_llm in return_perf_metrics return_perf_metrics 0.19 -
tensorrt_llm in guided_decoding_guide_type guided_decoding_guide_type 0.19 -
tensorrt_llm in guided_decoding_guide guided_decoding_guide 0.19 -
tensorrt_llm in return_num_input_tokens return_num_input_tokens 1.0 -
tensorrt_llm in return_num_output_tokens return_num_output_tokens 1.0 -
tensorrt_llm out output_ids _TOKENS_BATCH 0.12 -
tensorrt_llm out sequence_length _SEQUENCE_LENGTH 0.12 -
tensorrt_llm out cum_log_probs _CUM_LOG_PROBS 0.12 0.14
tensorrt_llm out output_log_probs _OUTPUT_LOG_PROBS 0.12 0.14
tensorrt_llm out context_logits _CONTEXT_LOGITS 0.12 0.14
tensorrt_llm out generation_logits _GENERATION_LOGITS 0.12 0.14
tensorrt_llm out batch_index _BATCH_INDEX 0.12 0.14
tensorrt_llm out cum_log_probs cum_log_probs 0.14 -
tensorrt_llm out output_log_probs output_log_probs 0.14 -
tensorrt_llm out context_logits context_logits 0.14 -
tensorrt_llm out generation_logits generation_logits 0.14 -
tensorrt_llm out batch_index batch_index 0.14 -
tensorrt_llm out sequence_index sequence_index 0.14 -
tensorrt_llm out kv_cache_alloc_new_blocks kv_cache_alloc_new_blocks 0.16 -
tensorrt_llm out kv_cache_reused_blocks kv_cache_reused_blocks 0.16 -
tensorrt_llm out kv_cache_alloc_total_blocks kv_cache_alloc_total_blocks 0.16 -
tensorrt_llm out arrival_time_ns arrival_time_ns 0.19 -
tensorrt_llm out first_scheduled_time_ns first_scheduled_time_ns 0.19 -
tensorrt_llm out first_token_time_ns first_token_time_ns 0.19 -
tensorrt_llm out last_token_time_ns last_token_time_ns 0.19 -
tensorrt_llm out acceptance_rate acceptance_rate 0.19 -
tensorrt_llm out total_accepted_draft_tokens total_accepted_draft_tokens 0.19 -
tensorrt_llm out total_draft_tokens total_draft_tokens 0.19 -
tensorrt_llm out num_input_tokens num_input_tokens 1.0 -
tensorrt_llm out num_output_tokens num_output_tokens 1.0 -
postprocessing in TOKENS_BATCH _TOKENS_BATCH 0.12 -
postprocessing in CUM_LOG_PROBS _CUM_LOG_PROBS 0.12 0.14
postprocessing in OUTPUT_LOG_PROBS _OUTPUT_LOG_PROBS 0.12 0.14
postprocessing in SEQUENCE_LENGTH _SEQUENCE_LENGTH 0.12 -
postprocessing in CONTEXT_LOGITS _CONTEXT_LOGITS 0.12 0.14
postprocessing in GENERATION_LOGITS _GENERATION_LOGITS 0.12 0.14
postprocessing in BATCH_INDEX _BATCH_INDEX 0.12 0.14
postprocessing out OUTPUT text_output 0.12 -
postprocessing out OUT_OUTPUT_LOG_PROBS output_log_probs 0.12 0.14
postprocessing out OUT_CUM_LOG_PROBS cum_log_probs 0.12 0.14
postprocessing out OUT_CONTEXT_LOGITS context_logits 0.12 0.14
postprocessing out OUT_GENERATION_LOGITS generation_logits 0.12 0.14
postprocessing out OUT_BATCH_INDEX batch_index 0.12 0.14
"""
# model, key, text of the template, first release, first release without it.
PARAMETERS = """
preprocessing tokenizer_dir ${tokenizer_dir} 0.12 -
preprocessing add_special_tokens ${add_special_tokens} 0.12 -
preprocessing multimodal_model_path ${multimodal_model_path} 0.19 -
preprocessing gpt_model_path ${engine_dir} 0.12 -
preprocessing max_num_images ${max_num_images} 0.15 -
preprocessing visual_model_path ${visual_model_path} 0.12 0.19
tensorrt_llm max_beam_width ${max_beam_width} 0.12 -
tensorrt_llm FORCE_CPU_ONLY_INPUT_TENSORS no 0.12 -
tensorrt_llm gpt_model_type ${batching_strategy} 0.12 -
tensorrt_llm gpt_model_path ${engine_dir} 0.12 -
tensorrt_llm encoder_model_path ${encoder_engine_dir} 0.12 -
tensorrt_llm max_tokens_in_paged_kv_cache ${max_tokens_in_paged_kv_cache} 0.12 -
tensorrt_llm max_attention_window_size ${max_attention_window_size} 0.12 -
tensorrt_llm sink_token_length ${sink_token_length} 0.12 -
tensorrt_llm batch_scheduler_policy ${batch_scheduler_policy} 0.12 -
tensorrt_llm kv_cache_free_gpu_mem_fraction ${kv_cache_free_gpu_mem_fraction} 0.12 -
tensorrt_llm cross_kv_cache_fraction ${cross_kv_cache_fraction} 0.14 -
tensorrt_llm kv_cache_host_memory_bytes ${kv_cache_host_memory_bytes} 0.12 -
tensorrt_llm kv_cache_onboard_blocks ${kv_cache_onboard_blocks} 0.12 -
tensorrt_llm exclude_input_in_output ${exclude_input_in_output} 0.12 -
tensorrt_llm cancellation_check_period_ms ${cancellation_check_period_ms} 0.12 -
tensorrt_llm stats_check_period_ms ${stats_check_period_ms} 0.12 -
tensorrt_llm iter_stats_max_iterations ${iter_stats_max_iterations} 0.12 -
tensorrt_llm request_stats_max_iterations ${request_stats_max_iterations} 0.12 -
tensorrt_llm enable_kv_cache_reuse ${enable_kv_cache_reuse} 0.12 -
tensorrt_llm normalize_log_probs ${normalize_log_probs} 0.12 -
tensorrt_llm enable_chunked_context ${enable_chunked_context} 0.12 -
tensorrt_llm gpu_device_ids ${gpu_device_ids} 0.12 -
tensorrt_llm participant_ids ${participant_ids} 0.13 -
tensorrt_llm num_nodes ${num_nodes} 0.19 -
tensorrt_llm lora_cache_optimal_adapter_size ${lora_cache_optimal_adapter_size} 0.12 -
tensorrt_llm lora_cache_max_adapter_size ${lora_cache_max_adapter_size} 0.12 -
tensorrt_llm lora_cache_gpu_memory_fraction ${lora_cache_gpu_memory_fraction} 0.12 -
tensorrt_llm lora_cache_host_memory_bytes ${lora_cache_host_memory_bytes} 0.12 -
tensorrt_llm lora_prefetch_dir ${lora_prefetch_dir} 0.19 -
tensorrt_llm decoding_mode ${decoding_mode} 0.12 -
tensorrt_llm executor_worker_path /opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker 0.12 -
tensorrt_llm lookahead_window_size ${lookahead_window_size} 0.19 -
tensorrt_llm lookahead_ngram_size ${lookahead_ngram_size} 0.19 -
tensorrt_llm lookahead_verification_set_size ${lookahead_verification_set_size} 0.19 -
tensorrt_llm medusa_choices ${medusa_choices} 0.12 -
tensorrt_llm eagle_choices ${eagle_choices} 0.16 -
tensorrt_llm gpu_weights_percent ${gpu_weights_percent} 0.12 -
tensorrt_llm enable_context_fmha_fp32_acc ${enable_context_fmha_fp32_acc} 0.12 -
tensorrt_llm multi_block_mode ${multi_block_mode} 0.12 -
tensorrt_llm cuda_graph_mode ${cuda_graph_mode} 0.15 -
tensorrt_llm cuda_graph_cache_size ${cuda_graph_cache_size} 0.15 -
tensorrt_llm speculative_decoding_fast_logits ${speculative_decoding_fast_logits} 0.15 -
tensorrt_llm tokenizer_dir ${tokenizer_dir} 0.19 -
tensorrt_llm guided_decoding_backend ${guided_decoding_backend} 0.19 -
tensorrt_llm xgrammar_tokenizer_info_path ${xgrammar_tokenizer_info_path} 0.19 -
preprocessing hf_model_path ${hf_model_path} 0.20 -
tensorrt_llm enable_trt_overlap ${enable_trt_overlap} 0.20 -
postprocessing tokenizer_dir ${tokenizer_dir} 0.12 -
postprocessing skip_special_tokens ${skip_special_tokens} 0.12 -
tensorrt_llm_bls accumulate_tokens ${accumulate_tokens} 0.12 -
tensorrt_llm_bls tensorrt_llm_model_name ${tensorrt_llm_model_name} 0.12 -
tensorrt_llm_bls tensorrt_llm_draft_model_name ${tensorrt_llm_draft_model_name} 0.12 -
tensorrt_llm_bls multimodal_encoders_name ${multimodal_encoders_name} 0.13 -
"""
