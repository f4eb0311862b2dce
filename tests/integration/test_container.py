"""Docker that is missing or whose daemon does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.errors import MachineError, MissingDependencyError, UsageError
from trtserve.nvidia.containers import ContainerRun, remove_container, require_docker

IMAGE = "nvcr.io/nvidia/tritonserver:25.12-trtllm-python-py3"


def box(**changes: object) -> ContainerRun:
    return ContainerRun(**{"image": IMAGE, "name": "trtserve-test", **changes})  # type: ignore[arg-type]


def script(folder: Path, text: str) -> None:
    (folder / "docker").write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / "docker").chmod(0o755)


def test_without_docker_and_without_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="not found on PATH"):
        require_docker(box())
    remove_container("trtserve-test")  # nothing to remove is no error
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script(tmp_path, "echo 'Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 1")
    with pytest.raises(MachineError, match="Cannot connect to the Docker daemon") as caught:
        require_docker(box())
    assert "systemctl start docker" in str(caught.value.hint)
    script(tmp_path, "echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1")
    with pytest.raises(MachineError) as caught:
        require_docker(box())
    assert "group docker" in str(caught.value.hint)
    with pytest.raises(UsageError, match="does not exist"):
        require_docker(box(read_only=(tmp_path / "no",)))
