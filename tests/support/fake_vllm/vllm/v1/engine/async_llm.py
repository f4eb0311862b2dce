"""An engine whose next token is the last one plus one, modulo 100, and for an adapter plus ten.

Prompts that begin with one of these do something else: 90 forks, 91 refuses, 92 kills the engine, 93 never answers, 94
starts a process that is stopped, 95 one that runs, and 96 stops after the first tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import PoolingParams, RequestOutputKind, SamplingParams

_VOCABULARY = 100
_DELTA = 2
_BLOCKS, _BLOCK = 8, 16
_SEPARATOR = 0


class AsyncLLM:
    def __init__(self, args: AsyncEngineArgs, loggers: list[Any]) -> None:
        if args.model.endswith("broken/model"):
            raise ValueError("the weights are damaged")
        print("vLLM prints to its standard output", flush=True)  # noqa: T201 - it must not break the frames
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=_BLOCKS, block_size=_BLOCK),
            model_config=SimpleNamespace(
                max_model_len=args.max_model_len,
                get_vocab_size=lambda: int(_config(args.model).get("vocab_size", _VOCABULARY)),
                get_hidden_size=lambda: 8,
                use_sep_token=True,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
            ),
        )
        self._loggers = [factory(self.vllm_config) for factory in loggers]
        self._running = 0
        self._scores = "SequenceClassification" in str(_config(args.model).get("architectures"))
        self.errored, self.dead_error = False, RuntimeError("EngineCore encountered an issue")

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs, stat_loggers: list[Any]) -> AsyncLLM:
        return cls(args, stat_loggers)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("classify", "token_classify") if self._scores else ("embed", "token_embed")

    def get_tokenizer(self) -> Any:
        def pair(text: str, text_pair: str) -> dict[str, list[int]]:
            first, second = [*text.encode(), _SEPARATOR], list(text_pair.encode())
            return {"input_ids": first + second, "token_type_ids": [0] * len(first) + [1] * len(second)}

        return pair

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        if "damaged" in lora_request.lora_path:
            raise ValueError("the adapter is damaged")
        return True

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        del request_id, priority
        params = sampling_params
        ids = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else list(prompt["prompt"].encode())
        self._running += 1
        try:
            await self._misbehave(ids[0])
            step = 10 if lora_request is not None else 1
            tokens: list[int] = []
            begin, reason = time.monotonic(), None
            while reason is None:
                await asyncio.sleep(0.001)
                fresh: list[int] = []
                while reason is None and len(fresh) < _DELTA:
                    last = (tokens or ids)[-1]
                    token = (last + step) % _VOCABULARY
                    if [token] in (params._bad_words_token_ids or []):
                        token = (token + step) % _VOCABULARY
                    fresh.append(token)
                    tokens.append(token)
                    if token in params.stop_token_ids and len(tokens) > params.min_tokens:
                        reason = "stop"
                    elif len(tokens) >= params.max_tokens:
                        reason = "length"
                self._record(len(fresh))
                if params.output_kind is RequestOutputKind.FINAL_ONLY and reason is None:
                    continue
                shown = fresh if params.output_kind is RequestOutputKind.DELTA else tokens
                outputs = [_output(index, shown, reason, params.logprobs) for index in range(params.n)]
                times = SimpleNamespace(scheduled_ts=begin, first_token_ts=begin, last_token_ts=time.monotonic())
                first = len(tokens) == len(fresh) or params.output_kind is RequestOutputKind.FINAL_ONLY
                asked = first and params.prompt_logprobs is not None
                yield SimpleNamespace(
                    prompt_token_ids=ids,
                    prompt_logprobs=[None, *_rows(ids[1:], params.prompt_logprobs)] if asked else None,
                    outputs=outputs,
                    finished=reason is not None,
                    num_cached_tokens=_BLOCK,
                    metrics=times,
                )
                if ids[0] == 96:
                    await asyncio.sleep(3600)
        finally:
            self._running -= 1
        self._record(0)  # as in vLLM not after a request that was cancelled

    async def encode(
        self,
        prompt: dict[str, Any],
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        """The vector of a text is its length, its first and its last token; the score of a pair is the last token."""
        del request_id, lora_request, priority
        assert pooling_params.task == ("classify" if self._scores else "embed")
        ids = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else list(prompt["prompt"].encode())
        await self._misbehave(ids[0])
        vector = np.array([len(ids), ids[0], ids[-1]], np.float32)[: pooling_params.dimensions]
        if self._scores:
            assert ids[pooling_params.extra_kwargs["compressed_token_type_ids"] - 1] == _SEPARATOR
            vector = vector[-1:]
        self._record(0)
        yield SimpleNamespace(prompt_token_ids=ids, outputs=SimpleNamespace(data=vector), finished=True)

    async def _misbehave(self, first: int) -> None:
        if first == 90 and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        if first == 90:
            await asyncio.sleep(3600)
        if first == 91:
            raise ValueError("vLLM does not like this prompt")
        if first == 92:
            self.errored = True
            await asyncio.sleep(60)
        if first == 93:
            await asyncio.sleep(3600)
        if first in (94, 95):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            if first == 94:
                os.kill(child.pid, signal.SIGSTOP)
            await asyncio.sleep(3600)

    def _record(self, generated: int) -> None:
        scheduler = SimpleNamespace(
            num_running_reqs=self._running,
            num_waiting_reqs=0,
            kv_cache_usage=0.25 if self._running else 0.0,
            prefix_cache_stats=SimpleNamespace(queries=2 * _BLOCK, hits=_BLOCK),
        )
        iteration = SimpleNamespace(num_generation_tokens=generated, num_prompt_tokens=0, finished_requests=[])
        for logger in self._loggers:
            logger.record(scheduler, iteration)

    def shutdown(self) -> None:
        """Nothing is left."""


def _config(model: str) -> dict[str, Any]:
    config = Path(model, "config.json")
    found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return found


def _output(index: int, tokens: list[int], reason: str | None, logprobs: int | None) -> Any:
    rows = None if logprobs is None else _rows(tokens, logprobs)
    return SimpleNamespace(
        index=index,
        token_ids=tokens,
        logprobs=rows,
        finish_reason=reason,
        stop_reason=None,
        text="".join(f" {token}" for token in tokens),
        cumulative_logprob=-0.5 * len(tokens),
    )


def _rows(tokens: list[int], count: int) -> list[Any]:
    return [
        {
            token + place: SimpleNamespace(logprob=-0.5 - place, rank=place + 1, decoded_token=f" {token + place}")
            for place in range(max(1, count))
        }
        for token in tokens
    ]
