"""Repositories in the shape of NVIDIA's templates after they were filled, from the fact tables of tests/doubles.

Nothing of the product is here, so what its tables have wrong is an alarm on a good repository. No text of NVIDIA's is
here either: names, types and dims are facts, and programs are one line that imports what theirs import.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

from tests.doubles.flags import Release
from tests.doubles.model_tables import MODELS, TensorRow, parameters, parse_release, steps, tensors

CORE, ENSEMBLE, BLS = "tensorrt_llm", "ensemble", "tensorrt_llm_bls"
_PROGRAMS = {BLS: "from lib.decode import Decoder\n", CORE: "import tensorrt_llm.bindings.executor\n"}
_TYPES = {"LOGITS": "TYPE_FP32", "FEATURES": "TYPE_FP16", "TABLE": "TYPE_FP16"}
# Keys that must be present although they have no value.
_KEYS = {"multimodal_model_path", "guided_decoding_backend", "xgrammar_tokenizer_info_path"}
_COUNTS = {"preprocessing": 2, CORE: 1, "postprocessing": 2, BLS: 8}
_BATCHING = (
    "dynamic_batching {\n    preferred_batch_size: [ 8 ]\n    max_queue_delay_microseconds: 0\n"
    "    default_queue_policy: { max_queue_size: 0 }\n}\n"
)
_QUEUES_IN_PREPROCESSING: Release = (0, 19)
_BATCHES_IN_POSTPROCESSING: Release = (0, 13)


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
        text = _config(
            model, parse_release(release), values, streaming=streaming, backend=backend, placeholders=placeholders
        )
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
    rows = "".join(_tensor(row) for row in tensors("llmapi", parse_release(release)))
    (folder / CORE / "config.pbtxt").write_text(head + rows)
    (folder / CORE / "1" / "model.py").write_text("from helpers import get_input\n")
    (folder / CORE / "1" / "helpers.py").write_text("def get_input(): ...\n")
    (folder / CORE / "1" / "model.yaml").write_text(
        f"model: {model}\nbackend: pytorch\ntensor_parallel_size: 1\npipeline_parallel_size: 1\n"
        "triton_config:\n  max_batch_size: 0\n  decoupled: False\n"
    )
    return folder


def _config(
    model: str, release: Release, values: dict[str, str], *, streaming: bool, backend: str, placeholders: bool
) -> str:
    """config.pbtxt in the order of the template's fields; the comment has a placeholder, as some of NVIDIA's have."""
    kind = 'platform: "ensemble"' if model == ENSEMBLE else f'backend: "{backend if model == CORE else "python"}"'
    parts = [f'# A ${{comment}}\nname: "{model}"\n{kind}\nmax_batch_size: 8\n']
    if model in (CORE, BLS):
        parts.append(f"model_transaction_policy {{\n  decoupled: {streaming}\n}}\n")
    if model == CORE or (model == "preprocessing" and release >= _QUEUES_IN_PREPROCESSING):
        parts.append(_BATCHING)
    if model == "postprocessing" and release >= _BATCHES_IN_POSTPROCESSING:
        parts.append("dynamic_batching {}\n")
    parts += [_tensor(row) for row in tensors(model, release)]
    if model == ENSEMBLE:
        return "".join([*parts, _steps(release)])
    for key, text in parameters(model, release).items():
        filled = Template(text).safe_substitute(values)
        if placeholders or "${" not in filled or key in _KEYS:
            value = "" if "${" in filled and not placeholders else filled
            parts.append(f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}\n')
    parts.append(f"instance_group [\n  {{\n    count: {_COUNTS[model]}\n    kind : KIND_CPU\n  }}\n]\n")
    return "".join(parts)


def _tensor(row: TensorRow) -> str:
    kind = _TYPES.get(row.kind, f"TYPE_{row.kind}")
    lines = [f'name: "{row.name}"', f"data_type: {kind}", f"dims: [ {row.dims.replace('x', ', ')} ]"]
    lines += ["reshape: { shape: [ ] }"] if "s" in row.flags else []
    lines += ["optional: true"] if "o" in row.flags else []
    lines += ["allow_ragged_batch: true"] if "r" in row.flags else []
    return f"{row.direction}put [\n  {{\n    " + "\n    ".join(lines) + "\n  }\n]\n"


def _steps(release: Release) -> str:
    rows, texts = steps(release), []
    for model in dict.fromkeys(row.model for row in rows):
        maps = [
            f'      {row.direction}put_map {{\n        key: "{row.tensor}"\n        value: "{row.ensemble_tensor}"\n'
            "      }\n"
            for row in rows
            if row.model == model
        ]
        texts.append(f'    {{\n      model_name: "{model}"\n      model_version: -1\n{"".join(maps)}    }}')
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(texts) + "\n  ]\n}\n"
