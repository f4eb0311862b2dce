"""Parts of TensorRT-LLM's interface that this executor does not support, and which of their values are harmless."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from trtserve.executor.interface.configs import CommunicationMode, ExecutorConfig, RequestType
from trtserve.executor.interface.requests import Request

logger = logging.getLogger(__name__)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_none(value: Any) -> bool:
    return value is None


def _is_empty(value: Any) -> bool:
    """True for None, an empty tensor or list, or a list of empty lists."""
    if value is None:
        return True
    if hasattr(value, "size"):
        return bool(value.size == 0)
    return all(hasattr(element, "__len__") and len(element) == 0 for element in value)


@dataclass(frozen=True)
class UnsupportedFeature:
    """A parameter that is accepted but not supported."""

    path: str
    """Attribute path from the request or the configuration."""
    neutral: Callable[[Any], bool]
    """Returns True for values that request nothing."""
    tensor: str = ""
    """Its Triton input or parameter."""

    def is_requested(self, record: Any) -> bool:
        """True when `record` has a value that is not neutral."""
        return not self.neutral(attrgetter(self.path)(record))

    def message(self) -> str:
        """Return the error for a request that uses it."""
        name = self.path.rsplit(".", 1)[-1]
        alias = f" (Triton: {self.tensor})" if self.tensor else ""
        return f"{name}{alias} is not supported by the embedded executor; omit it or give its neutral value"


REQUEST_FEATURES = (
    UnsupportedFeature("sampling_config.beam_width_array", _is_empty),
    UnsupportedFeature("output_config.return_encoder_output", _one_of(False)),
    UnsupportedFeature("output_config.additional_model_outputs", _is_empty),
    UnsupportedFeature("multimodal_input", _is_none),
    UnsupportedFeature("multimodal_embedding", _is_none),
    UnsupportedFeature("mrope_config", _is_none, "mrope_rotary_cos_sin"),
    UnsupportedFeature("lookahead_config", _is_none, "lookahead_window_size"),
    UnsupportedFeature("encoder_input_token_ids", _is_empty),
    UnsupportedFeature("encoder_input_features", _is_empty),
    UnsupportedFeature("type", _one_of(RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION)),
    UnsupportedFeature("context_phase_params", _is_none),
    UnsupportedFeature("cross_attention_mask", _is_empty),
    UnsupportedFeature("eagle_config", _is_none),
    UnsupportedFeature("skip_cross_attn_blocks", _is_empty),
    UnsupportedFeature("language_adapter_uid", _is_none),
)

CONFIG_FEATURES = (
    UnsupportedFeature("kv_cache_config.sink_token_length", _one_of(None, 0)),
    UnsupportedFeature("additional_model_outputs", _is_empty),
    UnsupportedFeature("use_variable_beam_width_search", _one_of(False)),
)
"""Generation logits, guided decoding and adapters are not listed: their settings only permit them to requests."""

DECODING_FEATURES = (
    UnsupportedFeature("medusa_choices", _is_empty),
    UnsupportedFeature("lookahead_decoding_config", _is_none, "lookahead_window_size"),
    UnsupportedFeature("eagle_config", _is_none, "eagle_choices"),
)
"""Fields of `decoding_config`."""


def refuse_unsupported(request: Request) -> None:
    """Raise RuntimeError that names the first unsupported feature that `request` uses."""
    _refuse(REQUEST_FEATURES, request)


def refuse_unsupported_config(config: ExecutorConfig) -> None:
    """Raise RuntimeError that names the first unsupported setting of `config` that would change results."""
    _refuse(CONFIG_FEATURES, config)
    if config.ngram_max_draft_len < 0:
        raise RuntimeError(f"ngram_max_draft_len is {config.ngram_max_draft_len}; expected 0 or more")
    if config.parallel_config and config.parallel_config.communication_mode is CommunicationMode.ORCHESTRATOR:
        raise RuntimeError("communication_mode ORCHESTRATOR is not supported by the embedded executor; use LEADER")
    if config.decoding_config is not None:
        _refuse(DECODING_FEATURES, config.decoding_config)
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if mode and not (mode.isAuto() or mode.isTopKorTopP() or mode.isBeamSearch()):
        raise RuntimeError(f"decoding_mode {mode.name} is not supported by the embedded executor; use auto")


def warn_about_decoding_mode(config: ExecutorConfig) -> None:
    """Log a warning if the decoding mode of `config` does not select the decoder.

    TensorRT-LLM ignores beam search with one beam. A request that does not match an explicit mode has no sampler
    there, and its tokens are undefined; here the request decides.
    """
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if not mode or mode.isAuto() or mode.isTopKandTopP():
        return
    if mode.isBeamSearch():
        if config.max_beam_width == 1:
            logger.warning("decoding_mode beam_search does not fit max_beam_width 1; using top_k_top_p")
        return
    name = "top_k" if mode.isTopK() else "top_p"
    logger.warning("decoding_mode %s is ignored: each request is sampled by its own top_k and top_p", name)
    if config.max_beam_width > 1:
        logger.warning(
            "decoding_mode %s does not fit max_beam_width %d: requests with beams use beam search",
            name,
            config.max_beam_width,
        )


def _refuse(features: Iterable[UnsupportedFeature], record: Any) -> None:
    for feature in features:
        if feature.is_requested(record):
            raise RuntimeError(feature.message())
