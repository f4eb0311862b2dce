"""Every input that the BLS model declares goes to a model behind it, or is refused by name when it asks for it."""

from __future__ import annotations

import sys
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


def start(conversation: Any, name: str, value: Any) -> Any:
    chain = conversation.Chain(core="core", draft=None, outputs=(), accumulate=False)
    return conversation.Conversation(chain, {**BASE, name: np.array([[value]])}, "id")


REFUSED: dict[str, tuple[Any, str]] = {
    "image_input": (1.0, "image_input was given"),
    "num_draft_tokens": (2, "without draft model"),
    "use_draft_logits": (True, "use_draft_logits needs num_draft_tokens"),
}


def test_every_declared_input_goes_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load(monkeypatch, BLS, "tensor_names")
    declared = {tensor.name for tensor in profile().models[BLS].inputs}
    assert declared == {*names.PREPROCESSING, *names.CORE, *REFUSED}


@pytest.mark.parametrize("name", [*REFUSED, "prompt_table_extra_id"])
def test_refused_by_name(conversation: Any, name: str) -> None:
    value, message = REFUSED.get(name, (3, "prompt_table_extra_id needs prompt_embedding_table"))
    with pytest.raises(ValueError, match=message):
        start(conversation, name, value)


@pytest.mark.parametrize("name", ["num_draft_tokens", "use_draft_logits", "prompt_table_extra_id"])
def test_neutral_values_pass(conversation: Any, name: str) -> None:
    assert hasattr(start(conversation, name, 0), "answers")
