"""How an import plans its stages, and where it puts its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planning_calls import ONCE, count_planning_calls
from tests.support.recorded_progress import Lines
from tests.support.tiny_models import write_tiny_model
from trtserve.cli import run
from trtserve.errors import DiskSpaceError, MemoryLimitError
from trtserve.pipeline.estimate import Question, plan_needs
from trtserve.pipeline.import_spec import ImportSpec, engine_destination
from trtserve.pipeline.importing import import_to_repository, plan_import, require_resources, warn_about_resources
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec


def spec(folder: Path) -> ImportSpec:
    return ImportSpec(
        source=str(folder),
        convert=ConvertSpec(),
        build=BuildSpec(runtime="openvino", max_batch_size=2, max_seq_len=64),
        repository=RepositorySpec(name="tiny"),
    )


def test_an_import_plans_each_stage_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = write_tiny_model(tmp_path / "hf"), count_planning_calls(monkeypatch)
    (folder / "tokenizer.json.bak").touch()  # it does not become part of the model
    made = import_to_repository(spec(folder))
    assert calls == ONCE
    calls.clear()
    assert import_to_repository(spec(folder)).path == made.path, "everything is reused"
    assert calls == ONCE


def test_a_dry_run_names_the_folders_that_the_import_makes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    before = plan_import(spec(folder)).stages()
    assert before[-1]["path"] is None, "it follows from the files of the engine"
    made = import_to_repository(spec(folder))
    after = plan_import(spec(folder)).stages()
    assert [stage["action"] for stage in after] == ["reuse"] * 4
    assert [stage["path"] for stage in after] == [*(stage["path"] for stage in before[:3]), str(made.path)]


@pytest.mark.parametrize("resource", ["free_memory", "free_disk"])
def test_a_dry_run_warns_of_what_the_import_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    plan, progress = plan_import(spec(write_tiny_model(tmp_path / "hf"))), Lines()
    warn_about_resources(plan, progress)
    assert not progress.warnings
    monkeypatch.setattr(f"trtserve.host.machine.{resource}", lambda *_: 1000)
    with pytest.raises((MemoryLimitError, DiskSpaceError)) as caught:
        require_resources(plan)
    warn_about_resources(plan, progress)
    assert caught.value.message in progress.warnings[-1]
    assert str(caught.value.hint) in progress.warnings[-1]


def test_plan_warns_of_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, progress = write_tiny_model(tmp_path / "hf"), Lines()
    question = Question(convert=ConvertSpec(), build=spec(folder).build)
    plan_needs(str(folder), question, progress=progress)
    assert not progress.warnings
    monkeypatch.setattr("trtserve.host.machine.free_disk", lambda _: 1000)
    plan_needs(str(folder), question, progress=progress)
    assert "1000 bytes free" in progress.warnings[-1]


def test_the_figures_of_a_plan_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory of start has one sequence of the cache, so that the others fit the free memory next to it."""
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda *_: 4 * 2**30)
    folder = str(write_tiny_model(tmp_path / "hf"))
    needs = plan_needs(folder, Question(convert=ConvertSpec(), build=spec(Path(folder)).build))
    machine, per_token, start = needs.machine, needs.kv_bytes_per_token, needs.stages[-1]
    assert machine is not None
    assert start.memory is not None
    assert per_token is not None
    taken = start.memory + (machine.tokens - machine.start_tokens) * per_token
    assert machine.free_memory - 32 * per_token < taken <= machine.free_memory
    assert run(["plan", folder, "--runtime", "openvino", "--max-batch-size", "2", "--max-seq-len", "64"]) == 0
    assert (
        f"{machine.tokens} tokens of KV cache: {machine.sequences} sequences of 64; the memory of start includes 64"
        in (capsys.readouterr().out)
    )


def test_an_interrupted_import_keeps_completed_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, progress = write_tiny_model(tmp_path / "hf"), Lines()

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trtserve.pipeline.build.BuildPlan.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_to_repository(spec(folder), progress=progress)
    again = plan_import(spec(folder))
    assert [stage["action"] for stage in again.stages()] == ["reuse", "reuse", "make", "make"]


def test_engine_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_destination("demo") is None
    monkeypatch.setenv("ENGINE_DEST_PATH", "/engines")
    assert str(engine_destination("demo")) == "/engines/demo"
