"""Combine the outputs of the rounds of speculative decoding into those of one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..shared.inner_models import Tensors
from .incremental_text import common_length

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
