"""Unsupported features are refused by name; defaults and neutral values are accepted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.support.executors import answer_of, executors
from tests.support.fake_model import FakeModel
from trtserve.executor import api
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.interface.convert import REQUEST_FEATURES, engine_request, refuse_unsupported_config
from trtserve.executor.interface.executor import Executor

ASKING: dict[str, Any] = {
    "sampling_config.beam_width_array": [2],
    "output_config.return_encoder_output": True,
    "output_config.additional_model_outputs": ["hidden"],
    "multimodal_input": api.MultimodalInput([[1]], [0], [1]),
    "multimodal_embedding": np.zeros(1),
    "mrope_config": api.MropeConfig(np.zeros(1), 0),
    "lookahead_config": api.LookaheadDecodingConfig(4, 3, 4),
    "encoder_input_token_ids": [1],
    "encoder_input_features": np.zeros(1),
    "type": api.RequestType.REQUEST_TYPE_CONTEXT_ONLY,
    "context_phase_params": api.ContextPhaseParams([1], 1),
    "cross_attention_mask": np.zeros(1),
    "eagle_config": api.EagleConfig(),
    "skip_cross_attn_blocks": np.zeros(1),
    "language_adapter_uid": 1,
}


LIMITS = EngineLimits(max_batch_size=1, max_seq_len=8, max_num_tokens=8, vocab_size=97)


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_defaults_are_accepted(name: str) -> None:
    with Executor.from_model(FakeModel(), LIMITS, api.ExecutorConfig()) as executor:
        assert not answer_of(executor, api.Request(input_token_ids=[1], **{name: 1})).has_error()


def test_every_unsupported_feature_has_a_case() -> None:
    assert set(ASKING) == {feature.path for feature in REQUEST_FEATURES}


@pytest.mark.parametrize(("path", "value"), ASKING.items(), ids=list(ASKING))
def test_unsupported_request_features_are_refused(path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    if owner == "sampling_config":
        request = api.Request([1], 1, sampling_config=api.SamplingConfig(**{name: value}))
    elif owner == "output_config":
        request = api.Request([1], 1, output_config=api.OutputConfig(**{name: value}))
    else:
        request = api.Request([1], 1, **{name: value})
    assert re.match(rf"{name}\b.*not supported", engine_request(request, {}).problem or "")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (api.ExecutorConfig(decoding_config=api.DecodingConfig(api.DecodingMode.Medusa())), "decoding_mode Medusa"),
        (api.ExecutorConfig(decoding_config=api.DecodingConfig(medusa_choices=[[0]])), "medusa_choices"),
        (
            api.ExecutorConfig(decoding_config=api.DecodingConfig(None, api.LookaheadDecodingConfig(4, 3, 4))),
            r"lookahead_decoding_config \(Triton: lookahead_window_size\)",
        ),
        (api.ExecutorConfig(decoding_config=api.DecodingConfig(eagle_config=api.EagleConfig())), "eagle_config"),
        (api.ExecutorConfig(use_variable_beam_width_search=True), "use_variable_beam_width_search"),
        (
            api.ExecutorConfig(
                parallel_config=api.ParallelConfig(communication_mode=api.CommunicationMode.ORCHESTRATOR)
            ),
            "ORCHESTRATOR",
        ),
    ],
)
def test_unsupported_settings_are_refused(config: api.ExecutorConfig, name: str) -> None:
    with pytest.raises(RuntimeError, match=name):
        refuse_unsupported_config(config)


@pytest.mark.parametrize(
    ("mode", "beams", "warnings"),
    [
        (api.DecodingMode.Auto(), 4, []),
        (api.DecodingMode.TopKTopP(), 1, []),
        (api.DecodingMode.BeamSearch(), 2, []),
        (api.DecodingMode.BeamSearch(), 1, ["beam_search does not fit max_beam_width 1; using top_k_top_p"]),
        (api.DecodingMode.TopK(), 1, ["top_k is ignored"]),
        (api.DecodingMode.TopP(), 3, ["top_p is ignored", "top_p does not fit max_beam_width 3"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_ineffective_decoding_mode_gives_a_warning(
    mode: api.DecodingMode, beams: int, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with executors() as start:
        start(decoding_config=api.DecodingConfig(mode), max_beam_width=beams)
    assert len(caplog.messages) == len(warnings)
    for message, words in zip(caplog.messages, warnings, strict=True):
        assert words in message


def test_request_decides_how_it_is_sampled_in_every_mode() -> None:
    """In TensorRT-LLM the result of a top_p request is undefined in mode top_k, and vice versa."""
    answers = []
    for mode in (None, api.DecodingMode.TopK(), api.DecodingMode.TopP(), api.DecodingMode.TopKTopP()):
        with executors() as start:
            executor, _ = start(decoding_config=mode and api.DecodingConfig(mode))
            tokens = [
                answer_of(executor, api.Request([5, 6], 8, sampling_config=sampling)).result.output_token_ids
                for sampling in (api.SamplingConfig(top_p=0.9, seed=3), api.SamplingConfig(top_k=20, seed=3))
            ]
            answers.append(tokens)
    assert answers[0][0] != answers[0][1]
    assert all(answer == answers[0] for answer in answers)
