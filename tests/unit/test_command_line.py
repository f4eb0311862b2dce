"""The words for a spec are those from which the command line makes the same spec."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trtserve.cli import import_ as command_line
from trtserve.cli import run
from trtserve.errors import UsageError
from trtserve.pipeline.import_spec import ImportSpec, as_json
from trtserve.specs import BUILDER_FIELDS, BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.command_line import given_values, import_command, option_words, spec_of

CONVERT = ConvertSpec(
    tp_size=4, pp_size=2, moe_tp_size=2, moe_ep_size=2, dtype="bfloat16", quantize="fp8", gpu_sm=90, keep_fp8=True,
    trtllm_version="1.2.1", use_parallel_embedding=True, embedding_sharding_dim=1,
    ignore_tensors=("v_head.*", "score weight"), converter="upstream", trtllm_script="llama", workers=2,
    calib_dataset="my texts", calib_size=8, trtllm_examples=Path("/examples"), converter_flags=("--a", "-v"),
    container="25.12", container_flags=("--shm-size=8g",),
)  # fmt: skip
BUILD = BuildSpec(
    max_batch_size=4, max_input_len=64, max_seq_len=128, max_num_tokens=256, max_beam_width=2, max_draft_len=3,
    speculative_decoding_mode="draft_tokens_external", max_prompt_embedding_table_size=16, gather_context_logits=True,
    gather_generation_logits=True, gather_all_token_logits=True, lora_plugin="auto",
    lora_target_modules=("attn_q", "attn_v"), max_lora_rank=8, kv_precision="f16", runtime="tensorrt_llm",
    device="cuda", trtllm_version="1.2.1", use_paged_context_fmha="enable", use_fp8_context_fmha="disable",
    context_fmha="enable", remove_input_padding="enable", reduce_fusion="enable", multiple_profiles="enable",
    gemm_plugin="auto", gpt_attention_plugin="float16", kv_cache_type="paged", tokens_per_block=64, opt_num_tokens=32,
    logits_dtype="float16", profiling_verbosity="detailed", build_workers=2, builder_flags=("--moe_plugin", "disable"),
    container="25.12", container_flags=("--shm-size=8g",),
)  # fmt: skip


def repository(lora: Path) -> RepositorySpec:
    """Every field but the absolute paths, which contradict those of a container."""
    return RepositorySpec(
        name="tiny", streaming=False, release="1.0", triton_max_batch_size=2, preprocessing_instance_count=2,
        postprocessing_instance_count=3, bls_instance_count=4, max_tokens_in_paged_kv_cache=512,
        kv_cache_free_gpu_mem_fraction=0.5, batching_strategy="V1", batch_scheduler_policy="max_utilization",
        enable_kv_cache_reuse=False, enable_chunked_context=True, max_attention_window_size="64,32",
        exclude_input_in_output=False, accumulate_tokens=True, max_queue_size=9, lora={"poet": lora},
        ngram_max_draft_len=3,
        settings={"gpu_device_ids": "0,1;2,3", "preprocessing.add_special_tokens": "false"}, copy=True,
        triton_backend="python", trtllm_version="1.2.1", suffix="_b", container_paths="/models",
        vllm_python="/opt/vllm/bin/python",
    )  # fmt: skip


def given(command: str, monkeypatch: pytest.MonkeyPatch) -> ImportSpec:
    """What the command line makes of it."""
    caught: list[ImportSpec] = []
    monkeypatch.setattr(command_line, "_run", lambda spec, *_, **__: caught.append(spec))
    assert run(shlex.split(command)[1:]) == 0
    return caught[0]


def test_the_specs_set_every_field(tmp_path: Path) -> None:
    for spec, kept in ((CONVERT, set()), (BUILD, set()), (repository(tmp_path), {"name", "absolute_paths"})):
        assert set(given_values(spec)) == {field.name for field in fields(spec)} - kept
    assert given_values(BuildSpec()) == given_values(ConvertSpec()) == given_values(RepositorySpec(name="tiny")) == {}
    assert not set(given_values(BUILD, without=BUILDER_FIELDS)) & set(BUILDER_FIELDS)


def test_import_takes_the_words_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = tmp_path / "a poet"
    lora.mkdir()
    spec = ImportSpec(
        source="demo", convert=CONVERT, build=BUILD, repository=repository(lora), tokenizer=_model(tmp_path), out=lora
    )
    command = import_command("tiny", "demo", as_json(spec))
    again = given(command, monkeypatch)
    assert again == spec
    with_version = import_command("tiny", "demo", as_json(spec), without=("trtllm_version", "release"))
    assert command.count("--trtllm-version") == 1
    assert not {"--trtllm-version", "--release"} & set(with_version.split())


def _model(folder: Path) -> Path:
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(folder / "model")


def test_a_record_of_an_older_version_has_only_its_source() -> None:
    assert import_command("tiny", "org/tiny", {}) == "trtserve import org/tiny --name tiny (and its flags)"


def test_what_json_keeps_makes_the_spec_again(tmp_path: Path) -> None:
    specs: list[Any] = [CONVERT, BUILD, repository(tmp_path)]
    for spec in specs:
        name = {"name": "tiny"} if isinstance(spec, RepositorySpec) else {}
        again = spec_of(type(spec), {**given_values(spec), **name, "dropped_since": 1})
        assert given_values(again) == given_values(spec)


def test_words_are_quoted() -> None:
    assert option_words({"calib_dataset": "my texts", "gather_context_logits": True, "streaming": True}) == [
        "--calib-dataset 'my texts'",
        "--gather-context-logits",
        "--streaming",
    ]
    assert option_words({"settings": {"a": "b c"}, "builder_flags": ["--x", "1"]}) == [
        "--set 'a=b c'",
        "--builder-flag=--x",
        "--builder-flag=1",
    ]


def test_a_name_too_long_for_a_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "--dry-run", "a" * 5000]) == UsageError.code
    assert "is not a valid path: File name too long" in capsys.readouterr().err


def test_an_integer_beyond_all_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = tmp_path / "setup.yaml"
    setup.write_text(f"models: {{demo: {{source: demo}}}}\nservers: {{demo: {{model: demo, http_port: {10**400}}}}}\n")
    assert run(["diff", str(setup)]) == UsageError.code
    assert "http_port is 1000000" in capsys.readouterr().err
