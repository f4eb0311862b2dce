"""Features of engines: the flags of trtllm-build, its rules, and what they become in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.cli import run
from trtserve.errors import UsageError
from trtserve.executor.embedded import Features
from trtserve.executor.engine.shapes import lora_modules
from trtserve.executor.openvino.runtime import OpenvinoPlan
from trtserve.pipeline.build import plan_build
from trtserve.specs import BuildSpec, ConvertSpec

ALL = BuildSpec(
    max_batch_size=4,
    max_seq_len=128,
    max_beam_width=4,
    max_draft_len=8,
    max_prompt_embedding_table_size=64,
    gather_generation_logits=True,
    lora_plugin="auto",
    lora_target_modules=("attn_v attn_q", "mlp_gate,attn_q"),
    max_lora_rank=8,
)


def _convert(folder: Path, family: str) -> Checkpoint:
    model = Model(path=write_tiny_model(folder / "model", family))
    return convert_model(model, ConvertSpec(dtype="float32"), out=folder / "checkpoint")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _convert(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _convert(tmp_path_factory.mktemp("gpt2"), "gpt2")


def _plan(checkpoint: Checkpoint, **spec: Any) -> OpenvinoPlan:
    engine = plan_build(checkpoint, BuildSpec(**spec)).engine
    assert isinstance(engine, OpenvinoPlan)
    return engine


def _features(checkpoint: Checkpoint, **spec: Any) -> Features:
    return _plan(checkpoint, **spec).features


def test_config_lists_the_features(llama: Checkpoint, tmp_path: Path) -> None:
    engine = build_engine(llama, ALL, out=tmp_path / "engine")
    build = json.loads((engine.path / "config.json").read_text(encoding="utf-8"))["build_config"]
    wanted = {
        "max_beam_width": 4,
        "max_draft_len": 8,
        "speculative_decoding_mode": 2,
        "max_prompt_embedding_table_size": 64,
        "gather_context_logits": False,
        "gather_generation_logits": True,
        "opt_num_tokens": 16,
    }
    assert {key: build[key] for key in wanted} == wanted
    assert build["lora_config"] == {
        "lora_dir": [],
        "lora_ckpt_source": "hf",
        "max_lora_rank": 8,
        "lora_target_modules": ["attn_q", "attn_v", "mlp_gate"],
        "trtllm_modules_to_hf_modules": {"attn_q": "q_proj", "attn_v": "v_proj", "mlp_gate": "up_proj"},
    }
    plugins = build["plugin_config"]
    assert (plugins["lora_plugin"], plugins["use_paged_context_fmha"]) == ("float32", True)
    outline = plan_build(llama, ALL).engine.config_outline()["build_config"]
    assert all(build[key] == value for key, value in outline.items() if key != "plugin_config")
    assert outline["plugin_config"].items() <= plugins.items()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"gather_context_logits": True, "max_draft_len": 4}, "cannot gather context logits .*max-draft-len 4"),
        ({"gather_all_token_logits": True, "max_draft_len": 4}, "cannot gather context logits"),
        ({"speculative_decoding_mode": "medusa"}, "speculative-decoding-mode medusa needs TensorRT-LLM's GPU"),
        ({"speculative_decoding_mode": "draft_tokens_external"}, "max-draft-len 0 leaves no room for a draft"),
        ({"speculative_decoding_mode": "none", "max_draft_len": 4}, "max-draft-len is 4, but"),
        ({"lora_plugin": "auto"}, "needs --lora-target-modules"),
        ({"lora_plugin": "auto", "lora_target_modules": ["attn_x"]}, "'attn_x' is not a module; expected attn_qkv"),
        ({"lora_plugin": "auto", "lora_target_modules": ["moe_gate"]}, "moe_gate: LlamaForCausalLM has no such part"),
        ({"max_beam_width": 4, "max_batch_size": 8, "max_num_tokens": 31}, "one token for each of 4 beams per step"),
    ],
    ids=str,
)
def test_impossible_feature_combinations_are_refused(llama: Checkpoint, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _features(llama, **spec)


@pytest.mark.parametrize(
    "spec",
    [
        {"max_beam_width": 0},
        {"max_draft_len": -1},
        {"max_prompt_embedding_table_size": -1},
        {"max_lora_rank": 0},
        {"lora_plugin": "enable"},
        {"use_paged_context_fmha": "true"},
        {"speculative_decoding_mode": "magic"},
    ],
    ids=str,
)
def test_invalid_values_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(spec)).replace('_', '-')} is"):
        BuildSpec(**spec)


def test_misspelt_module_gets_a_suggestion(llama: Checkpoint) -> None:
    with pytest.raises(UsageError) as caught:
        _features(llama, lora_plugin="auto", lora_target_modules=["atn_q"])
    assert caught.value.hint == "Did you mean attn_q?"


def test_a_plain_mlp_has_no_gate(gpt2: Checkpoint) -> None:
    with pytest.raises(UsageError, match="GPT2LMHeadModel has no gate"):
        _features(gpt2, lora_plugin="auto", lora_target_modules=["mlp_gate"])
    features = _features(gpt2, lora_plugin="float16", lora_target_modules=["mlp_h_to_4h"])
    assert (features.lora_plugin, features.lora_target_modules) == ("float16", ("mlp_h_to_4h",))


def test_draft_length_alone_means_external_drafts(llama: Checkpoint) -> None:
    plan = _plan(llama, max_draft_len=4)
    assert plan.features.speculative_decoding_mode == "draft_tokens_external"
    assert any(note.startswith("--max-draft-len 4 alone") for note in plan.notes)


def test_modules_without_lora_plugin_are_reported(llama: Checkpoint) -> None:
    plan = _plan(llama, lora_target_modules=["attn_q"])
    assert (plan.features.lora_plugin, plan.features.lora_target_modules) == (None, ())
    assert any("has no effect without --lora-plugin" in note for note in plan.notes)


def test_gather_all_token_logits_sets_both(llama: Checkpoint) -> None:
    features = _features(llama, gather_all_token_logits=True)
    assert features.gather_context_logits
    assert features.gather_generation_logits


def test_lora_modules_map_to_rows_of_the_fused_matrix() -> None:
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 16,
        "hidden_size": 48,
        "intermediate_size": 96,
    }
    modules = {
        module.name: module
        for module in lora_modules(CheckpointConfig.of(config), ["attn_v", "attn_k", "attn_q", "attn_dense"])
    }
    assert list(modules) == ["attn_q", "attn_k", "attn_v", "attn_dense"]
    parts = [(modules[name].first, modules[name].outputs) for name in ("attn_q", "attn_k", "attn_v")]
    assert parts == [(0, 64), (64, 32), (96, 32)]
    assert all(modules[name].width == 128 for name in ("attn_q", "attn_k", "attn_v"))
    assert (modules["attn_dense"].inputs, modules["attn_dense"].outputs) == (64, 48)
    assert modules["attn_k"].numbers(8) == 8 * (48 + 32)


def test_command_takes_the_flags_in_both_spellings(llama: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max_beam_width", "2", "--gather_all_token_logits", "--lora_plugin=auto", "--max_multimodal_len", "8"]
    modules = ["--lora-target-modules", "attn_q attn_k", "--lora_target_modules", "attn_v", "--max-lora-rank", "16"]
    arguments = ["build", str(llama.path), "--dry-run", *flags, *modules, "--use_paged_context_fmha", "disable"]
    assert run(arguments) == 0
    assert (
        "features  2 beams, prompt tables of 8 rows, context logits, generation logits, adapters of rank 16 on "
        "attn_q attn_k attn_v, no reuse of KV blocks\n"
    ) in capsys.readouterr().out
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["lora_target_modules"] == ["attn_q", "attn_k", "attn_v"]
    assert run(["import", "demo", "--dry-run", "--max-draft-len", "4", "--gather_context_logits"]) == UsageError.code
