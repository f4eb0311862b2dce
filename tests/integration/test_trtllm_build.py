"""`trtserve build --runtime tensorrt_llm` around a strict double of trtllm-build: command lines, faults, manifests."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.double_engines import write_checkpoint
from tests.support.doubles import Doubles
from tests.support.unsupported_release import ENGINELESS
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine, Manifest, load_artifact
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.unified import read_config
from trtserve.cli import run
from trtserve.errors import UnsupportedModelError
from trtserve.nvidia.tensorrt_llm import TensorrtLlmRuntime
from trtserve.repository.engines import rebuild_command
from trtserve.repository.served import CoreModel
from trtserve.specs import BuildSpec
from trtserve.store import Store

# Container and version of TensorRT-LLM: the oldest, one with other defaults, the first with new ones, both ends of 1.x.
RELEASES = (
    ("24.08", "0.12.0"),
    ("24.12", "0.16.0"),
    ("25.05", "0.19.0"),
    ("25.10", "1.0.0"),
    ("26.07", "1.2.1"),
)


class Builder:
    """The command line on a machine with one container's TensorRT-LLM."""

    def __init__(self, doubles: Doubles, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.doubles = doubles
        self.checkpoint = folder / "checkpoint"
        self.out = folder / "engine"
        self._monkeypatch = monkeypatch

    def install(self, container: str, version: str, **settings: Any) -> None:
        self.doubles.configure(container=container, version=version, **settings)
        self._monkeypatch.syspath_prepend(str(self.doubles.packages(version)))

    def __call__(self, *arguments: str) -> int:
        return run(["build", str(self.checkpoint), "--runtime", "tensorrt_llm", "--out", str(self.out), *arguments])

    @property
    def argv(self) -> list[str]:
        """Arguments of the last call, without its folders."""
        given = list(self.doubles.calls("trtllm-build")[-1].arguments)
        for flag in ("--checkpoint_dir", "--output_dir", "--output_timing_cache"):
            place = given.index(flag)
            del given[place : place + 2]
        return given


@pytest.fixture
def build(doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    monkeypatch.chdir(tmp_path)
    return Builder(doubles, tmp_path, monkeypatch)


@pytest.fixture
def late(build: Builder) -> Builder:
    """With a TensorRT-LLM of the newest release."""
    build.install("26.07", "1.2.1")
    return build


def _limits(batch: int, tokens: int) -> list[str]:
    lengths = ["--max_input_len", "64", "--max_seq_len", "64"]
    return ["--max_batch_size", str(batch), *lengths, "--max_num_tokens", str(tokens), "--max_beam_width", "1"]


@pytest.mark.parametrize(("container", "version"), RELEASES, ids=[version for _, version in RELEASES])
def test_the_command_line_of_each_release(container: str, version: str, build: Builder) -> None:
    build.install(container, version, gpus=1)
    assert build("--gemm-plugin", "auto", "--kv-cache-type", "paged", "--use-paged-context-fmha", "enable") == 0
    batch, paged = (
        (256, ["--paged_kv_cache", "enable"]) if version == "0.12.0" else (2048, ["--kv_cache_type", "paged"])
    )
    first, second = (["--gemm_plugin", "auto", "--use_paged_context_fmha", "enable"], paged)
    if version != "0.12.0":
        first, second = second, first
    assert build.argv == [*_limits(batch, 8192), *first, *second]
    manifest = Manifest.read(build.out)
    assert manifest.tools["tensorrt_llm"] == version
    assert set(manifest.tools) == {"tensorrt_llm", "tensorrt", "cuda", "driver"}
    assert manifest.facts["gpu"] == {"name": "NVIDIA H100 80GB HBM3", "sm": "90"}
    assert manifest.facts["mapping"]["tp_size"] == 2
    assert sorted(path.name for path in build.out.iterdir()) == [
        "config.json", "manifest.json", "rank0.engine", "rank1.engine",
    ]  # fmt: skip
    assert json.loads((build.out / "config.json").read_text())["version"] == version
    assert not list(Path.cwd().glob("model.cache"))


def test_every_typed_option_reaches_the_tool(late: Builder) -> None:
    assert (
        late(
            *("--max-batch-size", "4", "--max-seq-len", "48", "--max-num-tokens", "96", "--max-beam-width", "2"),
            *("--opt-num-tokens", "32", "--max-draft-len", "3", "--gather-generation-logits"),
            *("--max-prompt-embedding-table-size", "16", "--logits-dtype", "float16", "--kv-cache-type", "paged"),
            *("--tokens-per-block", "16", "--gemm-plugin", "float16", "--gpt-attention-plugin", "float16"),
            *("--context-fmha", "enable", "--remove-input-padding", "enable", "--use-paged-context-fmha", "disable"),
            *("--use-fp8-context-fmha", "disable", "--reduce-fusion", "enable", "--multiple-profiles", "disable"),
            *("--profiling-verbosity", "detailed", "--lora-plugin", "auto", "--lora-target-modules", "attn_q,attn_v"),
            *("--max-lora-rank", "8", "--workers", "2", "--", "--moe_plugin", "disable", "--monitor_memory"),
        )
        == 0
    )
    expected = (
        "--max_batch_size 4 --max_input_len 48 --max_seq_len 48 --max_num_tokens 96 --max_beam_width 2 "
        "--max_draft_len 3 --speculative_decoding_mode draft_tokens_external --max_prompt_embedding_table_size 16 "
        "--gather_generation_logits --opt_num_tokens 32 --logits_dtype float16 --kv_cache_type paged "
        "--tokens_per_block 16 --gemm_plugin float16 --gpt_attention_plugin float16 --context_fmha enable "
        "--remove_input_padding enable --use_paged_context_fmha disable --use_fp8_context_fmha disable "
        "--reduce_fusion enable --multiple_profiles disable --profiling_verbosity detailed --lora_plugin auto "
        "--lora_target_modules attn_q attn_v --max_lora_rank 8 --moe_plugin disable --monitor_memory --workers 2"
    )
    assert " ".join(late.argv) == expected


# Fault, exit code, text in the message besides the last lines.
FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({"build_fault": "oom"}, 14, ("signal 9: it ran out of memory", "It needs about", "were free", "--tp-size")),
    ({"build_fault": "no-engine"}, 21, ("rank0.engine is missing (2 ranks",)),
    ({"build_fault": "no-engine", "build_fault_rank": 1}, 21, ("rank1.engine is missing",)),
    ({"build_fault": "empty", "build_fault_rank": 1}, 21, ("rank1.engine has 0 bytes, too little",)),
    ({"build_fault": "cut-config"}, 21, ("config.json is not JSON",)),
    ({"build_fault": "error"}, 21, ("ended with code 1", "Provided tensor names are different", "The command was:")),
    ({"version": "1.1.0"}, 21, ("TensorRT-LLM 1.1.0 built the engine; expected 1.2.1", "--trtllm-version")),
]


@pytest.mark.parametrize(("fault", "code", "expected"), FAULTS, ids=[str(list(each[0].values())) for each in FAULTS])
def test_faults_are_explained_and_leave_nothing(
    fault: dict[str, Any], code: int, expected: tuple[str, ...], late: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    late.doubles.configure(**{"container": "26.07", "version": "1.2.1", **fault})
    assert late() == code
    error = capsys.readouterr().err
    for text in expected:
        assert text in error
    (log,) = (Store().root / "logs").iterdir()
    assert f"log:   {log}" in error
    assert "TensorRT-LLM version" in log.read_text()
    assert not late.out.exists()
    assert not list(late.out.parent.glob(".*"))


def test_progress_follows_the_log_and_remembers_the_time(late: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    late.doubles.configure(container="26.07", version="1.2.1", gpus=1)
    assert late() == 0
    printed = capsys.readouterr().err
    for text in (
        "Ranks are those of the checkpoint: tp 2 × pp 1.",
        "TensorRT builds engine 1 of 2",
        "Writing rank1.engine (2 of 2)",
        "All engines are built",
        "trtllm-build --checkpoint_dir",
    ):
        assert text in printed
    assert "as earlier builds did" not in printed
    assert late("--max-batch-size", "8") == 0
    assert "as earlier builds did" in capsys.readouterr().err


def test_equal_builds_are_reused_and_the_gpu_decides(late: Builder) -> None:
    assert late() == 0
    assert late() == 0
    assert len(late.doubles.calls("trtllm-build")) == 1
    late.doubles.configure(container="26.07", version="1.2.1", sm=80, gpu_name="NVIDIA A100-SXM4-80GB")
    assert late() == 0
    assert len(late.doubles.calls("trtllm-build")) == 2
    assert load_artifact(Engine, late.out).manifest.facts["gpu"]["sm"] == "80"  # type: ignore[union-attr]


def test_build_workers_follow_gpus_and_options(late: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    late.doubles.configure(container="26.07", version="1.2.1", gpus=1)
    assert late("--dry-run") == 0
    assert "--workers" not in capsys.readouterr().out
    assert late("--dry-run", "--workers", "2") == 0
    planned = capsys.readouterr().out
    assert "--workers 2" in planned
    assert "trtllm-build builds 1 rank at once, one on each GPU." in planned


def test_ranks_that_are_built_at_once_are_in_memory_at_once(
    late: Builder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks do not fit where one does: refused before trtllm-build starts, with a number that fits."""
    late.doubles.configure(container="26.07", version="1.2.1", gpus=2)
    config = read_config(late.checkpoint)
    one, two = (TensorrtLlmRuntime().plan(config, BuildSpec(build_workers=workers)).memory_bytes for workers in (1, 2))
    assert two == 2 * one > 0
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: one)
    assert late("--workers", "2") == 14
    assert "--workers 1 (of import: --build-workers 1)" in capsys.readouterr().err
    assert not late.doubles.calls("trtllm-build")


def test_dry_run_prints_the_command_without_tensorrt_llm(build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert build("--dry-run", "--trtllm-version", "0.16.0", "--max-batch-size", "8") == 0
    planned = capsys.readouterr().out
    assert f"command   trtllm-build --checkpoint_dir {build.checkpoint} --output_dir {build.out}" in planned
    assert "--max_batch_size 8" in planned
    assert "tensorrt_llm 0.16.0, tensorrt 10.7.0" in planned
    assert build("--dry-run", "--json", "--trtllm-version", "0.16.0") == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["command"].startswith("trtllm-build --checkpoint_dir ")
    assert result["tools"]["tensorrt_llm"] == "0.16.0"
    assert not build.doubles.calls("trtllm-build")


def test_a_checkpoint_of_another_release_is_reported(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mapping = {"world_size": 1, "tp_size": 1, "pp_size": 1, "cp_config": {}}
    write_checkpoint(tmp_path / "checkpoint", mapping=mapping)
    build = Builder(doubles, tmp_path, monkeypatch)
    assert build("--dry-run", "--trtllm-version", "0.18.2") == 0
    planned = capsys.readouterr().out
    assert "TensorRT-LLM 0.18 refuses the keys mapping.cp_config" in planned
    assert "trtserve convert --trtllm-version 0.18" in planned
    assert build("--dry-run", "--trtllm-version", "1.2.1") == 0
    assert "cp_config" not in capsys.readouterr().out


def test_pipeline_stages_that_old_releases_split_differently_are_refused(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoint", pp=2, num_hidden_layers=3)
    build = Builder(doubles, tmp_path, monkeypatch)
    assert build("--dry-run", "--trtllm-version", "0.18.2") == 2
    assert "--pp-size 2 does not divide the 3 layers" in capsys.readouterr().err
    assert build("--dry-run", "--trtllm-version", "1.2.1") == 0


REFUSED = [
    (("--trtllm-version", ENGINELESS), 2, "--runtime llmapi"),
    (("--trtllm-version", "0.11.0"), 2, "older than 0.12"),
    (("--kv-precision", "u8"), 2, "checkpoint sets the precision"),
    (("--max-seq-len", "65"), 2, "the model has 64 positions"),
    (("--", "--tp_size", "2"), 2, "checkpoint fixes the parallelism"),
    (("--", "--max_batch_size", "8"), 2, "Put it before the `--`, as --max-batch-size."),
    (("--", "--max_multimodal_len", "8"), 2, "Put it before the `--`"),
    (("--", "--workers", "8"), 2, "Give `--workers N` before the `--`"),
    (("--", "--dry_run"), 2, "`trtserve build --dry-run`"),
    (("--", "--moe_plugin", "enable"), 2, "It takes one of auto"),
    (("--", "--enable_xqa", "enable"), 2, "XQA kernels are always on"),
    (("--", "moe"), 2, "all its arguments have names"),
    (("--gather-context-logits", "--max-draft-len", "2"), 2, "cannot gather context logits"),
    (("--lora-plugin", "auto"), 2, "accepts no adapter"),
    (("--lora-target-modules", "attn_q"), 2, "has no effect without --lora-plugin"),
    (("--lora-plugin", "auto", "--lora-target-modules", "q_proj"), 2, "It takes one of attn_qkv"),
]


@pytest.mark.parametrize(("arguments", "code", "expected"), REFUSED, ids=[" ".join(each[0]) for each in REFUSED])
def test_impossible_builds_are_refused_first(
    arguments: tuple[str, ...], code: int, expected: str, late: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert late(*arguments) == code
    assert expected in capsys.readouterr().err
    assert not late.doubles.calls("trtllm-build")


@pytest.mark.parametrize("key", ["full_attention_rotary_scaling", "rotary_scaling"])
def test_a_gemma3_that_scales_some_layers_only_is_refused(
    key: str, late: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = late.checkpoint / "config.json"
    gemma = {"architecture": "Gemma3ForCausalLM", key: {"rope_type": "linear", "factor": 8.0}}
    path.write_text(json.dumps(json.loads(path.read_text()) | gemma))
    assert late() == UnsupportedModelError.code
    printed = " ".join(capsys.readouterr().err.split())
    assert "scales the rotary embedding (linear) only in layers without a window, and a TensorRT-LLM engine" in printed
    assert "--runtime llmapi" in printed
    assert not late.doubles.calls("trtllm-build")


def test_options_that_a_release_lacks_name_those_that_have_them(
    build: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    build.install("24.08", "0.12.0")
    assert build("--gemm-plugin", "nvfp4") == 2
    assert "nvfp4: It takes one of auto" in capsys.readouterr().err
    assert build("--speculative-decoding-mode", "eagle", "--max-draft-len", "4") == 2
    assert "It takes one of draft_tokens_external" in capsys.readouterr().err
    assert build("--", "--monitor_memory") == 2
    assert "Releases that have it: 0.15" in capsys.readouterr().err


def test_the_expected_memory_is_reported(build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert build("--dry-run", "--trtllm-version", "1.2.1", "--workers", "1") == 0
    assert re.search(r"needs +about 3\.0 GiB of memory \(an estimate\), for 1 rank", capsys.readouterr().out)
    assert build("--dry-run", "--trtllm-version", "1.2.1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["result"]["memory_bytes"] > 3 * 2**30


def test_a_machine_without_gpu_is_refused_before_the_build(late: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    late.doubles.configure(container="26.07", version="1.2.1", gpus=0)
    assert late() == 30
    assert "needs an NVIDIA GPU of the kind that will serve" in capsys.readouterr().err
    assert not late.doubles.calls("trtllm-build")
    assert not late.out.exists()


def test_the_module_is_run_where_there_is_no_console_script(late: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    (late.doubles.bin / "trtllm-build").unlink()
    assert late("--dry-run") == 0
    planned = capsys.readouterr().out
    assert f"{sys.executable} -m tensorrt_llm.commands.build --checkpoint_dir" in planned
    assert "trtllm-build is not on PATH" in planned


def test_llmapi_builds_nothing(build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", str(build.checkpoint), "--runtime", "llmapi"]) == 2
    error = capsys.readouterr().err
    assert "nothing to convert or build" in error
    assert "trtserve import MODEL --runtime llmapi" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_builder_too(number: int, late: Builder) -> None:
    late.doubles.configure(container="26.07", version="1.2.1", build_seconds=60)
    environment = {**os.environ, "PYTHONPATH": str(late.doubles.folder / "packages-1.2.1")}
    argv = [sys.executable, "-m", "trtserve", "build", str(late.checkpoint), "--runtime", "tensorrt_llm"]
    with subprocess.Popen(
        [*argv, "--out", str(late.out)],
        env=environment,
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        wait_until(lambda: late.doubles.calls("trtllm-build"))
        (call,) = late.doubles.calls("trtllm-build")
        command.send_signal(number)
        command.communicate(timeout=60)
        assert command.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not Path(f"/proc/{call.pid}").exists())  # after a SIGKILL the kernel ends it
    if number == signal.SIGKILL:
        return  # what it wrote is cleared away by the next build
    assert not late.out.exists()
    assert not list(late.out.parent.glob(".*"))


def _core(engine: Path) -> CoreModel:
    config, facts = EngineConfig.of(json.loads((engine / "config.json").read_text())), Manifest.read(engine).facts
    return CoreModel(name="tiny", backend="python", engine=engine, config=config, built_with=facts["built_with"])


def _planned(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    words = shlex.split(command)[1:]
    behind = words.index("--") if "--" in words else len(words)
    assert run([*words[:behind], "--dry-run", "--json", *words[behind:]]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


OPTIONS = (
    (),
    ("--max-draft-len", "3", "--speculative-decoding-mode", "medusa", "--kv-cache-type", "continuous"),
    ("--logits-dtype", "float16", "--opt-num-tokens", "32", "--max-beam-width", "2", "--profiling-verbosity", "none"),
    ("--lora-plugin", "float16", "--lora-target-modules", "attn_q,attn_v", "--max-lora-rank", "8"),
    ("--gather-all-token-logits", "--use-paged-context-fmha", "disable", "--remove-input-padding", "disable"),
    ("--", "--moe_plugin", "disable", "--weight_sparsity", "--user_buffer", "enable"),
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options[:2]) or "nothing")
def test_the_rebuild_command_makes_the_same_engine(
    options: tuple[str, ...], late: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("--max-batch-size", "4", "--max-seq-len", "64")
    assert late(*limits, *options) == 0
    core, wanted = _core(late.out), Manifest.read(late.out)
    own = rebuild_command(core, str(late.checkpoint))
    assert _planned(own, capsys)["fingerprint"] == wanted.fingerprint
    # What its config.json alone tells, as of an engine that somebody else built.
    planned = _planned(rebuild_command(replace(core, built_with=None), str(late.checkpoint)), capsys)
    assert set(planned["arguments"]) == set(wanted.spec["arguments"])


def test_the_rebuild_command_keeps_the_limits_of_the_engine(build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    build.install("24.08", "0.12.0")  # whose trtllm-build has other defaults
    assert build("--reduce-fusion", "enable") == 0
    core, old = _core(build.out), Manifest.read(build.out)
    build.install("26.07", "1.2.1")
    again = _planned(rebuild_command(core, str(build.checkpoint)), capsys)
    assert again["tools"]["tensorrt_llm"] == "1.2.1"
    assert again["fingerprint"] != old.fingerprint
    assert again["arguments"] == old.spec["arguments"]
    assert "--container 25.12" in rebuild_command(core, container="25.12")


def test_another_version_than_the_installed_one_is_refused(late: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert late("--trtllm-version", "1.1.0", "--dry-run") == 0
    assert late("--trtllm-version", "1.1.0") == 2
    assert "--trtllm-version is 1.1.0, but TensorRT-LLM 1.2.1 is installed" in capsys.readouterr().err
    assert not late.doubles.calls("trtllm-build")


def test_ranks_of_adapters_mean_nothing_without_them(late: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert late("--max-lora-rank", "8") == 2
    assert "--max-lora-rank has no effect without --lora-plugin" in capsys.readouterr().err
