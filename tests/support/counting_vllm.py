"""Engines of the vllm runtime whose vLLM is `tests/support/fake_vllm`: a model that counts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import ModelRepository
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.build import Device
from trtserve.store import Store

PACKAGES = Path(__file__).with_name("fake_vllm")


def counting_python(folder: Path) -> Path:
    """Write an interpreter that imports the counting vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    words = f"PYTHONPATH={shlex.quote(str(PACKAGES))} exec {shlex.quote(sys.executable)}"
    python.write_text(f'#!/bin/sh\n{words} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python


def counting_engine(
    folder: Path, *, adapters: dict[int, str] | None = None, arguments: dict[str, Any] | None = None, **build: Any
) -> Path:
    """Write an engine folder for it, as a repository's core model has it."""
    config = {
        "version": "1.2.0",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "float32",
            "vocab_size": 100,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "build_config": {"max_batch_size": 4, "max_seq_len": 64, "max_num_tokens": 64, **build},
        "trtserve": {
            "runtime": "vllm",
            "device": "cpu",
            "vllm_python": str(counting_python(folder / "environment")),
            "kv_precision": "f32",
            "engine_arguments": arguments or {},
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model").mkdir(exist_ok=True)
    if adapters is not None:
        (folder / "lora").mkdir()
        (folder / "lora" / "adapters.json").write_text(json.dumps(adapters), encoding="utf-8")
    return folder


def gpu_repository(home: Path, *, tp_size: int = 1, device: Device = "cuda") -> ModelRepository:
    """Import a tiny Llama for vLLM on GPUs, or another device; nothing of it runs here."""
    spec = resolve_import(
        str(write_tiny_model(home / "tiny")),
        name="tiny",
        convert=ConvertSpec(tp_size=tp_size),
        build=BuildSpec(runtime="vllm", device=device),
        repository=RepositorySpec(vllm_python=str(counting_python(home / "vllm"))),
        store=Store(home),
    )
    return import_to_repository(spec, store=Store(home))


def pooling_repository(home: Path, python: Path | None = None) -> Path:
    """Import a tiny model that scores texts for a query."""
    folder = write_tiny_model(home / "tiny", architectures=["BertForSequenceClassification"])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "modules.json").write_text("[]", encoding="utf-8")
    spec = resolve_import(
        str(folder),
        name="vllm_model",
        convert=ConvertSpec(),
        build=BuildSpec(runtime="vllm", max_seq_len=64),
        repository=RepositorySpec(vllm_python="any" if python is None else str(python)),
        store=Store(home),
    )
    return import_to_repository(spec, store=Store(home)).path


def nvidia_repository(folder: Path, name: str = "vllm_model", config: str = "", **arguments: Any) -> Path:
    """Write a model of NVIDIA's backend `vllm` into a repository, as `triton import --backend vllm` writes it."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    text = f'backend: "vllm"\ninstance_group [\n  {{\n    kind: KIND_MODEL\n  }}\n]\n{config}'
    (version.parent / "config.pbtxt").write_text(text, encoding="utf-8")
    (version / "model.json").write_text(json.dumps({"model": "org/model", **arguments}), encoding="utf-8")
    return folder
