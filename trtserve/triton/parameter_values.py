"""Which values a parameter of a Triton model takes, in every runtime.

Source: sections 1, 2 and 5 of the interface reference of the Triton models. Where NVIDIA's backend takes a value that
it cannot read for none, with a warning in its log at most, the value is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from trtserve.errors import UsageError
from trtserve.triton.profiles import BLS, CORE, POSTPROCESSING, PREPROCESSING, Row

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_TREE = re.compile(r"\{[0-9]+(,[0-9]+)*\}(,\{[0-9]+(,[0-9]+)*\})*")
_DEVICES = re.compile(r"[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*")


@dataclass(frozen=True)
class Values:
    """`accepts` tells whether a text is one of them, `expected` says in words which they are.

    `choices` are those among which a runtime may have fewer: every word of an enumeration, or the neutral number.
    """

    expected: str
    accepts: Callable[[str], bool]
    choices: tuple[str, ...] = ()


def _is_integer(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= least


def _integer(least: int, *, neutral: int | None = None) -> Values:
    choices = () if neutral is None else (str(neutral),)
    return Values(f"a whole number of {least} or more", lambda text: _is_integer(text, least), choices)


def _integers(least: int) -> Values:
    return Values(
        f"whole numbers of {least} or more, separated by commas",
        lambda text: all(_is_integer(part, least) for part in text.split(",")),
    )


def _share(*, zero: bool) -> Values:
    """A number up to 1; 0 only with `zero`."""
    return Values(
        f"a number in {'[' if zero else '('}0, 1]",
        lambda text: _NUMBER.fullmatch(text) is not None and 0 <= float(text) <= 1 and (zero or float(text) > 0),
    )


def _one_of(*words: str) -> Values:
    return Values(f"one of {', '.join(words)}", lambda text: text in words, words)


def _matching(pattern: re.Pattern[str], expected: str) -> Values:
    return Values(expected, lambda text: pattern.fullmatch(text) is not None)


_TEXT = Values("any text", lambda _: True)
# The words that the C++ backend and the Python core model read alike.
_SWITCH = replace(_one_of("true", "false", "True", "False", "TRUE", "FALSE", "1", "0"), choices=("true", "false"))
_WORDS = ("true", "1", "t", "y", "yes", "false", "0", "f", "n", "no")
_CHOICE = Values(f"one of {', '.join(_WORDS)}", lambda text: text.lower() in _WORDS)
_CHOICES_TREE = _matching(_TREE, "a tree such as {0},{0,0},{1}")
_DEVICE_LISTS = _matching(_DEVICES, "numbers such as 0,1, or 0,1;2,3 for two instances")

_DECODING_MODES = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search", "medusa")
_LATER_DECODING_MODES = ("redrafter", "lookahead", "eagle")

VALUES: dict[str, dict[str, Values]] = {
    CORE: {
        "max_beam_width": _integer(1, neutral=1),
        "FORCE_CPU_ONLY_INPUT_TENSORS": _one_of("no", "yes"),
        "gpt_model_type": _one_of("inflight_fused_batching", "inflight_batching", "V1", "v1"),
        "gpt_model_path": _TEXT,
        "encoder_model_path": _TEXT,
        "max_tokens_in_paged_kv_cache": _integer(1),
        "max_attention_window_size": _integers(1),
        "sink_token_length": _integer(0, neutral=0),
        "batch_scheduler_policy": _one_of("guaranteed_no_evict", "max_utilization"),
        "kv_cache_free_gpu_mem_fraction": _share(zero=False),
        "cross_kv_cache_fraction": _share(zero=True),
        "kv_cache_host_memory_bytes": _integer(0),
        "kv_cache_onboard_blocks": _SWITCH,
        "exclude_input_in_output": _SWITCH,
        "cancellation_check_period_ms": _integer(1),
        "stats_check_period_ms": _integer(1),
        "iter_stats_max_iterations": _integer(0),
        "request_stats_max_iterations": _integer(0),
        "enable_kv_cache_reuse": _SWITCH,
        "normalize_log_probs": _SWITCH,
        "enable_chunked_context": _SWITCH,
        "gpu_device_ids": _DEVICE_LISTS,
        "participant_ids": _DEVICE_LISTS,
        "num_nodes": _integer(1),
        "lora_cache_optimal_adapter_size": _integer(1),
        "lora_cache_max_adapter_size": _integer(1),
        "lora_cache_gpu_memory_fraction": _share(zero=True),
        "lora_cache_host_memory_bytes": _integer(0),
        "lora_prefetch_dir": _TEXT,
        "decoding_mode": _one_of(*_DECODING_MODES, *_LATER_DECODING_MODES),
        "executor_worker_path": _TEXT,
        "lookahead_window_size": _integer(1),
        "lookahead_ngram_size": _integer(1),
        "lookahead_verification_set_size": _integer(0),
        "medusa_choices": _CHOICES_TREE,
        "eagle_choices": _CHOICES_TREE,
        "gpu_weights_percent": _share(zero=True),
        "enable_context_fmha_fp32_acc": _SWITCH,
        "multi_block_mode": _SWITCH,
        "cuda_graph_mode": _SWITCH,
        "cuda_graph_cache_size": _integer(0),
        "speculative_decoding_fast_logits": _SWITCH,
        "tokenizer_dir": _TEXT,
        "guided_decoding_backend": _one_of("xgrammar"),
        "xgrammar_tokenizer_info_path": _TEXT,
        "enable_trt_overlap": _SWITCH,
    },
    PREPROCESSING: {"add_special_tokens": _CHOICE, "max_num_images": _integer(1)},
    POSTPROCESSING: {"skip_special_tokens": _CHOICE},
    BLS: {"accumulate_tokens": _CHOICE},
}
_REQUIRED = ("gpt_model_type", "gpt_model_path")
"""Parameters of the core model without which it does not load; the others are unset by an empty text."""


def values_of(model: str, name: str, release: str) -> Values:
    """The values of parameter `name` of `model` in `release`; any text for folders and names of models."""
    if name == "decoding_mode" and not Row(since="0.16").within(release):
        return _one_of(*_DECODING_MODES)
    if name == "max_attention_window_size" and not Row(since="0.13").within(release):
        return _integer(1)
    return VALUES.get(model, {}).get(name, _TEXT)


def require_value(key: str, value: str, *, model: str, name: str, release: str) -> None:
    """UsageError when `value`, given under `key`, is none that the parameter takes."""
    if not value.strip():
        if model == CORE and name in _REQUIRED:
            raise UsageError(f"--set {key}= is empty; the core model does not load without it.")
        return
    values = values_of(model, name, release)
    if not values.accepts(value.strip()):
        raise UsageError(f"--set {key}={value}: expected {values.expected}.")
