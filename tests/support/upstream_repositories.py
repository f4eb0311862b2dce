"""Repositories in the shape of NVIDIA's templates after they were filled.

Their tensors and parameters are those of the product's tables, which tests/golden/release_facts.py guards. No text of
NVIDIA's is here: names, types and dims are facts, and programs are one line that imports what theirs import.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

from trtserve.nvidia.releases import order
from trtserve.repository.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    MODELS,
    EnsembleStep,
    ModelProfile,
    TensorSpec,
    llmapi_model,
    profile,
)

_PROGRAMS = {BLS: "from lib.decode import Decoder\n", CORE: "import tensorrt_llm.bindings.executor\n"}
_TYPES = {"$logits": "FP32", "$encoder": "FP16", "$prompt": "FP16", "$lora": "FP16"}
# Parameters whose placeholder has another name.
_FILLED_FROM = {
    "gpt_model_type": "batching_strategy",
    "gpt_model_path": "engine_dir",
    "encoder_model_path": "encoder_engine_dir",
}
# Keys that must be present although they have no value.
_KEYS = {"multimodal_model_path", "guided_decoding_backend", "xgrammar_tokenizer_info_path"}
_COUNTS = {"preprocessing": 2, CORE: 1, "postprocessing": 2, BLS: 8}
_BATCHING = (
    "dynamic_batching {\n    preferred_batch_size: [ 8 ]\n    max_queue_delay_microseconds: 0\n"
    "    default_queue_policy: { max_queue_size: 0 }\n}\n"
)


def write_upstream(
    folder: Path,
    release: str,
    *,
    engine: Path,
    tokenizer: Path,
    streaming: bool = True,
    backend: str = "tensorrtllm",
    placeholders: bool = False,
) -> Path:
    """Write the five models of `release` to `folder`; engine and tokenizer are outside of it.

    `placeholders` keeps those of parameters without a value, as NVIDIA's guides do.
    """
    values = {
        "batching_strategy": "inflight_fused_batching",
        "engine_dir": str(engine),
        "tokenizer_dir": str(tokenizer),
        "max_beam_width": "1",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "exclude_input_in_output": "True",
    }
    for model in MODELS:
        version = folder / model / "1"
        version.mkdir(parents=True)
        text = _config(model, release, values, streaming=streaming, backend=backend, placeholders=placeholders)
        (folder / model / "config.pbtxt").write_text(text)
        if model == ENSEMBLE:
            (version / ".tmp").touch()
        elif model != CORE or backend == "python":
            (version / "model.py").write_text(_PROGRAMS.get(model, "import json\n"))
    (folder / BLS / "1" / "lib").mkdir()
    (folder / BLS / "1" / "lib" / "decode.py").write_text("class Decoder: ...\n")
    return folder


def write_upstream_llmapi(folder: Path, release: str, model: str) -> Path:
    """Write the model of the LLM API; only its model.yaml has transaction policy and batch size."""
    (folder / CORE / "1").mkdir(parents=True)
    head = f'name: "{CORE}"\nbackend: "python"\ninstance_group [\n  {{\n    count: 1\n    kind : KIND_CPU\n  }}\n]\n'
    rows = _tensors(llmapi_model(release, own=False))
    (folder / CORE / "config.pbtxt").write_text(head + rows)
    (folder / CORE / "1" / "model.py").write_text("from helpers import get_input\n")
    (folder / CORE / "1" / "helpers.py").write_text("def get_input(): ...\n")
    (folder / CORE / "1" / "model.yaml").write_text(
        f"model: {model}\nbackend: pytorch\ntensor_parallel_size: 1\npipeline_parallel_size: 1\n"
        "triton_config:\n  max_batch_size: 0\n  decoupled: False\n"
    )
    return folder


def _config(
    model: str, release: str, values: dict[str, str], *, streaming: bool, backend: str, placeholders: bool
) -> str:
    """config.pbtxt in the order of the template's fields; the comment has a placeholder, as some of NVIDIA's have."""
    kind = 'platform: "ensemble"' if model == ENSEMBLE else f'backend: "{backend if model == CORE else "python"}"'
    parts = [f'# A ${{comment}}\nname: "{model}"\n{kind}\nmax_batch_size: 8\n']
    if model in (CORE, BLS):
        parts.append(f"model_transaction_policy {{\n  decoupled: {streaming}\n}}\n")
    if model == CORE or (model == "preprocessing" and order(release) >= (0, 19)):
        parts.append(_BATCHING)
    if model == "postprocessing" and order(release) >= (0, 13):
        parts.append("dynamic_batching {}\n")
    known = profile(release).models[model]
    parts.append(_tensors(known))
    if model == ENSEMBLE:
        return "".join([*parts, _steps(known.steps)])
    for row in known.parameters:
        text = row.unset or f"${{{_FILLED_FROM.get(row.name, row.name)}}}"
        filled = Template(text).safe_substitute(values)
        if placeholders or "${" not in filled or row.name in _KEYS:
            value = "" if "${" in filled and not placeholders else filled
            parts.append(f'parameters: {{\n  key: "{row.name}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}\n')
    parts.append(f"instance_group [\n  {{\n    count: {_COUNTS[model]}\n    kind : KIND_CPU\n  }}\n]\n")
    return "".join(parts)


def _tensors(model: ModelProfile) -> str:
    rows = [("in", row) for row in model.inputs] + [("out", row) for row in model.outputs]
    return "".join(_tensor(side, row) for side, row in rows)


def _tensor(side: str, row: TensorSpec) -> str:
    kind = _TYPES.get(row.type, row.type)
    lines = [f'name: "{row.name}"', f"data_type: TYPE_{kind}", f"dims: [ {', '.join(map(str, row.dims))} ]"]
    lines += ["reshape: { shape: [ ] }"] if row.scalar else []
    lines += ["optional: true"] if row.optional else []
    lines += ["allow_ragged_batch: true"] if row.ragged else []
    return f"{side}put [\n  {{\n    " + "\n    ".join(lines) + "\n  }\n]\n"


def _steps(steps: tuple[EnsembleStep, ...]) -> str:
    texts = []
    for step in steps:
        links = [("in", link) for link in step.inputs] + [("out", link) for link in step.outputs]
        maps = [
            f'      {side}put_map {{\n        key: "{link.name}"\n        value: "{link.ensemble_tensor}"\n      }}\n'
            for side, link in links
        ]
        texts.append(f'    {{\n      model_name: "{step.model}"\n      model_version: -1\n{"".join(maps)}    }}')
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(texts) + "\n  ]\n}\n"
