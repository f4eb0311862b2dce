"""`trtserve run`: which of import and start it does before it talks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtserve.cli.app import run
from trtserve.client.endpoint import Endpoint
from trtserve.errors import ModelNotFoundError, ServerNotFoundError
from trtserve.store import Store


class Pipeline:
    """What is imported and running, and what was done."""

    def __init__(self) -> None:
        self.imported: list[str] = []
        self.running: list[str] = []
        self.done: list[str] = []

    def find_server(self, name: str, **_: Any) -> Any:
        if name not in self.running:
            raise ServerNotFoundError(f"no {name}")
        return SimpleNamespace(name=name, url="http://127.0.0.1:1")

    def import_(self, spec: Any, **_: Any) -> None:
        self.done.append(f"import {spec.source} as {spec.name}")
        self.imported.append(spec.name)

    def find_repository(self, name: str) -> Any:
        if name not in self.imported:
            raise ModelNotFoundError(f"no {name}")
        return SimpleNamespace(name=name, path=Path(name))

    def start(self, repository: Any, *_: Any, **__: Any) -> Any:
        self.done.append(f"start {repository.name}")
        self.running.append(repository.name)
        return self.find_server(repository.name)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    fake = Pipeline()
    monkeypatch.setattr("trtserve.server.discovery.find_server", fake.find_server)
    monkeypatch.setattr("trtserve.server.discovery.endpoint_of", lambda _: Endpoint())
    monkeypatch.setattr("trtserve.pipeline.importing.import_to_repository", fake.import_)
    monkeypatch.setattr("trtserve.server.repositories.find_repository", fake.find_repository)
    monkeypatch.setattr("trtserve.server.detach.start_in_background", fake.start)
    monkeypatch.setattr(
        Store, "recorded", lambda _: [SimpleNamespace(name=name, repository=name) for name in fake.imported]
    )
    talk = lambda _server, _spec, *, question, **_: fake.done.append(f"ask {question}")  # noqa: E731
    monkeypatch.setattr("trtserve.cli.run_.converse", talk)
    return fake


def test_what_is_missing_is_made_first(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "demo", "What?"]) == 0
    assert capsys.readouterr().err.splitlines()[:-1] == ["Importing demo", "Starting demo"]
    assert pipeline.done == ["import demo as demo", "start demo", "ask What?"]
    assert run(["run", "demo"]) == 0
    assert pipeline.done[3:] == ["ask None"]
    pipeline.running.clear()
    assert run(["run", "demo"]) == 0
    assert pipeline.done[4:] == ["start demo", "ask None"]


def test_an_import_of_any_name_is_taken_as_it_is(pipeline: Pipeline) -> None:
    pipeline.imported.append("mine")
    assert run(["run", "mine"]) == 0
    assert pipeline.done == ["start mine", "ask None"]


def test_a_name_that_means_nothing_is_refused(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "nothing"]) == ModelNotFoundError.code
    assert "nothing" in capsys.readouterr().err
    assert not pipeline.done
