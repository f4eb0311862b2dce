"""Every input of the BLS model is used or refused by name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.programs.bls import inputs as names
from trtserve.programs.bls import model as request
from trtserve.programs.bls.inputs import BlsSettings
from trtserve.programs.shared.lora_names import LoraNames
from trtserve.repository.profiles import BLS, profile

BASE = {"text_input": np.array([[b"x"]], dtype=np.object_), "max_tokens": np.array([[4]], dtype=np.int32)}


def start(inputs: dict[str, Any], **chain: Any) -> Any:
    lora = LoraNames(Path("/nowhere"))
    arrays = {
        name: np.array([[value]], dtype=object if isinstance(value, bytes) else None) for name, value in inputs.items()
    }
    models = BlsSettings(core="core", lora=lora, **chain)
    return request.BlsRequest(models, BASE | arrays, "id", threading.Event())


REFUSED: dict[str, tuple[Any, str]] = {
    "image_input": (1.0, "image_input was given"),
    "num_draft_tokens": (2, "without draft model"),
    "use_draft_logits": (True, "use_draft_logits needs num_draft_tokens"),
    "draft_acceptance_threshold": (0.5, "draft_acceptance_threshold needs num_draft_tokens"),
    "lora_name": (b"poet", "lora_name is 'poet', which this repository does not know"),
}


def test_every_declared_input_is_used_or_refused() -> None:
    declared = {tensor.name for tensor in profile().models[BLS].inputs}
    assert declared == {*names.PREPROCESSING, *names.CORE, *REFUSED}


@pytest.mark.parametrize("name", [*REFUSED, "prompt_table_extra_id"])
def test_refused_by_name(name: str) -> None:
    value, message = REFUSED.get(name, (3, "prompt_table_extra_id needs prompt_embedding_table"))
    with pytest.raises(ValueError, match=message):
        start({name: value})


NEUTRAL: dict[str, Any] = {
    "num_draft_tokens": 0,
    "use_draft_logits": False,
    "draft_acceptance_threshold": 0.0,
    "prompt_table_extra_id": 0,
    "lora_name": b"",
    "stop_words": b"",
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_pass(name: str) -> None:
    assert hasattr(start({name: NEUTRAL[name]}), "answers")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stream", True, "streaming is not supported with speculative decoding"),
        ("return_context_logits", True, "context logits are not supported with speculative decoding"),
        ("beam_width", 2, "beam_width above 1 is not supported with speculative decoding"),
        ("num_return_sequences", 2, "num_return_sequences above 1 is not supported"),
        ("guided_decoding_guide_type", b"json", "guided decoding is not supported"),
        ("prompt_embedding_table", 1.0, "prompt_embedding_table is not supported"),
        ("text_input", b"", None),
    ],
)
def test_inputs_that_speculative_decoding_refuses(name: str, value: Any, message: str | None) -> None:
    inputs = {"num_draft_tokens": 4, name: value}
    if message is None:
        assert hasattr(start(inputs, draft="draft"), "answers")
        return
    with pytest.raises(ValueError, match=message):
        start(inputs, draft="draft")


def test_accumulated_beams_are_refused() -> None:
    with pytest.raises(ValueError, match="accumulate_tokens needs beam_width 1; this request asks for 3 beams"):
        start({"beam_width": 3}, accumulate=True)
    assert hasattr(start({"beam_width": 3}), "answers")


def test_invalid_text_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="stop_words is not valid UTF-8"):
        start({"stop_words": b"\xff"})
