"""Every input that the BLS model declares goes to a model behind it, or is refused by name when it asks for it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.model_modules import load
from trtserve.triton.profiles import BLS, profile

BASE = {"text_input": np.array([[b"x"]], dtype=np.object_), "max_tokens": np.array([[4]], dtype=np.int32)}


@pytest.fixture
def conversation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace())
    return load(monkeypatch, BLS, "conversation")


def start(conversation: Any, inputs: dict[str, Any], **chain: Any) -> Any:
    lora = conversation.adapter_of.__globals__["LoraNames"](Path("/nowhere"))
    arrays = {
        name: np.array([[value]], dtype=object if isinstance(value, bytes) else None) for name, value in inputs.items()
    }
    models = conversation.Chain(core="core", lora=lora, **chain)
    return conversation.Conversation(models, BASE | arrays, "id", threading.Event())


REFUSED: dict[str, tuple[Any, str]] = {
    "image_input": (1.0, "image_input was given"),
    "num_draft_tokens": (2, "without draft model"),
    "use_draft_logits": (True, "use_draft_logits needs num_draft_tokens"),
    "draft_acceptance_threshold": (0.5, "draft_acceptance_threshold needs num_draft_tokens"),
    "lora_name": (b"poet", "lora_name is 'poet', which this repository does not know"),
}


def test_every_declared_input_goes_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load(monkeypatch, BLS, "tensor_names")
    declared = {tensor.name for tensor in profile().models[BLS].inputs}
    assert declared == {*names.PREPROCESSING, *names.CORE, *REFUSED}


@pytest.mark.parametrize("name", [*REFUSED, "prompt_table_extra_id"])
def test_refused_by_name(conversation: Any, name: str) -> None:
    value, message = REFUSED.get(name, (3, "prompt_table_extra_id needs prompt_embedding_table"))
    with pytest.raises(ValueError, match=message):
        start(conversation, {name: value})


NEUTRAL: dict[str, Any] = {
    "num_draft_tokens": 0,
    "use_draft_logits": False,
    "draft_acceptance_threshold": 0.0,
    "prompt_table_extra_id": 0,
    "lora_name": b"",
    "stop_words": b"",
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_pass(conversation: Any, name: str) -> None:
    assert hasattr(start(conversation, {name: NEUTRAL[name]}), "answers")


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
def test_what_speculative_decoding_cannot_do(conversation: Any, name: str, value: Any, message: str | None) -> None:
    inputs = {"num_draft_tokens": 4, name: value}
    if message is None:
        assert hasattr(start(conversation, inputs, draft="draft"), "answers")
        return
    with pytest.raises(ValueError, match=message):
        start(conversation, inputs, draft="draft")


def test_accumulated_beams_are_refused(conversation: Any) -> None:
    with pytest.raises(ValueError, match="accumulate_tokens needs beam_width 1; this request asks for 3 beams"):
        start(conversation, {"beam_width": 3}, accumulate=True)
    assert hasattr(start(conversation, {"beam_width": 3}), "answers")


def test_invalid_text_is_refused_by_name(conversation: Any) -> None:
    with pytest.raises(ValueError, match="stop_words is not valid UTF-8"):
        start(conversation, {"stop_words": b"\xff"})
