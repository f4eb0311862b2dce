"""The settings of a BLS model, its inputs, and what they become for the models that it calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..shared.arrays import Tensors
from ..shared.files import read_json
from ..shared.inner_models import InnerModelError, call, call_streamed, stop_request
from ..shared.lora_names import NOT_CACHED, LoraNames, name_of


@dataclass(frozen=True, kw_only=True)
class BlsSettings:
    """Names of the models that a BLS model calls, and how it works with them."""

    core: str
    lora: LoraNames
    inputs: frozenset[str] = frozenset()  # the BLS model's own inputs
    outputs: tuple[str, ...] = ()  # the BLS model's own outputs, without `text_output`
    accumulate: bool = False  # whether each streamed response holds the whole text so far
    exclude_input: bool = False  # whether the core model leaves the prompt out when a request does not say
    longest: int | None = None
    """max_seq_len of the engine: most tokens of prompt and answer, or None when it is unknown."""
    draft: str | None = None
    draft_longest: int | None = None  # max_seq_len of the draft engine, or None when it is unknown
    preprocessing: str = "preprocessing"
    postprocessing: str = "postprocessing"
    pushed: bool = False
    """Whether the core model sends several answers to one call (NVIDIA's C++ backend), instead of being asked for
    each."""

    @property
    def always_indexed(self) -> bool:
        """Whether each answer has a batch_index: for clients of all releases, and in 0.12 and 0.13."""
        return {"seed", "random_seed"} <= self.inputs or "sequence_index" not in self.outputs

    @property
    def seed_input(self) -> str:
        """The release's name of the seed."""
        return "seed" if "seed" in self.inputs else "random_seed"

    @property
    def min_tokens_input(self) -> str:
        """The release's name of the minimum number of new tokens."""
        return "min_tokens" if "min_tokens" in self.inputs else "min_length"


def engine_length(repository: Path, model: str) -> int | None:
    """Return max_seq_len of the engine in the folder of `model`, or None when it is in another place."""
    try:
        config = read_json(repository / model / "1" / "config.json")
        return int(config["build_config"]["max_seq_len"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "pad_id": "PAD_ID",
    "end_id": "END_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "image_bytes_input": "IMAGE_BYTES",
    "image_url_input": "IMAGE_URL",
    "video_bytes_input": "VIDEO_BYTES",
}
PREPROCESSING_OUTPUTS = (
    "INPUT_ID", "REQUEST_INPUT_LEN", "DECODER_INPUT_ID", "BAD_WORDS_IDS", "STOP_WORDS_IDS", "EMBEDDING_BIAS",
    "OUT_END_ID", "OUT_PAD_ID",
)  # fmt: skip
PROMPT_TABLE_OUTPUT = "OUT_PROMPT_TABLE_EXTRA_IDS"

CORE_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
CORE = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    **{
        name: name
        for name in (
            "beam_width",
            "temperature",
            "repetition_penalty",
            "min_length",
            "min_tokens",
            "presence_penalty",
            "frequency_penalty",
            "random_seed",
            "seed",
            "num_return_sequences",
            "return_log_probs",
            "return_context_logits",
            "return_generation_logits",
            "return_perf_metrics",
            "return_kv_cache_reuse_stats",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "return_finish_reason",
            "prompt_embedding_table",
            "prompt_vocab_size",
            "lora_task_id",
            "lora_weights",
            "lora_config",
            "exclude_input_in_output",
            "guided_decoding_guide_type",
            "guided_decoding_guide",
        )
    },
}


_ONLY_WITH_DRAFTS = ("use_draft_logits", "draft_acceptance_threshold")
_NOT_WITH_DRAFTS = {
    "stream": "streaming is not supported with speculative decoding",
    "return_context_logits": "context logits are not supported with speculative decoding",
    # Each round is its own request: the draft model cannot use the table's ids, and a guide would start again.
    "prompt_vocab_size": "prompt_vocab_size is not supported with speculative decoding",
    "guided_decoding_guide_type": "guided decoding is not supported with speculative decoding",
}
_ONCE_WITH_DRAFTS = ("beam_width", "num_return_sequences")


def is_set(inputs: Tensors, name: str) -> bool:
    """Return whether an input has a value other than 0, False and "", which clients send as neutral values."""
    return name in inputs and bool(np.any(inputs[name]))


def largest(inputs: Tensors, name: str, default: int) -> int:
    """Return the largest element of an integer input; `default` when it is absent or empty."""
    value = inputs.get(name)
    return default if value is None or value.size == 0 else int(np.max(value))


def may_answer_repeatedly(inputs: Tensors) -> bool:
    """Return whether the core model may answer the request more than once: streams, several rows, several sequences."""
    rows = len(inputs.get("text_input", ()))
    return is_set(inputs, "stream") or rows > 1 or largest(inputs, "num_return_sequences", 1) > 1


def check(settings: BlsSettings, inputs: Tensors) -> None:
    """Raise ValueError for wrong inputs."""
    if inputs.get("text_input") is None or inputs["text_input"].size == 0:
        raise ValueError("text_input is required")
    limits = inputs.get("max_tokens")
    batch = len(inputs["text_input"])
    if limits is None or limits.size != batch or int(limits.min()) <= 0:
        raise ValueError("max_tokens must be a single value > 0")
    if "image_input" in inputs:
        raise ValueError("image_input was given, but this repository serves a text model without vision parts.")
    if settings.accumulate and (beams := largest(inputs, "beam_width", 1)) > 1:
        raise ValueError(f"accumulate_tokens needs beam_width 1; this request asks for {beams} beams.")
    if is_set(inputs, "prompt_table_extra_id") and "prompt_embedding_table" not in inputs:
        raise ValueError("prompt_table_extra_id needs prompt_embedding_table, which was not given.")
    if largest(inputs, "num_draft_tokens", 0) > 0:
        _check_speculative(settings, inputs, batch)
    elif given := [name for name in _ONLY_WITH_DRAFTS if is_set(inputs, name)]:
        raise ValueError(f"{given[0]} needs num_draft_tokens above 0.")


def _check_speculative(settings: BlsSettings, inputs: Tensors, batch: int) -> None:
    for name, message in _NOT_WITH_DRAFTS.items():
        if is_set(inputs, name):
            raise ValueError(message)
    if "prompt_embedding_table" in inputs:
        raise ValueError("prompt_embedding_table is not supported with speculative decoding")
    for name in _ONCE_WITH_DRAFTS:
        if largest(inputs, name, 1) > 1:
            raise ValueError(f"{name} above 1 is not supported with speculative decoding")
    if batch > 1:
        raise ValueError("batch size above 1 is not supported with speculative decoding")
    if settings.draft is None:
        raise ValueError("cannot perform speculative decoding without draft model")


def core_inputs(settings: BlsSettings, inputs: Tensors, request_id: str) -> Tensors:
    """Call preprocessing, and return its tensors and the client's under the names of the core model."""
    given = {inner: inputs[name] for name, inner in PREPROCESSING.items() if name in inputs}
    wanted = list(PREPROCESSING_OUTPUTS)
    if "prompt_table_extra_id" in inputs:
        wanted.append(PROMPT_TABLE_OUTPUT)
    prepared = call(settings.preprocessing, given, wanted, request_id)
    batch = len(inputs["text_input"])
    result = {CORE_FROM_PREPROCESSING[name]: value for name, value in prepared.items()}
    for name, inner in CORE.items():
        if name in inputs:
            value: Any = inputs[name]
            # Inputs declared with `reshape { }` arrive as [batch]. What NumPy cannot hold (BF16) is a tensor of Triton.
            flat = isinstance(value, np.ndarray) and value.ndim == 1
            result[inner] = value.reshape(batch, 1) if flat else value
    for name in ("return_context_logits", "return_generation_logits"):
        result.setdefault(name, np.zeros((batch, 1), dtype=np.bool_))
    return result


def prompts(inputs: Tensors) -> list[list[int]]:
    """Return the prompt ids of each batch row."""
    lengths = inputs["input_lengths"].reshape(-1)
    return [row[:length].tolist() for row, length in zip(inputs["input_ids"], lengths, strict=True)]


def adapter_of(inputs: Tensors) -> str | None:
    """Return the name in `lora_name`, or None when there is none.

    Raises ValueError when rows differ, or ids are given too.
    """
    name = name_of(inputs.get("lora_name"))
    if name and any(other in inputs for other in ("lora_task_id", "lora_weights", "lora_config")):
        raise ValueError("lora_name and lora_task_id were both given; give only one of them.")
    return name


class CoreModel:
    """Calls the core model under one request id."""

    def __init__(
        self, model: str, request_id: str, *, lora: LoraNames, adapter: str | None, pushed: bool = False
    ) -> None:
        """Raise ValueError for an adapter that the repository does not have."""
        self._pushed = pushed
        self._model = model
        self._request_id = request_id
        self._lora = lora
        self._adapter = adapter
        self._task_id = None if adapter is None else lora.task_id(adapter)

    def answers(self, inputs: Tensors, outputs: Sequence[str]) -> Iterator[Tensors]:
        """Yield every answer with tensors; InnerModelError carries the core model's error message."""
        if self._adapter is None:
            yield from call_streamed(self._model, inputs, outputs, self._request_id, pushed=self._pushed)
            return
        batch = len(inputs["input_ids"])
        inputs = {**inputs, "lora_task_id": np.full((batch, 1), self._task_id, dtype=np.uint64)}
        begun = False
        try:
            for answer in call_streamed(self._model, inputs, outputs, self._request_id, pushed=self._pushed):
                begun = True
                yield answer
        except InnerModelError as error:
            if begun or NOT_CACHED not in str(error):
                raise
            if batch > 1:
                self.stop()  # another row may run, if another request has just sent the adapter
            weights, config = self._lora.tensors(self._adapter)
            tensors = {"lora_weights": np.repeat(weights, batch, axis=0), "lora_config": np.repeat(config, batch, 0)}
            yield from call_streamed(self._model, inputs | tensors, outputs, self._request_id, pushed=self._pushed)

    def stop(self) -> None:
        """Stop what runs under the request id."""
        stop_request(self._model, self._request_id)
