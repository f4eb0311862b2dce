"""The check of repositories: every single fault is found under its name, and no good repository is alarmed about."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories_to_check import RepositoryFactory, bases, others
from tests.support.repository_changes import (
    TOKENIZER,
    Change,
    added_tensor,
    assign,
    both,
    edit,
    instances,
    parameter,
    remove,
    replaced,
    tensor,
    text,
)
from tests.support.repository_faults import FAULTS, Fault
from tests.support.unsupported_release import ENGINELESS
from tests.support.upstream_repositories import write_upstream
from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.cli import run
from trtserve.errors import CheckError, RepositoryError
from trtserve.progress import SilentProgress
from trtserve.repository.check import RULES, check_repository, require_sound
from trtserve.repository.check.repository import MachineFacts
from trtserve.repository.check.rules import RepositoryReport
from trtserve.repository.engines import Installation
from trtserve.repository.programs import import_statements

LOADED = {rule.name for rule in RULES if rule.needs == "tokenizer"}


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> RepositoryFactory:
    return RepositoryFactory(tmp_path_factory.mktemp("repositories"))


@pytest.fixture(scope="module")
def good(factory: RepositoryFactory) -> dict[str, Path]:
    return bases(factory)


def report_of(path: Path, *, tokenizers: bool = False, here: MachineFacts | None = None) -> RepositoryReport:
    found = load_artifact(ModelRepository, path)
    return check_repository(
        ModelRepository(path=found.path, manifest=found.manifest), load_tokenizers=tokenizers, here=here
    )


def broken(fault: Fault, good: dict[str, Path], folder: Path) -> Path:
    copy = folder / "repository"
    shutil.copytree(good[fault.base], copy, copy_function=os.link)
    fault.change(copy)
    return copy


def machine(**installed: str) -> MachineFacts:
    return MachineFacts(installation=Installation(**installed), gpus=1, version=installed.get("tensorrt_llm"))


def _fault_of(rule: str) -> Fault:
    return next(fault for fault in FAULTS if fault.rule == rule)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.base}: {fault.what}")
def test_every_fault_is_found_by_its_rule(fault: Fault, good: dict[str, Path], tmp_path: Path) -> None:
    found = report_of(broken(fault, good, tmp_path), tokenizers=fault.rule in LOADED).findings
    assert fault.rule in {finding.rule for finding in found}
    assert all(finding.what and (finding.fix or finding.file) for finding in found)


def test_every_rule_has_a_fault() -> None:
    assert len({(fault.base, fault.what) for fault in FAULTS}) == len(FAULTS)
    machine_rules = {rule.name for rule in RULES if rule.needs == "machine"}
    assert {rule.name for rule in RULES} - {fault.rule for fault in FAULTS} == machine_rules | {"no-model"}


def test_no_alarm_on_good_repositories(factory: RepositoryFactory, good: dict[str, Path]) -> None:
    found = {**good, **others(factory)}
    assert len(found) >= 20
    reports = {name: report_of(path, tokenizers=name in good) for name, path in found.items()}
    assert {name: report.findings for name, report in reports.items() if report.findings} == {}


def test_imports_are_found_in_every_part_of_a_program() -> None:
    parts = ("try:", "except OSError:", "else:", "finally:")
    source = "def f():\n" + "".join(f"  {part}\n    import m{number}\n" for number, part in enumerate(parts))
    source += "match f:\n  case 1:\n    from m4 import x\nimport m5\n"
    found = [
        each.module if isinstance(each, ast.ImportFrom) else each.names[0].name for each in import_statements(source)
    ]
    assert sorted(filter(None, found)) == [f"m{number}" for number in range(6)]


def _with_moderation_step(repository: Path) -> None:
    """Add a model of the user's, and a step of the ensemble that asks it."""
    (repository / "moderation/1").mkdir(parents=True)
    (repository / "moderation/1/model.py").write_text("class TritonPythonModel:\n    pass\n")
    (repository / "moderation/config.pbtxt").write_text(
        'backend: "python" max_batch_size: 12 input { name: "TEXT" data_type: TYPE_STRING dims: 1 } '
        'output { name: "FLAGGED" data_type: TYPE_BOOL dims: 1 } parameters { key: "list" value { string_value: "x" } }'
    )

    def add_step(config: Any) -> None:
        step = config.ensemble_scheduling.step.add(model_name="moderation", model_version=-1)
        step.input_map["TEXT"], step.output_map["FLAGGED"] = "text_input", "flagged"
        config.output.add(name="flagged", data_type=1, dims=[1])

    edit("ensemble", add_step)(repository)


CUSTOMISATIONS: dict[str, Change] = {
    "an extra optional tensor": added_tensor(
        "tensorrt_llm_bls", name="trace_id", data_type=13, dims=[1], optional=True
    ),
    "an input that may be left out": tensor("tensorrt_llm", "input_lengths", assign("optional", True)),
    "more instances": both(instances("preprocessing", 7), instances("tiny", 3)),
    "priorities": edit("tensorrt_llm", lambda c: setattr(c.dynamic_batching, "priority_levels", 3)),
    "smaller batches": both(*(edit(each, assign("max_batch_size", 4)) for each in ("ensemble", "tensorrt_llm_bls"))),
    "a response cache": edit("preprocessing", lambda c: setattr(c.response_cache, "enable", True)),
    "a step of the user's": _with_moderation_step,
}


@pytest.mark.parametrize("change", CUSTOMISATIONS.values(), ids=CUSTOMISATIONS)
def test_harmless_customisations_are_not_reported(change: Change, good: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(good["cpp"], copy, copy_function=os.link)
    change(copy)
    assert report_of(copy).findings == ()


@pytest.mark.parametrize("base", ["openvino", "newest"])
def test_no_alarm_without_a_manifest(base: str, good: dict[str, Path], tmp_path: Path) -> None:
    """A repository for all releases is known by its core model's tensors, another by those of its release."""
    copy = tmp_path / "repository"
    shutil.copytree(good[base], copy, copy_function=os.link)
    (copy / "manifest.json").unlink()
    assert report_of(copy).findings == ()
    edit("tensorrt_llm", lambda config: config.input[0].dims.append(7))(copy)
    assert "tensors" in {finding.rule for finding in report_of(copy).findings}


def test_a_path_that_the_cpu_runtime_ignores_need_not_exist(good: dict[str, Path], tmp_path: Path) -> None:
    for base, rules in (("openvino", set()), ("newest", {"path"})):
        copy = tmp_path / base
        shutil.copytree(good[base], copy, copy_function=os.link)
        parameter("tensorrt_llm", "xgrammar_tokenizer_info_path", "/elsewhere.json")(copy)
        assert {finding.rule for finding in report_of(copy).findings} == rules


def test_added_tokens_beyond_the_vocabulary_are_named(good: dict[str, Path], tmp_path: Path) -> None:
    copy = broken(_fault_of("tokenizer-added"), good, tmp_path)
    (finding,) = [each for each in report_of(copy).findings if each.rule.startswith("tokenizer-")]
    assert (finding.severity, finding.model) == ("warning", "preprocessing")
    assert "has 1 added token beyond the engine's vocabulary" in finding.what
    assert "'<tool>' (5000)" in finding.what


def _only_finding(good: dict[str, Path], folder: Path, change: Change) -> tuple[str, str | None, str, str]:
    """Rule, model, sentence and advice of the only finding after `change`, besides that a file was changed."""
    copy = folder / "repository"
    shutil.copytree(good["cpp"], copy)
    change(copy)
    findings = report_of(copy, tokenizers=True).findings
    (finding,) = (each for each in findings if each.rule != "file-content")
    return finding.rule, finding.model, finding.what, finding.fix


def test_a_syntax_error_is_reported_once(good: dict[str, Path], tmp_path: Path) -> None:
    file = "preprocessing/config.pbtxt"
    rule, _, what, fix = _only_finding(good, tmp_path, text(file, "parameters {", "parameters "))
    assert rule == "config-syntax"
    assert what.startswith("config.pbtxt is not a Triton model configuration: ")
    assert what.endswith('Expected "{".')
    assert fix.startswith("Correct the line, or rebuild the repository")


def test_a_missing_parameter_is_reported_once(good: dict[str, Path], tmp_path: Path) -> None:
    rule, _, _, fix = _only_finding(good, tmp_path, parameter("tensorrt_llm", "gpt_model_type", None))
    assert (rule, fix) == ("parameter-missing", "Set it: batching strategy (`batching_strategy`).")


def test_a_missing_tokenizer_json_is_reported_by_preprocessing_in_one_line(
    good: dict[str, Path], tmp_path: Path
) -> None:
    rule, model, what, _ = _only_finding(good, tmp_path, remove(f"{TOKENIZER}/tokenizer.json"))
    assert (rule, model) == ("tokenizer-load", "preprocessing")
    assert "\n" not in what
    assert not what.rstrip().endswith(":")


@pytest.mark.parametrize("template", [True, False])
def test_a_broken_tokenizer_config_is_one_error(template: bool, good: dict[str, Path], tmp_path: Path) -> None:
    broken_file = replaced(f"{TOKENIZER}/tokenizer_config.json", '{"version": ')
    change = broken_file if template else both(remove(f"{TOKENIZER}/chat_template.jinja"), broken_file)
    rule, model, _, _ = _only_finding(good, tmp_path, change)
    assert (rule, model) == ("tokenizer-load", "preprocessing")


def test_engines_are_compared_with_the_machine(good: dict[str, Path]) -> None:
    def rules(base: str, here: MachineFacts) -> list[str]:
        return [finding.rule for finding in report_of(good[base], here=here).findings]

    fitting = machine(tensorrt_llm="0.18.2", tensorrt="10.9.0.34", sm="9.0", gpu="NVIDIA H200")
    assert rules("cpp", fitting) == []
    for other in ({"tensorrt_llm": "0.19.0"}, {"tensorrt": "10.8.0.1"}, {"sm": "8.0"}):
        assert rules("cpp", machine(**other)) == ["machine-engine"]
    assert rules("newest", machine(tensorrt_llm=ENGINELESS)) == ["machine-engine", "machine-release"]
    assert rules("gpus", machine()) == ["machine-gpus"]
    assert rules("newest", replace(machine(), gpu_bytes=12)) == ["machine-gpu-memory"]
    assert rules("newest", replace(machine(), gpu_bytes=13)) == []
    assert rules("openvino", machine()) == []


def test_the_tensorrt_version_is_read_from_the_engine_without_a_manifest(good: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(good["newest"], copy)
    (copy / "manifest.json").unlink()
    plan = struct.pack("<II", 0x74727466, 0) + bytes(16) + bytes((10, 14, 1, 48))
    (copy / "tensorrt_llm/1/rank0.engine").write_bytes(plan)
    fitting = machine(tensorrt_llm="1.2.0", tensorrt="10.14.1.48")
    assert report_of(copy, here=fitting).findings == ()
    (finding,) = report_of(copy, here=machine(tensorrt_llm="1.2.0", tensorrt="10.13.3.9")).findings
    assert finding.rule == "machine-engine"
    assert "built by TensorRT 10.14.1.48, but 10.13.3.9 is installed" in finding.what


def test_too_little_shared_memory_is_an_error(
    good: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trtserve.repository.check.machine.SHARED_MEMORY", tmp_path / "nothing")
    assert [finding.rule for finding in report_of(good["cpp"], here=machine()).findings] == ["machine-memory"]


def test_errors_come_before_warnings(good: dict[str, Path], tmp_path: Path) -> None:
    copy = broken(_fault_of("cache-small"), good, tmp_path)
    for rule in ("engine-extra", "ensemble-batch"):
        _fault_of(rule).change(copy)
    report = report_of(copy)
    assert [finding.severity for finding in report.findings] == ["error", "error", "warning"]
    assert {finding.rule for finding in report.findings} == {"engine-extra", "ensemble-batch", "cache-small"}


def test_check_command_prints_findings_and_fails_on_errors(
    good: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(good["cpp"]), "--no-machine"]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    copy = broken(_fault_of("engine-extra"), good, tmp_path)
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
    assert "built by TensorRT-LLM 1.2.0, but 0.18.2 is installed" in capsys.readouterr().out


def test_a_folder_without_models_is_one_error(tmp_path: Path) -> None:
    assert [finding.rule for finding in report_of(tmp_path).findings] == ["no-model"]


class _Warnings(SilentProgress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_start_refuses_what_stops_triton(good: dict[str, Path], tmp_path: Path) -> None:
    warned = _Warnings()
    require_sound(ModelRepository(path=good["upstream"]), warned)
    assert warned.warnings == []
    copy = broken(_fault_of("ensemble-tensor"), good, tmp_path)
    with pytest.raises(RepositoryError, match=r"has two types: INT32 .* in tensorrt_llm .* .* in postprocessing"):
        require_sound(ModelRepository(path=copy), warned)


def test_start_warns_about_other_faults(good: dict[str, Path], tmp_path: Path) -> None:
    copy, warned = broken(_fault_of("cache-both"), good, tmp_path), _Warnings()
    require_sound(ModelRepository(path=copy), warned)
    assert len(warned.warnings) == 1
    assert warned.warnings[0].startswith("tensorrt_llm: Both max_tokens_in_paged_kv_cache (2560)")


@pytest.mark.parametrize("version", ["0.12.0", "0.17.0", "0.19.0", "1.2.0"])
def test_placeholders_that_nvidias_guides_leave_are_warnings(factory: RepositoryFactory, version: str) -> None:
    path, warned = factory.upstream(f"unfilled{version}", version, placeholders=True), _Warnings()
    assert (path / "tensorrt_llm/config.pbtxt").read_text().count("${") > 15
    report = report_of(path)
    assert {finding.rule for finding in report.findings} == {"placeholder-unset"}
    assert not report.errors
    require_sound(ModelRepository(path=path), warned)
    assert any("max_tokens_in_paged_kv_cache" in text or "and " in text for text in warned.warnings)


def test_empty_lists_count_as_unset(good: dict[str, Path], tmp_path: Path) -> None:
    """As in NVIDIA's C++ backend."""
    copy = tmp_path / "repository"
    shutil.copytree(good["cpp"], copy, copy_function=os.link)
    for name in ("gpu_device_ids", "participant_ids", "medusa_choices", "eagle_choices"):
        parameter("tensorrt_llm", name, "")(copy)
    assert report_of(copy).findings == ()


def test_the_release_of_programs_on_the_embedded_executor_is_that_of_their_tensors(
    factory: RepositoryFactory, tmp_path: Path
) -> None:
    """The engine was built by no TensorRT-LLM, so its format says nothing."""
    engine = factory.embedded(max_batch_size=8)
    write_upstream(
        tmp_path / "models", "0.16", engine=engine.path, tokenizer=factory.hf, backend="python", placeholders=True
    )
    report = report_of(tmp_path / "models")
    assert report.release == "0.16"
    assert not report.errors


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_in_a_repository_stops_the_check(kind: str, good: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(good["cpp"], copy, copy_function=os.link)
    place = copy / "preprocessing" / "1" / "tokenizer" / "special_tokens_map.json"
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    found = [finding for finding in report_of(copy).findings if finding.rule == "file-access"]
    assert [finding.file for finding in found] == [place]
    assert "is not a regular file" in found[0].what


def test_links_that_lead_back_are_walked_once(good: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(good["cpp"], copy, copy_function=os.link)
    (copy / "tensorrt_llm" / "1" / "back").symlink_to(copy)
    assert not [finding for finding in report_of(copy).findings if finding.rule == "file-access"]
