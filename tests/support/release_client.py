"""The tensors, types and shapes that NVIDIA's clients send, release by release.

Source: the interface reference of the clients (inflight_batcher_llm_client.py, end_to_end_grpc_client.py and
benchmark_core_model.py of every tagged release). Each says whether its calls are unary or on a gRPC stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.model_server import Tensors, flags, floats, integers, texts
from trtserve.nvidia.releases import order


def long_integers(*values: int) -> Any:
    """UINT64 [rows, 1]."""
    return np.array([[value] for value in values], dtype=np.uint64)


@dataclass(frozen=True)
class Flag:
    """A flag of a client: its tensor, and the releases that have it."""

    make: Callable[..., Any]
    since: str = "0.8"
    until: str = "99.0"


KV_CACHE_OUTPUTS = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
PERF_OUTPUTS = (
    *KV_CACHE_OUTPUTS,
    *(f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)

_SHARED = {
    "num_return_sequences": Flag(integers, "0.14"),
    "repetition_penalty": Flag(floats),
    "presence_penalty": Flag(floats),
    "frequency_penalty": Flag(floats),
    "return_log_probs": Flag(flags),
    "return_context_logits": Flag(flags),
    "return_generation_logits": Flag(flags),
    "return_kv_cache_reuse_stats": Flag(flags, "0.16", "0.18"),
    "return_perf_metrics": Flag(flags, "0.19"),
}
_CORE = {
    **_SHARED,
    # Before 0.14 the flag only tells the client where the answer begins.
    "exclude_input_in_output": Flag(flags, "0.14"),
    "lora_task_id": Flag(long_integers, "0.9"),
    "return_num_input_tokens": Flag(flags, "0.20"),
    "return_num_output_tokens": Flag(flags, "0.20"),
}
_TEXT = {
    **_SHARED,
    "return_log_probs": Flag(flags, "0.14"),
    "end_id": Flag(integers),
    "pad_id": Flag(integers),
    "lora_task_id": Flag(long_integers, "0.15"),
    "guided_decoding_guide_type": Flag(texts, "0.19"),
    "guided_decoding_guide": Flag(texts, "0.19"),
}


# Flag of the client of texts → the outputs that it requests for it.
_OUTPUTS_OF = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_kv_cache_reuse_stats": KV_CACHE_OUTPUTS,
    "return_perf_metrics": PERF_OUTPUTS,
}


@dataclass(frozen=True)
class ReleaseClient:
    """The clients of one release. A keyword is a flag of the client; KeyError for one that the release has not."""

    release: str

    def has(self, name: str, *, text: bool = False) -> bool:
        """Whether the client of the core model, or that of texts, has the flag."""
        flag = (_TEXT if text else _CORE).get(name)
        return flag is not None and order(flag.since) <= order(self.release) <= order(flag.until)

    def core(self, prompt: Sequence[int], count: int, *, streaming: bool = False, **given: Any) -> Tensors:
        """inflight_batcher_llm_client.py: a gRPC stream with `streaming` or num_return_sequences, else a unary call."""
        tensors = {
            "input_ids": np.array([prompt], dtype=np.int32),
            "input_lengths": integers(len(prompt)),
            "request_output_len": integers(count),
            "beam_width": integers(given.pop("beam_width", 1)),
            "temperature": floats(given.pop("temperature", 1.0)),
            "streaming": flags(streaming),
            "end_id": integers(given.pop("end_id", 2)),
            "pad_id": integers(given.pop("pad_id", 2)),
            "runtime_top_k": integers(given.pop("top_k", 1)),
            "runtime_top_p": floats(given.pop("top_p", 0.0)),
        }
        return {**tensors, **self._flags(given, text=False)}

    def text(self, prompts: str | Sequence[str], count: int, *, streaming: bool = False, **given: Any) -> Tensors:
        """end_to_end_grpc_client.py, on a stream in every case; several prompts are its `--batch-inputs`."""
        rows = [prompts] if isinstance(prompts, str) else list(prompts)
        tensors = {
            "text_input": texts(*rows),
            "max_tokens": integers(count),
            "stream": flags(streaming),
            "beam_width": integers(given.pop("beam_width", 1)),
            "temperature": floats(given.pop("temperature", 1.0)),
        }
        excluded = flags(given.pop("exclude_input_in_output", False))
        if order(self.release) >= (0, 16):
            tensors["exclude_input_in_output"] = excluded
        for name in ("bad_words", "stop_words", "embedding_bias_words"):
            if words := given.pop(name, None):
                tensors[name] = np.array([[word.encode() for word in words]], dtype=np.object_)
        if weights := given.pop("embedding_bias_weights", None):
            tensors["embedding_bias_weights"] = np.array([weights], dtype=np.float32)
        tensors.update(self._flags(given, text=True))
        return {
            name: value if len(value) == len(rows) else value.repeat(len(rows), 0) for name, value in tensors.items()
        }

    @staticmethod
    def text_outputs(*flags_given: str, rows: int = 1, sequences: int = 1) -> list[str]:
        """Return the outputs that end_to_end_grpc_client.py requests by name: the text, and those of its flags."""
        names = ["text_output", *(name for flag in flags_given for name in _OUTPUTS_OF[flag])]
        return names + ["batch_index"] * (rows > 1) + ["sequence_index"] * (sequences > 1)

    def benchmark(self, prompt: Sequence[int], count: int) -> Tensors:
        """benchmark_core_model.py: HTTP by default, unary; a gRPC stream with `--decoupled`."""
        return {
            "input_ids": np.array([prompt], dtype=np.int32),
            "input_lengths": integers(len(prompt)),
            "request_output_len": integers(count),
            "pad_id": integers(0),
            "end_id": integers(1),
        }

    def stop(self) -> Tensors:
        """The second request that `--stop-after-ms` sends, under the same request id."""
        return {
            "input_ids": np.zeros((1, 1), dtype=np.int32),
            "input_lengths": integers(0),
            "request_output_len": integers(0),
            "stop": flags(True),
        }

    def _flags(self, given: dict[str, Any], *, text: bool) -> Tensors:
        table = _TEXT if text else _CORE
        for name in given:
            if not self.has(name, text=text):
                raise KeyError(f"The client of release {self.release} has no flag {name}")
        return {name: table[name].make(value) for name, value in given.items()}


NEWEST = ReleaseClient("1.2")
