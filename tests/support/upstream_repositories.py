"""Repositories in the shape of NVIDIA's templates, written from the tables and filled by the rules of its tool.

No text of NVIDIA's is here: names, types and dims are facts, and programs are one line that imports what theirs import.
"""

from __future__ import annotations

from pathlib import Path

from trtserve.repo.templates import fill_templates, write_filled
from trtserve.triton.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    ModelProfile,
    Tensor,
    llmapi_model,
    profile,
)

# Variables of the tool where they have another name than the parameter, and texts that are no variables.
_VARIABLES = {"gpt_model_type": "batching_strategy", "gpt_model_path": "engine_dir"}
_TYPES = {
    "$logits": "${logits_datatype}",
    "$encoder": "${encoder_input_features_data_type}",
    "$prompt": "${prompt_embedding_table_data_type}",
    "$lora": "TYPE_FP16",
}
_OWN = {"lora_name"}
_PROGRAMS = {BLS: "from lib.decode import Decoder\n", CORE: "import tensorrt_llm.bindings.executor\n"}
_COUNTS = {PREPROCESSING: "preprocessing", POSTPROCESSING: "postprocessing", BLS: "bls"}


def write_upstream(
    folder: Path, release: str, *, engine: Path, tokenizer: Path, streaming: bool = True, backend: str = "tensorrtllm"
) -> Path:
    """The five models of `release` in `folder`, whose engine and tokenizer lie outside."""
    templates = folder.with_name(f"{folder.name}.templates")
    for model, table in profile(release).models.items():
        version = templates / model / "1"
        version.mkdir(parents=True)
        (templates / model / "config.pbtxt").write_text(_template(table, release))
        if model == ENSEMBLE:
            (version / ".tmp").touch()
        elif model != CORE or backend == "python":
            (version / "model.py").write_text(_PROGRAMS.get(model, "import json\n"))
    (templates / BLS / "1" / "lib").mkdir()
    (templates / BLS / "1" / "lib" / "decode.py").write_text("class Decoder: ...\n")
    values = {
        "triton_backend": backend,
        "triton_max_batch_size": "8",
        "decoupled_mode": str(streaming),
        "preprocessing_instance_count": "2",
        "postprocessing_instance_count": "2",
        "bls_instance_count": "8",
        "max_queue_delay_microseconds": "0",
        "max_queue_size": "0",
        "batching_strategy": "inflight_fused_batching",
        "engine_dir": str(engine),
        "tokenizer_dir": str(tokenizer),
        "max_beam_width": "1",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "exclude_input_in_output": "True",
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "prompt_embedding_table_data_type": "TYPE_FP16",
    }
    everything = "".join(path.read_text() for path in templates.glob("*/config.pbtxt"))
    given = ",".join(f"{key}:{value}" for key, value in values.items() if f"${{{key}}}" in everything)
    write_filled(templates, fill_templates(templates, given, release=release, drop_unset=True), folder)
    return folder


def write_upstream_llmapi(folder: Path, release: str, model: str) -> Path:
    """The model of the LLM API: transaction policy and batches stand in model.yaml alone."""
    (folder / CORE / "1").mkdir(parents=True)
    table = llmapi_model(release)
    tensors = [_tensor("input", each) for each in table.inputs] + [_tensor("output", each) for each in table.outputs]
    head = f'name: "{CORE}"\nbackend: "python"\ninstance_group [\n  {{\n    count: 1\n    kind : KIND_CPU\n  }}\n]\n'
    (folder / CORE / "config.pbtxt").write_text(head + "".join(tensors))
    (folder / CORE / "1" / "model.py").write_text("from helpers import get_input\n")
    (folder / CORE / "1" / "helpers.py").write_text("def get_input(): ...\n")
    (folder / CORE / "1" / "model.yaml").write_text(
        f"model: {model}\nbackend: pytorch\ntensor_parallel_size: 1\npipeline_parallel_size: 1\n"
        "triton_config:\n  max_batch_size: 0\n  decoupled: False\n"
    )
    return folder


def _template(table: ModelProfile, release: str) -> str:
    parts = [f'name: "{table.name}"\n', _kind(table.name), "max_batch_size: ${triton_max_batch_size}\n"]
    if table.name in (CORE, BLS):
        parts.append("model_transaction_policy {\n  decoupled: ${decoupled_mode}\n}\n")
    if table.name == CORE:
        parts.append(
            "dynamic_batching {\n    preferred_batch_size: [ ${triton_max_batch_size} ]\n"
            "    max_queue_delay_microseconds: ${max_queue_delay_microseconds}\n"
            "    default_queue_policy: { max_queue_size: ${max_queue_size} }\n}\n"
        )
    parts += [_tensor("input", tensor) for tensor in table.inputs if tensor.name not in _OWN]
    parts += [_tensor("output", tensor) for tensor in table.outputs]
    if table.name == ENSEMBLE:
        return "".join([*parts, _steps(table)])
    for row in table.parameters:
        text = row.text or f"${{{_VARIABLES.get(row.name, row.name)}}}"
        parts.append(f'parameters: {{\n  key: "{row.name}"\n  value: {{\n    string_value: "{text}"\n  }}\n}}\n')
    count = f"${{{_COUNTS[table.name]}_instance_count}}" if table.name in _COUNTS else "1"
    parts.append(f"instance_group [\n  {{\n    count: {count}\n    kind : KIND_CPU\n  }}\n]\n")
    return "".join([f"# Release {release}, with a ${{comment}}\n", *parts])


def _kind(model: str) -> str:
    if model == ENSEMBLE:
        return 'platform: "ensemble"\n'
    return f'backend: "{"${triton_backend}" if model == CORE else "python"}"\n'


def _tensor(direction: str, tensor: Tensor) -> str:
    kind = _TYPES.get(tensor.type, f"TYPE_{tensor.type}")
    lines = [f'name: "{tensor.name}"', f"data_type: {kind}", f"dims: [ {', '.join(map(str, tensor.dims))} ]"]
    lines += ["reshape: { shape: [ ] }"] if tensor.scalar else []
    lines += ["optional: true"] if tensor.optional else []
    lines += ["allow_ragged_batch: true"] if tensor.ragged else []
    return f"{direction} [\n  {{\n    " + "\n    ".join(lines) + "\n  }\n]\n"


def _steps(table: ModelProfile) -> str:
    steps = []
    for step in table.steps:
        maps = [
            f'      {kind} {{\n        key: "{link.name}"\n        value: "{link.ensemble_tensor}"\n      }}\n'
            for kind, links in (("input_map", step.inputs), ("output_map", step.outputs))
            for link in links
        ]
        steps.append(f'    {{\n      model_name: "{step.model}"\n      model_version: -1\n{"".join(maps)}    }}')
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n"
