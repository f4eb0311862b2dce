"""Build executor requests from the input tensors of a Triton request, one per batch row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.arrays import decoded
from ..shared.files import read_json, read_object
from ..shared.parameters import ModelParameters
from .settings import ExecutorModule, given

Inputs = dict[str, NDArray[Any]]

_MOST_WORD_IDS = 1 << 16  # of a request's stop words, and of its bad words
_MOST_IMAGES = 64  # as in the gateway
_MOST_IDS = 1 << 20  # of a sequence, when the engine does not name its longest


class Row:
    """One batch row; it remembers which tensors were read, so that unsupported ones can be refused."""

    def __init__(self, tensors: Inputs, longest: int) -> None:
        """`longest` is the most ids that `integers` returns."""
        self._tensors, self._longest = tensors, longest
        self._read: set[str] = set()

    def array(self, name: str) -> NDArray[Any] | None:
        """Return the tensor, or None when it is absent or empty."""
        self._read.add(name)
        value = self._tensors.get(name)
        return None if value is None or value.size == 0 else value

    def scalar(self, name: str, default: Any = None) -> Any:
        """Return the only element, or `default` when the tensor is absent. Raises ValueError for several elements."""
        self._read.add(name)
        value = self._tensors.get(name)
        if value is None:
            return default
        if value.size != 1:
            raise ValueError(f"Expected a scalar tensor for tensor {name}, got {value.size} values.")
        return value.reshape(()).item()

    def required(self, name: str) -> Any:
        """Return the only element. Raises ValueError when the tensor is absent."""
        value = self.scalar(name)
        if value is None:
            raise ValueError(f"{name} is required.")
        return value

    def either(self, names: Sequence[str]) -> Any:
        """Return the value under any of `names`, which releases used for one setting.

        Raises ValueError when two differ.
        """
        values = {name: value for name in names if (value := self.scalar(name)) is not None}
        if len(set(values.values())) > 1:
            given = " and ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"Two names of one setting were given with different values: {given}.")
        return next(iter(values.values()), None)

    def integers(self, name: str, count: int | None = None) -> list[int]:
        """Return all elements or the first `count`, or [] when the tensor is absent.

        Raises ValueError for more than the longest sequence has: a list of millions would hold up every request.
        """
        value = self.array(name)
        if value is None:
            return []
        value = value.reshape(-1)[:count]
        if value.size > self._longest:
            raise ValueError(
                f"{name} has {value.size} ids, which exceeds maximum input length: at most {self._longest} are allowed."
            )
        return list(value.tolist())

    def text(self, name: str) -> str | None:
        """Return the first element, or None when it is absent or "". Raises ValueError when it is not UTF-8."""
        value = self.array(name)
        return None if value is None else decoded(value.reshape(-1)[0], name) or None

    def words(self, name: str) -> list[list[int]] | None:
        """Read a word list [2, n]: all ids, and the end offset of each word, padded with -1.

        Returns None when there are no words.
        """
        value = self.array(name)
        if value is None:
            return None
        if value.shape[-1] > _MOST_WORD_IDS:
            raise ValueError(f"{name} has {value.shape[-1]} ids; at most {_MOST_WORD_IDS} are allowed.")
        if value.ndim != 2 or value.shape[0] != 2:
            raise ValueError(f"{name} has shape [batch, {', '.join(map(str, value.shape))}]; expected [batch, 2, n].")
        ids, ends = value.tolist()
        used = ends[: ends.index(-1)] if -1 in ends else ends
        starts = [0, *used[:-1]]
        padded = any(end != -1 for end in ends[len(used) :])
        rising = all(start < end for start, end in zip(starts, used, strict=False))
        if padded or not rising or (used and used[-1] > len(ids)):
            raise ValueError(
                f"{name} has offsets {ends[:100]}; they must rise, end within the {len(ids)} ids, and be padded by -1."
            )
        return [ids[start:end] for start, end in zip(starts, used, strict=False)] or None

    def is_set(self, name: str) -> bool:
        """Return whether the tensor has a value other than 0, False and "", which clients send as neutral values."""
        value = self._tensors.get(name)
        return value is not None and bool(np.any(value))

    def unread(self) -> list[str]:
        """Return the names of tensors with a value that is not neutral and that were not read."""
        return [name for name in self._tensors if name not in self._read and self.is_set(name)]


def rows_of(inputs: Inputs, batch: int, longest: int) -> list[Row]:
    """Split a batch into rows; ValueError names a tensor whose first dimension is not `batch`."""
    for name, value in inputs.items():
        if value.ndim == 0 or value.shape[0] != batch:
            raise ValueError(
                f"{name} has shape {list(value.shape)}; its first dimension must be the batch size {batch}."
            )
    rows = ({name: np.asarray(value[index]) for name, value in inputs.items()} for index in range(batch))
    return [Row(tensors, longest) for tensors in rows]


# Keyword of SamplingConfig ← names of the tensor, the older name last.
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
    "min_p": ("min_p",),
    "min_tokens": ("min_tokens", "min_length"),
    "seed": ("seed", "random_seed"),
}
_BEFORE_0_13 = {"min_tokens": "min_length", "seed": "random_seed"}
_GUIDES = {"json": "JSON", "json_schema": "JSON_SCHEMA", "regex": "REGEX", "ebnf_grammar": "EBNF_GRAMMAR"}
_SKIPPED_BLOCKS = "skip_cross_attn_blocks"
_RETENTION_PRIORITY = 35  # default of TensorRT-LLM
# Input → the other input that it needs.
_NEEDS = {
    "lora_weights": "lora_task_id",
    "lora_config": "lora_task_id",
    "draft_logits": "draft_input_ids",
    "draft_acceptance_threshold": "draft_input_ids",
    "guided_decoding_guide": "guided_decoding_guide_type",
    "mrope_position_deltas": "mrope_rotary_cos_sin",
    "prompt_table_extra_ids": "prompt_embedding_table",
    "encoder_output_lengths": "encoder_input_features",
    "cross_attention_mask": "encoder_input_features",
}
# Inputs that `model.py` reads for the whole batch, and inputs that TensorRT-LLM ignores too: a prompt table has its own
# size, and decoder ids are used without their length.
_NOT_FOR_THE_REQUEST = {
    "stop", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "prompt_vocab_size",
    "decoder_input_lengths",
}  # fmt: skip


class RequestFactory:
    """Builds executor requests. Raises ValueError, TypeError or RuntimeError for inputs that are not valid."""

    def __init__(
        self,
        module: ExecutorModule,
        *,
        decoupled: bool,
        exclude_input: bool,
        vocabulary: int | None = None,
        longest: int = _MOST_IDS,
    ) -> None:
        """`longest` is the most ids of a sequence.

        `vocabulary` is the size by which prompt ids are wrapped; None leaves them to the executor's check.
        """
        self._module = module
        self._vocabulary, self._longest = vocabulary, longest
        self._decoupled = decoupled
        self._exclude_input = exclude_input

    def requests(self, inputs: Inputs) -> list[Any]:
        """Return one executor request per batch row."""
        ids = inputs.get("input_ids")
        if ids is None or ids.ndim != 2 or ids.size == 0:
            raise ValueError("Invalid format for input_ids: expected a tensor [batch, length] with at least one token.")
        batch = ids.shape[0]
        self._check_policy(inputs, batch)
        return [self._request(row) for row in rows_of(inputs, batch, self._longest)]

    def _check_policy(self, inputs: Inputs, batch: int) -> None:
        if self._decoupled:
            return
        if bool(np.any(inputs.get("streaming", False))):
            raise ValueError("Streaming is only supported in decoupled mode.")
        if batch > 1:
            raise ValueError(f"Batch size {batch} needs the decoupled transaction policy; this model answers once.")
        beams = int(np.max(inputs.get("beam_width", 1)))  # with beams, all sequences come back in one response
        if beams <= 1 and (count := int(np.max(inputs.get("num_return_sequences", 1)))) > 1:
            raise ValueError(
                f"num_return_sequences is {count}, which needs the decoupled transaction policy: each sequence is a "
                "response, and this model answers once. Make the repository with streaming, or ask once per sequence."
            )

    def _request(self, row: Row) -> Any:
        keywords, tops, prompt = self._keywords(row), self._tops(row), self._named(row, "return_prompt_log_probs")
        images = row.array("images")
        if images is not None and self._module.torch is not None:
            raise ValueError("images needs the vllm runtime.")
        ids = row.array("decoder_input_ids")
        if ids is not None and bool(np.any(ids != row.scalar("pad_id", 0))):
            raise ValueError("decoder_input_ids (decoder_text_input) was given, but this is a decoder-only model.")
        for name in row.unread():
            if name not in _NOT_FOR_THE_REQUEST:
                raise ValueError(
                    f"{name} needs {_NEEDS[name]}, which was not given."
                    if name in _NEEDS
                    else f"{name} is not supported by this model; leave it out or give its neutral value."
                )
        request = self._module.api.Request(**keywords)
        if tops:
            request.top_log_probs = tops
        if prompt:
            request.prompt_log_probs = True
        if images is not None:
            if images.size > _MOST_IMAGES:
                raise ValueError(f"images has {images.size} files; at most {_MOST_IMAGES} are allowed.")
            request.images = images.reshape(-1).tolist()
        return request

    def _named(self, row: Row, name: str) -> int:
        """Return an input of the vllm runtime that goes with log-probabilities."""
        value = int(row.scalar(name, 0))
        if value and (self._module.torch is not None or not row.is_set("return_log_probs")):
            raise ValueError(f"{name} needs return_log_probs, and the vllm runtime.")
        return value

    def _tops(self, row: Row) -> int:
        """Return how many of the most likely tokens are wanted with each log-probability."""
        tops = self._named(row, "num_top_log_probs")
        if tops < 0:
            raise ValueError(f"num_top_log_probs is {tops}; expected 0 or more.")
        return tops

    def _keywords(self, row: Row) -> dict[str, Any]:
        tokens = _prompt(row)
        if self._vocabulary is not None and row.array("prompt_embedding_table") is None:  # whose rows have the next ids
            tokens = [token % self._vocabulary for token in tokens]
        sequences = int(row.scalar("num_return_sequences", 0))
        keywords = given(
            end_id=row.scalar("end_id"),
            pad_id=row.scalar("pad_id"),
            bad_words=row.words("bad_words_list"),
            stop_words=row.words("stop_words_list"),
            embedding_bias=self._tensor(row, "embedding_bias"),
            prompt_tuning_config=self._prompt_tuning(row, len(tokens)),
            lora_config=self._lora(row),
            external_draft_tokens_config=self._draft(row),
            lookahead_config=self._lookahead(row),
            kv_cache_retention_config=self._retention(row),
            guided_decoding_params=self._guide(row),
            skip_cross_attn_blocks=self._tensor(row, _SKIPPED_BLOCKS) if row.is_set(_SKIPPED_BLOCKS) else None,
            mrope_config=self._mrope(row),
            **self._encoder(row),
        )
        if sequences and not self._module.since("0.16"):
            keywords["num_return_sequences"] = sequences
        limit = "max_tokens" if self._module.since("0.13") else "max_new_tokens"
        keywords[limit] = row.required("request_output_len")
        return {
            "input_token_ids": tokens,
            "streaming": bool(row.scalar("streaming", False)),
            "sampling_config": self._sampling(row, sequences),
            "output_config": self._module.api.OutputConfig(**self._outputs(row)),
            **keywords,
        }

    def _sampling(self, row: Row, sequences: int) -> Any:
        keywords = given(**{keyword: row.either(names) for keyword, names in _SAMPLING.items()})
        if not self._module.since("0.13"):
            keywords = {_BEFORE_0_13.get(name, name): value for name, value in keywords.items()}
        if "early_stopping" in keywords:
            keywords["early_stopping"] = int(keywords["early_stopping"])
        top_p = row.scalar("runtime_top_p", 0.0)
        if top_p != 0:  # the executor refuses what is no probability
            keywords["top_p"] = top_p
        if sequences and self._module.since("0.16"):
            keywords["num_return_sequences"] = sequences
        return self._module.api.SamplingConfig(beam_width=int(row.scalar("beam_width", 0)) or 1, **keywords)

    def _outputs(self, row: Row) -> dict[str, bool]:
        names = ("return_log_probs", "return_context_logits", "return_generation_logits")
        keywords = {name: bool(row.scalar(name, False)) for name in names}
        keywords["exclude_input_from_output"] = bool(row.scalar("exclude_input_in_output", self._exclude_input))
        if self._module.since("0.16"):
            metrics = row.either(("return_perf_metrics", "return_kv_cache_reuse_stats"))
            keywords["return_perf_metrics"] = bool(metrics)
        return keywords

    def _tensor(self, row: Row, name: str) -> Any:
        value = row.array(name)
        return None if value is None else self._module.as_tensor(value)

    def _encoder(self, row: Row) -> dict[str, Any]:
        features = self._tensor(row, "encoder_input_features")
        if features is None:
            return {}
        return given(
            encoder_input_features=features,
            encoder_output_length=row.scalar("encoder_output_lengths"),
            cross_attention_mask=self._tensor(row, "cross_attention_mask"),
        )

    def _prompt_tuning(self, row: Row, length: int) -> Any:
        table = self._tensor(row, "prompt_embedding_table")
        if table is None:
            return None
        extra = row.integers("prompt_table_extra_ids", length)
        if not extra:
            return self._module.api.PromptTuningConfig(table)
        return self._module.api.PromptTuningConfig(table, extra)

    def _lora(self, row: Row) -> Any:
        task = row.scalar("lora_task_id")
        if task is None:
            return None
        weights, config = self._tensor(row, "lora_weights"), self._tensor(row, "lora_config")
        return self._module.api.LoraConfig(task, weights, config)

    def _draft(self, row: Row) -> Any:
        tokens = row.integers("draft_input_ids")
        if not tokens:
            return None
        logits = self._tensor(row, "draft_logits")
        threshold = row.scalar("draft_acceptance_threshold")
        return self._module.api.ExternalDraftTokensConfig(tokens, logits, threshold)

    def _lookahead(self, row: Row) -> Any:
        names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
        if not any(row.is_set(name) for name in names):
            return None
        return self._module.api.LookaheadDecodingConfig(*(row.required(name) for name in names))

    def _guide(self, row: Row) -> Any:
        kind = row.text("guided_decoding_guide_type")
        if kind is None:
            return None
        if kind not in _GUIDES:
            raise ValueError(f"guided_decoding_guide_type is {kind!r}; expected one of {', '.join(_GUIDES)}.")
        guide = row.text("guided_decoding_guide")
        if kind == "json" and guide:
            raise ValueError("guided_decoding_guide_type json allows any JSON and takes no guided_decoding_guide.")
        params = self._module.api.GuidedDecodingParams
        return params(getattr(params.GuideType, _GUIDES[kind]), guide)

    def _retention(self, row: Row) -> Any:
        names = ("starts", "ends", "priorities", "durations_ms")
        starts, ends, priorities, durations = (row.integers(f"retention_token_range_{name}") for name in names)
        decode_priority = row.scalar("retention_decode_priority", _RETENTION_PRIORITY)
        decode_duration = _milliseconds(row.scalar("retention_decode_duration_ms", -1))
        if not len(starts) == len(ends) == len(priorities) or len(durations) not in (0, len(starts)):
            raise ValueError(
                "retention_token_range_starts, _ends and _priorities must have the same length, and _durations_ms too "
                "when it is given."
            )
        if not starts and decode_priority == _RETENTION_PRIORITY and decode_duration is None:
            return None
        config = self._module.api.KvCacheRetentionConfig
        durations = durations or [-1] * len(starts)
        ranges = [
            config.TokenRangeRetentionConfig(start, None if end < 0 else end, priority, _milliseconds(duration))
            for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
        ]
        return config(ranges, decode_priority, decode_duration)

    def _mrope(self, row: Row) -> Any:
        table = self._tensor(row, "mrope_rotary_cos_sin")
        if table is None:
            return None
        return self._module.api.MropeConfig(table, row.required("mrope_position_deltas"))


def _prompt(row: Row) -> list[int]:
    ids = row.array("input_ids")
    size = 0 if ids is None else ids.size
    length = int(row.scalar("input_lengths", size))
    if not 1 <= length <= size:
        raise ValueError(f"input_lengths is {length}; expected 1 … {size}, the ids that the row of input_ids has.")
    return row.integers("input_ids", length)


def most_ids(engine: Path) -> int:
    """Return how many ids a tensor may have: the engine's `max_seq_len`, or 2^20 when it names none.

    It is at least 2^17, which takes no time to read: what is only a little too long is refused in the engine's words.
    """
    build = read_object(engine / "config.json").get("build_config") or {}
    return max(int(build.get("max_seq_len") or _MOST_IDS), 1 << 17)


def vocabulary_to_wrap(parameters: ModelParameters, engine: Path) -> int | None:
    """Return the engine's vocabulary size if `out_of_vocabulary_ids` is `wrap`, else None.

    Raises ValueError for another word.
    """
    asked = parameters.text("out_of_vocabulary_ids") or "refuse"
    if asked not in ("refuse", "wrap"):
        raise ValueError(f"Parameter out_of_vocabulary_ids is {asked!r}; expected refuse or wrap.")
    if asked == "refuse":
        return None
    config = read_json(engine / "config.json")
    return int(config["pretrained_config"]["vocab_size"])


def _milliseconds(value: int) -> Any:
    from datetime import timedelta

    return None if value < 0 else timedelta(milliseconds=value)
