"""The check of repositories: every single fault is found under its name, and no good repository is alarmed about."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.repositories_to_check import Kitchen, bases, others
from tests.support.repository_changes import TOKENIZER, Change, both, edit, parameter, remove, replaced, text
from tests.support.repository_faults import FAULTS, Fault
from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.check.repository import RULES, RepositoryReport, check_repository, require_sound
from trtserve.check.repository.subject import MachineFacts
from trtserve.cli import run
from trtserve.errors import CheckError, RepositoryError
from trtserve.progress import SilentProgress
from trtserve.triton.engine_match import Installation

# The numbers that the documents tell are those of these tests.
TOLD = Path(__file__).parents[2].joinpath("docs", "check.md").read_text(encoding="utf-8")
LOADED = {rule.name for rule in RULES if rule.needs == "tokenizer"}


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Kitchen:
    return Kitchen(tmp_path_factory.mktemp("kitchen"))


@pytest.fixture(scope="module")
def good(kitchen: Kitchen) -> dict[str, Path]:
    return bases(kitchen)


def report_of(path: Path, *, tokenizers: bool = False, here: MachineFacts | None = None) -> RepositoryReport:
    found = load_artifact(ModelRepository, path)
    return check_repository(ModelRepository(path=found.path, manifest=found.manifest), tokenizers=tokenizers, here=here)


def broken(fault: Fault, good: dict[str, Path], folder: Path) -> Path:
    copy = folder / "repository"
    shutil.copytree(good[fault.base], copy, copy_function=os.link)
    fault.change(copy)
    return copy


def machine(**installed: str) -> MachineFacts:
    return MachineFacts(installation=Installation(**installed), gpus=1, version=installed.get("tensorrt_llm"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.base}: {fault.what}")
def test_every_fault_is_found_by_name(fault: Fault, good: dict[str, Path], tmp_path: Path) -> None:
    found = report_of(broken(fault, good, tmp_path), tokenizers=fault.rule in LOADED).findings
    assert fault.rule in {finding.rule for finding in found}
    assert all(finding.what and (finding.fix or finding.file) for finding in found)


def test_there_are_enough_faults() -> None:
    assert len({(fault.base, fault.what) for fault in FAULTS}) == len(FAULTS) >= 60
    assert f" {len(FAULTS)} single faults in {len({fault.base for fault in FAULTS})} good repositories " in TOLD
    machine_rules = {rule.name for rule in RULES if rule.needs == "machine"}
    assert {rule.name for rule in RULES} - {fault.rule for fault in FAULTS} == machine_rules | {"no-model"}


def test_no_alarm_on_good_repositories(kitchen: Kitchen, good: dict[str, Path]) -> None:
    found = {**good, **others(kitchen)}
    assert len(found) >= 20
    assert f" {len(found)} good repositories (" in TOLD
    reports = {name: report_of(path, tokenizers=name in good) for name, path in found.items()}
    assert {name: report.findings for name, report in reports.items() if report.findings} == {}


@pytest.mark.parametrize("base", ["openvino", "newest"])
def test_no_alarm_without_a_manifest(base: str, good: dict[str, Path], tmp_path: Path) -> None:
    """A repository for all releases is known by its core model's tensors, another by those of its release."""
    copy = tmp_path / "repository"
    shutil.copytree(good[base], copy, copy_function=os.link)
    (copy / "manifest.json").unlink()
    assert report_of(copy).findings == ()
    edit("tensorrt_llm", lambda config: config.input[0].dims.append(7))(copy)
    assert "tensor-dims" in {finding.rule for finding in report_of(copy).findings}


def test_a_path_without_meaning_may_be_of_another_machine(good: dict[str, Path], tmp_path: Path) -> None:
    for base, rules in (("openvino", set()), ("newest", {"path"})):
        copy = tmp_path / base
        shutil.copytree(good[base], copy, copy_function=os.link)
        parameter("tensorrt_llm", "xgrammar_tokenizer_info_path", "/elsewhere.json")(copy)
        assert {finding.rule for finding in report_of(copy).findings} == rules


def test_added_tokens_beyond_the_vocabulary_are_named(good: dict[str, Path], tmp_path: Path) -> None:
    copy = broken(next(each for each in FAULTS if each.rule == "tokenizer-added"), good, tmp_path)
    (finding,) = [each for each in report_of(copy).findings if each.rule.startswith("tokenizer-")]
    assert (finding.severity, finding.model) == ("warning", "preprocessing")
    assert "has 1 added token beyond the engine's vocabulary" in finding.what
    assert "'<tool>' (5000)" in finding.what


def _told(good: dict[str, Path], folder: Path, change: Change) -> tuple[str, str | None, str, str]:
    """Rule, model, sentence and advice of the only finding after `change`."""
    copy = folder / "repository"
    shutil.copytree(good["cpp"], copy)
    change(copy)
    (finding,) = report_of(copy, tokenizers=True).findings
    return finding.rule, finding.model, finding.what, finding.fix


def test_a_line_that_cannot_be_read_is_told_once(good: dict[str, Path], tmp_path: Path) -> None:
    file = "preprocessing/config.pbtxt"
    rule, _, what, fix = _told(good, tmp_path, text(file, "parameters {", "parameters "))
    assert rule == "config-syntax"
    assert what.startswith("config.pbtxt is not a Triton model configuration: ")
    assert what.endswith('Expected "{".')
    assert fix.startswith("Mend the line, or make the repository again: ")


def test_a_parameter_that_is_missing_is_explained_once(good: dict[str, Path], tmp_path: Path) -> None:
    rule, _, _, fix = _told(good, tmp_path, parameter("tensorrt_llm", "gpt_model_type", None))
    assert (rule, fix) == ("parameter-missing", "Set it: batching strategy (`batching_strategy`).")


def test_a_missing_tokenizer_json_is_told_whole_by_the_model_that_encodes(
    good: dict[str, Path], tmp_path: Path
) -> None:
    rule, model, what, _ = _told(good, tmp_path, remove(f"{TOKENIZER}/tokenizer.json"))
    assert (rule, model) == ("tokenizer-load", "preprocessing")
    assert "\n" not in what
    assert not what.rstrip().endswith(":")


@pytest.mark.parametrize("template", [True, False])
def test_a_broken_tokenizer_config_is_one_error(template: bool, good: dict[str, Path], tmp_path: Path) -> None:
    broken_file = replaced(f"{TOKENIZER}/tokenizer_config.json", '{"version": ')
    change = broken_file if template else both(remove(f"{TOKENIZER}/chat_template.jinja"), broken_file)
    rule, model, _, _ = _told(good, tmp_path, change)
    assert (rule, model) == ("tokenizer-load", "preprocessing")


def test_the_machine(good: dict[str, Path]) -> None:
    def rules(base: str, here: MachineFacts) -> list[str]:
        return [finding.rule for finding in report_of(good[base], here=here).findings]

    fitting = machine(tensorrt_llm="0.18.2", tensorrt="10.9.0.34", sm="9.0", gpu="NVIDIA H200")
    assert rules("cpp", fitting) == []
    for other in ({"tensorrt_llm": "0.19.0"}, {"tensorrt": "10.8.0.1"}, {"sm": "8.0"}):
        assert rules("cpp", machine(**other)) == ["machine-engine"]
    assert rules("newest", machine(tensorrt_llm="1.3.0")) == ["machine-engine", "machine-release"]
    assert rules("gpus", machine()) == ["machine-gpus"]
    assert rules("newest", replace(machine(), gpu_bytes=12)) == ["machine-gpu-memory"]
    assert rules("newest", replace(machine(), gpu_bytes=13)) == []
    assert rules("openvino", machine()) == []


def test_an_engine_without_a_manifest_names_its_tensorrt(good: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(good["newest"], copy)
    (copy / "manifest.json").unlink()
    plan = struct.pack("<II", 0x74727466, 0) + bytes(16) + bytes((10, 14, 1, 48))
    (copy / "tensorrt_llm/1/rank0.engine").write_bytes(plan)
    fitting = machine(tensorrt_llm="1.2.0", tensorrt="10.14.1.48")
    assert report_of(copy, here=fitting).findings == ()
    (finding,) = report_of(copy, here=machine(tensorrt_llm="1.2.0", tensorrt="10.13.3.9")).findings
    assert finding.rule == "machine-engine"
    assert "built by TensorRT 10.14.1.48, and 10.13.3.9 is installed" in finding.what


def test_little_shared_memory(good: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trtserve.check.repository.machine.SHARED_MEMORY", tmp_path / "nothing")
    assert [finding.rule for finding in report_of(good["cpp"], here=machine()).findings] == ["machine-memory"]


def test_all_findings_are_told_errors_first(good: dict[str, Path], tmp_path: Path) -> None:
    copy = broken(next(each for each in FAULTS if each.rule == "cache-small"), good, tmp_path)
    for each in (fault for fault in FAULTS if fault.rule in ("engine-extra", "ensemble-batch")):
        each.change(copy)
    report = report_of(copy)
    assert [finding.severity for finding in report.findings] == ["error", "error", "warning"]
    assert {finding.rule for finding in report.findings} == {"engine-extra", "ensemble-batch", "cache-small"}


def test_command(good: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(good["cpp"]), "--no-machine"]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    copy = broken(next(each for each in FAULTS if each.rule == "engine-extra"), good, tmp_path)
    assert run(["check", str(copy), "--json"]) == CheckError.code
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["passed"], result["errors"], result["release"]) == (False, 1, "0.18")
    assert result["findings"][0]["rule"] == "engine-extra"
    assert result["findings"][0]["model"] == "tensorrt_llm"
    assert run(["check", str(copy)]) == CheckError.code
    assert "error: tensorrt_llm [engine-extra]" in capsys.readouterr().out
    assert run(["check", str(good["cpp"]), "--against", "model"]) == 2
    assert "--against is for checkpoints, and this is a model repository" in capsys.readouterr().err
    assert run(["check", str(good["gpus"]), "--trtllm-version", "0.18.2"]) == CheckError.code
    assert "built by TensorRT-LLM 1.2.0, and 0.18.2 is installed" in capsys.readouterr().out


def test_an_empty_folder_of_models(tmp_path: Path) -> None:
    assert [finding.rule for finding in report_of(tmp_path).findings] == ["no-model"]


class Heard(SilentProgress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_start_refuses_what_stops_triton(good: dict[str, Path], tmp_path: Path) -> None:
    heard = Heard()
    require_sound(ModelRepository(path=good["upstream"]), heard)
    assert heard.warnings == []
    copy = broken(next(each for each in FAULTS if each.rule == "ensemble-type"), good, tmp_path)
    with pytest.raises(RepositoryError, match="has two types: INT32 in tensorrt_llm"):
        require_sound(ModelRepository(path=copy), heard)


def test_start_tells_the_rest(good: dict[str, Path], tmp_path: Path) -> None:
    copy, heard = broken(next(each for each in FAULTS if each.rule == "cache-both"), good, tmp_path), Heard()
    require_sound(ModelRepository(path=copy), heard)
    assert len(heard.warnings) == 1
    assert heard.warnings[0].startswith("tensorrt_llm: Both max_tokens_in_paged_kv_cache (2560)")
