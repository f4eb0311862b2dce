"""Repositories of the LLM API: model.yaml, tensors per release, GPUs of instances, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.recorded_progress import Lines
from tests.support.tiny_models import write_tiny_model
from tests.support.unsupported_release import ENGINELESS
from trtserve.artifacts import Model, ModelRepository
from trtserve.cli import run
from trtserve.errors import CorruptFileError, RepositoryError, UnsupportedModelError, UsageError
from trtserve.nvidia.releases import NEWEST
from trtserve.pipeline.parity.original import Vocabulary, prompt_set
from trtserve.programs.llmapi import engine
from trtserve.repository.check import check_repository
from trtserve.repository.config import parse_config
from trtserve.repository.llmapi import plan_llmapi_repository, require_architecture
from trtserve.repository.profiles import llmapi_model
from trtserve.repository.publishing import assemble_repository
from trtserve.repository.served import inspect_repository
from trtserve.repository.tokenizer import check_tokenizer
from trtserve.specs import RepositorySpec

SPEC = RepositorySpec(name="tiny")
# Inputs by their first release.
INPUTS = {
    "0.19": {"text_input", "streaming", "sampling_param_beam_width", "sampling_param_seed", "return_finish_reason"},
    "0.20": {"sampling_param_best_of"},
    "1.0": {"sampling_param_return_perf_metrics", "lora_id", "lora_name", "lora_path", "lora_ckpt_source"},
}
OF_1_0 = {"kv_cache_reused_block", "kv_cache_hit_rate", "arrival_time_ns", "acceptance_rate", "total_draft_tokens"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(path=write_tiny_model(tmp_path_factory.mktemp("hf") / "model"))


def settings(repository: Path, model: str = "tensorrt_llm") -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((repository / model / "1" / "model.yaml").read_text())
    return content


@pytest.mark.parametrize("release", ["0.19", "0.20", "0.21", "1.0", "1.2"])
def test_tensors_follow_the_release(release: str) -> None:
    table = llmapi_model(release)
    names = {tensor.name for tensor in table.inputs}
    for since, own in INPUTS.items():
        expected = own - ({"sampling_param_beam_width"} if release != "0.19" else set())
        if tuple(map(int, release.split("."))) >= tuple(map(int, since.split("."))):
            assert expected <= names
        else:
            assert not expected & names
    assert len(names) == len(table.inputs)
    outputs = {tensor.name for tensor in table.outputs}
    assert {"text_output", "finish_reason", "stop_reason", "cumulative_logprob"} <= outputs
    assert (outputs >= OF_1_0) == release.startswith("1.")
    assert "stop" in names


def test_releases_without_the_llm_api_are_refused(model: Model) -> None:
    with pytest.raises(UsageError, match="has no model for the LLM API"):
        plan_llmapi_repository(model, replace(SPEC, release="0.18"))
    assert plan_llmapi_repository(model, replace(SPEC, trtllm_version=f"{ENGINELESS}rc4")).release == NEWEST


def test_repository(model: Model, tmp_path: Path) -> None:
    spec = replace(
        SPEC,
        streaming=False,
        kv_cache_free_gpu_mem_fraction=0.25,
        settings={"max_seq_len": "512", "moe_expert_parallel_size": "2", "gpu_device_ids": "0,1;2,3"},
    )
    made = assemble_repository(plan_llmapi_repository(model, spec, tp_size=2, out=tmp_path / "out"))
    assert settings(made.path) == {
        "model": "tensorrt_llm/1/model",
        "backend": "pytorch",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "triton_config": {"max_batch_size": 0, "decoupled": False},
        "max_seq_len": 512,
        "moe_expert_parallel_size": 2,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.25},
    }
    core = parse_config((made.path / "tensorrt_llm" / "config.pbtxt").read_text())
    assert (core.backend, core.max_batch_size, core.model_transaction_policy.decoupled) == ("python", 0, False)
    assert (core.instance_group[0].count, core.parameters["gpu_device_ids"].string_value) == (2, "0,1;2,3")
    assert (made.path / "tensorrt_llm" / "1" / "model" / "model.safetensors").samefile(model.path / "model.safetensors")
    served = inspect_repository(made)
    assert (served.runtime, served.world_size, served.core_models[0].instances) == ("llmapi", 2, 2)
    assert made.manifest is not None
    facts = made.manifest.facts
    assert (facts["tp_size"], facts["pp_size"], facts["model"]) == (2, 1, str(model.path))
    assert str(tmp_path) not in (made.path / "tensorrt_llm" / "1" / "model.yaml").read_text()


def test_paths_and_suffix(model: Model, tmp_path: Path) -> None:
    spec = replace(SPEC, suffix="_b", container_paths="/models")
    made = assemble_repository(plan_llmapi_repository(model, spec, out=tmp_path / "out"))
    assert settings(made.path, "tensorrt_llm_b")["model"] == "/models/tensorrt_llm_b/1/model"
    alias = parse_config((made.path / "tiny" / "config.pbtxt").read_text())
    assert alias.parameters["tensorrt_llm_model_name"].string_value == "tensorrt_llm_b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"tensor_parallel_size": "two"}}, "expected int"),
        ({"settings": {"max_batch_size": "true"}}, "expected int"),
        ({"settings": {"max_seq_len": "0"}}, "1 or more"),
        ({"settings": {"model": "x"}}, "set by other flags"),
        ({"settings": {"backend.x": "1"}}, "has no parts"),
        ({"settings": {"gpu_device_ids": "0"}}, "has 1 GPU for 2 ranks"),
        ({"settings": {"kv_cache_config.dtype": "[1"}}, r"--set kv_cache_config\.dtype=\[1: the value is not YAML"),
        ({"settings": {"gpu_device_ids": "a,b"}}, "expected numbers"),
        ({"batching_strategy": "V1"}, "--batching-strategy has no meaning"),
        (
            {"settings": {"kv_cache_config.max_tokens": "5"}, "max_tokens_in_paged_kv_cache": 6},
            "were both given",
        ),
        ({"name": "tensorrt_llm"}, "a Triton model in every repository"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(UsageError, match=message):
        plan_llmapi_repository(model, replace(SPEC, **change), tp_size=2)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="is not a Hugging Face model"):
        plan_llmapi_repository(Model(path=tmp_path), SPEC)


def test_command_assembles_and_describes(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--runtime", "llmapi", "--out", str(tmp_path / "out")]
    assert run(["repo", "org/Some-Model", *out, "--tp-size", "2", "--json", "--dry-run"]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)["result"]
    assert (content["model"], content["models"]) == ("org/Some-Model", ["tensorrt_llm", "Some-Model"])
    assert content["world_size"] == 2
    assert "from the hub when it starts" in printed.err
    assert not (tmp_path / "out").exists()
    assert run(["repo", str(model.path), *out, "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert inspect_repository(ModelRepository(path=tmp_path / "out")).runtime == "llmapi"
    assert run(["repo", str(model.path), *out, "--tokenizer", str(model.path)]) == 2


@pytest.mark.parametrize("wrong", ["two", 0, 1.5, True])
def test_an_invalid_parallel_size_is_reported_with_its_file(
    wrong: object, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assemble_repository(plan_llmapi_repository(model, SPEC, out=tmp_path / "out"))
    file = tmp_path / "out" / "tensorrt_llm" / "1" / "model.yaml"
    content = settings(tmp_path / "out")
    file.unlink()
    file.write_text(yaml.safe_dump({**content, "tensor_parallel_size": wrong, "max_sequence_len": 128}))
    repository = ModelRepository(path=tmp_path / "out")
    with pytest.raises(RepositoryError, match=f"tensor_parallel_size is {wrong!r}; expected a whole number") as caught:
        inspect_repository(repository)
    assert str(file) in str(caught.value)
    for more in (["--dry-run"], ["--slurm", "--container", "26.07", "--dry-run"]):
        assert run(["start", "--model-repository", str(repository.path), *more]) == 22
        assert "tensor_parallel_size is" in capsys.readouterr().err
    report = check_repository(repository, load_tokenizers=False)
    first, second = (next(each for each in report.findings if key in each.what) for key in ("_parallel_", "_sequence_"))
    assert (first.rule, first.file, first.fix) == ("core-files", file, "Correct it in model.yaml.")
    assert (second.rule, second.file) == ("llmapi-keyword", file)
    assert sum("_parallel_size" in each.what for each in report.findings) == 1


def test_gpu_groups_choose_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("TRTLLM_VISIBLE_DEVICES", "7")
    assert engine.choose_gpus("", 1, "tensorrt_llm_0") is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert engine.choose_gpus("0,1;2,3", 2, "tensorrt_llm_0_1") == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["TRTLLM_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ValueError, match="expected one group of GPUs for each of 2 instances"):
        engine.choose_gpus("0,1", 2, "tensorrt_llm_0_1")


def test_variables_of_a_slurm_job_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK", "ORTE_X", "OMPI_MCA_orte_x")
    kept = ("OMPI_MCA_btl", "PMIX_MCA_psec")
    for name in (*gone, *kept):
        monkeypatch.setenv(name, "1")
    engine.forget_mpi_job()
    assert not set(gone) & set(os.environ)
    assert set(kept) <= set(os.environ)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("sampling_param_stop", [b"a"] * 1025, "1025 words; at most 1024"),
        ("sampling_param_bad", [b"a" * 1025], "a word of 1025 bytes; at most 1024"),
        ("text_input", [b"a" * ((8 << 20) + 1)], "text_input has 8388609 bytes; at most 8388608"),
        ("sampling_param_guided_decoding", [b"a" * ((8 << 20) + 1)], "8388609 bytes; at most"),
    ],
)
def test_texts_and_lists_are_bounded(name: str, values: list[bytes], message: str) -> None:
    import numpy as np

    inputs = {"text_input": np.array([b"x"], dtype=np.object_), name: np.array(values, dtype=np.object_)}
    with pytest.raises(ValueError, match=message):
        engine.read_request(inputs, decoupled=True)


def test_lora_inputs_need_each_other() -> None:
    import numpy as np

    text = {"text_input": np.array([b"x"], dtype=np.object_)}
    with pytest.raises(ValueError, match="must be given together"):
        engine.read_request({**text, "lora_id": np.array([1], dtype=np.uint64)}, decoupled=True)
    names = {name: np.array([b"poet"], dtype=np.object_) for name in ("lora_name", "lora_path")}
    found = engine.read_request({**text, **names, "lora_id": np.array([1], dtype=np.uint64)}, decoupled=True)
    assert found.lora == {"lora_int_id": 1, "lora_name": "poet", "lora_path": "poet", "lora_ckpt_source": "hf"}
    with pytest.raises(ValueError, match="decoupled mode"):
        engine.read_request({**text, "streaming": np.array([True])}, decoupled=False)


def test_code_of_a_model_runs_only_when_asked_for_and_the_manifest_records_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, folder = tmp_path / "ran", tmp_path / "model"
    shutil.copytree(model.path, folder)
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers asks when nobody has decided
    with pytest.raises(RepositoryError, match="contains custom code"):
        check_tokenizer(folder, None)
    (tmp_path / "prompts.txt").write_text("Hi\n")
    with pytest.raises(UsageError, match="contains custom code"):
        prompt_set(folder, Vocabulary(size=256, longest=8), tmp_path / "prompts.txt")
    plan = plan_llmapi_repository(Model(path=folder), SPEC, out=tmp_path / "out")
    with pytest.raises(RepositoryError, match="contains custom code") as caught:
        assemble_repository(plan)
    assert "--set trust_remote_code=true" in str(caught.value.hint)
    assert not plan.path.exists()
    asked = replace(SPEC, settings={"trust_remote_code": "true"})
    made = assemble_repository(plan_llmapi_repository(Model(path=folder), asked, out=tmp_path / "asked"))
    assert made.manifest is not None
    assert made.manifest.facts["model_yaml"]["trust_remote_code"] is True
    assert settings(made.path)["trust_remote_code"] is True
    assert not ran.exists()


def test_a_broken_tokenizer_is_refused(model: Model, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model.path, broken)
    (broken / "tokenizer.json").write_text('{"version": ')
    plan = plan_llmapi_repository(Model(path=broken), SPEC, out=tmp_path / "out")
    with pytest.raises(RepositoryError, match="The tokenizer cannot be loaded") as caught:
        assemble_repository(plan)
    assert "--set tokenizer=FOLDER" in str(caught.value.hint)
    assert not plan.path.exists()
    shutil.copy(model.path / "tokenizer.json", broken)
    (broken / "config.json").write_text("[]")
    with pytest.raises(CorruptFileError, match=r"config\.json is not a JSON object"):
        assemble_repository(plan)
    assert not plan.path.exists()
    shutil.copy(model.path / "config.json", broken)
    (broken / "tokenizer.json").write_text('{"version": ')
    elsewhere = replace(SPEC, settings={"tokenizer": str(model.path)})
    assert assemble_repository(
        plan_llmapi_repository(Model(path=broken), elsewhere, out=tmp_path / "other")
    ).path.is_dir()


def test_unknown_keywords_give_a_warning(model: Model, tmp_path: Path) -> None:
    heard = Lines()
    given = {"foo": "1", "max_sequence_len": "8", "use_cuda_graph": "true", "attn_backend": "FLASHINFER"}
    plan_llmapi_repository(model, replace(SPEC, settings=given), out=tmp_path / "out", progress=heard)
    assert [text.partition(":")[0] for text in heard.warnings] == [
        "--set foo",
        "--set max_sequence_len",
        "--set use_cuda_graph",
    ]
    assert "Did you mean max_seq_len?" in heard.warnings[1]
    assert "after release 0.21: give cuda_graph_config" in heard.warnings[2]
    heard = Lines()
    older = replace(SPEC, release="0.20", settings={"use_cuda_graph": "true", "cuda_graph_batch_sizes": "[1, 2]"})
    plan_llmapi_repository(model, older, out=tmp_path / "out", progress=heard)
    assert heard.warnings == []


@pytest.mark.parametrize("name", ["MambaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_an_architecture_that_the_llm_api_lacks_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    expected = f"loads {name} with --runtime llmapi"
    with pytest.raises(UnsupportedModelError, match=expected):
        plan_llmapi_repository(Model(path=folder), SPEC)
    for command in ("import --runtime llmapi --dry-run", "repo --runtime llmapi --dry-run"):
        assert run([*command.split(), str(folder)]) == UnsupportedModelError.code
        assert expected in " ".join(capsys.readouterr().err.split())
    for settings in ({"trust_remote_code": "true"}, {"backend": "tensorrt"}):
        require_architecture(config, replace(SPEC, settings=settings))


def test_an_architecture_of_another_backend_says_which() -> None:
    with pytest.raises(UnsupportedModelError, match="its backend _autodeploy"):
        require_architecture({"architectures": ["Olmo3ForCausalLM"]}, SPEC)
    require_architecture({"architectures": ["Olmo3ForCausalLM"]}, replace(SPEC, settings={"backend": "_autodeploy"}))
    require_architecture({"architectures": ["Qwen3NextForCausalLM"]}, SPEC)
