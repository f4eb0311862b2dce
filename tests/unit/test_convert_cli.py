"""`trtserve convert` on the command line: the path on stdout, talk on stderr, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.cli import run


def test_convert_prints_the_path_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    assert run(["convert", str(folder), "--tp-size", "2", "--quantize", "int8"]) == 0
    captured = capsys.readouterr()
    checkpoint = Path(captured.out.strip())
    assert checkpoint.parent == tmp_path / "home" / "checkpoints"
    assert checkpoint.name.startswith("tiny-")
    assert {path.name for path in checkpoint.iterdir()} == {
        "config.json",
        "manifest.json",
        "rank0.safetensors",
        "rank1.safetensors",
    }
    assert "float16, 2 ranks" in captured.err


def test_json_describes_the_checkpoint_and_its_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "tiny", dtype="bfloat16")
    arguments = ["convert", str(folder), "--out", str(tmp_path / "out"), "--json", "--quiet"]
    results = []
    for _ in range(2):
        assert run(arguments) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        envelope = json.loads(captured.out)
        assert (envelope["version"], envelope["command"]) == (1, "convert")
        results.append(envelope["result"])
    assert results[0]["dtype"] == "bfloat16"
    assert results[0]["path"] == str(tmp_path / "out")
    assert results[0]["bytes"] == (tmp_path / "out" / "rank0.safetensors").stat().st_size
    assert [result.pop("reused") for result in results] == [False, True]
    assert results[0] == results[1]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    assert run(["convert", str(folder), "--out", str(tmp_path / "out"), "--dry-run", "--tp-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "tp 4 × pp 1" in out
    assert str(tmp_path / "out") in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tp-size", "3"], 2, "4 attention heads do not divide by 3"),
        (["--dtype", "int3"], 2, "--dtype is 'int3'"),
        (["--tp-size", "0"], 2, "--tp-size is 0"),
        (["--quantize", "int3"], 2, "--quantize is 'int3'"),
        (["--embedding-sharding-dim", "1"], 2, "add --use-parallel-embedding"),
        (["--name", "ü x", "--out", "made"], 2, "'ü x' cannot name an artefact"),
        (["second"], 2, "second follows the model"),
        (["--", "--load_by_shard"], 2, "--load_by_shard follows the model"),
    ],
)
def test_errors_have_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    assert run(["convert", str(folder), *arguments]) == code
    assert message in capsys.readouterr().err


def test_options_come_from_the_environment_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSERVE_CONVERT_TP_SIZE", "4")
    folder = write_tiny_model(tmp_path / "tiny")
    assert run(["convert", str(folder), "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["tp_size"] == 4
    assert run(["convert", str(folder), "--json", "--dry-run", "--tp-size", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["tp_size"] == 2
