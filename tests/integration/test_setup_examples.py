"""Every example of a setup file is planned, with tiny models of the same families on a hub on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, running_hub
from tests.support.peft_adapters import write_adapter
from tests.support.stages import convert_adapter
from tests.support.tiny_models import write_tiny_model
from trtserve.cli import run
from trtserve.executor.torch import runtime as torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "setups"
WITH_TORCH = "two-gpus"
# Hub id → family of its stand-in.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
}
FILES = [
    pytest.param(path, marks=[pytest.mark.needs("torch")] if path.stem == WITH_TORCH else [], id=path.stem)
    for path in sorted(EXAMPLES.glob("*.yaml"))
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        for family in set(MODELS.values()):
            shape: dict[str, Any] = {
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "max_position_embeddings": 32768,
            }
            write_tiny_model(tmp_path / family, family, **shape)
        for repository, family in MODELS.items():
            running.add(repository, tmp_path / family)
        yield running


@pytest.mark.parametrize("path", FILES)
def test_an_example_is_planned(
    path: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "count_gpus", lambda: 2)
    file = Path(shutil.copy(path, tmp_path))
    for name in ("poet", "lawyer"):
        convert_adapter(write_adapter(tmp_path / "adapters" / name, modules={"self_attn.q_proj": (64, 64)}))
    assert run(["up", str(file), "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["result"]
    assert planned["models"]
    assert all(stage["action"] == "make" for model in planned["models"] for stage in model["stages"])
    on_cluster = path.stem in ("slurm", "kubernetes")
    assert [server["action"] for server in planned["servers"]] == ["write" if on_cluster else "start"]
    assert not list(tmp_path.glob("*.slurm"))


@pytest.mark.parametrize(
    ("name", "files"),
    [("slurm", ["qwen.slurm/server.sbatch", "qwen.slurm/task.sh"]), ("kubernetes", ["mistral-objects.yaml"])],
)
def test_the_examples_for_clusters_are_written(
    name: str, files: list[str], hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path))
    assert run(["up", str(file)]) == 0
    printed = capsys.readouterr()
    assert all((tmp_path / each).is_file() for each in files)
    assert str(tmp_path / files[0]) in printed.out
    assert "Start it: " in printed.err
    assert run(["diff", str(file)]) == 0
    assert capsys.readouterr().out == ""
