"""Which parts of the interface this executor does not carry out, and the values that ask for nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from trtserve.executor.configs import ExecutorConfig
from trtserve.executor.enums import (
    CommunicationMode,
    DecodingMode010,
    RequestType,
)
from trtserve.executor.requests import Request

logger = logging.getLogger(__name__)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _absent(value: Any) -> bool:
    return value is None


def _nothing(value: Any) -> bool:
    """None, an empty tensor or list, or a list of empty lists."""
    if value is None:
        return True
    if hasattr(value, "size"):
        return bool(value.size == 0)
    return all(hasattr(element, "__len__") and len(element) == 0 for element in value)


@dataclass(frozen=True)
class Unbuilt:
    """A parameter that is declared but not carried out; `neutral` tells the values that ask for nothing.

    `path` leads to it from the request or the configuration, `tensor` is its Triton input or parameter.
    """

    path: str
    neutral: Callable[[Any], bool]
    tensor: str = ""

    def asked_by(self, record: Any) -> bool:
        """True when `record` asks for it."""
        return not self.neutral(attrgetter(self.path)(record))

    def message(self) -> str:
        """The error for a value that asks for it."""
        name = self.path.rsplit(".", 1)[-1]
        alias = f" (Triton: {self.tensor})" if self.tensor else ""
        return f"{name}{alias} is not supported by the embedded executor; leave it out or give its neutral value"


REQUEST_FEATURES = (
    Unbuilt("sampling_config.beam_width_array", _nothing),
    Unbuilt("output_config.return_encoder_output", _one_of(False)),
    Unbuilt("output_config.additional_model_outputs", _nothing),
    Unbuilt("multimodal_input", _absent),
    Unbuilt("multimodal_embedding", _absent),
    Unbuilt("mrope_config", _absent, "mrope_rotary_cos_sin"),
    Unbuilt("lookahead_config", _absent, "lookahead_window_size"),
    Unbuilt("encoder_input_token_ids", _nothing),
    Unbuilt("encoder_input_features", _nothing),
    Unbuilt("type", _one_of(RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION)),
    Unbuilt("context_phase_params", _absent),
    Unbuilt("cross_attention_mask", _nothing),
    Unbuilt("eagle_config", _absent),
    Unbuilt("skip_cross_attn_blocks", _nothing),
    Unbuilt("language_adapter_uid", _absent),
)

CONFIG_FEATURES = (
    Unbuilt("kv_cache_config.sink_token_length", _one_of(None, 0)),
    Unbuilt("medusa_choices", _nothing),
    Unbuilt("decoding_mode", lambda mode: mode is not DecodingMode010.MEDUSA),
    Unbuilt("additional_model_outputs", _nothing),
    Unbuilt("use_variable_beam_width_search", _one_of(False)),
)
"""Logits of the generation, guided decoding and adapters are permissions: requests that lack them are refused."""

DECODING_FEATURES = (
    Unbuilt("medusa_choices", _nothing),
    Unbuilt("lookahead_decoding_config", _absent, "lookahead_window_size"),
    Unbuilt("eagle_config", _absent, "eagle_choices"),
)
"""Of `decoding_config`, where there is one."""


def refuse_unbuilt(request: Request) -> None:
    """Raise RuntimeError naming the first thing that `request` asks for and this executor does not do."""
    _refuse(REQUEST_FEATURES, request)


def refuse_unbuilt_config(config: ExecutorConfig) -> None:
    """Raise RuntimeError naming the first setting of `config` that changes results and cannot be done here."""
    _refuse(CONFIG_FEATURES, config)
    if config.parallel_config and config.parallel_config.communication_mode is CommunicationMode.ORCHESTRATOR:
        raise RuntimeError("communication_mode ORCHESTRATOR is not supported by the embedded executor; use LEADER")
    if config.decoding_config is not None:
        _refuse(DECODING_FEATURES, config.decoding_config)
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if mode and not (mode.isAuto() or mode.isTopKorTopP() or mode.isBeamSearch()):
        raise RuntimeError(f"decoding_mode {mode.name} is not supported by the embedded executor; use auto")


def warn_of_decoding_mode(config: ExecutorConfig) -> None:
    """Tell in the log when the decoding mode of `config` does not choose the decoder.

    TensorRT-LLM replaces beam search where there is one beam (reference: executor-api section 2.6). A request that is
    none of an explicit mode's meets no sampler there, and its tokens are undefined; here the request decides.
    """
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if not mode or mode.isAuto() or mode.isTopKandTopP():
        return
    if mode.isBeamSearch():
        if config.max_beam_width == 1:
            logger.warning("decoding_mode beam_search does not fit max_beam_width 1; using top_k_top_p")
        return
    name = "top_k" if mode.isTopK() else "top_p"
    logger.warning("decoding_mode %s restricts nothing: each request is sampled by its own top_k and top_p", name)
    if config.max_beam_width > 1:
        logger.warning(
            "decoding_mode %s does not fit max_beam_width %d: requests with beams are searched",
            name,
            config.max_beam_width,
        )


def _refuse(features: Iterable[Unbuilt], record: Any) -> None:
    for feature in features:
        if feature.asked_by(record):
            raise RuntimeError(feature.message())
