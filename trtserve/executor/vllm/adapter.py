"""Requests of the executor as keywords of vLLM, and vLLM's outputs as those of the executor."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from trtserve.executor.engine.admission import (
    allowed_bias,
    allowed_end_id,
    allowed_max_tokens,
    check_prompt,
    check_sampling,
)
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.outputs import ended_response, next_responses
from trtserve.executor.engine.requests import (
    AdapterSource,
    BlockUse,
    FinishReason,
    GenerationRequest,
    GuideType,
    PromptLogProbs,
    RequestMetrics,
    RequestOutput,
)
from trtserve.executor.engine.sampling import Choice, SamplingParameters
from trtserve.executor.engine.sequence import NO_END, RequestGroup, Sequence, StopWords, as_tokens

_GUIDES = {
    GuideType.JSON_SCHEMA: "json",
    GuideType.REGEX: "regex",
    GuideType.EBNF_GRAMMAR: "grammar",
    GuideType.STRUCTURAL_TAG: "structural_tag",
}
_ELSEWHERE = "the openvino, torch and tensorrt_llm runtimes have it"

# Fields of SamplingParameters, and of GenerationRequest, that vLLM lacks.
_SAMPLING = (
    "beam_width", "top_p_min", "top_p_decay", "top_p_reset_ids", "no_repeat_ngram_size", "prompt_ignore_length",
    "beam_search_diversity_rate", "length_penalty",
)  # fmt: skip
_REQUEST = (
    "position_ids", "draft", "post_processor", "retention", "return_context_logits", "return_generation_logits",
)  # fmt: skip
# Fields that vLLM has under the same names: of every request, and of one that is not greedy.
_SAME, _DRAWN = (
    ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ("temperature", "top_k", "top_p", "min_p"),
)
# vLLM refuses values beyond these.
_BOUNDS = {"temperature": (0.0, 2.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}
# vLLM schedules whole numbers, low ones first; ours are 0 … 1, high ones first.
_PRIORITIES = 1000
_MOST_SEED = 2**63


Adapters = Mapping[int, tuple[str, int, str]]
"""The adapters of a repository: task id → the arguments of vLLM's LoRARequest, which are a name, a number, a folder."""


def vllm_request(
    request: GenerationRequest, limits: EngineLimits, adapters: Adapters, *, hidden_size: int, guides: bool
) -> dict[str, Any]:
    """Return the request for the engine side. Raises RuntimeError for what vLLM cannot do, by name."""
    if request.problem is not None:
        raise RuntimeError(request.problem)
    _refuse_unsupported(request)
    check_sampling(request, limits)
    prompt = as_tokens(request.tokens)
    check_prompt(request, prompt, limits, hidden_size=hidden_size, max_position=0, reuse=False)
    found: dict[str, Any] = {
        "prompt": prompt.tolist(),
        "images": list(request.images),
        "sampling": _sampling(request, limits),
        # Stop words of several tokens are found here, so their tokens are needed as they come.
        "stream": request.streaming or bool(request.stop_words),
        "priority": round((0.5 - request.priority) * _PRIORITIES),
    }
    if request.prompt_table is not None:
        table = np.ascontiguousarray(request.prompt_table.rows, dtype=np.float32)
        found["table"] = [limits.vocab_size, table.shape[1], table.tobytes()]
    if request.top_log_probs:
        found["tops"] = request.top_log_probs
    if words := [list(word) for word in request.bad_words if word]:
        found["bad_words"] = words
    if request.cache_salt is not None:
        found["salt"] = str(request.cache_salt)
    if request.adapter is not None:
        found["lora"] = _adapter(request.adapter, adapters)
    if request.guide is not None:
        if not guides:
            raise RuntimeError("Guided decoding needs the parameter guided_decoding_backend and a tokenizer")
        kind = request.guide.kind
        found["guide"] = {"json_object": True} if kind is GuideType.JSON else {_GUIDES[kind]: request.guide.text}
    return found


def _adapter(asked: AdapterSource, adapters: Adapters) -> tuple[str, int, str]:
    if asked.weights is not None:
        raise RuntimeError(
            "lora_weights are not supported by the vllm runtime, which loads adapters from the repository: make it "
            f"with --lora NAME=FOLDER; with weights in requests {_ELSEWHERE}"
        )
    if asked.task_id not in adapters:
        known = ", ".join(map(str, adapters)) or "none"
        raise RuntimeError(
            f"lora_task_id {asked.task_id} is not an adapter of this repository (it has {known}); the vllm runtime "
            "loads adapters from the repository only: make it with --lora NAME=FOLDER"
        )
    return adapters[asked.task_id]


def _refuse_unsupported(request: GenerationRequest) -> None:
    neutral = SamplingParameters()
    asked = [name for name in _SAMPLING if getattr(request.sampling, name) != getattr(neutral, name)]
    asked += [name for name in _REQUEST if not any(getattr(request, name) is each for each in (None, False))]
    if asked:
        raise RuntimeError(f"{asked[0]} is not supported by the vllm runtime; {_ELSEWHERE}")
    for name, (lowest, highest) in _BOUNDS.items():
        if not lowest <= getattr(request.sampling, name) <= highest:
            raise RuntimeError(
                f"{name} is {getattr(request.sampling, name):g}; vLLM takes {lowest:g} … {highest:g}; beyond that "
                f"{_ELSEWHERE}"
            )


def _sampling(request: GenerationRequest, limits: EngineLimits) -> dict[str, Any]:
    """Return the keywords of SamplingParams."""
    own = request.sampling
    max_tokens = allowed_max_tokens(request, len(request.tokens), 0, limits)
    end = allowed_end_id(request.end_id, limits)
    ends = [] if end < 0 else [end]
    if not own.min_tokens:
        # vLLM ends a request itself at these. Before min_tokens it would ban them, which only the end token is here.
        ends += [word[0] for word in request.stop_words if len(word) == 1]
    words: dict[str, Any] = {
        "n": 1 if own.greedy else request.num_sequences,  # greedy sequences are copies
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "min_tokens": min(own.min_tokens, max_tokens),
        "ignore_eos": True,
        "stop_token_ids": ends,
    }
    words |= {name: getattr(own, name) for name in (*_SAME, *(() if own.greedy else _DRAWN))}
    if not own.greedy and own.seed:  # a generator of its own for each row of a step is slow; the default, 0, is none
        words["seed"] = own.seed % _MOST_SEED
    if request.return_log_probs or request.top_log_probs:
        words["logprobs"] = request.top_log_probs
    if request.prompt_log_probs:
        words["prompt_logprobs"] = request.top_log_probs
    if (bias := allowed_bias(request.bias, limits)) is not None and bias.any():
        words["logit_bias"] = {int(token): float(bias[token]) for token in np.flatnonzero(bias)}
    return words


class OutputSequence(msgspec.Struct):
    """What is new of one of a request's sequences."""

    index: int
    tokens: list[int]
    reason: str | None = None
    log_probs: list[float] | None = None
    tops: list[list[tuple[int, float]]] | None = None


class VllmOutput(msgspec.Struct):
    """What is new of a request."""

    finished: bool
    cached: int
    sequences: list[OutputSequence]
    prompt: PromptLogProbs | None = None
    prompt_tokens: int | None = None
    times: tuple[float, float, float] | None = None  # monotonic seconds: first scheduled, first token, last token


class OpenRequest:
    """A request that vLLM works on, and the outputs that it becomes."""

    def __init__(
        self, number: int, request: GenerationRequest, max_tokens: int, *, tokens_per_block: int, joins: bool = False
    ) -> None:
        """`max_tokens`: what the request asks for, or fewer if its sequences would become too long.

        `joins`: tokens of a stream that vLLM gives together make one response, instead of one each.
        """
        self.request = request
        prompt, words = as_tokens(request.tokens), [tuple(word) for word in request.stop_words if word]
        first = Sequence(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            end_id=NO_END if request.end_id is None else request.end_id,
            stop_words=StopWords(words, prompt) if words else None,
            group=RequestGroup(request.num_sequences, request.num_sequences),
            streaming=request.streaming,
            single_step=joins,
            return_all=request.return_all_tokens,
            exclude_input=request.exclude_input,
            client_id=request.client_id,
        )
        self._open = {
            index: replace(
                first,
                index=index,
                metrics=RequestMetrics(arrival=first.arrival, first_scheduled=first.arrival)
                if request.return_metrics
                else None,
                log_probs=[] if request.return_log_probs else None,
                generated=[],
                use=BlockUse(),
            )
            for index in range(request.num_sequences)
        }
        self._tops: dict[int, list[list[tuple[int, float]]]] = {index: [] for index in self._open}
        self._tokens_per_block = tokens_per_block
        self._prompt: PromptLogProbs | None = None

    @property
    def ended(self) -> bool:
        """Whether all sequences have ended."""
        return not self._open

    def outputs(self, news: VllmOutput) -> list[RequestOutput]:
        """Return the executor's outputs; `ended` is known afterwards, maybe before vLLM ends the request."""
        self._prompt = self._prompt or news.prompt
        made: list[RequestOutput] = []
        for part in news.sequences:
            for index in list(self._open) if self.request.sampling.greedy else [part.index]:  # greedy ones are copies
                if (sequence := self._open.get(index)) is not None:
                    made += self._advance(sequence, part, news)
        return made

    def end(self, reason: FinishReason) -> list[RequestOutput]:
        """End it early: tokens that were not sent are dropped, as in TensorRT-LLM."""
        made = [ended_response(sequence, reason) for sequence in self._open.values()]
        self._open.clear()
        return made

    def _advance(self, sequence: Sequence, part: OutputSequence, news: VllmOutput) -> list[RequestOutput]:
        """Return one output for each token of a stream, or for those that came together, or one at the end."""
        reason, tops = FinishReason.NOT_FINISHED, self._tops[sequence.index]
        for position, token in enumerate(part.tokens):
            own = part.log_probs[position] if part.log_probs is not None else math.nan
            reason = sequence.accept(Choice(token, own, own))
            if part.tops is not None and reason is not FinishReason.END_ID:
                tops.append(part.tops[position])
            if reason is not FinishReason.NOT_FINISHED:
                break
        if reason is FinishReason.NOT_FINISHED and part.reason is not None:
            reason = FinishReason.LENGTH if part.reason == "length" else FinishReason.END_ID
        if reason is not FinishReason.NOT_FINISHED:
            del self._open[sequence.index]
        elif not sequence.streaming:
            return []
        self._measure(sequence, news)
        sent, made = sequence.sent, next_responses(sequence, reason)
        for place, output in enumerate(made, sent):
            output.prompt_tokens = news.prompt_tokens
            output.prompt_log_probs = None if place else self._prompt
            if self.request.top_log_probs:
                output.top_log_probs = tops[place : place + 1 if len(made) > 1 else None]
        return made

    def _measure(self, sequence: Sequence, news: VllmOutput) -> None:
        sequence.iterations = len(sequence.generated)
        if (metrics := sequence.metrics) is None:
            return
        now = time.monotonic()
        known = news.times or (metrics.first_scheduled, metrics.first_token or now, now)
        metrics.first_scheduled, metrics.first_token, metrics.last_token = known
        blocks = -(-sequence.prompt_length // self._tokens_per_block)
        reused = news.cached // self._tokens_per_block
        sequence.use = BlockUse(total=blocks, new=blocks - reused, reused=reused, missed=blocks - reused)
