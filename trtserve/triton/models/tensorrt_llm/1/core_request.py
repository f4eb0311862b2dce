"""How the input tensors of one Triton request become executor requests, one per batch row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from executor_module import ExecutorModule
from numpy.typing import NDArray

Inputs = dict[str, NDArray[Any]]

# The table of the executor reference, section 5.2: keyword of SamplingConfig ← tensors (older name last).
_SAMPLING = {
    "top_k": ("runtime_top_k",),
    "temperature": ("temperature",),
    "repetition_penalty": ("repetition_penalty",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "length_penalty": ("len_penalty",),
    "beam_search_diversity_rate": ("beam_search_diversity_rate",),
    "early_stopping": ("early_stopping",),
    "top_p_min": ("runtime_top_p_min",),
    "top_p_reset_ids": ("runtime_top_p_reset_ids",),
    "top_p_decay": ("runtime_top_p_decay",),
    "min_tokens": ("min_tokens", "min_length"),
    "seed": ("seed", "random_seed"),
}
_BEFORE_0_13 = {"min_tokens": "min_length", "seed": "random_seed"}
_GUIDES = {"json": "JSON", "json_schema": "JSON_SCHEMA", "regex": "REGEX", "ebnf_grammar": "EBNF_GRAMMAR"}


class RequestFactory:
    """Builds executor requests; ValueError, TypeError or RuntimeError explain inputs that cannot be one."""

    def __init__(self, module: ExecutorModule, *, decoupled: bool, exclude_input: bool) -> None:
        self._module = module
        self._decoupled = decoupled
        self._exclude_input = exclude_input

    def requests(self, inputs: Inputs) -> list[Any]:
        """One executor request per batch row."""
        ids = inputs.get("input_ids")
        if ids is None or ids.ndim != 2 or ids.size == 0:
            raise ValueError("Invalid format for input_ids: expected a tensor [batch, length] with at least one token.")
        batch = ids.shape[0]
        self._check_policy(inputs, batch)
        return [
            self._request({name: _row(name, value, row, batch) for name, value in inputs.items()})
            for row in range(batch)
        ]

    def _check_policy(self, inputs: Inputs, batch: int) -> None:
        if self._decoupled:
            return
        if bool(np.any(inputs.get("streaming", False))):
            raise ValueError("Streaming is only supported in decoupled mode.")
        if batch > 1:
            raise ValueError(f"Batch size {batch} needs the decoupled transaction policy; this model answers once.")
        if int(np.max(inputs.get("num_return_sequences", 1))) > 1:
            raise ValueError("num_return_sequences above 1 needs the decoupled transaction policy.")

    def _request(self, row: Inputs) -> Any:
        api = self._module.api
        length = int(_scalar(row, "input_lengths", row["input_ids"].size))
        tokens = row["input_ids"][:length].tolist()
        keywords = _given(
            end_id=_scalar(row, "end_id"),
            pad_id=_scalar(row, "pad_id"),
            bad_words=_words(row, "bad_words_list"),
            stop_words=_words(row, "stop_words_list"),
            embedding_bias=self._tensor(row, "embedding_bias"),
            prompt_tuning_config=self._prompt_tuning(row, len(tokens)),
            lora_config=self._lora(row),
            external_draft_tokens_config=self._draft(row),
            lookahead_config=self._lookahead(row),
            kv_cache_retention_config=self._retention(row),
            guided_decoding_params=self._guide(row),
            encoder_input_features=self._tensor(row, "encoder_input_features"),
            cross_attention_mask=self._tensor(row, "cross_attention_mask"),
            skip_cross_attn_blocks=self._tensor(row, "skip_cross_attn_blocks"),
            mrope_config=self._mrope(row),
        )
        sequences = int(_scalar(row, "num_return_sequences", 0))
        if sequences and not self._module.since("0.16"):
            keywords["num_return_sequences"] = sequences
        limit = "max_tokens" if self._module.since("0.13") else "max_new_tokens"
        keywords[limit] = _required(row, "request_output_len")
        return api.Request(
            input_token_ids=tokens,
            streaming=bool(_scalar(row, "streaming", False)),
            sampling_config=self._sampling(row, sequences),
            output_config=api.OutputConfig(**self._outputs(row)),
            **keywords,
        )

    def _sampling(self, row: Inputs, sequences: int) -> Any:
        keywords = _given(**{keyword: _either(row, names) for keyword, names in _SAMPLING.items()})
        if not self._module.since("0.13"):
            keywords = {_BEFORE_0_13.get(name, name): value for name, value in keywords.items()}
        if "early_stopping" in keywords:
            keywords["early_stopping"] = int(keywords["early_stopping"])
        top_p = _scalar(row, "runtime_top_p", 0.0)
        if top_p > 0:
            keywords["top_p"] = top_p
        if sequences and self._module.since("0.16"):
            keywords["num_return_sequences"] = sequences
        return self._module.api.SamplingConfig(beam_width=int(_scalar(row, "beam_width", 0)) or 1, **keywords)

    def _outputs(self, row: Inputs) -> dict[str, bool]:
        names = ("return_log_probs", "return_context_logits", "return_generation_logits")
        keywords = {name: bool(_scalar(row, name, False)) for name in names}
        keywords["exclude_input_from_output"] = bool(_scalar(row, "exclude_input_in_output", self._exclude_input))
        if self._module.since("0.16"):
            metrics = _either(row, ("return_perf_metrics", "return_kv_cache_reuse_stats"))
            keywords["return_perf_metrics"] = bool(metrics)
        return keywords

    def _tensor(self, row: Inputs, name: str) -> Any:
        value = row.get(name)
        return None if value is None or value.size == 0 else self._module.as_tensor(value)

    def _prompt_tuning(self, row: Inputs, length: int) -> Any:
        table = self._tensor(row, "prompt_embedding_table")
        if table is None:
            return None
        extra = row.get("prompt_table_extra_ids")
        if extra is None or extra.size == 0:
            return self._module.api.PromptTuningConfig(table)
        return self._module.api.PromptTuningConfig(table, extra[:length].tolist())

    def _lora(self, row: Inputs) -> Any:
        task = _scalar(row, "lora_task_id")
        if task is None:
            return None
        weights, config = self._tensor(row, "lora_weights"), self._tensor(row, "lora_config")
        return self._module.api.LoraConfig(task, weights, config)

    def _draft(self, row: Inputs) -> Any:
        tokens = row.get("draft_input_ids")
        if tokens is None or tokens.size == 0:
            return None
        logits = self._tensor(row, "draft_logits")
        threshold = _scalar(row, "draft_acceptance_threshold")
        return self._module.api.ExternalDraftTokensConfig(tokens.tolist(), logits, threshold)

    def _lookahead(self, row: Inputs) -> Any:
        names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
        if not any(name in row for name in names):
            return None
        return self._module.api.LookaheadDecodingConfig(*(_required(row, name) for name in names))

    def _guide(self, row: Inputs) -> Any:
        kind, guide = row.get("guided_decoding_guide_type"), row.get("guided_decoding_guide")
        if kind is None or kind.size == 0:
            return None
        word = kind.reshape(-1)[0].decode("utf-8")
        if word not in _GUIDES:
            raise ValueError(f"guided_decoding_guide_type is {word!r}; expected one of {', '.join(_GUIDES)}.")
        params = self._module.api.GuidedDecodingParams
        text = None if guide is None or guide.size == 0 else guide.reshape(-1)[0].decode("utf-8")
        return params(getattr(params.GuideType, _GUIDES[word]), text)

    def _retention(self, row: Inputs) -> Any:
        if not any(name.startswith("retention_") for name in row):
            return None
        config = self._module.api.KvCacheRetentionConfig
        names = ("starts", "ends", "priorities", "durations_ms")
        starts, ends, priorities, durations = (_list(row, f"retention_token_range_{name}") for name in names)
        if not len(starts) == len(ends) == len(priorities) or len(durations) not in (0, len(starts)):
            raise ValueError("retention_token_range_starts, _ends and _priorities must have the same length.")
        durations = durations or [-1] * len(starts)
        ranges = [
            config.TokenRangeRetentionConfig(start, _unless_negative(end), priority, _milliseconds(duration))
            for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
        ]
        priority = _scalar(row, "retention_decode_priority", 35)
        return config(ranges, priority, _milliseconds(_scalar(row, "retention_decode_duration_ms", -1)))

    def _mrope(self, row: Inputs) -> Any:
        table = self._tensor(row, "mrope_rotary_cos_sin")
        if table is None:
            return None
        return self._module.api.MropeConfig(table, _required(row, "mrope_position_deltas"))


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


def _row(name: str, value: NDArray[Any], row: int, batch: int) -> NDArray[Any]:
    """The part of `value` that belongs to batch row `row`; scalars arrive as [batch] or [batch, 1]."""
    if value.ndim == 0 or value.shape[0] != batch:
        raise ValueError(f"{name} has shape {list(value.shape)}; its first dimension must be the batch size {batch}.")
    return np.asarray(value[row])


def _scalar(row: Inputs, name: str, default: Any = None) -> Any:
    value = row.get(name)
    if value is None:
        return default
    if value.size != 1:
        raise ValueError(f"Expected a scalar tensor for tensor {name}, got {value.size} values.")
    return value.reshape(()).item()


def _required(row: Inputs, name: str) -> Any:
    value = _scalar(row, name)
    if value is None:
        raise ValueError(f"{name} is required.")
    return value


def _either(row: Inputs, names: Sequence[str]) -> Any:
    """The value under any of the names that releases gave one setting."""
    values = {name: value for name in names if (value := _scalar(row, name)) is not None}
    if len(set(values.values())) > 1:
        told = " and ".join(f"{name} {value}" for name, value in values.items())
        raise ValueError(f"Two names of one setting were given with different values: {told}.")
    return next(iter(values.values()), None)


def _list(row: Inputs, name: str) -> list[int]:
    value = row.get(name)
    return [] if value is None else [int(item) for item in value.reshape(-1)]


def _unless_negative(value: int) -> int | None:
    return None if value < 0 else value


def _milliseconds(value: int) -> Any:
    from datetime import timedelta

    return None if value < 0 else timedelta(milliseconds=value)


def _words(row: Inputs, name: str) -> list[list[int]] | None:
    """Words [2, n] (ids in a row; running ends, padded with -1) as lists of ids; None when there is no word."""
    value = row.get(name)
    if value is None or value.size == 0:
        return None
    if value.ndim != 2 or value.shape[0] != 2:
        raise ValueError(f"{name} has shape [batch, {', '.join(map(str, value.shape))}]; expected [batch, 2, n].")
    ids, ends = value.tolist()
    used = ends[: ends.index(-1)] if -1 in ends else ends
    starts = [0, *used[:-1]]
    padded = any(end != -1 for end in ends[len(used) :])
    if padded or any(start >= end for start, end in zip(starts, used, strict=False)) or (used and used[-1] > len(ids)):
        raise ValueError(
            f"{name} has offsets {ends}; they must rise, end within the {len(ids)} ids, and be padded with -1."
        )
    return [ids[start:end] for start, end in zip(starts, used, strict=False)] or None
