"""The models whose texts an engine makes: what they show of it, and how they end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.python_backend import Tensor
from tests.support.waiting import wait_until
from trtserve.client.metrics import read_heartbeats
from trtserve.programs.llmapi import model as llmapi
from trtserve.programs.llmapi.engine import LlmEngine
from trtserve.programs.shared import engine_model
from trtserve.programs.shared.run_folder import VARIABLE

ARGUMENTS = {"model_name": "tensorrt_llm", "model_config": "{}"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(engine_model, "_BEAT", 0.01)
    return tmp_path


class SlowToSay(engine_model.EngineModel):
    """An engine that says slowly how it is."""

    asked, may_say = threading.Event(), threading.Event()

    def load(self, args: dict[str, str], config: dict[str, Any]) -> float | None:
        return 0.01

    def opened(self) -> Sequence[Any]:
        return ()

    def progress(self) -> int:
        self.asked.set()
        self.may_say.wait(60)
        return 0

    def failure(self) -> str | None:
        return None

    def close(self) -> None: ...


def test_an_unloaded_model_leaves_no_heartbeat(folder: Path) -> None:
    """A beat that had begun must not write the file again after the model has removed it."""
    model = SlowToSay()
    model.initialize(ARGUMENTS)
    assert model.asked.wait(60)
    later = threading.Timer(0.3, model.may_say.set)
    later.start()
    model.finalize()
    later.join()
    for watch in model._watches:
        watch.join(60)
    assert read_heartbeats(folder) == []


class Result:
    """An answer of the LLM, whose pieces come when the test says so."""

    def __init__(self) -> None:
        self.pieces, self.ended = 0, False

    def abort(self) -> None:
        self.ended = True

    async def __aiter__(self) -> AsyncIterator[Any]:
        given = 0
        while not self.ended:
            await asyncio.sleep(0.005)
            if given < self.pieces:
                given += 1
                yield SimpleNamespace(outputs=[SimpleNamespace(text="w", request_perf_metrics=None)], finished=False)


class Sender:
    def is_cancelled(self) -> bool:
        return False

    def send(self, *_: object, **__: object) -> None: ...


class Request:
    def __init__(self, *, streaming: bool) -> None:
        values = {"text_input": np.array([b"What?"], dtype=object), "streaming": np.array([streaming])}
        self._inputs = [Tensor(name, value) for name, value in values.items()]

    def request_id(self) -> str:
        return ""

    def parameters(self) -> str:
        return ""

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def get_response_sender(self) -> Sender:
        return Sender()


@pytest.mark.parametrize("streaming", [True, False])
def test_an_llm_that_hangs_shows_no_progress(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, streaming: bool
) -> None:
    """Its event loop turns on. Without a stream nobody can tell: nothing is seen of an answer before its end."""
    results = list[Result]()

    class Llm:
        def __init__(self, **_: object) -> None: ...

        def generate_async(self, *_: object, **__: object) -> Result:
            results.append(Result())
            return results[-1]

        def shutdown(self) -> None: ...

    modules = {
        "tensorrt_llm": SimpleNamespace(LLM=Llm, SamplingParams=lambda **_: None),
        "tensorrt_llm._utils": SimpleNamespace(global_mpi_rank=lambda: 0, global_mpi_size=lambda: 1),
    }
    monkeypatch.setattr("importlib.import_module", modules.__getitem__)
    monkeypatch.setattr(llmapi, "read_settings", lambda _: {"model": "x"})
    model = llmapi.TritonPythonModel()
    config = {"output": [{"name": "text_output"}], "model_transaction_policy": {"decoupled": True}}
    paths = {"model_repository": str(tmp_path), "model_version": "1", "model_instance_name": "tensorrt_llm_0"}
    model.initialize({**ARGUMENTS, **paths, "model_config": json.dumps(config)})

    def moves() -> bool:
        """Whether the heart shows steps while nothing comes, for half a second."""
        before = read_heartbeats(folder)[0].moved
        time.sleep(0.5)
        return read_heartbeats(folder)[0].moved > before

    try:
        assert isinstance(model._engine, LlmEngine)
        model.execute([Request(streaming=streaming)])
        wait_until(lambda: results and read_heartbeats(folder) and read_heartbeats(folder)[0].open_requests)
        wait_until(lambda: not moves() or not streaming)
        assert moves() is not streaming
        before = read_heartbeats(folder)[0].moved
        results[0].pieces += 1
        wait_until(lambda: read_heartbeats(folder)[0].moved > before)
    finally:
        for result in results:
            result.ended = True
        wait_until(lambda: not model.opened())
        model.finalize()
