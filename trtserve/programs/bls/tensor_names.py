"""The BLS model's tensors and their names in the models that it calls."""

from __future__ import annotations

PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "pad_id": "PAD_ID",
    "end_id": "END_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "image_bytes_input": "IMAGE_BYTES",
    "image_url_input": "IMAGE_URL",
    "video_bytes_input": "VIDEO_BYTES",
}
PREPROCESSING_OUTPUTS = (
    "INPUT_ID",
    "REQUEST_INPUT_LEN",
    "DECODER_INPUT_ID",
    "BAD_WORDS_IDS",
    "STOP_WORDS_IDS",
    "EMBEDDING_BIAS",
    "OUT_END_ID",
    "OUT_PAD_ID",
)
PROMPT_TABLE_OUTPUT = "OUT_PROMPT_TABLE_EXTRA_IDS"

CORE_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
CORE = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    **{
        name: name
        for name in (
            "beam_width",
            "temperature",
            "repetition_penalty",
            "min_length",
            "min_tokens",
            "presence_penalty",
            "frequency_penalty",
            "random_seed",
            "seed",
            "num_return_sequences",
            "return_log_probs",
            "return_context_logits",
            "return_generation_logits",
            "return_perf_metrics",
            "return_kv_cache_reuse_stats",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "return_finish_reason",
            "prompt_embedding_table",
            "prompt_vocab_size",
            "lora_task_id",
            "lora_weights",
            "lora_config",
            "exclude_input_in_output",
            "guided_decoding_guide_type",
            "guided_decoding_guide",
        )
    },
}
