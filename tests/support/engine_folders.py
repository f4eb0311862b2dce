"""Engine folders as `trtllm-build` leaves them, without weights: a config.json, and one file for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtserve.artifacts import Engine, Manifest


def write_engine(
    folder: Path,
    *,
    version: str | None = "0.18.2",
    tp_size: int = 1,
    pp_size: int = 1,
    model: dict[str, Any] | None = None,
    build: dict[str, Any] | None = None,
) -> Engine:
    """An engine by NVIDIA's own tool: no manifest."""
    folder.mkdir(parents=True)
    mapping = {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}
    pretrained = {"architecture": "LlamaForCausalLM", "dtype": "float16", "logits_dtype": "float32", "vocab_size": 320}
    limits = {
        "max_batch_size": 12,
        "max_input_len": 64,
        "max_seq_len": 128,
        "max_num_tokens": 64,
        "max_beam_width": 2,
        "plugin_config": {"use_paged_context_fmha": True},
    }
    content = {
        "pretrained_config": {**pretrained, "mapping": mapping, **(model or {})},
        "build_config": {**limits, **(build or {})},
        **({} if version is None else {"version": version}),
    }
    (folder / "config.json").write_text(json.dumps(content, indent=4))
    for rank in range(tp_size * pp_size):
        (folder / f"rank{rank}.engine").write_bytes(b"ftrt engine %d" % rank)
    return Engine(path=folder)


def built_here(engine: Engine, *, name: str = "tiny", **facts: Any) -> Engine:
    """The same as trtserve builds it: with a manifest of its origin."""
    manifest = Manifest(
        kind="engine",
        name=name,
        fingerprint="e" * 64,
        tools={"tensorrt_llm": "0.18.2", "tensorrt": "10.9.0.34", "cuda": "12.8.1", "driver": "570.86"},
        facts={"gpu": {"name": "NVIDIA H200", "sm": "90"}, **facts},
    )
    manifest.write(engine.path)
    return Engine(path=engine.path, manifest=manifest)
