"""`import` takes what the stages that it runs take, and hands it on."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.tiny_models import write_tiny_model
from trtserve.cli.app import run
from trtserve.cli.import_ import _import_spec
from trtserve.cli.whole import app
from trtserve.errors import ModelNotFoundError, RepositoryError, UnsupportedModelError, UsageError
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

TREE: Any = typer.main.get_command(app)


def parameters(command: str) -> dict[str, Any]:
    return {each.name: each for each in TREE.commands[command].params if each.param_type_name == "option"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


# What `repo` does with a repository or with templates that exist already is no part of an import.
OF_REPO_ALONE = {"into", "from_template", "drop_unset", "in_place"}
# --workers of `build` is --build-workers there, since the converter has workers too; its flags stand behind no `--`.
SPELLED_OTHERWISE = {"build_workers", "builder_flags"}


@pytest.mark.parametrize("stage", ["convert", "build", "repo"])
def test_every_option_of_a_stage_is_one_of_import(stage: str) -> None:
    own = parameters("import")
    for name, option in parameters(stage).items():
        if name in OF_REPO_ALONE:
            continue
        assert name in own, f"import lacks --{name}"
        if name in SPELLED_OTHERWISE:
            continue
        assert (own[name].opts, own[name].secondary_opts) == (option.opts, option.secondary_opts)
        assert own[name].default == option.default


@pytest.mark.parametrize("spec", [ConvertSpec, BuildSpec, RepositorySpec])
def test_every_field_of_a_spec_is_an_option(spec: type[Any]) -> None:
    assert {field.name for field in fields(spec)} <= set(parameters("import"))


def test_options_reach_the_specs(model: Path) -> None:
    command = TREE.commands["import"]
    given = {each.name: each.default for each in command.params}
    given |= {"source": str(model), "name": "mine", "tp_size": 2, "max_seq_len": 64, "bls_instance_count": 3}
    given |= {"settings": ["max_queue_size=4"], "tokenizer": str(model)}
    spec = _import_spec(given)
    assert (spec.name, spec.convert.tp_size, spec.build.max_seq_len) == ("mine", 2, 64)
    assert (spec.repository.bls_instance_count, spec.repository.settings) == (3, {"max_queue_size": "4"})
    assert spec.tokenizer == model


def test_settings_are_refused_before_anything_is_made(model: Path, tmp_path: Path) -> None:
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


def test_with_another_tokenizer_the_model_needs_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")))
    assert run(["import", str(bare), "--dry-run"]) == UnsupportedModelError.code
    assert "--tokenizer" in capsys.readouterr().err
    for kind in ("--dry-run", "--download-only", "--max-seq-len=64"):
        assert run(["import", str(bare), kind, "--tokenizer", str(model)]) == 0


def test_a_name_that_moves_to_another_build_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def imported(length: int) -> tuple[str, str]:
        assert run(["import", str(model), "--name", "mine", "--max-seq-len", str(length)]) == 0
        captured = capsys.readouterr()
        return captured.out.splitlines()[0], captured.err

    first, talk = imported(64)
    assert "now means" not in talk
    second, talk = imported(65)
    assert f"mine now means {second}; the former build {first} stays until `trtserve remove mine`" in talk
    assert "now means" not in imported(65)[1]


def test_a_folder_without_tokenizer_is_said_first(model: Path, tmp_path: Path) -> None:
    assert run(["import", str(model), "--tokenizer", str(tmp_path)]) == RepositoryError.code
    assert run(["import", str(model), "--tokenizer", "nobody"]) == ModelNotFoundError.code


def test_a_draft_model_by_its_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
