"""The command that an error about an old PyTorch file names converts the file."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trtserve.checkpoint.tensor_files import PickledFile
from trtserve.errors import UnsupportedModelError


@pytest.mark.needs("torch")
def test_old_format_error_names_a_working_rewrite_command(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "it's" / "pytorch_model.bin"
    path.parent.mkdir()
    torch.save({"weight": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedModelError, match=r"format from before 1\.6") as caught:
        PickledFile(path)
    _, _, command = str(caught.value.hint).partition(": ")
    python, *arguments = shlex.split(command)
    assert python == "python"
    subprocess.run([sys.executable, *arguments], check=True, timeout=120)
    assert PickledFile(path).tensor("weight").tolist() == [0.0, 1.0, 2.0]
