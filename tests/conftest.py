"""Every test has its own store and no access to the user's; a skipped oracle test fails where oracles are required."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.doubles import Doubles

# The same examples in every run, and no assertion about the clock.
settings.register_profile("trtserve", deadline=None, derandomize=True, database=None)
settings.load_profile("trtserve")

_ORACLE_REQUIRED = os.environ.get("TRTSERVE_ORACLE") == "required"


def pytest_configure() -> None:
    """Let child processes obey signals, and stop at once when oracles are required and PyTorch is missing.

    A shell's background job, setsid and nohup hand down SIGINT and SIGHUP as ignored, and what is ignored stays ignored
    in every child: tests of Ctrl-C would fail there. A handler, unlike that, is reset when a child is executed.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    if _ORACLE_REQUIRED and importlib.util.find_spec("torch") is None:
        raise pytest.UsageError("TRTSERVE_ORACLE=required, but PyTorch is not installed.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of an oracle test into a failure where oracles are required."""
    report = yield
    if _ORACLE_REQUIRED and report.skipped and item.get_closest_marker("oracle"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is an oracle test and was skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def isolated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the store, the hub's cache and the terminal's width to values of this test."""
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("ENGINE_DEST_PATH", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    """Strict stand-ins for NVIDIA's tools, in front of PATH (tests/doubles/README.md)."""
    made = Doubles(tmp_path / "doubles")
    made.install(monkeypatch)
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run fast tests first: unit, then integration, then those with a real Triton server."""
    order = {"unit": 0, "integration": 1, "e2e": 2}
    items.sort(key=lambda item: order.get(item.path.parent.name, 3))
