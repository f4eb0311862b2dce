"""Random and mutated bodies of requests to every API: most of them wrong in some place, many of them almost right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

NUMBERS = (0, -1, 1, 7, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308, -0.0, 1e-320)
TEXTS = (
    "",
    " ",
    "a" * 20_000,
    "\0",
    "\x1b]52;c;YQ==\x07",
    "\ud83d\ude00",
    "\ud800",
    "a\udfff",
    "é–字\N{ZERO WIDTH JOINER}",
    "%s%n{{ 1 }}{% for x in y %}",
    "../../etc/passwd",
    "@/etc/passwd",
    "true",
    "null",
    "<tool_call>{",
    "[" * 500,
)
_RAW = (b"[" * 5000, b"\0", b'"', b"{}", b"\xff\xfe", b"\xc3", b"\r\n\r\n", b"1e999", b"NaN", b"\\ud800", b"9" * 5000)
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": ["integer", "null"]}, "c": {"items": {"$ref": "#"}}},
    "required": ["a"],
}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}}
_CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
_MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hi", "name": "me"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALLED]},
    {"role": "assistant", "content": "Yes.", "refusal": None},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
)
# Key → values that are right; a body has some of the keys.
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "n": (1, 2),
    "max_tokens": (1, 2),
    "temperature": (0, 0.7, 2),
    "top_p": (0.5, 1),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (0, 1.5),
    "seed": (0, -1, 2**63),
    "stop": ("x", ["a", "b"], []),
    "logit_bias": ({"5": 1, "6": -100}, {}),
    "top_k": (-1, 0, 5),
    "min_tokens": (0, 1),
    "repetition_penalty": (1.0, 1.3),
    "stop_token_ids": ([1, 2], []),
    "ignore_eos": (True,),
    "guided_json": (_SCHEMA, json.dumps(_SCHEMA)),
    "guided_regex": ("[a-z]+", "a|b"),
    "guided_choice": (["a", "b.c"],),
    "guided_grammar": ("root ::= 'a'",),
    "guided_whitespace_pattern": ("[ ]?",),
    "structured_outputs": ({"choice": ["a"]}, {"json": _SCHEMA}),
    "user": ("me",),
    "metadata": ({"a": "b"},),
    "store": (False,),
    "min_p": (0, 0.1),
    "return_token_ids": (True,),
    "suffix": ("", "x"),
    "priority": (0,),
}
_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_SAMPLING,
    "prompt": ("Hi", ["a", "b"], [5, 6], [[5], [6, 7]]),
    "best_of": (1, 3),
    "echo": (True,),
    "logprobs": (0, 3),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    **_SAMPLING,
    "max_completion_tokens": (1, 2),
    "logprobs": (True,),
    "top_logprobs": (0, 3),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    ),
    "tools": ([_TOOL], [_TOOL, _TOOL], []),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": ({"enable_thinking": False}, {"messages": [], "tools": 1}),
    "reasoning_effort": ("low", "none"),
    "include_reasoning": (False,),
    "separate_reasoning": (False,),
    "continue_final_message": (True, False),
    "add_generation_prompt": (True, False),
}
_OLLAMA_TURNS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes.", "thinking": "Hm."},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}]},
    {"role": "tool", "content": "1", "tool_name": "f"},
    {"role": "user", "content": "Look", "images": ["AA=="]},
)
_OLLAMA: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "format": ("", "json", _SCHEMA),
    "options": ({"num_predict": 2, "temperature": 0}, {"num_predict": 1, "stop": ["a"], "num_ctx": 9, "top_k": 5}),
    "think": (True, False, "low"),
    "tools": ([_TOOL], []),
    "keep_alive": ("5m", -1),
}
_OLLAMA_TEXT: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in _OLLAMA.items() if name != "tools"},
    "system": ("Be brief.",),
    "raw": (True, False),
    "images": ([], ["AA=="]),
}
_FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_ITEMS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Hi"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "x"}'},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
)
_RESPONSES: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "instructions": ("Be brief.", ""),
    "temperature": (0, 0.7),
    "top_p": (0.5, 1),
    "max_output_tokens": (1, 2),
    "store": (True, False),
    "previous_response_id": ("", "resp_unknown"),
    "tools": ([_FUNCTION], []),
    "tool_choice": ("auto", "none", {"type": "function", "name": "f"}),
    "text": (
        {"format": {"type": "text"}},
        {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
    ),
    "reasoning": ({"effort": "low"}, {"effort": "none", "summary": "auto"}),
    "metadata": ({"a": "b"},),
    "include": (["reasoning.encrypted_content"],),
    "truncation": ("disabled",),
    "background": (False,),
}
_TURNS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "x"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": False}]},
    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "1"}]}]},
    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]},
    {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "Hi"}}]},
)
_MESSAGES_API: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "system": ("Be brief.", [{"type": "text", "text": "Be brief."}]),
    "temperature": (0, 1),
    "top_p": (0.5,),
    "top_k": (5,),
    "stop_sequences": (["x"], []),
    "tools": ([{"name": "f", "description": "d", "input_schema": _SCHEMA}], []),
    "tool_choice": ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}),
    "output_config": ({"effort": "low"}, {"format": {"type": "json_schema", "schema": _SCHEMA}}),
    "metadata": ({"user_id": "u"},),
    "context_management": ({"edits": []},),
}
_TOKENS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True, False),
    "return_token_strs": (True,),
    "add_generation_prompt": (True, False),
}
_VECTORS: dict[str, tuple[Any, ...]] = {
    "encoding_format": ("float", "base64"),
    "dimensions": (1, 8),
    "top_n": (1, 2),
    "return_documents": (True, False),
    "user": ("me",),
}
_GENERATE: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "id": ("1", 7),
    "bad_words": ("", ["a", "b"]),
    "stop_words": ("", "x", ["a", "b"]),
    "end_id": (-1, 2),
    "pad_id": (0,),
    "temperature": (0.7, 1),
    "top_k": (1, 5),
    "top_p": (0.5,),
    "random_seed": (3,),
    "beam_width": (1, 2),
    "repetition_penalty": (1.2,),
    "presence_penalty": (0.5,),
    "min_length": (1,),
    "return_log_probs": (True,),
    "return_context_logits": (False,),
    "num_return_sequences": (1, 2),
    "embedding_bias_words": (["a"],),
    "embedding_bias_weights": ([0.5],),
    "guided_decoding_guide_type": ("json_schema", "regex"),
    "guided_decoding_guide": ("[a-z]", '{"type": "object"}'),
}


def completion_body(model: str, chance: random.Random) -> bytes:
    """A body for `/v1/completions`."""
    return _body({"model": model, "prompt": "Hi", "max_tokens": 2}, _COMPLETION, chance)


def chat_body(model: str, chance: random.Random) -> bytes:
    """A body for `/v1/chat/completions`."""
    messages = [chance.choice(_MESSAGES) for _ in range(chance.randrange(1, 5))]
    return _body({"model": model, "messages": messages, "max_tokens": 2}, _CHAT, chance)


def responses_body(model: str, chance: random.Random) -> bytes:
    """A body for `/v1/responses`."""
    items = [chance.choice(_ITEMS) for _ in range(chance.randrange(1, 5))]
    needed = {"model": model, "input": chance.choice(("Hi", items)), "max_output_tokens": 2}
    return _body(needed, _RESPONSES, chance)


def messages_body(model: str, chance: random.Random) -> bytes:
    """A body for `/v1/messages`."""
    messages = [chance.choice(_TURNS) for _ in range(chance.randrange(1, 5))]
    return _body({"model": model, "messages": messages, "max_tokens": 2}, _MESSAGES_API, chance)


def ollama_chat_body(model: str, chance: random.Random) -> bytes:
    """A body for `/api/chat`."""
    messages = [chance.choice(_OLLAMA_TURNS) for _ in range(chance.randrange(1, 5))]
    return _body({"model": f"{model}:latest", "messages": messages, "options": {"num_predict": 2}}, _OLLAMA, chance)


def ollama_generate_body(model: str, chance: random.Random) -> bytes:
    """A body for `/api/generate`."""
    return _body({"model": model, "prompt": "Hi", "options": {"num_predict": 2}}, _OLLAMA_TEXT, chance)


def ollama_embed_body(model: str, chance: random.Random) -> bytes:
    """A body for `/api/embed`."""
    return _body({"model": model, "input": chance.choice(("Hi", ["a", "b"]))}, _VECTORS, chance)


def tokenize_body(model: str, chance: random.Random) -> bytes:
    """A body for `/tokenize`."""
    messages = [chance.choice(_MESSAGES) for _ in range(chance.randrange(1, 5))]
    given = chance.choice(({"prompt": "Hi"}, {"messages": messages}))
    return _body({"model": model, **given}, _TOKENS, chance)


def detokenize_body(model: str, chance: random.Random) -> bytes:
    """A body for `/detokenize`."""
    return _body({"model": model, "tokens": [5, 6]}, {}, chance)


def embeddings_body(model: str, chance: random.Random) -> bytes:
    """A body for `/v1/embeddings`."""
    given = chance.choice(("Hi", ["a", "b"], [5, 6], [[5], [6, 7]]))
    return _body({"model": model, "input": given}, _VECTORS, chance)


def rerank_body(model: str, chance: random.Random) -> bytes:
    """A body for `/v1/rerank`."""
    return _body({"model": model, "query": "a", "documents": ["b", "c"]}, _VECTORS, chance)


def generate_body(chance: random.Random) -> bytes:
    """A body for `generate` and `generate_stream` of a text model."""
    return _body({"text_input": "Hi", "max_tokens": 2}, _GENERATE, chance)


BODIES: dict[str, Callable[[str, random.Random], bytes]] = {
    "/v1/completions": completion_body,
    "/v1/chat/completions": chat_body,
    "/v1/responses": responses_body,
    "/v1/messages": messages_body,
    "/v1/messages/count_tokens": messages_body,
    "/v1/embeddings": embeddings_body,
    "/v1/rerank": rerank_body,
    "/api/chat": ollama_chat_body,
    "/api/generate": ollama_generate_body,
    "/api/embed": ollama_embed_body,
    "/tokenize": tokenize_body,
    "/detokenize": detokenize_body,
}
"""Path → a body for it, of a model with this name."""


def _body(needed: Mapping[str, Any], keys: Mapping[str, tuple[Any, ...]], chance: random.Random) -> bytes:
    asked = {
        name: chance.choice(keys[name]) for name in chance.sample(sorted(keys), min(len(keys), chance.randrange(6)))
    }
    body = changed({**needed, **asked}, chance, share=chance.choice((0, 0.02, 0.1)))
    # Lone surrogates as escapes, or as the bytes that UTF-8 does not allow.
    content = json.dumps(body, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
    return damaged(content, chance) if chance.random() < 0.2 else content


def changed(value: Any, chance: random.Random, share: float = 0.08) -> Any:
    """Return JSON with some of its values replaced by others; `share`: of how many."""
    if chance.random() < share:
        wrong: tuple[Any, ...] = (
            None,
            True,
            [],
            {},
            [[value]],
            {"a": value},
            chance.choice(NUMBERS),
            chance.choice(TEXTS),
            value,
        )
        return chance.choice(wrong)
    if isinstance(value, dict):
        new = {name: changed(each, chance, share) for name, each in value.items() if chance.random() > share / 2}
        return new | ({chance.choice(TEXTS): 1} if chance.random() < share / 2 else {})
    if isinstance(value, list):
        times = chance.choice((0, 2, 300)) if chance.random() < share / 2 else 1
        return [changed(each, chance, share) for each in value] * times
    return value


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return bytes with some of them changed, left out or added."""
    new = bytearray(content)
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(new) + 1)
        kind = chance.randrange(3)
        if kind == 0 and place < len(new):
            new[place] = chance.randrange(256)
        elif kind == 1:
            del new[place : place + chance.randrange(1, 50)]
        else:
            new[place:place] = chance.choice(_RAW)
    return bytes(new)
