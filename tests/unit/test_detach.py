"""What a supervisor in the background tells the command that started it."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from trtserve.cli.output import TerminalProgress
from trtserve.errors import PortInUseError
from trtserve.progress import SILENT
from trtserve.server.detach import Report, ReportDisplay, StartReport, reports


def reported(*calls: Callable[[StartReport], object]) -> list[Report]:
    reading, writing = os.pipe()
    report = StartReport(writing, SILENT)
    for call in calls:
        call(report)
    found = list(reports(reading, lambda: 0))
    os.close(reading)
    return found


def test_steps_and_the_end_arrive_in_order() -> None:
    found = reported(
        lambda report: report.step("Loading"),
        lambda report: report.warn("slow"),
        lambda report: report.ready(),
    )
    said = [(each.kind, each.text) for each in found]
    assert said == [("step", "Loading"), ("warn", "slow"), ("ready", "")]


def test_a_task_goes_on_where_the_reports_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    def load(report: StartReport) -> None:
        with report.task("Loading the models", total=3, unit="parts") as task:
            for loaded, waiting in ((0, "core"), (2, "core"), (0, "core"), (1, "")):
                task.describe(waiting)
                task.advance(loaded)

    *found, last = reported(load, lambda report: report.step("Nearly ready"), lambda report: report.ready())
    at = [(each.text, each.number) for each in found if each.kind == "at"]
    assert at == [("core", 0), ("core", 2), ("", 1)]  # what changes nothing is not sent
    with ExitStack() as tasks:
        display = ReportDisplay(TerminalProgress(), tasks)
        assert all(display.show(report) for report in found)
        assert not display.show(last)
    assert capsys.readouterr().err.splitlines() == ["Loading the models", "Nearly ready"]


def test_an_error_keeps_its_class_and_its_advice() -> None:
    def fail(report: StartReport) -> None:
        with suppress(PortInUseError), report.reporting():
            raise PortInUseError("taken", hint="choose another", log=Path("/log"))

    (report,) = reported(fail)
    again = report.error
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
    assert list(reports(reading, lambda: 1)) == []
    os.close(reading)
    os.close(writing)


def test_a_process_with_many_open_files_can_listen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    reading, writing = os.pipe()
    StartReport(writing, SILENT).ready()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1100)  # more than select(2) can wait for
    assert [each.kind for each in reports(high, lambda: 0)] == ["ready"]
    os.close(high)
    os.close(reading)


def test_only_an_error_has_failed() -> None:
    assert not any(Report(kind=kind).failed for kind in ("step", "warn", "task", "at", "end", "ready"))
    assert Report(kind="PortInUseError").failed
