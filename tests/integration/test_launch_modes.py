"""GPUs are counted with nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.host.gpus import count_gpus


def test_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0
    tool = tmp_path / "nvidia-smi"
    row = "echo '{0}, 9.0, 20, 5, 15, [N/A], [N/A], [N/A], 580.1, GPU-{0}, NVIDIA H200'\n"
    tool.write_text(f"#!/bin/sh\n{row.format(0)}{row.format(1)}")
    tool.chmod(0o755)
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,")
    assert count_gpus() == 1
