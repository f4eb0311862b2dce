"""Keys that other servers added to OpenAI's API: vLLM, SGLang, llama.cpp, TGI, TensorRT-LLM's server, OpenRouter.

Clients send many of them with the value that asks for what happens anyway: such a key is taken. One that has another
name here is honoured, and any other is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

OTHER_NAMES = {
    "ebnf": "guided_grammar",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
}
"""Key → the key that means the same here."""
NOT_SET: dict[str, tuple[Any, ...]] = {
    "ebnf": ("",),
    "grammar": ("",),
    "json_schema": ({}, ""),
    "logit_bias": ([],),
    "max_completion_tokens": (-1,),
    "max_new_tokens": (-1,),
    "max_tokens": (-1,),
    "n_predict": (-1,),
    "regex": ("",),
    "stream_options": ({},),
}
"""Keys that have a meaning → the values that count as null in other servers."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": ({},),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "data_parallel_rank": (-1,),
    "decoder_input_details": (False,),
    "details": (False,),
    "detokenize": (True,),
    "do_sample": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "echo": (False,),
    "extra_body": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "image_data": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "mcp_servers": ([],),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "models": ([],),
    "n_indent": (0,),
    "num_beams": (1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "options": ({},),
    "parse_tool_calls": (True,),
    "plugins": ([],),
    "post_sampling_probs": (False,),
    "priority": (0,),
    "provider": ({},),
    "reasoning_format": ("none", "auto"),
    "reasoning_split": (False,),
    "response_fields": ([],),
    "return_cached_tokens_details": (False,),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_tokens": (False,),
    "route": ("fallback", ""),
    "safe_prompt": (False,),
    "samplers": (["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],),
    "safety_settings": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ("", []),
    "suffix": ("",),
    "t_max_predict_ms": (0, -1),
    "tfs": (1,),
    "tfs_z": (1,),
    "thinking_forced_open": (False,),
    "timings_per_token": (False,),
    "tool_stream": (False,),
    "top_a": (0,),
    "top_logprobs": (0,),
    "top_logprobs_num": (0,),
    "top_n_sigma": (-1, 0),
    "top_p_min": (0,),
    "transforms": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "web_search_options": ({},),
    "xtc_probability": (0,),
}
"""Keys that this server does not have → the values that ask for nothing."""
WITHOUT_EFFECT = frozenset(
    {
        # Settings of what is refused if it is switched on.
        *("mirostat_eta", "mirostat_tau", "dynatemp_exponent", "xtc_threshold", "repeat_last_n", "penalize_nl"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "min_keep", "n_keep"),
        # What concerns OpenAI's own service, Anthropic's, or how Ollama runs a model.
        *("user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "client_metadata"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "max_tool_calls", "generate_summary"),
        *("context_management", "inference_geo", "betas", "diagnostics", "speed", "user_profile_id", "workspace_id"),
        *("input_examples", "defer_loading", "eager_input_streaming", "allowed_callers", "budget_tokens", "display"),
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap"),
        # How another server caches, names or reports a request, and how much it thinks.
        *("cache_control", "cache_prompt", "id_slot", "request_id", "rid", "return_progress", "usage"),
        *("stream_reasoning", "reasoning", "verbosity", "keep_alive", "session_id", "ttl"),
    }
)
"""Keys that say nothing about the answer of this server, whatever their value."""
REFUSED = {
    "suffix": "the model continues a text, it does not fill gaps",
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "audio": "the model generates text only",
    "prediction": "predicted outputs are not available",
    "web_search_options": "the server does not search the web",
    "skip_special_tokens": "special tokens are never part of the text",
    "use_beam_search": "ask with temperature 0, or use `trtserve query --beam-width`",
    "cache_salt": "prompts share one cache",
    "custom_logit_processor": "clients cannot bring programs",
    "do_sample": "ask with temperature 0",
    "extra_body": "it is an argument of OpenAI's Python client; its keys belong into the body itself",
    "input_ids": "give token ids as the prompt of a completion",
    "lora_path": "name the adapter as the model",
    "lora_request": "name the adapter as the model",
    "prompt_embeds": "the model reads text and token ids",
    "thinking_token_budget": "the model cannot be told how long to think",
    "truncate": "prompts are never cut",
}
"""Keys that cannot work here → why."""


def reason_against(key: str) -> str | None:
    """Return why a key of another server is refused, or None for one that nobody knows."""
    if key in NEUTRAL:
        values = " or ".join(json.dumps(value) for value in NEUTRAL[key] if value not in ("", [], {}))
        return REFUSED.get(key, "no model here has it") + (f"; leave it out, or give {values}" if values else "")
    return REFUSED.get(key)


def understood(asked: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the keys that are asked for, by their names here; `fields` are those that the body has.

    Raises ValueError for a key that is there under both names.
    """
    kept: dict[str, Any] = {}
    for name, value in asked.items():
        if value is None or value in NOT_SET.get(name, ()):
            continue
        if name not in fields and (name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ())):
            continue
        key = OTHER_NAMES[name] if name not in fields and OTHER_NAMES.get(name) in fields else name
        if key in kept:
            raise ValueError(f"{name} and {key} mean the same: give one of them")
        # Some languages have no whole numbers: 16.0 is an integer in JSON Schema too.
        kept[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return kept
