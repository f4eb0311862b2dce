"""The double of trtllm-build against the tables and rules of convert-and-build.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import trtllm_build
from tests.doubles.engine import read_engine
from tests.support.double_engines import write_checkpoint
from tests.support.doubles import Doubles

ALL = ("24.08", "24.09", "24.10", "24.11", "24.12", "25.01", "25.05", "25.10", "26.07")


class Builder:
    """Runs the double in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.doubles = Doubles(folder / "doubles")
        self.folder = folder
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str, **settings: Any) -> int:
        self.doubles.configure(**settings)
        return trtllm_build.main(list(arguments), self.doubles.folder)

    def fails_to_parse(self, *arguments: str, **settings: Any) -> bool:
        """Whether argparse ends it with code 2."""
        try:
            self(*arguments, **settings)
        except SystemExit as error:
            return error.code == 2
        return False

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the engine."""
        loaded: dict[str, Any] = json.loads((self.folder / "engine" / "config.json").read_text(encoding="utf-8"))
        return loaded


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    return Builder(tmp_path, monkeypatch)


_FOLDERS = ("--checkpoint_dir", "checkpoint", "--output_dir", "engine")


@pytest.mark.parametrize("container", ALL)
def test_engines_of_every_release(build: Builder, container: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(*_FOLDERS, "--gemm_plugin", "auto", container=container) == 0
    assert list(build.config) == ["version", "pretrained_config", "build_config"]
    headers = [read_engine(build.folder / "engine" / f"rank{rank}.engine") for rank in range(2)]
    assert [(header.rank, header.world_size, header.sm) for header in headers] == [(0, 2, 90), (1, 2, 90)]
    assert build.config["version"] == headers[0].tensorrt_llm
    assert (build.folder / "model.cache").exists()  # of the current folder, not of the engine folder
    assert "Total time of building all engines" in capsys.readouterr().out


# Flag, containers that refuse it, containers that take it (section 4 and the sources named in build_options.py).
_HISTORY = [
    (("--max_output_len", "8"), ALL, ()),
    (("--tp_size", "2"), ALL, ()),
    (("--use_custom_all_reduce", "enable"), ALL, ()),
    (("--multi_block_mode", "enable"), ALL, ()),
    (("--strongly_typed",), ALL, ()),
    (("--weight_only_precision", "int8"), ALL, ()),
    (("--use_gpt_attention_plugin", "float16"), ALL, ()),
    (("--use_inflight_batching",), ALL, ()),
    (("--kv_cache_type", "paged"), ("24.08",), ("24.09", "26.07")),
    (("--paged_kv_cache", "enable"), (), ALL),
    (("--use_fused_mlp",), ("24.09", "24.10", "26.07"), ("24.08",)),
    (("--use_fused_mlp", "enable"), ("24.08",), ("24.09", "24.10", "26.07")),
    (("--builder_opt", "4"), ("24.10", "26.07"), ("24.08", "24.09")),
    (("--builder_force_num_profiles", "1"), ("24.11", "26.07"), ("24.08", "24.10")),
    (("--monitor_memory",), ("24.08", "24.10"), ("24.11", "26.07")),
    (("--enable_xqa", "enable"), ("24.12", "26.07"), ("24.08", "24.11")),
    (("--lookup_plugin", "auto"), ("24.11", "26.07"), ("24.08", "24.10")),
    (("--user_buffer", "enable"), ("24.08", "24.11"), ("24.12", "26.07")),
    (("--speculative_decoding_mode", "eagle"), ("24.08", "24.10"), ("24.11", "26.07")),
    (("--auto_parallel", "1"), ("26.07",), ("24.08", "25.10")),
    (("--remove_input_padding", "true"), ALL, ()),
    (("--gemm_plugin", "enable"), ALL, ()),
    (("--max_batch_size", "many"), ALL, ()),
    (("--max_batch", "4"), ALL, ()),  # abbreviations
    (("--max_decoder_seq_len", "32"), (), ALL),
]


@pytest.mark.parametrize(("arguments", "refusing", "taking"), _HISTORY, ids=" ".join)
def test_flags_by_release(
    build: Builder, arguments: tuple[str, ...], refusing: tuple[str, ...], taking: tuple[str, ...]
) -> None:
    for container in refusing:
        assert build.fails_to_parse(*_FOLDERS, *arguments, container=container), container
    for container in taking:
        assert build(*_FOLDERS, *arguments, "--dry_run", container=container) == 0, container


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": {"world_size": 2, "tp_size": 2, "rank": 0}}, "unexpected keyword argument 'rank'"),
        ({"mapping": {"world_size": 3, "tp_size": 2}}, "world_size must equal to tp_size * pp_size * cp_size"),
        ({"mapping": {"world_size": 2, "tp_size": 2, "moe_tp_size": 2, "moe_ep_size": 2}}, "moe_tp_size * moe_ep_size"),
        ({"quantization": {"quant_algo": "W8A8"}}, "'W8A8' is not a valid QuantAlgo"),
        ({"quantization": {"use_meta_recipe": False}}, "unexpected keyword argument 'use_meta_recipe'"),
        ({"architecture": "Qwen3ForCausalLM"}, "Unsupported model architecture"),
        ({"num_hidden_layers": 3}, "Required but not provided tensors"),
    ],
)
def test_loader_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2, **changes)
    assert Builder(tmp_path, monkeypatch)(*_FOLDERS, container="24.08") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "engine" / "rank0.engine").exists()


def test_weights_must_be_whole(build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    path = build.folder / "checkpoint" / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert build(*_FOLDERS) == 1
    assert "MetadataIncompleteBuffer" in capsys.readouterr().err
    path.unlink()
    assert build(*_FOLDERS) == 1
    assert "No such file" in capsys.readouterr().err


def test_limits_that_hold_are_written(build: Builder) -> None:
    assert build(*_FOLDERS, "--max_batch_size", "4", "--max_seq_len", "48", "--dry_run") == 0
    limits = build.config["build_config"]
    assert (limits["max_input_len"], limits["max_seq_len"], limits["max_num_tokens"]) == (48, 48, 192)
    assert build(*_FOLDERS, "--context_fmha", "disable", "--max_input_len", "32", "--dry_run") == 0
    assert build.config["build_config"]["max_input_len"] == 32
    assert build.config["build_config"]["max_seq_len"] == 64  # deduced from max_position_embeddings


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gather_context_logits", "--max_draft_len", "4"),
        ("--multiple_profiles", "enable", "--opt_num_tokens", "4"),
        ("--lora_target_modules", "attn_q"),
        ("--lora_plugin", "auto"),
        ("--pp_reduce_scatter", "enable"),
        ("--kv_cache_type", "paged", "--paged_kv_cache", "disable"),
    ],
    ids=" ".join,
)
def test_contradictions(build: Builder, arguments: tuple[str, ...]) -> None:
    assert build(*_FOLDERS, *arguments) == 1


def test_faults(build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(*_FOLDERS, build_fault="no-engine", build_fault_rank=1) == 0
    assert "Engine generation completed" in capsys.readouterr().out  # complaint 16: the log looks well
    assert [path.name for path in (build.folder / "engine").glob("*.engine")] == ["rank0.engine"]
    assert build(*_FOLDERS, build_fault="error") == 1
    assert build(*_FOLDERS, gpus=0) == 1
    assert "Found no NVIDIA driver" in capsys.readouterr().err
