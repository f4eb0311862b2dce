"""Repositories of NVIDIA's backend `vllm`: what they serve, how they start, what `check` finds, and requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.counting_vllm import counting_python, nvidia_repository, pooling_repository
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import ModelRepository
from trtserve.bench.messages import ignores_end, text_tensors
from trtserve.bench.records import TrafficRequest
from trtserve.cli import run
from trtserve.client.request import RequestContext, request_tensors
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import ModelDescription, TensorDescription
from trtserve.client.tokenizer import PreparedPrompts
from trtserve.errors import RepositoryError, UsageError
from trtserve.executor.vllm.installation import VllmInstallation, any_release
from trtserve.repository.check import check_repository
from trtserve.repository.pooling import pools
from trtserve.repository.served import inspect_repository
from trtserve.server.plan import plan_server
from trtserve.server.repositories import named_paths
from trtserve.specs import RepositorySpec, ServerSpec
from trtserve.store import Store

MODEL = ModelDescription(
    name="vllm_model",
    decoupled=True,
    max_batch_size=0,
    inputs={
        name: TensorDescription(name=name, datatype=kind, dims=(1,), optional=name != "text_input")
        for kind, names in (
            ("BYTES", ("text_input", "sampling_parameters")),
            ("BOOL", ("stream", "exclude_input_in_output", "return_finish_reason", "return_num_output_tokens")),
            ("BOOL", ("return_logprobs", "return_cumulative_logprob", "return_num_input_tokens")),
        )
        for name in names
    },
    outputs={},
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM is here: the tables of its releases answer."""
    monkeypatch.delenv("TRTSERVE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("trtserve.executor.vllm.installation.find_installation", lambda *_, **__: None)
    monkeypatch.setattr("trtserve.repository.check.runtimes.find_installation", lambda: None)
    monkeypatch.setattr("trtserve.executor.vllm.runtime.find_installation", lambda *_, **__: None)


def found(path: Path) -> dict[str, str]:
    return {each.rule: each.what for each in check_repository(ModelRepository(path=path)).findings}


def test_it_is_served_like_a_model_of_the_vllm_runtime(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    path = nvidia_repository(tmp_path / "repository", model=str(model), tensor_parallel_size=2, dtype="float16")
    served = inspect_repository(ModelRepository(path=path))
    assert (served.runtime, served.backend, served.world_size, served.streaming) == ("vllm", "vllm", 2, True)
    assert served.precision["compute_precision"] == "float16"
    assert served.starts_workers
    assert named_paths(path) == (model,)
    assert found(path) == {}


@pytest.mark.parametrize(
    ("architecture", "files", "runner", "expected"),
    [
        ("BertModel", (), "auto", True),
        ("XLMRobertaForSequenceClassification", (), "auto", True),
        ("Qwen2ForCausalLM", (), "auto", False),  # which vLLM has for vectors too
        ("Qwen2ForCausalLM", ("modules.json",), "auto", True),
        ("Qwen2ForCausalLM", ("modules.json",), "generate", False),
        ("Qwen2ForCausalLM", (), "pooling", True),
        ("NobodysModel", (), "auto", False),
    ],
)
def test_a_pooling_model_is_known_by_its_files_and_its_architecture(
    architecture: str, files: tuple[str, ...], runner: str, expected: bool
) -> None:
    spec = RepositorySpec(settings={} if runner == "auto" else {"runner": runner})
    assert pools({"architectures": [architecture]}, files, spec, any_release()) == expected


def test_the_import_of_a_pooling_model_is_one_model_in_nvidias_shape(tmp_path: Path) -> None:
    path = pooling_repository(tmp_path)
    settings = json.loads((path / "vllm_model" / "1" / "model.json").read_text())
    assert settings["model"] == "vllm_model/1/model"
    assert (settings["runner"], settings["max_model_len"]) == ("pooling", 64)
    assert (path / settings["model"] / "1_Pooling" / "config.json").is_file()
    assert found(path) == {}
    served = inspect_repository(ModelRepository(path=path))
    assert (served.runtime, served.backend, served.model) == ("vllm", "vllm", "vllm_model")
    with pytest.raises(UsageError, match="does not find the model's folder vllm_model/1/model") as caught:
        plan_server(ModelRepository(path=path), ServerSpec(container="26.08"), store=Store(tmp_path))
    assert "--absolute-paths" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-queue-size", "3"], "--max-queue-size has no meaning for a pooling model"),
        (["--tokenizer", "{model}"], "--tokenizer has no meaning for a pooling model"),
        (["--set", "pooler_confg={{}}"], "--set pooler_confg: neither a parameter"),
    ],
)
def test_what_means_nothing_for_a_pooling_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    model = write_tiny_model(tmp_path / "model", architectures=["BertModel"])
    asked = [word.format(model=model) for word in words]
    assert run(["repo", str(model), "--runtime", "vllm", "--vllm-python", "any", *asked]) == 2
    assert message in capsys.readouterr().err
    assert run(["repo", str(model), "--runtime", "vllm", "--vllm-python", "any", "--dry-run"]) == 0
    assert "models    model" in capsys.readouterr().out


def test_a_container_has_nvidias_own_backend(tmp_path: Path) -> None:
    path = nvidia_repository(tmp_path / "repository")
    plan = plan_server(ModelRepository(path=path), ServerSpec(container="26.08"), store=Store(tmp_path))
    words = plan.instances[0].launch.command.argv
    assert any(word.endswith(":26.08-vllm-python-py3") for word in words)
    assert "--disable-auto-complete-config" not in words
    with pytest.raises(UsageError, match="--world-size is 2; the engine of the vllm runtime starts its workers itself"):
        plan_server(ModelRepository(path=path), ServerSpec(container="26.08", world_size=2), store=Store(tmp_path))


def test_here_it_is_our_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = VllmInstallation(counting_python(tmp_path / "vllm"), tmp_path)
    monkeypatch.setattr("trtserve.server.launch.modes.require_installation", lambda *_, **__: installation)
    path = nvidia_repository(tmp_path / "repository")
    plan = plan_server(ModelRepository(path=path), ServerSpec(), store=Store(tmp_path))
    words = plan.instances[0].launch.command.argv
    assert "--disable-auto-complete-config" not in words
    assert any(word.startswith(f"--backend-directory={tmp_path}/backends/") for word in words)


def test_check_names_what_cannot_work(tmp_path: Path) -> None:
    path = nvidia_repository(
        tmp_path / "repository",
        config='parameters { key: "GPU_DEVICE_IDS" value { string_value: "0,0" } }'
        'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }',
        model="/nowhere/model",
        max_modle_len=9,
        enable_lora="true",
    )
    findings = found(path)
    assert "max_modle_len: not an engine argument of vLLM" in findings["vllm-argument"]
    assert "neither a folder on this machine nor a name on the hub" in findings["vllm-model"]
    assert "multi_lora.json does not exist" in findings["vllm-adapters"]
    assert "GPU_DEVICE_IDS is '0,0'; model.json has 1 ranks" in findings["vllm-gpus"]
    assert "REPORT_CUSTOM_METRICS works in NVIDIA's image only" in findings["vllm-metrics"]
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoForCausalLM"]}))
    settings = {"model": str(model), "tensor_parallel_size": 2, "enable_lora": True}
    (path / "vllm_model/1/model.json").write_text(json.dumps(settings))
    (path / "vllm_model/1/multi_lora.json").write_text(json.dumps({"poet": "/nowhere"}))
    text = (path / "vllm_model/config.pbtxt").read_text()
    (path / "vllm_model/config.pbtxt").write_text(text.replace("KIND_MODEL", "KIND_GPU"))
    findings = found(path)
    assert "has no implementation of NoForCausalLM" in findings["vllm-model"]
    assert "The adapter poet is '/nowhere', which is not a folder." in findings["vllm-adapters"]


def test_a_model_json_without_a_model_is_refused(tmp_path: Path) -> None:
    path = nvidia_repository(tmp_path / "repository", model=None)
    with pytest.raises(RepositoryError, match="names no model"):
        inspect_repository(ModelRepository(path=path))
    (path / "vllm_model/1/model.json").write_text('{"model": "org/model", "tensor_parallel_size": "two"}')
    with pytest.raises(RepositoryError, match="tensor_parallel_size is 'two'"):
        inspect_repository(ModelRepository(path=path))
    (path / "vllm_model/1/model.json").unlink()
    with pytest.raises(RepositoryError, match="does not exist"):
        inspect_repository(ModelRepository(path=path))


def asked(**options: Any) -> dict[str, Any]:
    spec = QuerySpec(prompts=("hi",), options=options)
    context = RequestContext(spec=spec, model=MODEL, prompts=PreparedPrompts(texts=("hi",)))
    values = {each.name: each.flat()[0] for each in request_tensors(context)}
    return {**values, **json.loads(values.pop("sampling_parameters"))}


def test_options_of_query_are_vllms_parameters() -> None:
    plain = asked()
    assert (plain["max_tokens"], plain["temperature"], plain["exclude_input_in_output"]) == (256, 0, True)
    sampled = asked(temperature=0.5, top_k=3, top_p=0.0, seed=7, num_return_sequences=2, lora="poet", end_id=-1)
    assert (sampled["temperature"], sampled["top_k"], sampled["n"], sampled["lora_name"]) == (0.5, 3, 2, "poet")
    assert "top_p" not in sampled  # 0 is off, which vLLM refuses
    assert (sampled["ignore_eos"], sampled["stop_token_ids"]) == (True, [])
    assert asked(stop_words=("a", "b"))["stop"] == ["a", "b"]
    assert json.loads(asked(guide_type="regex", guide="a+")["structured_outputs"]) == {"regex": "a+"}
    assert json.loads(asked(guide_type="json")["structured_outputs"]) == {"json_object": True}
    counted = asked(return_log_probs=True, return_num_input_tokens=True)
    assert (counted["logprobs"], counted["return_logprobs"], counted["return_num_input_tokens"]) == (0, True, True)
    with pytest.raises(UsageError, match="--beam-width does not exist in NVIDIA's vllm backend"):
        asked(beam_width=2)


def test_bench_asks_for_answers_of_full_length() -> None:
    request = TrafficRequest(token_ids=np.array([1], np.int32), output_len=9, text="hi", end_id=-1)
    values = {each.name: each.flat()[0] for each in text_tensors(MODEL, request, stream=True)}
    full = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "min_tokens": 9}
    assert json.loads(values["sampling_parameters"]) == full
    assert values["return_num_output_tokens"] is True
    values = {each.name: each.flat()[0] for each in text_tensors(MODEL, replace(request, end_id=None), stream=True)}
    assert json.loads(values["sampling_parameters"]) == {"max_tokens": 9, "temperature": 0}
    assert ignores_end(MODEL)
