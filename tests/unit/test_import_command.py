"""`import` takes what the stages that it runs take, and hands it on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.cli.app import run
from trtserve.errors import ModelNotFoundError, RepositoryError, UnsupportedModelError, UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_wrong_settings_are_refused_before_the_work(model: Path, tmp_path: Path) -> None:
    for setting in ("max_beam_width=2", "batch_scheduler_policy=bogus", "sink_token_length=4"):
        assert run(["import", str(model), "--set", setting, "--out", str(tmp_path / "out")]) == UsageError.code
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_served(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_tiny_model(tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text(encoding="utf-8"))
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "mark": 1}), encoding="utf-8")
    arguments = ["import", str(model), "--max-seq-len", "64", "--tokenizer", str(other)]
    assert run(arguments) == 0
    repository = Path(capsys.readouterr().out.splitlines()[0])
    served = repository / "preprocessing" / "1" / "tokenizer" / "tokenizer_config.json"
    assert json.loads(served.read_text(encoding="utf-8"))["mark"] == 1
    assert run([*arguments, "--dry-run"]) == 0
    assert "repo      reuse" in capsys.readouterr().out


def test_with_tokenizer_the_model_needs_none(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")))
    assert run(["import", str(bare), "--dry-run"]) == UnsupportedModelError.code
    assert "--tokenizer" in capsys.readouterr().err
    for kind in ("--dry-run", "--download-only", "--max-seq-len=64"):
        assert run(["import", str(bare), kind, "--tokenizer", str(model)]) == 0


def test_a_name_that_moves_to_another_build_is_reported(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def imported(length: int) -> tuple[str, str]:
        assert run(["import", str(model), "--name", "mine", "--max-seq-len", str(length)]) == 0
        captured = capsys.readouterr()
        return captured.out.splitlines()[0], captured.err

    first, talk = imported(64)
    assert "now means" not in talk
    second, talk = imported(65)
    assert f"mine now means {second}; `trtserve prune` removes the older build {first}" in talk
    assert "now means" not in imported(65)[1]


def test_a_missing_tokenizer_is_reported_first(model: Path, tmp_path: Path) -> None:
    assert run(["import", str(model), "--tokenizer", str(tmp_path)]) == RepositoryError.code
    assert run(["import", str(model), "--tokenizer", "nobody"]) == ModelNotFoundError.code


def test_a_draft_model_can_be_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft is imported like any model; its name is then that of its engine and of its tokenizer."""
    small = write_tiny_model(tmp_path / "small", num_hidden_layers=1)
    assert run(["import", str(small), "--max-seq-len", "64", "--quiet"]) == 0
    arguments = ["import", str(model), "--max-seq-len", "64", "--draft-engine", "small"]
    assert run(arguments) == RepositoryError.code
    assert "takes no draft tokens" in capsys.readouterr().err
    assert run([*arguments, "--max-draft-len", "4"]) == 0
    repository = Path(capsys.readouterr().out.splitlines()[0])
    assert (repository / "tensorrt_llm_draft" / "1" / "rank0.bin").exists()
    assert run([*arguments, "--max-draft-len", "4", "--dry-run"]) == 0
    assert "repo      reuse" in capsys.readouterr().out
    content = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"][0]["content"] = "<other>"
    (small / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert run(["import", str(small), "--max-seq-len", "64", "--quiet"]) == 0
    assert run([*arguments, "--max-draft-len", "4", "--dry-run"]) == RepositoryError.code
    assert "The draft model has another tokenizer" in capsys.readouterr().err
