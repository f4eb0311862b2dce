"""A strict stand-in for TensorRT-LLM's LLM API: keywords and types as documented, a language of counted words.

An answer to any prompt is " w0 w1 w2 …", one word for each token, until `max_tokens` or a stop word.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__version__ = os.environ.get("TRTSERVE_STAND_IN_RELEASE", "1.2.0")

_SECONDS_PER_TOKEN = 0.005
_LLM_KEYWORDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "backend": str,
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "moe_expert_parallel_size": int,
    "moe_tensor_parallel_size": int,
    "gpus_per_node": int,
    "max_batch_size": int,
    "max_seq_len": int,
    "max_num_tokens": int,
    "enable_chunked_prefill": bool,
    "kv_cache_config": dict,
    "trust_remote_code": bool,
}
_KV_KEYWORDS: dict[str, type | tuple[type, ...]] = {
    "enable_block_reuse": bool,
    "max_tokens": int,
    "free_gpu_memory_fraction": float,
    "host_cache_size": int,
}
_SAMPLING: dict[str, type | tuple[type, ...]] = {
    "end_id": int,
    "pad_id": int,
    "max_tokens": int,
    "bad": list,
    "stop": list,
    "include_stop_str_in_output": bool,
    "best_of": int,
    "top_k": int,
    "top_p": float,
    "seed": int,
    "temperature": float,
    "min_tokens": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "length_penalty": float,
    "exclude_input_from_output": bool,
    "return_perf_metrics": bool,
}


def _check(owner: str, given: dict[str, Any], known: dict[str, type | tuple[type, ...]]) -> None:
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
        kinds = known[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise TypeError(f"{owner}: {name} is {value!r}; expected {kinds}")


class SamplingParams:
    """Keywords only, of exact Python types."""

    def __init__(self, **keywords: Any) -> None:
        _check("SamplingParams", keywords, _SAMPLING)
        if not 0 <= keywords.get("top_p", 1.0) <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={keywords['top_p']}")
        self.max_tokens: int = keywords.get("max_tokens", 32)
        self.stop: list[str] = keywords.get("stop", [])
        self.bad: list[str] = keywords.get("bad", [])
        self.keeps_stop: bool = keywords.get("include_stop_str_in_output", False)
        self.excludes_input: bool = keywords.get("exclude_input_from_output", True)


@dataclass
class CompletionOutput:
    """One sequence."""

    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None
    cumulative_logprob: float | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class RequestOutput:
    """What a request has come to; iterated in an event loop, `abort` ends it."""

    prompt: str
    parameters: SamplingParams
    streaming: bool
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False

    @property
    def prompt_token_ids(self) -> list[int]:
        """A token for each word."""
        return list(range(len(self.prompt.split())))

    def abort(self) -> None:
        """End it at the next token."""
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        text, number = "", 0
        while not self.finished:
            await asyncio.sleep(_SECONDS_PER_TOKEN)
            word = f" w{number}"
            text += "" if word.strip() in self.parameters.bad else word
            number += 1
            self._update(text, number)
            if self.streaming or self.finished:
                yield self

    def _update(self, text: str, number: int) -> None:
        reason = stopped = None
        for stop in self.parameters.stop:
            if (place := text.find(stop)) >= 0:
                reason, stopped = "stop", stop
                text = text[: place + (len(stop) if self.parameters.keeps_stop else 0)]
        if self.aborted:
            reason = "cancelled"
        elif reason is None and number >= self.parameters.max_tokens:
            reason = "length"
        front = "" if self.streaming or self.parameters.excludes_input else self.prompt
        self.outputs = [CompletionOutput(front + text, reason, stopped, -0.5 * number, list(range(number)))]
        self.finished = reason is not None


class LLM:
    """Loads a folder with a config.json, or takes a name of the hub. The prompt "End." ends it."""

    ended = False

    def __init__(self, **keywords: Any) -> None:
        _check("LLM", keywords, _LLM_KEYWORDS)
        _check("KvCacheConfig", keywords.get("kv_cache_config", {}), _KV_KEYWORDS)
        model = keywords["model"]
        if model.count("/") != 1 and not (Path(model) / "config.json").is_file():
            raise ValueError(f"Failed to load the model: {model}")

    def generate_async(
        self, inputs: str, sampling_params: SamplingParams, *, streaming: bool = False, lora_request: Any = None
    ) -> RequestOutput:
        """Must be called where an event loop runs."""
        asyncio.get_running_loop()
        for value, kind in ((inputs, str), (sampling_params, SamplingParams), (streaming, bool)):
            if not isinstance(value, kind):
                raise TypeError(f"generate_async: {value!r} is no {kind.__name__}")
        assert lora_request is None
        self.ended = inputs == "End."
        return RequestOutput(inputs, sampling_params, streaming)

    def _check_health(self) -> bool:
        return not self.ended

    def shutdown(self) -> None:
        """Nothing is left to end."""
