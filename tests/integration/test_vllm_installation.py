"""Which vLLM an interpreter has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.counting_vllm import counting_python
from trtserve.errors import MissingDependencyError
from trtserve.executor.vllm.installation import VARIABLE, find_installation, require_installation


def test_the_installation_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    python = counting_python(tmp_path)
    found = find_installation(str(python))
    assert found is not None
    assert (found.version, found.on_cpu, found.python) == ("0.32.0+cpu", True, python)
    monkeypatch.setenv(VARIABLE, str(python))
    assert require_installation() == found


def test_without_vllm_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(MissingDependencyError, match="needs vLLM, which is not installed here") as error:
        require_installation()
    assert "--vllm-python ~/vllm" in str(error.value.hint)
    with pytest.raises(MissingDependencyError, match="there is no interpreter"):
        require_installation(str(tmp_path / "nothing"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path("/bin/true"))
    with pytest.raises(MissingDependencyError, match="has no vLLM: it has no package vllm"):
        require_installation(str(tmp_path))


def test_an_old_vllm_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = version = '0.11.2'\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {package / '__init__.py'}\n")
    python.chmod(0o755)
    with pytest.raises(MissingDependencyError, match=r"vLLM 0.11.2 .* is too old; the vllm runtime needs 0.13"):
        require_installation(str(python))
