"""Fixtures that several unit tests share; a unit test that starts a process fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.testing  # noqa: F401  asks lscpu when it is imported
import pytest

from tests.support import python_backend
from tests.support.executors import Start, executors
from tests.support.guide_trials import TrialInThisProcess
from tests.support.waiting import wait_until
from trtserve.client.tokenizer import render
from trtserve.executor.engine import guided

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from tests.support.scripted_triton import ScriptedTriton

# The models import it; Triton's own exists in its stub alone.
sys.modules["triton_python_backend_utils"] = python_backend

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_running = False


def _refuse(event: str, _: object) -> None:
    if _running and event in _STARTS:
        raise RuntimeError(f"Unit tests start no process ({event}): tests/integration is the place for this one.")


sys.addaudithook(_refuse)


@pytest.fixture(scope="session")
def template_process() -> None:
    """The process that renders chat templates: it starts before the tests, and serves them all."""
    render("", [], {})


@pytest.fixture(autouse=True)
def no_process(template_process: None) -> Iterator[None]:
    """Let a test that starts a process fail."""
    global _running  # noqa: PLW0603  an audit hook cannot be removed again
    _running = True
    yield
    _running = False


@pytest.fixture(autouse=True)
def guide_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try guides in this process."""
    monkeypatch.setattr(guided, "_trial", TrialInThisProcess)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start executors over fake models; they are shut down at the end."""
    with executors() as make:
        yield make


@pytest.fixture(scope="module")
def scripted_endpoint(folder: Path) -> Iterator[tuple[ScriptedTriton, TestClient]]:
    """A Triton with the answers of a script, for the model in the file's `folder`, and OpenAI's API in front of it."""
    from tests.support.scripted_endpoint import endpoint_of  # machines with GPUs lack what a gateway needs
    from tests.support.scripted_triton import ScriptedTriton

    triton = ScriptedTriton(folder)
    with endpoint_of(triton) as client:
        yield triton, client


@pytest.fixture
def triton(scripted_endpoint: tuple[ScriptedTriton, TestClient]) -> Iterator[ScriptedTriton]:
    """Its Triton, with the usual script and no requests yet; what a test has begun ends with it."""
    triton, _ = scripted_endpoint
    triton.reset()
    before = len(triton._tasks)
    yield triton
    wait_until(lambda: not triton.running and len(triton._tasks) <= before)


@pytest.fixture
def client(scripted_endpoint: tuple[ScriptedTriton, TestClient], triton: ScriptedTriton) -> TestClient:
    """Its client; a test that changes `triton` changes the answers."""
    return scripted_endpoint[1]
