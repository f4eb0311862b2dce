"""What a supervisor in the background tells the command that started it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trtserve.errors import PortInUseError
from trtserve.progress import SILENT
from trtserve.server.background import StartReport, _error, _events


def reported(*calls: Any) -> list[dict[str, Any]]:
    reading, writing = os.pipe()
    report = StartReport(writing, SILENT)
    for call in calls:
        call(report)
    events = list(_events(reading, lambda: 0))
    os.close(reading)
    return events


def test_steps_and_the_end_arrive_in_order() -> None:
    events = reported(
        lambda report: report.step("Loading"),
        lambda report: report.warn("slow"),
        lambda report: report.task("Comparing", total=2).__enter__(),
        lambda report: report.ready(),
    )
    assert events == [{"step": "Loading"}, {"warn": "slow"}, {"step": "Comparing"}, {"ready": True}]


def test_an_error_keeps_its_class_and_its_advice() -> None:
    error = PortInUseError("taken", hint="choose another", log=Path("/log"))
    (event,) = reported(lambda report: report.failed(error))
    again = _error(json.loads(json.dumps(event["error"])))
    assert isinstance(again, PortInUseError)
    assert (again.message, again.hint, again.log) == ("taken", "choose another", Path("/log"))


def test_nobody_has_to_listen() -> None:
    reading, writing = os.pipe()
    report = StartReport(writing, SILENT)
    os.close(reading)
    report.step("Loading")
    report.ready()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(writing)


def test_a_signal_ends_the_listening() -> None:
    reading, writing = os.pipe()
    assert list(_events(reading, lambda: 1)) == []
    os.close(reading)
    os.close(writing)
