"""Assembling a model repository: what is in it, what decides it, and what is refused before a file is written."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import make_repository
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Engine, Manifest, ModelRepository, load_artifact
from trtserve.cli.app import run
from trtserve.errors import RepositoryError, TrtserveError, UsageError
from trtserve.repository.assembling import default_name, plan_repository
from trtserve.repository.config import parse_config
from trtserve.repository.programs import tree
from trtserve.repository.served import inspect_repository
from trtserve.specs import RepositorySpec

SPEC = RepositorySpec(name="tiny")
MODELS = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls", "tiny")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    folder = tmp_path / "engine"
    folder.mkdir()
    config = {
        "pretrained_config": {"dtype": "float16", "vocab_size": 320, "mapping": {"world_size": 1}},
        "build_config": {
            "max_batch_size": 12,
            "max_input_len": 64,
            "max_seq_len": 128,
            "max_num_tokens": 64,
            "max_beam_width": 1,
        },
        "trtserve": {"runtime": "openvino", "compute_precision": "bf16", "kv_precision": "u8"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("rank0.xml", "rank0.bin", "rank0.engine"):
        (folder / name).write_bytes(b"weights")
    manifest = Manifest(kind="engine", name="tiny-engine", fingerprint="f" * 64)
    manifest.write(folder)
    return Engine(path=folder, manifest=manifest)


def config(repository: Path, model: str) -> Any:
    return parse_config((repository / model / "config.pbtxt").read_text())


def parameters(repository: Path, model: str) -> dict[str, str]:
    return {key: value.string_value for key, value in config(repository, model).parameters.items()}


def test_repository(engine: Engine, tokenizer: Path) -> None:
    repository = make_repository(engine, tokenizer, SPEC).path
    assert sorted(path.name for path in repository.iterdir()) == [*MODELS[:1], "manifest.json", *MODELS[1:]]
    assert all(config(repository, model).name == model for model in MODELS)
    assert {config(repository, model).max_batch_size for model in MODELS} == {12}
    core = parameters(repository, "tensorrt_llm")
    assert core["executor"] == "openvino"
    assert core["executor_release"] == "1.2"
    assert core["gpt_model_type"] == "inflight_fused_batching"
    assert core["exclude_input_in_output"] == ""
    assert core["max_tokens_in_paged_kv_cache"] == ""
    assert (repository / core["gpt_model_path"] / "rank0.bin").samefile(engine.path / "rank0.bin")
    assert not (repository / "tensorrt_llm" / "1" / "manifest.json").exists()
    for model in ("preprocessing", "postprocessing"):
        folder = repository / parameters(repository, model)["tokenizer_dir"]
        assert (folder / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
        assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls", "tiny"])
def test_programs_find_their_modules_and_leave_nothing_behind(
    engine: Engine, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """As Triton's Python stub loads them: with the version folder on sys.path."""
    repository = make_repository(engine, tokenizer, SPEC).path
    monkeypatch.syspath_prepend(str(repository / model / "1"))
    try:
        program = runpy.run_path(str(repository / model / "1" / "model.py"))
        loaded = program["TritonPythonModel"].__module__
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "trtserve_models"]:
            del sys.modules[name]
    assert loaded.startswith("trtserve_models.")
    assert not list(repository.rglob("__pycache__"))


def test_paths_are_relative(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    repository = make_repository(engine, tokenizer, SPEC, out=tmp_path / "out").path
    configs = list(repository.glob("*/config.pbtxt"))
    assert configs
    for path in configs:
        assert str(tmp_path) not in path.read_text()


def test_streaming_sets_the_transaction_policy(engine: Engine, tokenizer: Path) -> None:
    for streaming in (True, False):
        repository = make_repository(engine, tokenizer, replace(SPEC, streaming=streaming)).path
        for model in ("tensorrt_llm", "tensorrt_llm_bls", "tiny"):
            assert config(repository, model).model_transaction_policy.decoupled == streaming


def test_options_reach_the_configurations(engine: Engine, tokenizer: Path) -> None:
    spec = RepositorySpec(
        name="tiny",
        triton_max_batch_size=3,
        bls_instance_count=2,
        max_tokens_in_paged_kv_cache=4096,
        kv_cache_free_gpu_mem_fraction=0.25,
        settings={
            "tensorrt_llm_bls.accumulate_tokens": "true",
            "batching_strategy": "inflight_batching",
            "max_queue_size": "9",
        },
        copy=True,
    )
    made = make_repository(engine, tokenizer, spec)
    core = parameters(made.path, "tensorrt_llm")
    assert core["max_tokens_in_paged_kv_cache"] == "4096"
    assert core["kv_cache_free_gpu_mem_fraction"] == "0.25"
    assert core["gpt_model_type"] == "inflight_batching"
    assert config(made.path, "tensorrt_llm").dynamic_batching.default_queue_policy.max_queue_size == 9
    for model in ("tensorrt_llm_bls", "tiny"):
        assert parameters(made.path, model)["accumulate_tokens"] == "true"
        assert config(made.path, model).instance_group[0].count == 2
        assert config(made.path, model).max_batch_size == 3
    assert not (made.path / "tensorrt_llm" / "1" / "rank0.bin").samefile(engine.path / "rank0.bin")


def test_manifest_facts(engine: Engine, tokenizer: Path) -> None:
    manifest = make_repository(engine, tokenizer, SPEC).manifest
    assert manifest is not None
    expected = {
        "alias": "tiny",
        "streaming": True,
        "release": "1.2",
        "all_releases": True,
        "runtime": "openvino",
        "compute_precision": "bf16",
        "kv_precision": "u8",
        "vocab_size": 320,
    }
    assert {key: manifest.facts[key] for key in expected} == expected
    assert manifest.facts["limits"]["max_seq_len"] == 128
    assert manifest.inputs == {"engine": "f" * 64}


def test_a_release_gets_exactly_its_tensors(engine: Engine, tokenizer: Path) -> None:
    repository = make_repository(engine, tokenizer, replace(SPEC, release="0.17.0")).path
    names = {tensor.name for tensor in config(repository, "tensorrt_llm").input}
    assert "min_length" in names
    assert "min_tokens" not in names
    assert parameters(repository, "tensorrt_llm")["executor_release"] == "0.17"


def test_engines_of_trtllm_build_are_accepted(engine: Engine, tokenizer: Path) -> None:
    content = json.loads((engine.path / "config.json").read_text())
    del content["trtserve"]
    (engine.path / "config.json").write_text(json.dumps(content))
    repository = make_repository(engine, tokenizer, SPEC).path
    assert config(repository, "tensorrt_llm").backend == "tensorrtllm"
    assert "executor" not in parameters(repository, "tensorrt_llm")
    assert "random_seed" not in {tensor.name for tensor in config(repository, "tensorrt_llm").input}


def test_incomplete_engine_is_refused(engine: Engine, tokenizer: Path) -> None:
    (engine.path / "rank0.bin").write_bytes(b"")
    (engine.path / "rank0.xml").unlink()
    with pytest.raises(RepositoryError, match=r"rank0\.xml, rank0\.bin missing or empty"):
        plan_repository(engine, tokenizer, SPEC)


def test_only_equal_inputs_are_reused(engine: Engine, tokenizer: Path) -> None:
    first = make_repository(engine, tokenizer, SPEC)
    assert plan_repository(engine, tokenizer, SPEC).reused
    assert make_repository(engine, tokenizer, replace(SPEC, copy=True)).path == first.path
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert not plan_repository(engine, tokenizer, SPEC).reused
    assert not plan_repository(engine, tokenizer, replace(SPEC, streaming=False)).reused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "ensemble"}, "a Triton model in every repository"),
        ({"name": "a/b"}, "cannot be the name"),
        ({"release": "0.11"}, "supported are 0.12 … 1.2"),
        ({"settings": {"max_beam_with": "2"}}, "has no parameter 'max_beam_with'"),
        ({"settings": {"preprocessing.engine_dir": "x"}}, "preprocessing has no parameter 'engine_dir'"),
        ({"settings": {"max_beam_width": "2"}}, "--set max_beam_width=2 cannot start in the embedded executor"),
        ({"settings": {"max_queue_size": str(2**40)}}, "cannot start with these settings"),
    ],
)
def test_impossible_settings_are_refused(engine: Engine, tokenizer: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_repository(engine, tokenizer, replace(SPEC, **change))


def test_gpu_engines_accept_settings_that_the_embedded_executor_refuses(engine: Engine, tokenizer: Path) -> None:
    content = json.loads((engine.path / "config.json").read_text())
    del content["trtserve"]
    (engine.path / "config.json").write_text(json.dumps(content))
    spec = replace(SPEC, settings={"batch_scheduler_policy": "max_utilization", "max_attention_window_size": "64"})
    core = plan_repository(engine, tokenizer, spec).options.parameters["tensorrt_llm"]
    assert core["batch_scheduler_policy"] == "max_utilization"
    with pytest.raises(UsageError, match="expected a whole number"):
        plan_repository(engine, tokenizer, replace(SPEC, settings={"max_tokens_in_paged_kv_cache": "abc"}))


def test_flags_set_parameters(engine: Engine, tokenizer: Path) -> None:
    flags: dict[str, Any] = {
        "batching_strategy": "inflight_batching",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "enable_kv_cache_reuse": False,
        "exclude_input_in_output": True,
        "accumulate_tokens": True,
        "max_queue_size": 7,
    }
    made = make_repository(engine, tokenizer, replace(SPEC, **flags)).path
    core, bls = parameters(made, "tensorrt_llm"), parameters(made, "tensorrt_llm_bls")
    assert (core["gpt_model_type"], core["batch_scheduler_policy"]) == ("inflight_batching", "guaranteed_no_evict")
    assert (core["enable_kv_cache_reuse"], core["exclude_input_in_output"]) == ("false", "true")
    assert (bls["accumulate_tokens"], bls["exclude_input_in_output"]) == ("true", "true")
    assert config(made, "tensorrt_llm").dynamic_batching.default_queue_policy.max_queue_size == 7
    twice = replace(SPEC, max_queue_size=7, settings={"tensorrt_llm.max_queue_size": "8"})
    with pytest.raises(UsageError, match=r"--set tensorrt_llm\.max_queue_size and --max-queue-size were"):
        plan_repository(engine, tokenizer, twice)


def test_folders_without_engine_or_tokenizer_are_refused(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="has no tokenizer files"):
        plan_repository(engine, engine.path, SPEC)
    with pytest.raises(RepositoryError, match=r"has no config\.json"):
        plan_repository(Engine(path=tmp_path), tokenizer, SPEC)
    with pytest.raises(RepositoryError, match="not an engine"):
        plan_repository(Engine(path=tokenizer), tokenizer, SPEC)


def test_broken_tokenizer_leaves_nothing_behind(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    (tokenizer / "tokenizer.json").write_text("{")
    with pytest.raises(RepositoryError, match="tokenizer cannot be loaded"):
        make_repository(engine, tokenizer, SPEC, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_too_large_ids_is_refused(engine: Engine, tokenizer: Path) -> None:
    content = json.loads((engine.path / "config.json").read_text())
    content["pretrained_config"]["vocab_size"] = 40
    (engine.path / "config.json").write_text(json.dumps(content))
    with pytest.raises(RepositoryError, match="the engine's vocabulary has 40 tokens"):
        make_repository(engine, tokenizer, SPEC)


def test_default_name(engine: Engine, tmp_path: Path) -> None:
    assert default_name(engine) == "tiny-engine"
    foreign = tmp_path / "my engine (1)"
    foreign.mkdir()
    assert default_name(Engine(path=foreign)) == "my-engine-1"


def test_the_tree_has_one_line_per_model(tmp_path: Path) -> None:
    (tmp_path / "r" / "b" / "1").mkdir(parents=True)
    (tmp_path / "r" / "a.txt").touch()
    (tmp_path / "r" / "b" / "x").touch()
    (tmp_path / "r" / ".hidden").touch()
    assert tree(tmp_path / "r").splitlines() == ["r/", "├── b/  x, 1/", "└── a.txt"]


def test_the_tree_leaves_code_modules_out(tmp_path: Path) -> None:
    for name in ("1/model.py", "1/trtserve_models/core/model.py", "1/__pycache__/model.pyc", "__pycache__/x"):
        file = tmp_path / "core" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert tree(tmp_path).splitlines()[1:] == ["└── core/  1/model.py"]


def test_command_prints_the_path_and_the_tree(
    engine: Engine, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["repo", str(engine.path), "--tokenizer", str(tokenizer), "--name", "tiny", "--set", "max_queue_size=4"]
    assert run([*arguments, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert planned.startswith("make ")
    assert run(arguments) == 0
    shown = capsys.readouterr()
    path = Path(shown.out.strip())
    assert str(path) in planned
    assert (path / "manifest.json").exists()
    assert "├── ensemble/" in shown.err
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["path"], result["reused"], result["alias"]) == (str(path), True, "tiny")


def test_command_suggests_close_names_of_settings(
    engine: Engine, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["repo", str(engine.path), "--tokenizer", str(tokenizer), "--set", "max_batchsize=4"]
    assert run(arguments) == UsageError.code
    assert issubclass(UsageError, TrtserveError)
    assert "has no parameter 'max_batchsize'" in capsys.readouterr().err


def test_ignored_parameters_are_listed(engine: Engine, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "gpu_device_ids=0", "--set", "preprocessing.max_num_images=2"]
    assert run(["repo", str(engine.path), "--tokenizer", str(tokenizer), *given]) == 0
    captured = capsys.readouterr()
    assert "Ignored by the openvino runtime: preprocessing.max_num_images, gpu_device_ids" in captured.err
    path = Path(captured.out.strip())
    ignored = ("preprocessing.max_num_images", "gpu_device_ids")
    assert Manifest.read(path).facts["ignored_parameters"] == list(ignored)
    assert inspect_repository(load_artifact(ModelRepository, path)).ignored_parameters == ignored
    with_classes = {file.parents[1].name for file in path.glob("*/1/parameter_classes.json")}
    assert with_classes == {"preprocessing", "tensorrt_llm", "tensorrt_llm_bls", path.name.rpartition("-")[0]}


def test_gpu_engines_get_no_parameter_classes(engine: Engine, tokenizer: Path) -> None:
    content = json.loads((engine.path / "config.json").read_text())
    del content["trtserve"]
    (engine.path / "config.json").write_text(json.dumps(content))
    spec = replace(SPEC, settings={"gpu_device_ids": "0", "medusa_choices": "{0}"})
    repository = make_repository(engine, tokenizer, spec)
    assert not list(repository.path.glob("*/1/parameter_classes.json"))
    assert repository.manifest is not None
    assert repository.manifest.facts["ignored_parameters"] == []


def test_a_parameter_of_another_model_is_refused(engine: Engine, tokenizer: Path) -> None:
    spec = replace(SPEC, settings={"preprocessing.multimodal_model_path": "/vision"})
    with pytest.raises(UsageError, match=r"preprocessing: Parameter multimodal_model_path is '/vision'.*not supported"):
        plan_repository(engine, tokenizer, spec)
