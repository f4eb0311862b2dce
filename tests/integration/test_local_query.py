"""`query --engine --local`: the executor in the command's own process, both runtimes, one rank and several."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_folders import write_engine
from tests.support.in_process import END_ID, InProcess
from tests.support.text_requests import ENDLESS, MAX_SEQ_LEN
from tests.support.tiny_models import write_tiny_model
from tests.support.unsupported_release import ENGINELESS
from trtserve import process
from trtserve.cli import run
from trtserve.process import Command
from trtserve.store import Store

ROOT = Path(__file__).parents[2]
# Takes the tiny engine seconds, in which a stop comes through on a busy machine too.
LONG = ("--max-tokens", str(ENDLESS), "--end-id", "-1")
STAND_INS = ROOT / "tests" / "support" / "stand_ins"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the import `tiny` in float32."""
    folder = tmp_path_factory.mktemp("local")
    model = write_tiny_model(folder / "tiny", max_position_embeddings=MAX_SEQ_LEN, num_hidden_layers=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSERVE_HOME", str(folder / "home"))
        flags = (
            "--dtype",
            "float32",
            "--max-seq-len",
            str(MAX_SEQ_LEN),
            "--max-batch-size",
            "2",
            "--max-beam-width",
            "2",
        )
        assert run(["import", str(model), *flags, "--quiet"]) == 0
    return folder / "home"


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TRTSERVE_HOME", str(home))
    return Store()


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["query", *arguments, "--local", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_the_answer_is_the_executors(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = store.recorded()
    ids = ("--input-tokens-csv", "5,6,7", "--max-tokens", "6", "--end-id", str(END_ID))
    found = _answer(capsys, "--engine", "tiny", *ids)
    oracle = InProcess(Path(record.engine))
    try:
        expected = oracle.tokens([5, 6, 7], 6)
    finally:
        oracle.close()
    assert found["sequences"][0]["token_ids"] == expected
    assert found["sequences"][0]["finish_reason"] in ("length", "end_id")
    # The engine's folder and the repository are the same engine.
    for place in (record.engine, record.repository):
        assert _answer(capsys, "--engine", place, *ids)["sequences"][0]["token_ids"] == expected


def test_texts_are_tokenised_and_streamed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("query", "--engine", "tiny", "--local", "What is ML?", "--max-tokens", "8")
    assert run([*asked]) == 0
    whole = capsys.readouterr().out
    assert run([*asked, "--stream", "--verbose"]) == 0
    streamed = capsys.readouterr()
    assert streamed.out == whole
    assert "tensorrt_llm: TTFT " in streamed.err


def test_options_of_requests(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ("--engine", "tiny", "--input-tokens-csv", "5,6,7", "--max-tokens", "3")
    beams = _answer(capsys, *ids, "--beam-width", "2", "--return-log-probs")
    assert [sequence["beam"] for sequence in beams["sequences"]] == [0, 1]
    assert len(beams["sequences"][0]["log_probs"]) == 3
    samples = _answer(capsys, *ids, "-n", "2", "--top-k", "5", "--seed", "1")
    assert [sequence["sequence"] for sequence in samples["sequences"]] == [0, 1]
    rows = ("--engine", "tiny", "--prompt", "one", "--prompt", "two three", "--batch", "--max-tokens", "2")
    assert [sequence["prompt"] for sequence in _answer(capsys, *rows)["sequences"]] == [0, 1]


def test_stop_words_and_times_end_it(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ("--engine", "tiny", "--input-tokens-csv", "5,6,7", "--stop-after-ms", "30", "--stream")
    found = _answer(capsys, *ids, *LONG)
    assert found["stopped"]
    assert found["output_tokens"] < ENDLESS


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--engine", "tiny"), 2, "--engine needs --local"),
        (("--local",), 2, "--local needs --engine ENGINE"),
        (("--engine", "tiny", "--local", "--url", "localhost:8001"), 2, "--url is for servers"),
        (("--engine", "tini", "--local"), 10, "Did you mean tiny?"),
        (
            ("--engine", "tiny", "--local", "--max-tokens", "3", "--beam-width", "3"),
            41,
            "larger than configured max beam width 2",
        ),
        (
            ("--engine", "tiny", "--local", "--lookahead-config", "[2,2,2]"),
            41,
            "not supported by the embedded executor",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_impossible_queries_are_refused(
    arguments: tuple[str, ...], code: int, expected: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["query", "--input-tokens-csv", "5,6,7", *arguments]) == code
    assert expected in capsys.readouterr().err


def test_tokenizer_is_that_of_the_model_it_was_made_of(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of this test has no import: only manifests name the source of an engine."""
    (record,) = Store(home).recorded()
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "other"))
    asked = ("query", "What is ML?", "--local", "--max-tokens", "3", "--engine")
    assert run([*asked, record.engine]) == 0
    answer = capsys.readouterr().out
    assert run([*asked, record.engine, "--tokenizer", record.model]) == 0
    assert capsys.readouterr().out == answer
    alone = tmp_path / "engine"
    shutil.copytree(record.engine, alone)
    (alone / "manifest.json").unlink()
    assert run([*asked, str(alone)]) == 2
    printed = capsys.readouterr().err
    assert "needs a tokenizer" in printed
    assert "--tokenizer" in printed


def test_another_version_of_tensorrt_llm_is_reported(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = store.recorded()
    assembled = ["repo", record.engine, "--tokenizer", record.model, "--dry-run"]
    imported = ["import", record.model, "--dry-run"]
    for command in (assembled, imported):
        assert run([*command, "--trtllm-version", ENGINELESS]) == 0
        assert f"--trtllm-version {ENGINELESS} is not used" in capsys.readouterr().err
        with monkeypatch.context() as patch:
            patch.setenv("TRTSERVE_TRTLLM_VERSION", ENGINELESS)
            assert run(command) == 0
        assert "is not used" not in capsys.readouterr().err


def test_a_missing_runtime_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_engine(tmp_path / "engine", version="1.2.0").path
    assert run(["query", "--engine", str(engine), "--local", "--input-tokens-csv", "5,6"]) == 3
    error = capsys.readouterr().err
    assert "cannot be imported: No module named 'tensorrt_llm'" in error
    assert "in NVIDIA's container" in error


def test_several_ranks_without_their_runtime_are_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Command] = []
    monkeypatch.setattr(process, "become", started.append)
    engine = write_engine(tmp_path / "engine", version="1.2.0", tp_size=2).path
    assert run(["query", "--engine", str(engine), "--local", "--input-tokens-csv", "5,6"]) == 3
    assert capsys.readouterr().err.count("error:") == 1
    assert not started


def test_ctrl_c_stops_it(store: Store) -> None:
    argv = [sys.executable, "-m", "trtserve", "query", "--engine", "tiny", "--local", "--stream", "go on", *LONG]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        command.stdout.read(1)  # the answer has begun
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.needs("torch")
class TestTensorrtLlm:
    """With strict bindings whose answers count upwards."""

    def _query(self, engine: Path, release: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STAND_INS}"}
        environment["TRTSERVE_STAND_IN_RELEASE"] = release
        argv = [sys.executable, "-m", "trtserve", "query", "--engine", str(engine), "--local", *arguments]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)

    @pytest.mark.parametrize("release", ["0.12.0", "0.16.0", "1.2.0"])
    def test_one_rank(self, release: str, tmp_path: Path) -> None:
        engine = write_engine(tmp_path / "engine", version=release).path
        asked = ("--input-tokens-csv", "5,6,7", "--max-tokens", "4", "--min-tokens", "1", "--top-k", "1", "--json")
        ended = self._query(engine, release, *asked)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)["result"]
        assert found["sequences"][0]["token_ids"] == [8, 9, 10, 11]

    def test_several_ranks_under_mpirun(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second one takes no question and waits for the first: 0 is the end of both."""
        monkeypatch.setenv("TRTSERVE_STAND_IN_MEETING", str(tmp_path))
        engine = write_engine(tmp_path / "engine", version="1.2.0", tp_size=2).path
        ended = self._query(engine, "1.2.0", "--input-tokens-csv", "5,6,7", "--max-tokens", "3")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip() == "8, 9, 10"
        assert (tmp_path / "rank1").read_text() == "ended after its leader"

    def test_a_refused_question_ends_all_ranks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRTSERVE_STAND_IN_MEETING", str(tmp_path))
        engine = write_engine(tmp_path / "engine", version="1.2.0", tp_size=2).path
        ended = self._query(engine, "1.2.0", "--input-tokens-csv", "5,6,7", "--input", "max_tokens=0")
        assert ended.returncode != 0
        assert "error:" in ended.stderr
