"""Speculative decoding: a draft model proposes tokens, the target model keeps those that it would have chosen.

The loop is that of NVIDIA's BLS model. Each round is one request to each model, with everything generated so far as its
prompt; KV cache reuse makes it short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..shared.arrays import Tensors
from ..shared.inner_models import InnerModelError, call_streamed, only
from .inputs import BlsSettings, CoreModel, is_set, largest, prompts
from .texts import IncrementalText, StoppedText, StopWords, common_length

_SUMMED = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "cum_log_probs")
_FIRST = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
# Logits are those of releases before 0.14, which fill them with zeros: no request with drafts asks for them.
_LAST = ("last_token_time_ns", "finish_reason", "context_logits", "generation_logits", "batch_index")
_DRAFTS = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")


class DraftStatistics:
    """Combines the target's answers; the outputs are those that the answers have."""

    def __init__(self) -> None:
        self.rounds = 0
        self._accepted = 0
        self._drafted = 0
        self._outputs: Tensors = {}
        self._names: set[str] = set()

    def add(self, answer: Tensors, drafts: Sequence[int], new: Sequence[int]) -> None:
        """Add one round: the target's answer, the proposed ids, and the new ids."""
        self.rounds += 1
        self._drafted += len(drafts)
        self._accepted += common_length(drafts, new)
        self._names |= answer.keys()
        for name, value in answer.items():
            if name in _SUMMED:
                self._outputs[name] = value + self._outputs.get(name, np.zeros_like(value))
            elif name in _LAST or (name in _FIRST and name not in self._outputs):
                self._outputs[name] = value
            elif name == "output_log_probs":
                before = self._outputs.get(name)
                self._outputs[name] = value if before is None else np.concatenate([before, value], axis=-1)

    def outputs(self, prompt_length: int, generated: int) -> Tensors:
        """Return output name → array for the request."""
        rate = self._accepted / self._drafted if self._drafted else 0.0
        outputs = dict(self._outputs)
        # Releases with performance metrics have these too; the core model knows only its own round.
        if "last_token_time_ns" in self._names:
            values = (np.float32(rate), np.int32(self._accepted), np.int32(self._drafted))
            outputs |= {name: np.array([[value]]) for name, value in zip(_DRAFTS, values, strict=True)}
        for name, count in (("num_input_tokens", prompt_length), ("num_output_tokens", generated)):
            if name in self._names:
                outputs[name] = np.array([[count]], dtype=np.int32)
        return outputs


_TOKENS = ("output_ids", "sequence_length")
_TOO_LONG = "exceeds maximum input length"
"""Part of a core model's error: its KV cache may hold fewer tokens than the engine allows."""
# Inputs that are only for the target model.
_TARGET_ONLY = (
    "prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids", "lora_task_id", "lora_weights",
    "lora_config", "return_log_probs", "return_perf_metrics", "return_kv_cache_reuse_stats",
    "return_num_input_tokens", "return_num_output_tokens", "return_finish_reason",
)  # fmt: skip


class SpeculativeDecoding:
    """Runs one request without streaming, beams or a batch."""

    def __init__(
        self,
        settings: BlsSettings,
        target: CoreModel,
        client: Tensors,
        inputs: Tensors,
        *,
        request_id: str,
        cancelled: threading.Event,
    ) -> None:
        """`client` are the inputs of the BLS model, `inputs` those of the core model."""
        self._settings = settings
        self._target = target
        self._client = client
        self._inputs = inputs
        self._request_id = request_id
        self._cancelled = cancelled
        (self._prompt,) = prompts(inputs)
        self._generated: list[int] = []
        self._statistics = DraftStatistics()
        self._uses_logits = is_set(client, "use_draft_logits")
        # Decoding text in every round is slow; the ids show the end, unless drafts are compared by their logits.
        wants_reason = self._uses_logits or is_set(client, "return_finish_reason")
        self._needs_reason = wants_reason and "return_finish_reason" in settings.inputs
        wanted = len(self._prompt) + int(client["max_tokens"].item())
        self._longest = min(wanted, settings.longest or wanted)

    def run(self, words: StopWords, decode: Callable[[Sequence[list[int]]], list[str]]) -> Tensors:
        """Generate, and return the core model's outputs for the request.

        Ends at max_tokens, when the target ends (end id or stop words) or adds nothing, when the text contains one of
        `words`, and when the client cancels. Every round adds a token, so there are at most max_tokens rounds.
        """
        text, stopped = IncrementalText(decode), StoppedText(words)
        most = self._longest - len(self._prompt)
        while not self._statistics.rounds or len(self._generated) < most:
            drafts, logits = self._drafts()
            try:
                answer = self._verify(drafts, logits)
            except InnerModelError as error:
                if self._generated and _TOO_LONG in str(error):
                    break  # the target's limit, where plain decoding ends too
                raise
            new = self._new_ids(answer, most=self._most_new_tokens(drafts))
            self._generated += new
            self._statistics.add(answer, drafts, new)
            if words:
                stopped.add(text.add(new))
            if stopped.stopped or self._has_ended(answer, drafts, new):
                break
        return self._outcome()

    @property
    def _tokens(self) -> list[int]:
        return self._prompt + self._generated

    def _drafts(self) -> tuple[list[int], NDArray[np.float32] | None]:
        """Return the proposed ids, and their logits [1, ids, vocabulary] if the request compares logits."""
        tokens = self._tokens
        count = min(largest(self._client, "num_draft_tokens", 0), self._longest - len(tokens) - 1)
        if self._settings.draft_longest is not None:
            count = min(count, self._settings.draft_longest - len(tokens))
        if count <= 0 or self._settings.draft is None:
            return [], None
        inputs = self._round_inputs(count, least=count)
        inputs = {name: value for name, value in inputs.items() if name not in _TARGET_ONLY}
        inputs["return_generation_logits"] = np.array([[self._uses_logits]])
        outputs = (*_TOKENS, "generation_logits") if self._uses_logits else _TOKENS
        try:
            answer = only(call_streamed(self._settings.draft, inputs, outputs, self._request_id))
        except InnerModelError as error:
            if self._generated and _TOO_LONG in str(error):
                return [], None
            raise InnerModelError(f"The draft model {self._settings.draft} answered: {error}") from error
        ids = self._new_ids(answer, most=count)
        if not self._uses_logits:
            return ids, None
        return ids, answer["generation_logits"].reshape(1, -1, answer["generation_logits"].shape[-1])[:, : len(ids)]

    def _verify(self, drafts: list[int], logits: NDArray[np.float32] | None) -> Tensors:
        given = int(self._inputs.get(self._settings.min_tokens_input, np.zeros(1)).item())
        inputs = self._round_inputs(self._most_new_tokens(drafts), least=max(0, given - len(self._generated)))
        inputs["return_generation_logits"] = np.array([[False]])
        if drafts:
            inputs["draft_input_ids"] = np.array([drafts], dtype=np.int32)
        if logits is not None and drafts:
            inputs["draft_logits"] = logits
            if "draft_acceptance_threshold" in self._client:
                inputs["draft_acceptance_threshold"] = self._client["draft_acceptance_threshold"].reshape(1, 1)
        outputs = [name for name in self._settings.outputs if name != "finish_reason"]
        if self._needs_reason:
            inputs["return_finish_reason"] = np.array([[True]])
            outputs.append("finish_reason")
        return only(self._target.answers(inputs, (*_TOKENS, *outputs)))

    def _most_new_tokens(self, drafts: list[int]) -> int:
        """Return the most new tokens of a round; without drafts the rest is generated in one round."""
        if drafts:
            return len(drafts) + 1
        return max(1, self._longest - len(self._tokens))

    def _round_inputs(self, count: int, *, least: int) -> Tensors:
        tokens, settings = self._tokens, self._settings
        inputs = self._inputs | {
            "input_ids": np.array([tokens], dtype=np.int32),
            "input_lengths": np.array([[len(tokens)]], dtype=np.int32),
            "request_output_len": np.array([[count]], dtype=np.int32),
        }
        for name in ("min_length", "min_tokens"):
            inputs.pop(name, None)
        if least:
            inputs[settings.min_tokens_input] = np.array([[least]], dtype=np.int32)
        if "exclude_input_in_output" in settings.inputs:
            inputs["exclude_input_in_output"] = np.array([[True]])
        seeds = [inputs.pop(name) for name in ("seed", "random_seed") if name in inputs]
        # Random numbers depend on the position in a request; one seed would start each round with one number.
        seed = int(seeds[0].item()) if seeds else 0
        shifted = (seed + len(self._generated)) % 2**64
        inputs[settings.seed_input] = np.array([[shifted]], dtype=np.uint64)
        return inputs

    def _new_ids(self, answer: Tensors, *, most: int) -> list[int]:
        """Return the ids after the prompt, which releases without exclude_input_in_output may repeat or leave out."""
        tokens = self._tokens
        length = int(answer["sequence_length"].reshape(-1)[0])
        ids: list[int] = answer["output_ids"].reshape(-1)[:length].tolist()
        if "exclude_input_in_output" in self._settings.inputs:
            return ids
        return ids[len(tokens) :] if length > most or ids[: len(tokens)] == tokens else ids

    def _has_ended(self, answer: Tensors, drafts: list[int], new: list[int]) -> bool:
        if not new or self._cancelled.is_set():
            return True
        if "finish_reason" in answer:
            return bool(answer["finish_reason"].reshape(-1)[0] != b"length")
        if any(self._tokens[-len(word) :] == word for word in self._stop_ids()):
            return True
        # The target adds a token after the accepted drafts, unless that was the end id.
        return not self._uses_logits and len(new) < self._most_new_tokens(drafts) and new == drafts[: len(new)]

    def _stop_ids(self) -> list[list[int]]:
        """Return the stop words as ids, for core models that do not report why they ended."""
        lists = self._inputs.get("stop_words_list")
        if lists is None or lists.size == 0:
            return []
        ids, ends = lists[0].tolist()
        used = [end for end in ends if end > 0]
        return [ids[start:end] for start, end in zip([0, *used], used, strict=False)]

    def _outcome(self) -> Tensors:
        given = self._client.get("exclude_input_in_output")
        excluded = self._settings.exclude_input if given is None else bool(np.any(given))
        ids = self._generated if excluded else self._tokens
        tokens = {
            "output_ids": np.array(ids, dtype=np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
        }
        outputs = self._statistics.outputs(len(self._prompt), len(self._generated))
        if not is_set(self._client, "return_finish_reason"):
            outputs.pop("finish_reason", None)
        return tokens | outputs
