"""Every test has its own store and no access to the user's; tests whose needs are missing are left out as a group."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from xdist.scheduler import LoadFileScheduling

from tests.support.doubles import Doubles
from tests.support.needs import BARE, IN_CI, NEEDS, left_out_line, missing_needs
from trtserve.host import gpus, ports

# Kernels in the Triton language run in its interpreter where there is no GPU. It reads this when it is imported.
if os.environ.get("TRTSERVE_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"
    # Tests say which GPUs their doubles of NVIDIA's tools have.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)

# The same examples in every run, and no assertion about the clock. Hypothesis would also try constants of the modules
# that happen to be loaded: other examples in each process, after seconds of parsing.
settings.register_profile("trtserve", deadline=None, derandomize=True, database=None)
settings.load_profile("trtserve")
providers._get_local_constants = Constants

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_NUMBERS = itertools.count()
_MANY_MODULES = 50
_frozen_modules = 0
_PLACES = {"unit": 0, "integration": 1, "faults": 2, "e2e": 3}
_LEFT_OUT = pytest.StashKey[tuple[int, list[str]]]()


def pytest_configure() -> None:
    """Share the ports among processes, and let child processes obey signals.

    A shell's background job, setsid and nohup hand down SIGINT and SIGHUP as ignored, and what is ignored stays ignored
    in every child: tests of Ctrl-C would fail there. A handler, unlike that, is reset when a child is executed.
    """
    _share_ports()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def _share_ports() -> None:
    """Draw ports from this process's share, so that no other test takes one before its server listens."""
    draw = ports._drawn_from
    ports._drawn_from = functools.wraps(draw)(lambda: draw()[_WORKER::_WORKERS])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose needs are missing, and sort the others: in one process fast tests run first."""
    missing = missing_needs()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    lacked = set[str]()
    for item in items:
        needed = {name for mark in item.iter_markers("needs") for name in mark.args}
        if unknown := needed - NEEDS.keys():
            raise pytest.UsageError(f"{item.nodeid} needs {unknown}; tests/support/needs.py knows {list(NEEDS)}.")
        absent = needed.intersection(missing)
        lacked |= absent
        (left_out if absent else kept).append(item)
    items[:] = sorted(kept, key=lambda item: (_place(item.path), item.path))
    if hasattr(config, "workerinput"):
        items[:] = _mixed(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        names = [name for name in NEEDS if name in lacked]
        config.stash[_LEFT_OUT] = (len(left_out), names)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = config.stash[_LEFT_OUT]


def _place(path: Path) -> int:
    return _PLACES.get(path.parent.name, len(_PLACES))


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort files for several processes: those that wait for servers first, and between them unit tests, which compute.

    So the processors are busy from the beginning, and no slow file is left for the end, where others would wait for it.
    """
    files = sorted({item.path for item in items}, key=lambda path: (-_place(path), path))
    computing = [path for path in files if _place(path) == 0]
    waiting = [path for path in files if _place(path) > 0]
    at = {path: number / len(computing) for number, path in enumerate(computing)}
    at |= {path: 0.9 * number / len(waiting) for number, path in enumerate(waiting)}
    return sorted(items, key=lambda item: at[item.path])


class _Turned(pytest.Dir):  # type: ignore[misc]  # final, but nothing else orders files before their import
    """A folder whose files a process of pytest-xdist imports from a place of its own on.

    In a fresh checkout each file is then compiled by the first process that comes to it, and not by all at once.
    """

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        turn = len(found) * _WORKER // _WORKERS
        return found[turn:] + found[:turn]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector:
    return _Turned.from_parent(parent, path=path)


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from the thousands of collected tests: it would look at them again and again."""
    _freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep it away from what tests import, too: every build collects, for 0.2 s beside PyTorch and transformers."""
    if len(sys.modules) > _frozen_modules + _MANY_MODULES:
        _freeze()


def _freeze() -> None:
    global _frozen_modules  # noqa: PLW0603  the collector is this process's as well
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


class _ByServer(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Files run whole in one process, and together those that ask the servers and engines of tests/e2e/conftest.py."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        text = (self.config.rootpath / file).read_text("utf-8") if file.startswith("tests/e2e/") else ""
        return next((name for name in ("features", "echo_folder") if name in text), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Share the tests among processes, whatever --dist says."""
    return _ByServer(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Keep what a process of pytest-xdist left out; each of them collects all tests."""
    config, output = getattr(node, "config", None), getattr(node, "workeroutput", {})
    if isinstance(config, pytest.Config) and "left_out" in output:
        count, names = output["left_out"]
        config.stash[_LEFT_OUT] = (count, list(names))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that were left out, in one line."""
    if found := config.stash.get(_LEFT_OUT, None):
        terminalreporter.write_line(left_out_line(*found), yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI nothing may be left out but in the bare run."""
    if IN_CI and not BARE and _LEFT_OUT in session.config.stash:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure in CI."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which CI does not allow: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def isolated_environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point the store, the hub's cache and the terminal's width to values of this test; nvidia-smi is asked again.

    Without files of its own a test gets no folder for them: making thousands takes a quarter of the fast tests' time.
    """
    if "tmp_path" in request.fixturenames:
        folder = request.getfixturevalue("tmp_path")
    else:
        folder = tmp_path_factory.getbasetemp() / f"test-{next(_NUMBERS)}"
    gpus._asked_once.cache_clear()
    monkeypatch.setenv("TRTSERVE_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
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
