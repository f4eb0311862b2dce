"""A second core model in a repository: which engines make a pair, and what both models are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import make_repository
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Engine, Manifest
from trtserve.cli.app import run
from trtserve.errors import RepositoryError, UsageError
from trtserve.repository.assembling import plan_repository
from trtserve.repository.config import parse_config
from trtserve.repository.tokenizer import require_same_tokens
from trtserve.specs import RepositorySpec

SPEC = RepositorySpec(name="tiny")
MakeEngine = Callable[..., Engine]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(name: str, *, runtime: str = "openvino", layers: int = 2, vocab_size: int = 320, **build: Any) -> Engine:
        folder = tmp_path / name
        folder.mkdir()
        limits = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 64}
        plugins = {"use_paged_context_fmha": True, "lora_plugin": None}
        model = {"dtype": "float16", "vocab_size": vocab_size, "num_hidden_layers": layers, "hidden_size": 64}
        model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mapping": {"world_size": 1}}
        config = {
            "pretrained_config": model,
            "build_config": {**limits, "max_beam_width": 1, "max_draft_len": 0, "plugin_config": plugins, **build},
            "trtserve": {"runtime": runtime},
        }
        (folder / "config.json").write_text(json.dumps(config))
        for file in ("rank0.xml", "rank0.bin", "rank0.engine"):
            (folder / file).write_bytes(name.encode())
        manifest = Manifest(kind="engine", name=name, fingerprint=name)
        manifest.write(folder)
        return Engine(path=folder, manifest=manifest)

    return make


@pytest.fixture
def target(make_engine: MakeEngine) -> Engine:
    return make_engine("target", max_draft_len=8)


def parameters(repository: Path, model: str) -> dict[str, str]:
    config = parse_config((repository / model / "config.pbtxt").read_text())
    assert config.name == model
    return {key: value.string_value for key, value in config.parameters.items()}


def test_repository_of_two_engines(target: Engine, make_engine: MakeEngine, tokenizer: Path) -> None:
    draft = make_engine("draft", layers=1)
    made = make_repository(target, tokenizer, SPEC, draft=draft)
    core, second = (parameters(made.path, name) for name in ("tensorrt_llm", "tensorrt_llm_draft"))
    assert (core["gpt_model_path"], second["gpt_model_path"]) == ("tensorrt_llm/1", "tensorrt_llm_draft/1")
    assert (made.path / "tensorrt_llm_draft" / "1" / "rank0.bin").samefile(draft.path / "rank0.bin")
    assert (made.path / "tensorrt_llm_draft" / "1" / "model.py").exists()
    assert core["enable_kv_cache_reuse"] == second["enable_kv_cache_reuse"] == "true"
    for name in ("tensorrt_llm_bls", "tiny"):
        bls = parameters(made.path, name)
        assert bls["tensorrt_llm_model_name"] == "tensorrt_llm"
        assert bls["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert made.manifest is not None
    assert made.manifest.inputs == {"engine": "target", "draft engine": "draft"}
    assert made.manifest.facts["draft"]["max_draft_len"] == 8


def test_without_a_draft_engine_there_is_one_core_model(target: Engine, tokenizer: Path) -> None:
    made = make_repository(target, tokenizer, SPEC)
    assert not (made.path / "tensorrt_llm_draft").exists()
    assert parameters(made.path, "tiny")["tensorrt_llm_draft_model_name"] == ""


def test_the_draft_engine_is_part_of_the_fingerprint(target: Engine, make_engine: MakeEngine, tokenizer: Path) -> None:
    plans = [
        plan_repository(target, tokenizer, SPEC, draft=draft) for draft in (None, make_engine("a"), make_engine("b"))
    ]
    assert len({plan.fingerprint for plan in plans}) == 3
    assert plans[1].models == (*plans[0].models[:-1], "tensorrt_llm_draft", "tiny")


def test_settings_of_the_draft_model(target: Engine, make_engine: MakeEngine, tokenizer: Path) -> None:
    settings = {"tensorrt_llm_draft.enable_kv_cache_reuse": "false", "enable_kv_cache_reuse": "false"}
    spec = replace(SPEC, settings=settings, max_tokens_in_paged_kv_cache=512)
    made = make_repository(target, tokenizer, spec, draft=make_engine("draft"))
    for name in ("tensorrt_llm", "tensorrt_llm_draft"):
        assert parameters(made.path, name)["enable_kv_cache_reuse"] == "false"
        assert parameters(made.path, name)["max_tokens_in_paged_kv_cache"] == "512"
    with pytest.raises(UsageError, match=r"tensorrt_llm_draft\.max_queue_size needs a draft model"):
        plan_repository(target, tokenizer, replace(SPEC, settings={"tensorrt_llm_draft.max_queue_size": "3"}))
    wrong = replace(SPEC, settings={"tensorrt_llm_draft.max_beams": "3"})
    with pytest.raises(UsageError, match="has no parameter 'max_beams'"):
        plan_repository(target, tokenizer, wrong, draft=make_engine("other"))


def test_an_explicit_memory_fraction_is_divided(target: Engine, make_engine: MakeEngine, tokenizer: Path) -> None:
    spec = replace(SPEC, kv_cache_free_gpu_mem_fraction=0.6)
    plan = plan_repository(target, tokenizer, spec, draft=make_engine("draft", layers=1))
    assert plan.draft is not None
    assert plan.draft.options.parameters["tensorrt_llm"]["kv_cache_free_gpu_mem_fraction"] == "0.2000"
    assert plan.options.parameters["tensorrt_llm"]["kv_cache_free_gpu_mem_fraction"] == "0.4000"


def test_two_models_on_one_gpu_share_its_memory(make_engine: MakeEngine, tokenizer: Path) -> None:
    first, second = (make_engine(name, runtime="tensorrt_llm", max_draft_len=4) for name in ("gpu", "small"))
    plan = plan_repository(first, tokenizer, SPEC, draft=second)
    assert plan.draft is not None
    shares = [
        options.parameters["tensorrt_llm"]["kv_cache_free_gpu_mem_fraction"]
        for options in (plan.options, plan.draft.options)
    ]
    assert shares == ["0.4500", "0.4500"]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"vocab_size": 319}, "The draft engine's vocabulary has 319 tokens, the target's 320"),
        ({"runtime": "tensorrt_llm"}, "built for different runtimes"),
    ],
)
def test_engines_that_do_not_match_are_refused(
    target: Engine, make_engine: MakeEngine, tokenizer: Path, draft: dict[str, Any], message: str
) -> None:
    with pytest.raises(RepositoryError, match=message):
        plan_repository(target, tokenizer, SPEC, draft=make_engine("draft", **draft))


def test_a_target_built_without_drafts_is_refused(make_engine: MakeEngine, tokenizer: Path) -> None:
    with pytest.raises(RepositoryError, match="takes no draft tokens") as caught:
        plan_repository(make_engine("plain"), tokenizer, SPEC, draft=make_engine("draft"))
    assert "--max-draft-len" in str(caught.value.hint)


def test_tokenizers_must_agree(target: Engine, make_engine: MakeEngine, tokenizer: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other")
    require_same_tokens(tokenizer, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RepositoryError, match=r"'a' is \d+ for the target and \d+ for the draft"):
        plan_repository(target, tokenizer, SPEC, draft=make_engine("draft"), draft_tokenizer=other)
    require_same_tokens(tokenizer, tmp_path)


def test_command_takes_a_draft_engine(
    target: Engine, make_engine: MakeEngine, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_engine("draft", max_seq_len=32)
    arguments = ["repo", str(target.path), "--tokenizer", str(tokenizer), "--draft-engine", str(draft.path)]
    assert run([*arguments, "--dry-run"]) == 0
    assert "draft     draft, at most 8 tokens per step" in capsys.readouterr().out
    assert run(arguments) == 0
    assert "ends at 32 tokens" in capsys.readouterr().err
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert "tensorrt_llm_draft" in result["models"]
    assert result["draft"]["limits"]["max_seq_len"] == 32
