"""Named LoRA adapters: the table, its files, and sending them only when they are not cached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.programs.bls import inputs as bls_inputs
from trtserve.programs.shared.inner_models import InnerModelError
from trtserve.programs.shared.lora_names import LoraNames


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters" / "poet"
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_weights.npy", np.ones((1, 2, 8), dtype=np.float32))
    np.save(folder / "model.lora_config.npy", np.array([[[1, 0, 2], [2, 0, 2]]], dtype=np.int32))
    table = {"poet": {"task_id": 2**62, "folder": "adapters/poet"}, "gone": {"task_id": 5, "folder": "nowhere"}}
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": table}))
    return tmp_path


def test_table(repository: Path) -> None:
    names = LoraNames(repository)
    assert names.names == ("gone", "poet")
    assert names.task_id("poet") == 2**62
    weights, config = names.tensors("poet")
    assert weights.dtype == np.float16
    assert config.dtype == np.int32
    assert (weights.shape, config.shape) == ((1, 2, 8), (1, 2, 3))
    with pytest.raises(ValueError, match="lora_name is 'Poet', which this repository does not know; it has gone, poet"):
        names.task_id("Poet")
    with pytest.raises(ValueError, match="adapter gone cannot be read"):
        names.tensors("gone")


def test_without_a_table_every_name_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has none"):
        LoraNames(tmp_path).task_id("poet")
    (tmp_path / "lora.json").write_text("[]")
    with pytest.raises(ValueError, match=r"lora\.json is not a table"):
        LoraNames(tmp_path)


class Core:
    """A core model that knows an adapter once it was sent."""

    def __init__(self, error: type[Exception]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.cached: set[int] = set()
        self.error = error

    def __call__(
        self, model: str, inputs: Any, outputs: Sequence[str], request_id: str, *, pushed: bool = False
    ) -> Iterator[dict[str, Any]]:
        assert not pushed
        if "stop" in inputs:
            return
        self.calls.append(inputs)
        task = int(inputs["lora_task_id"][0, 0])
        if "lora_weights" in inputs:
            self.cached.add(task)
        if task not in self.cached:
            raise self.error(f"LoRA task {task} not found in cache. Please send LoRA weights with request")
        yield {"output_ids": np.zeros((1, 1, 1))}


def ask(names: Any, batch: int) -> list[Any]:
    inputs = {"input_ids": np.zeros((batch, 1), dtype=np.int32)}
    return list(bls_inputs.CoreModel("core", "id", lora=names, adapter="poet").answers(inputs, ("output_ids",)))


@pytest.mark.parametrize("batch", [1, 3])
def test_tensors_are_sent_on_first_use_and_after_eviction(
    repository: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    core, names = Core(InnerModelError), LoraNames(repository)
    monkeypatch.setattr(bls_inputs, "call_streamed", core)
    monkeypatch.setattr(bls_inputs, "stop_request", lambda *_: None)
    assert len(ask(names, batch)) == 1
    assert [set(call) - {"input_ids"} for call in core.calls] == [
        {"lora_task_id"},
        {"lora_task_id", "lora_weights", "lora_config"},
    ]
    assert core.calls[1]["lora_weights"].shape == (batch, 2, 8)
    assert core.calls[0]["lora_task_id"].tolist() == [[2**62]] * batch
    ask(names, batch)
    assert len(core.calls) == 3
    core.cached.clear()
    ask(names, batch)
    assert len(core.calls) == 5


def test_other_errors_are_not_repeated(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*arguments: Any, pushed: bool) -> Iterator[Any]:
        assert not pushed
        calls.append(arguments)
        raise InnerModelError("Prompt length (9) exceeds maximum input length (8)")

    monkeypatch.setattr(bls_inputs, "call_streamed", refuse)
    with pytest.raises(InnerModelError, match="Prompt length"):
        ask(LoraNames(repository), 1)
    assert len(calls) == 1


def names_tensor(*names: str) -> Any:
    return np.array([[name.encode()] for name in names], dtype=np.object_)


def test_one_adapter_per_request() -> None:
    assert bls_inputs.adapter_of({}) is None
    assert bls_inputs.adapter_of({"lora_name": names_tensor("")}) is None
    assert bls_inputs.adapter_of({"lora_name": names_tensor("a", "a")}) == "a"
    with pytest.raises(ValueError, match="differs between the rows"):
        bls_inputs.adapter_of({"lora_name": names_tensor("a", "b")})
    with pytest.raises(ValueError, match="both given"):
        bls_inputs.adapter_of({"lora_name": names_tensor("a"), "lora_task_id": np.array([[1]])})
