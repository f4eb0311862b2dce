"""The doubles refuse what NVIDIA's tools, docker and Slurm refuse, so that a wrong command line fails a test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import convert_checkpoint, docker, llmapi_launch, slurm, tritonserver, trtllm_build
from tests.doubles.mounts import MountError, parse_mount, translate
from tests.doubles.slurm_options import OptionError, script_options
from tests.support.double_engines import write_checkpoint
from tests.support.doubles import Doubles

IMAGE = "nvcr.io/nvidia/tritonserver:25.04-trtllm-python-py3"
Tool = Callable[[list[str], Path], int]

convert: Tool = partial(convert_checkpoint.main, family="llama", script="convert_checkpoint.py")
REFUSED: list[tuple[Tool, str, tuple[str, ...], str]] = [
    (trtllm_build.main, "25.04", ("--max_output_len", "8"), "unrecognized arguments"),
    (trtllm_build.main, "24.08", ("--kv_cache_type", "paged"), "unrecognized arguments"),
    (trtllm_build.main, "26.07", ("--auto_parallel", "1"), "unrecognized arguments"),
    (convert, "24.12", ("--use_embedding_sharing",), "unrecognized arguments"),
    (tritonserver.main, "25.04", ("--model-repository=r", "--http-max-input-size=5"), "unrecognized option"),
    (llmapi_launch.main, "25.12", ("tritonserver", "--model-repository=/a b"), "at its blanks"),
    (docker.main, "25.04", ("run", "--gpu", "all", IMAGE, "true"), "unknown flag: --gpu"),
    (docker.main, "25.04", ("run", "-v", "/nowhere:/models", IMAGE, "true"), "does not exist"),
    (docker.main, "25.04", ("run", "nvcr.io/nvidia/tritonserver:25.04-py3", "true"), "manifest unknown"),
    (slurm.srun, "25.04", ("--gpus", "4", "true"), "unrecognized option '--gpus'"),
    (slurm.srun, "25.04", ("--container-image", IMAGE, "true"), "'#' is between registry and image"),
]


@pytest.mark.parametrize(("tool", "container", "words", "text"), REFUSED, ids=[" ".join(row[2]) for row in REFUSED])
def test_wrong_command_lines_are_refused(
    tool: Tool, container: str, words: tuple[str, ...], text: str, doubles: Doubles, capsys: pytest.CaptureFixture[str]
) -> None:
    doubles.configure(container=container)
    with suppress(SystemExit):  # argparse ends the tool itself
        assert tool(list(words), doubles.folder) != 0
    assert text in capsys.readouterr().err


def test_paths_outside_the_mounts_do_not_exist_in_a_container(tmp_path: Path) -> None:
    mounts = [parse_mount(f"{tmp_path}:/models")]
    assert translate("--model-repository=/models/a", mounts) == f"--model-repository={tmp_path}/a"
    with pytest.raises(MountError, match="No such file"):
        translate("--model-repository=/engines", mounts)


def test_job_options_behind_a_command_are_refused() -> None:
    with pytest.raises(OptionError, match="comes after a command"):
        script_options("#!/bin/bash\necho\n#SBATCH --nodes=1\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": {"world_size": 2, "tp_size": 2, "rank": 0}}, "unexpected keyword argument 'rank'"),
        ({"num_hidden_layers": 3}, "Required but not provided tensors"),
    ],
)
def test_checkpoints_that_no_loader_takes_are_refused(
    changes: dict[str, Any],
    message: str,
    doubles: Doubles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "checkpoint", tp=2, **changes)
    assert trtllm_build.main(["--checkpoint_dir", "checkpoint", "--output_dir", "engine"], doubles.folder) == 1
    assert message in capsys.readouterr().err
