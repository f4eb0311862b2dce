"""A GPU that only nvidia-smi shows, with the double of nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doubles import Doubles
from trtserve.executor import runtimes


def test_gpu_visible_only_to_nvidia_smi(doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In WSL and in sandboxes the driver's folder of /proc is not there."""
    monkeypatch.setattr(runtimes, "_NVIDIA_GPUS", tmp_path / "absent")
    assert runtimes.has_nvidia_gpu()
    doubles.configure(gpus=0)
    assert not runtimes.has_nvidia_gpu()
