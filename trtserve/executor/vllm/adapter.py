"""Requests of the executor as keywords of vLLM, and vLLM's outputs as those of the executor."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from trtserve.executor.engine.requests import (
    BlockUse,
    FinishReason,
    GenerationRequest,
    GuideType,
    PromptLogProbs,
    RequestMetrics,
    RequestOutput,
)
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.engine.sequence import as_tokens
from trtserve.executor.engine.stop_words import StopWords

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


class PeftAdapters:
    """The adapters of a repository: task id → number, name and folder as vLLM wants them."""

    def __init__(self, folders: Mapping[int, str]) -> None:
        self._known = {
            task: (f"adapter-{task}", number, folder) for number, (task, folder) in enumerate(folders.items(), 1)
        }

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[tuple[str, int, str]]:
        """Return the arguments of all LoRARequests."""
        return list(self._known.values())

    def find(self, task: int) -> tuple[str, int, str]:
        """Return the arguments of a LoRARequest. Raises RuntimeError for an unknown task id."""
        if task not in self._known:
            known = ", ".join(map(str, self._known)) or "none"
            raise RuntimeError(
                f"lora_task_id {task} is not an adapter of this repository (it has {known}); the vllm runtime loads "
                "adapters from the repository only: make it with --lora NAME=FOLDER"
            )
        return self._known[task]


def vllm_request(
    request: GenerationRequest, limits: EngineLimits, adapters: PeftAdapters, *, hidden_size: int, guides: bool
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
        if request.adapter.weights is not None:
            raise RuntimeError(
                "lora_weights are not supported by the vllm runtime, which loads adapters from the repository: make "
                f"it with --lora NAME=FOLDER; with weights in requests {_ELSEWHERE}"
            )
        found["lora"] = adapters.find(request.adapter.task_id)
    if request.guide is not None:
        if not guides:
            raise RuntimeError("Guided decoding needs the parameter guided_decoding_backend and a tokenizer")
        kind = request.guide.kind
        found["guide"] = {"json_object": True} if kind is GuideType.JSON else {_GUIDES[kind]: request.guide.text}
    return found


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
    times: tuple[float, float, float] | None = None
    """Monotonic seconds: first scheduled, first token, last token."""


class _Sequence:
    """What is known of one sequence."""

    def __init__(self, request: GenerationRequest) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.sent = 0
        self.ended = False
        words = [tuple(word) for word in request.stop_words if word]
        self.stop_words = StopWords(words, np.asarray(request.tokens)) if words else None


class OpenRequest:
    """A request that vLLM works on, and the outputs that it becomes."""

    def __init__(self, number: int, request: GenerationRequest, *, tokens_per_block: int) -> None:
        self.number, self.request = number, request
        self.arrival = time.monotonic()
        self._sequences = [_Sequence(request) for _ in range(request.num_sequences)]
        self._tokens_per_block = tokens_per_block
        self._first_token = 0.0
        self._prompt: PromptLogProbs | None = None

    @property
    def ended(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.ended for sequence in self._sequences)

    def outputs(self, news: VllmOutput) -> list[RequestOutput]:
        """Return the executor's outputs; `ended` is known afterwards, maybe before vLLM ends the request."""
        self._first_token = self._first_token or time.monotonic()
        self._prompt = self._prompt or news.prompt
        made: list[RequestOutput] = []
        for part in news.sequences:
            copies = range(len(self._sequences)) if self.request.sampling.greedy else (part.index,)
            for index in copies:
                if not self._sequences[index].ended:
                    made += self._advance(index, part, news)
        return made

    def end(self, reason: FinishReason) -> list[RequestOutput]:
        """End it early: tokens that were not sent are dropped, as in TensorRT-LLM."""
        made = []
        for index, sequence in enumerate(self._sequences):
            if not sequence.ended:
                sequence.ended = True
                prompt = [] if self.request.streaming or self.request.exclude_input else list(self.request.tokens)
                made.append(self._output(index, prompt, reason, news=None))
        return made

    def _advance(self, index: int, part: OutputSequence, news: VllmOutput) -> list[RequestOutput]:
        sequence, request = self._sequences[index], self.request
        reason = FinishReason.NOT_FINISHED
        for position, token in enumerate(part.tokens):
            stopped = sequence.stop_words is not None and sequence.stop_words.end(sequence.tokens, token)
            sequence.tokens.append(token)
            if part.log_probs is not None:
                sequence.log_probs.append(part.log_probs[position])
            if part.tops is not None:
                sequence.tops.append(part.tops[position])
            if stopped:
                reason = FinishReason.STOP_WORDS
                break
        if reason is FinishReason.NOT_FINISHED and part.reason is not None:
            reason = FinishReason.LENGTH if part.reason == "length" else FinishReason.END_ID
            if reason is FinishReason.END_ID and sequence.tokens[-1:] == [request.end_id]:
                sequence.tokens.pop()  # the end token is not in the answer
                del sequence.log_probs[len(sequence.tokens) :], sequence.tops[len(sequence.tokens) :]
        sequence.ended = reason is not FinishReason.NOT_FINISHED
        return self._responses(index, reason, news)

    def _responses(self, index: int, reason: FinishReason, news: VllmOutput) -> list[RequestOutput]:
        """Return one output for each token of a stream, or one at the end."""
        sequence, request = self._sequences[index], self.request
        count = len(sequence.tokens)
        if not request.streaming:
            if not sequence.ended:
                return []
            prompt = [] if request.exclude_input else list(request.tokens)
            return [self._output(index, [*prompt, *sequence.tokens], reason, news=news)]
        with_last = sequence.ended and reason is not FinishReason.END_ID
        ends = range(sequence.sent + 1, count + (0 if with_last else 1))
        made = [self._streamed(index, end, FinishReason.NOT_FINISHED, news) for end in ends]
        if sequence.ended:
            made.append(self._streamed(index, count, reason, news))
        return made

    def _streamed(self, index: int, end: int, reason: FinishReason, news: VllmOutput) -> RequestOutput:
        sequence = self._sequences[index]
        tokens = sequence.tokens[0 if self.request.return_all_tokens else sequence.sent : end]
        output = self._output(index, tokens, reason, news=news, end=end)
        sequence.sent = end
        return output

    def _output(
        self, index: int, tokens: list[int], reason: FinishReason, *, news: VllmOutput | None, end: int | None = None
    ) -> RequestOutput:
        sequence, request = self._sequences[index], self.request
        final = reason is not FinishReason.NOT_FINISHED
        output = RequestOutput(
            request_id=self.number,
            client_id=request.client_id,
            tokens=[tokens],
            reasons=[reason],
            index=index,
            ended=final,
            is_last=final and self.ended,
            iterations=len(sequence.tokens),
            metrics=self._metrics(news) if request.return_metrics else None,
            prompt_tokens=None if news is None else news.prompt_tokens,
        )
        if self._prompt is not None and not sequence.sent:
            output.prompt_log_probs = self._prompt
        if request.return_log_probs and news is not None:
            known = sequence.log_probs[:end]
            output.log_probs, output.cum_log_probs = [known], [sum(known)]
            if request.top_log_probs:
                output.top_log_probs = sequence.tops[sequence.sent if request.streaming else 0 : end]
        return output

    def _metrics(self, news: VllmOutput | None) -> RequestMetrics:
        scheduled, first, last = (news and news.times) or (self.arrival, self._first_token, time.monotonic())
        blocks = -(-len(self.request.tokens) // self._tokens_per_block)
        reused = 0 if news is None else news.cached // self._tokens_per_block
        return RequestMetrics(
            arrival=self.arrival,
            first_scheduled=scheduled,
            first_token=first,
            last_token=last,
            blocks=BlockUse(total=blocks, new=blocks - reused, reused=reused, missed=blocks - reused),
        )
