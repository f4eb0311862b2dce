"""Repositories of TensorRT-LLM engines: what their configurations say, in which release, and where their paths lead."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_folders import built_here, write_engine
from tests.support.stages import make_repository
from tests.support.tiny_models import write_tiny_model
from tests.support.unsupported_release import ENGINELESS
from trtserve.artifacts import Engine, ModelRepository
from trtserve.errors import RepositoryError, UsageError
from trtserve.repository.assembling import plan_repository
from trtserve.repository.config import parse_config
from trtserve.repository.engines import Installation, rebuild_command, remake_command, require_matching
from trtserve.repository.served import ServedRepository, inspect_repository
from trtserve.specs import RepositorySpec

SPEC = RepositorySpec(name="tiny")
# Parameters that the C++ backend requires.
MANDATORY = {"gpt_model_type", "gpt_model_path", "batch_scheduler_policy"}
KEY_MUST_EXIST = {"tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return write_engine(tmp_path / "engine")


def config(repository: Path, model: str) -> Any:
    return parse_config((repository / model / "config.pbtxt").read_text())


def parameters(repository: Path, model: str) -> dict[str, str]:
    return {key: value.string_value for key, value in config(repository, model).parameters.items()}


def made(engine: Engine, tokenizer: Path, out: Path, **changes: Any) -> Path:
    return make_repository(engine, tokenizer, replace(SPEC, **changes), out=out).path


def test_gpu_engines_use_the_tensorrtllm_backend(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    repository = made(engine, tokenizer, tmp_path / "out")
    core = config(repository, "tensorrt_llm")
    assert (core.backend, core.max_batch_size, core.model_transaction_policy.decoupled) == ("tensorrtllm", 12, True)
    assert core.instance_group[0].count == 1
    assert parameters(repository, "tensorrt_llm") == {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "gpt_model_path": "tensorrt_llm/1",
        "gpt_model_type": "inflight_fused_batching",
        "max_beam_width": "2",
    }
    assert (repository / "tensorrt_llm" / "1" / "rank0.engine").samefile(engine.path / "rank0.engine")
    # A stream of pushed answers needs a process of its own; the engine takes twelve requests.
    assert config(repository, "tiny").instance_group[0].count == 12
    assert parameters(repository, "tiny")["core_answers"] == "pushed"
    made(engine, tokenizer, tmp_path / "plain", streaming=False)
    assert config(tmp_path / "plain", "tiny").instance_group[0].count == 1


@pytest.mark.parametrize(
    ("version", "names", "logits"),
    [
        ("0.12.0", {"min_length", "random_seed"}, "TYPE_FP32"),
        ("0.17.0.post1", {"min_length", "random_seed"}, "TYPE_FP16"),
        ("0.19.0", {"min_length", "random_seed"}, "TYPE_FP16"),
        ("0.20.0", {"min_tokens", "seed"}, "TYPE_FP16"),
        ("1.0.3.2510", {"min_tokens", "seed"}, "TYPE_FP16"),
    ],
)
def test_the_release_follows_the_engine(
    version: str, names: set[str], logits: str, tokenizer: Path, tmp_path: Path
) -> None:
    from tritonclient.grpc.model_config_pb2 import DataType

    engine = write_engine(tmp_path / "engine", version=version, model={"logits_dtype": "float16"})
    repository = made(engine, tokenizer, tmp_path / "out")
    core = config(repository, "tensorrt_llm")
    assert names == {t.name for t in core.input} & {"min_length", "min_tokens", "random_seed", "seed"}
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", "tiny"):
        types = {t.name: DataType.Name(t.data_type) for t in config(repository, model).output}
        assert types["context_logits"] == types["generation_logits"] == logits
    assert set(parameters(repository, "tensorrt_llm")) >= MANDATORY
    present = KEY_MUST_EXIST & set(parameters(repository, "tensorrt_llm"))
    assert present == (set() if version < "0.19" else KEY_MUST_EXIST)


def test_options_override_the_release_of_the_engine(tokenizer: Path, tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "engine", version="0.19.0")
    plan = plan_repository(engine, tokenizer, replace(SPEC, release="0.20"))
    assert plan.facts["release"] == "0.20"
    assert plan_repository(engine, tokenizer, replace(SPEC, trtllm_version="0.21.0")).facts["release"] == "0.21"
    with pytest.raises(UsageError, match="different releases"):
        plan_repository(engine, tokenizer, replace(SPEC, release="0.20", trtllm_version="0.21.0"))
    with pytest.raises(UsageError) as caught:
        plan_repository(engine, tokenizer, replace(SPEC, trtllm_version=f"{ENGINELESS}rc2"))
    assert "llmapi" in f"{caught.value} {caught.value.hint}"
    old = write_engine(tmp_path / "old", version="0.9.0")
    with pytest.raises(RepositoryError, match=r"built by TensorRT-LLM 0\.9\.0"):
        plan_repository(old, tokenizer, SPEC)
    nameless = write_engine(tmp_path / "nameless", version=None)
    assert plan_repository(nameless, tokenizer, SPEC).facts["release"] == "1.2"


def test_the_python_backend(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    repository = made(engine, tokenizer, tmp_path / "out", triton_backend="python")
    assert config(repository, "tensorrt_llm").backend == "python"
    assert "executor" not in parameters(repository, "tensorrt_llm")
    assert parameters(repository, "tiny").get("core_answers") is None
    assert config(repository, "tiny").instance_group[0].count == 1
    assert not list(repository.glob("*/1/parameter_classes.json"))
    with pytest.raises(UsageError, match="one group of GPUs"):
        made(engine, tokenizer, tmp_path / "two", triton_backend="python", settings={"gpu_device_ids": "0;1"})


def test_gpu_groups_become_instances(tokenizer: Path, tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "engine", tp_size=2)
    repository = made(engine, tokenizer, tmp_path / "out", settings={"gpu_device_ids": "0,1;2,3"})
    assert config(repository, "tensorrt_llm").instance_group[0].count == 2
    served = inspect_repository(ModelRepository(path=repository))
    assert served.core_models[0].gpu_device_ids == ((0, 1), (2, 3))
    assert (served.world_size, served.core_models[0].instances) == (2, 2)
    with pytest.raises(UsageError, match=r"the group 0 has 1 GPU for 2 ranks"):
        made(engine, tokenizer, tmp_path / "wrong", settings={"gpu_device_ids": "0"})


def test_a_missing_rank_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "engine", tp_size=2, pp_size=2)
    (engine.path / "rank3.engine").unlink()
    with pytest.raises(RepositoryError, match=r"rank3\.engine missing or empty"):
        plan_repository(engine, tokenizer, SPEC)


@pytest.mark.parametrize("change", [{}, {"absolute_paths": True}, {"container_paths": "/models/"}])
def test_absolute_and_container_paths(change: dict[str, Any], engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    repository = made(engine, tokenizer, tmp_path / "out", **change)
    root = {"absolute_paths": f"{repository}/", "container_paths": "/models/"}.get(next(iter(change), ""), "")
    assert parameters(repository, "tensorrt_llm")["gpt_model_path"] == f"{root}tensorrt_llm/1"
    for model in ("preprocessing", "postprocessing"):
        assert parameters(repository, model)["tokenizer_dir"] == f"{root}preprocessing/1/tokenizer"
    served = inspect_repository(ModelRepository(path=repository, manifest=_manifest(repository)))
    assert served.core_models[0].engine == repository / "tensorrt_llm" / "1"
    assert (served.runtime, served.backend, served.release) == ("tensorrt_llm", "tensorrtllm", "0.18")


def _manifest(repository: Path) -> Any:
    from trtserve.artifacts import Manifest

    return Manifest.read(repository)


def test_two_models_in_one_repository(tokenizer: Path, tmp_path: Path) -> None:
    first = write_engine(tmp_path / "first", tp_size=2)
    second = write_engine(tmp_path / "second", build={"max_batch_size": 3})
    repository = made(first, tokenizer, tmp_path / "out")
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    spec = replace(SPEC, name="small", suffix="_b")
    assert make_repository(second, tokenizer, spec, into=repository).path == repository
    for path, content in before.items():
        assert path.name == "manifest.json" or path.read_bytes() == content
    for model in ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"):
        assert config(repository, f"{model}_b").name == f"{model}_b"
    steps = config(repository, "ensemble_b").ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["preprocessing_b", "tensorrt_llm_b", "postprocessing_b"]
    for model in ("tensorrt_llm_bls_b", "small"):
        named = parameters(repository, model)
        assert (named["tensorrt_llm_model_name"], named["preprocessing_model_name"]) == (
            "tensorrt_llm_b",
            "preprocessing_b",
        )
        assert named["postprocessing_model_name"] == "postprocessing_b"
    assert parameters(repository, "tensorrt_llm_b")["gpt_model_path"] == "tensorrt_llm_b/1"
    assert parameters(repository, "postprocessing_b")["tokenizer_dir"] == "preprocessing_b/1/tokenizer"
    served = inspect_repository(ModelRepository(path=repository, manifest=_manifest(repository)))
    assert [(core.name, core.world_size) for core in served.core_models] == [("tensorrt_llm", 2), ("tensorrt_llm_b", 1)]
    assert served.model == "tiny"
    members = _manifest(repository).facts["members"]
    assert set(members) == {"tiny", "small"}
    # Again is nothing new; another engine under a name that is taken is refused, and nothing changes.
    again = plan_repository(second, tokenizer, spec, into=repository)
    assert again.reused
    with pytest.raises(RepositoryError, match="has a model preprocessing_b already") as caught:
        make_repository(first, tokenizer, spec, into=repository)
    assert "--suffix _c --name OTHER" in str(caught.value.hint)
    with pytest.raises(UsageError, match="differs from what the models"):
        plan_repository(first, tokenizer, replace(SPEC, name="c", suffix="_c", container_paths="/m"), into=repository)


def test_adding_to_a_folder_of_other_tools_is_refused(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign" / "x").mkdir(parents=True)
    with pytest.raises(RepositoryError, match="was not made by trtserve"):
        plan_repository(engine, tokenizer, replace(SPEC, suffix="_b"), into=tmp_path / "foreign")


def served_of(engine: Engine, tokenizer: Path, out: Path) -> ServedRepository:
    repository = make_repository(engine, tokenizer, SPEC, out=out)
    return inspect_repository(repository)


def test_an_engine_for_another_gpu_names_the_command_that_rebuilds_it(tokenizer: Path, tmp_path: Path) -> None:
    engine = built_here(write_engine(tmp_path / "engine", build={"gather_context_logits": True}))
    served = served_of(engine, tokenizer, tmp_path / "out")
    assert served.core_models[0].origin["gpu"] == "NVIDIA H200"
    here = Installation(tensorrt_llm="0.18.2", tensorrt="10.9.0.34", sm="9.0", gpu="NVIDIA H200")
    require_matching(served, here)
    require_matching(served, Installation())
    command = "trtserve build tiny --runtime tensorrt_llm --max-batch-size 12 --max-input-len 64 --max-seq-len 128"
    for change, message in (
        ({"tensorrt_llm": "0.19.0"}, "was built by TensorRT-LLM 0.18.2, but 0.19.0 is installed"),
        ({"tensorrt": "10.8.0.43"}, "was built by TensorRT 10.9.0.34, but 10.8.0.43 is installed"),
        ({"sm": "80", "gpu": "NVIDIA A100"}, r"compute capability 90 \(NVIDIA H200\), but this GPU has 80"),
    ):
        with pytest.raises(RepositoryError, match=message) as caught:
            require_matching(served, replace(here, **change))
        assert command in str(caught.value.hint)
        assert "--gather-context-logits" in str(caught.value.hint)
    with pytest.raises(RepositoryError, match=r"0\.18\.2, but the container has 0\.19\.0"):
        require_matching(served, replace(here, tensorrt_llm="0.19.0"), container="25.05")


def test_the_rebuild_command_repeats_explicit_options(tokenizer: Path, tmp_path: Path) -> None:
    plugins = {"gemm_plugin": "float16", "gpt_attention_plugin": "float16", "use_paged_context_fmha": True}
    plugins |= {"tokens_per_block": 64, "reduce_fusion": False, "context_fmha": True, "nccl_plugin": "float16"}
    engine = built_here(
        write_engine(tmp_path / "engine", build={"plugin_config": plugins}), checkpoint="/my checkpoints/tiny"
    )
    served = served_of(engine, tokenizer, tmp_path / "out")
    with pytest.raises(RepositoryError) as caught:
        require_matching(served, Installation(tensorrt_llm="1.0.0"))
    command = str(caught.value.hint).partition(": ")[2]
    assert command.startswith("trtserve build '/my checkpoints/tiny' --runtime tensorrt_llm --max-batch-size 12 ")
    assert command.endswith(" --gemm-plugin float16 --use-paged-context-fmha enable")


def test_engines_of_other_tools_are_compared_by_version(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    served = served_of(engine, tokenizer, tmp_path / "out")
    with pytest.raises(RepositoryError, match=r"built by TensorRT-LLM 0\.18\.2, but 1\.0\.0 is installed"):
        require_matching(served, Installation(tensorrt_llm="1.0.0"))
    assert rebuild_command(served.core_models[0]).startswith("trtserve build CHECKPOINT --runtime tensorrt_llm")


def test_manifest_facts(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    facts = json.loads((made(engine, tokenizer, tmp_path / "out") / "manifest.json").read_text())["facts"]
    assert (facts["runtime"], facts["triton_backend"], facts["world_size"]) == ("tensorrt_llm", "tensorrtllm", 1)
    assert facts["core_models"] == {
        "tensorrt_llm": {
            "engine": "tensorrt_llm/1",
            "world_size": 1,
            "gpu_device_ids": "",
            "origin": {"tensorrt_llm": "0.18.2"},
            "built_as": None,
            "built_with": None,
            "parameters": None,
            "files": {"rank0.engine": 13},
        }
    }


def test_a_draft_model_with_a_suffix(tokenizer: Path, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    target = write_engine(tmp_path / "target", tp_size=2, model=shape, build={"max_draft_len": 4})
    draft = write_engine(tmp_path / "draft", model={**shape, "num_hidden_layers": 1})
    spec = replace(SPEC, suffix="_b", container_paths="/models")
    repository = make_repository(target, tokenizer, spec, draft=draft, out=tmp_path / "out").path
    named = parameters(repository, "tiny")
    assert (named["tensorrt_llm_model_name"], named["tensorrt_llm_draft_model_name"]) == (
        "tensorrt_llm_b",
        "tensorrt_llm_draft_b",
    )
    own = parameters(repository, "tensorrt_llm_draft_b")
    assert own["gpt_model_path"] == "/models/tensorrt_llm_draft_b/1"
    assert config(repository, "tensorrt_llm_draft_b").backend == "tensorrtllm"
    shares = [
        float(parameters(repository, name)["kv_cache_free_gpu_mem_fraction"])
        for name in ("tensorrt_llm_b", "tensorrt_llm_draft_b")
    ]
    assert shares == [pytest.approx(0.6), pytest.approx(0.3)]
    served = inspect_repository(ModelRepository(path=repository, manifest=_manifest(repository)))
    assert [(core.name, core.world_size) for core in served.core_models] == [
        ("tensorrt_llm_b", 2),
        ("tensorrt_llm_draft_b", 1),
    ]
    assert all(core.engine is not None for core in served.core_models)


def test_adapters_with_a_suffix(tokenizer: Path, tmp_path: Path) -> None:
    import numpy as np

    build = {
        "lora_config": {"lora_target_modules": ["attn_q"], "max_lora_rank": 8},
        "plugin_config": {"lora_plugin": "auto"},
    }
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "head_size": 16}
    engine = write_engine(tmp_path / "engine", model=shape, build=build)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    np.save(adapter / "model.lora_weights.npy", np.ones((1, 1, 2 * 128), np.float16))
    np.save(adapter / "model.lora_config.npy", np.array([[[1, 0, 2]]], np.int32))
    repository = made(engine, tokenizer, tmp_path / "out", suffix="_b", lora={"poet": adapter})
    table = json.loads((repository / "lora_b.json").read_text())["adapters"]
    assert (repository / table["poet"]["folder"] / "model.lora_weights.npy").is_file()
    for model in ("preprocessing_b", "tensorrt_llm_bls_b", "tiny"):
        assert parameters(repository, model)["lora_table"] == "lora_b.json"


def test_the_command_that_remakes_a_repository(tokenizer: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "the checkpoint"
    checkpoint.mkdir()
    engine = built_here(write_engine(tmp_path / "engine", tp_size=2), checkpoint=str(checkpoint))
    out = made(engine, tokenizer, tmp_path / "out", streaming=False, release="0.18", settings={"gpu_device_ids": "0,1"})
    (core,) = inspect_repository(ModelRepository(path=out)).core_models
    command = remake_command(out, core)
    assert command is not None
    build, _, rest = command.removeprefix('trtserve repo "$(').partition(')" ')
    assert shlex.split(build)[:3] == ["trtserve", "build", str(checkpoint)]
    own = str(out / "preprocessing/1/tokenizer")
    expected = ["--name", "tiny", "--tokenizer", own, "--no-streaming", "--set", "gpu_device_ids=0,1"]
    assert shlex.split(rest) == expected
    checkpoint.rmdir()
    assert remake_command(out, core) is None
    (out / "manifest.json").unlink()
    assert remake_command(out, core) is None


def test_ngram_drafts_need_the_embedded_executor(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="TensorRT-LLM's executor makes no draft tokens"):
        made(engine, tokenizer, tmp_path / "one", ngram_max_draft_len=4, triton_backend="python")


def test_wrapped_ids_need_the_python_backend(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    wrap = {"out_of_vocabulary_ids": "wrap"}
    with pytest.raises(UsageError, match="C\\+\\+ backend does not read"):
        made(engine, tokenizer, tmp_path / "cpp", settings=wrap)
    repository = made(engine, tokenizer, tmp_path / "python", settings=wrap, triton_backend="python")
    assert parameters(repository, "tensorrt_llm")["out_of_vocabulary_ids"] == "wrap"
    plain = made(engine, tokenizer, tmp_path / "plain", triton_backend="python")
    assert "out_of_vocabulary_ids" not in parameters(plain, "tensorrt_llm")
    with pytest.raises(UsageError, match="expected one of refuse, wrap"):
        made(engine, tokenizer, tmp_path / "wrong", settings={"out_of_vocabulary_ids": "clip"}, triton_backend="python")
