"""Tensors of the BLS model and their names in the model of the LLM API."""

from __future__ import annotations

SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "length_penalty": "length_penalty",
    "min_tokens": "min_tokens",
    "min_length": "min_tokens",
    "seed": "seed",
    "random_seed": "seed",
    "end_id": "end_id",
    "pad_id": "pad_id",
    "return_perf_metrics": "return_perf_metrics",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
}
"""Input → parameter of SamplingParams; two names of one parameter must agree."""

WORDS = {"stop_words": "stop", "bad_words": "bad"}

COUNTS = {"return_num_input_tokens": "num_input_tokens", "return_num_output_tokens": "num_output_tokens"}
"""Input → output of the same names in both models."""

OTHERS = ("text_input", "stream", "exclude_input_in_output", "return_finish_reason", *COUNTS)
"""Inputs that `request.py` handles itself."""

NEUTRAL = {"beam_width": 1, "num_return_sequences": 1}
"""Input → its neutral value; for all others it is 0, False or ""."""

OUTPUTS = {
    "kv_cache_alloc_new_blocks": "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks": "kv_cache_reused_block",
    "kv_cache_alloc_total_blocks": "kv_cache_alloc_total_blocks",
    **{
        name: name
        for name in (
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
            "acceptance_rate",
            "total_accepted_draft_tokens",
            "total_draft_tokens",
        )
    },
}
"""Output → output of the model of the LLM API, given when return_perf_metrics asks for it."""
