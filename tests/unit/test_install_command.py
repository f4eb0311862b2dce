"""Hints name an installation command that works where trtserve came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.host import machine
from trtserve.host.machine import install_command

ROOT = Path(__file__).parents[2]


def test_a_clone_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("cpu") == "pip install '.[cpu]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("oracle") == f"pip install '{ROOT}[oracle]'"
    assert install_command() == f"pip install {ROOT}"


def test_an_installation_from_an_index_has_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "site-packages" / "trtserve" / "host" / "x.py"))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: _Distribution())
    assert install_command("cpu") == "pip install 'trtserve[cpu]'"


class _Distribution:
    def read_text(self, name: str) -> str | None:
        return None
