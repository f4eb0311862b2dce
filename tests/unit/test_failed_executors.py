"""What clients and supervisors are told of an executor that has stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtserve.client.endpoint import refused
from trtserve.client.metrics import read_heartbeats
from trtserve.gateway.openai.errors import api_error
from trtserve.programs.core import model as _core
from trtserve.programs.core.pending import Pending, PendingTable
from trtserve.programs.shared.run_folder import VARIABLE, Heartbeat
from trtserve.programs.shared.senders import GuardedSender

core: Any = _core
LOST = "The executor has stopped working: AcceleratorError: CUDA error: queue of launches is broken"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (LOST, 503),
        (f"An error occurred when processing the input values, the error was '{LOST}'", 503),
        ("Encountered an error in forwardAsync function: the step failed: queue full", 500),
        ("Encountered an error in forwardAsync function: no token is allowed as token 1 of the answer", 400),
        ("Maximum queue size of 3 has been reached, please try again later", 429),
    ],
)
def test_whose_fault_an_error_is(text: str, status: int) -> None:
    error = api_error(refused(text))
    assert error.status == status
    assert ("retry-after" in error.response().headers) == (status in (429, 503))


def test_the_command_line_says_what_to_do() -> None:
    assert "--restart on-failure" in str(refused(LOST).hint)


def test_a_heartbeat_tells_the_cause_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    Heartbeat("tensorrt_llm").beat(open_requests=0, progress=0, failure=LOST)
    (found,) = read_heartbeats(tmp_path)
    assert found.failure == LOST.removeprefix("The executor has stopped working: ")
    assert found.ailment == f"its executor has stopped working: {found.failure}"


class Sender:
    """Keeps what it was asked to send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, answer: Any = None, flags: int = 0) -> None:
        self.sent.append(answer)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A core model that serves; `exits` holds the codes with which it ended its process."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(core, "_LAST_WORDS", 0.01)
    model = core.TritonPythonModel()
    model.exits = []
    monkeypatch.setattr(core.os, "_exit", model.exits.append)
    monkeypatch.setattr(core.logging, "shutdown", lambda: None)
    model._stopping, model._pending, model._heartbeat = threading.Event(), PendingTable(), Heartbeat("tensorrt_llm")
    model._answers = model._steps = 0
    model._failure = None
    return model


def test_the_process_of_a_failed_executor_ends(model: Any, tmp_path: Path) -> None:
    def failed(timeout: Any) -> Any:
        raise RuntimeError(LOST)

    model._executor = SimpleNamespace(await_responses=failed)
    model._await_responses()
    assert model.exits == [1]
    assert read_heartbeats(tmp_path)[0].failure is not None
    with pytest.raises(RuntimeError, match="stopped working"):
        model._submit(SimpleNamespace(parameters=lambda: "", inputs=list), None)


def test_the_process_of_a_hung_executor_answers_and_ends(model: Any, tmp_path: Path) -> None:
    sender = Sender()
    pending = Pending("mine", GuardedSender(sender), open_rows={3: None})  # type: ignore[dict-item]
    with model._pending.lock:
        model._pending.add(pending)
    model._executor = SimpleNamespace(hang=lambda: "a step has not come back")
    model._beat()
    assert model.exits == [1]
    (answer,) = sender.sent
    assert answer._error.code() == answer._error.UNAVAILABLE
    assert read_heartbeats(tmp_path)[0].failure == "a step has not come back"


def test_a_model_that_is_unloaded_does_not_end_its_process(model: Any, tmp_path: Path) -> None:
    model._stopping.set()
    model._end_process(LOST)
    assert (model.exits, list(tmp_path.iterdir())) == ([], [])


def test_errors_and_failed_steps_are_no_progress(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def iteration(requests: int) -> Any:
        return SimpleNamespace(
            inflight_batching_stats=SimpleNamespace(num_scheduled_requests=requests), static_batching_stats=None
        )

    records = [iteration(requests) for requests in (0, 2, 0, 1, 0)]
    model._executor = SimpleNamespace(get_latest_iteration_stats=lambda: records)
    model._metrics = SimpleNamespace(report=lambda _records: None)
    model._report_statistics()
    assert model._steps == 2
    answers = [SimpleNamespace(request_id=9, has_error=lambda failed=failed: failed) for failed in (True, False)]

    def once(timeout: Any) -> Any:
        model._stopping.set()
        return answers

    model._executor = SimpleNamespace(await_responses=once)
    monkeypatch.setattr(core, "joined", lambda _answers: [])
    model._await_responses()
    assert model._answers == 1
