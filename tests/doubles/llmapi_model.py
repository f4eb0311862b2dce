"""llmapi model of the tritonserver double: model.yaml, its parallel sizes and its instances."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.doubles.containers import Versions
from tests.doubles.model_configs import LoadError, Model
from tests.doubles.settings import Settings

_FIRST = (0, 19)
_NO_TENSORRT = (1, 0)  # "llmapi + TensorRT backend in Triton" is gone
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size", "moe_tensor_parallel_size")
# What a container has for Triton's Python models.
_IN_CONTAINER = frozenset(
    {"numpy", "tensorrt_llm", "torch", "transformers", "triton_python_backend_utils", "c_python_backend_utils", "yaml"}
)
_TRITON_KEYS = frozenset({"max_batch_size", "decoupled", "cancellation_check_period_ms", "multimodal"})


def settings_file(model: Model) -> Path:
    """Where an llmapi model would have its settings; LLM_CONFIG_PATH replaces the file name."""
    return model.folder / "1" / os.environ.get("LLM_CONFIG_PATH", "model.yaml")


def is_llmapi(model: Model) -> bool:
    """Whether a model is NVIDIA's llmapi model."""
    return model.backend == "python" and settings_file(model).exists()


def _read(model: Model) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(settings_file(model).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise LoadError(f"{model.name}: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise LoadError(f"{model.name}: (strict double) model.yaml names no model")
    return config


def _world(config: dict[str, Any], model: Model) -> int:
    for name in _SIZES:
        if name in config and (type(config[name]) is not int or config[name] < 1):
            raise LoadError(f"{model.name}: {name} must be a positive integer, got {config[name]!r}")
    return int(config.get("tensor_parallel_size", 1)) * int(config.get("pipeline_parallel_size", 1))


def _check_front(config: dict[str, Any], model: Model, completed: bool) -> None:
    """max_batch_size and decoupled reach Triton only through auto-completion."""
    front = config.get("triton_config", {})
    if unknown := front.keys() - _TRITON_KEYS:
        raise LoadError(f"{model.name}: (strict double) triton_config holds {', '.join(sorted(unknown))}")
    if int(front.get("max_batch_size", 0)) != 0:
        raise LoadError(f"{model.name}: (strict double) batching is not supported by the llmapi model")
    declared = model.config.model_transaction_policy.decoupled
    if not completed and bool(front.get("decoupled", False)) != declared:
        raise LoadError(
            f"{model.name}: (strict double) decoupled of model.yaml does not reach Triton with "
            "--disable-auto-complete-config, and config.pbtxt says otherwise"
        )


def _check_instances(model: Model, size: int, present: int) -> None:
    count = max((group.count for group in model.config.instance_group), default=1)
    text = model.parameter("gpu_device_ids")
    if count > 1 and text is None:
        raise LoadError(f"{model.name}: gpu_device_ids must be given for {count} instances")
    if text is None:
        if size > present:
            raise LoadError(f"{model.name}: world size {size} is larger than the number of GPUs {present}")
        return
    groups = [[int(number) for number in group.split(",")] for group in text.split(";")]
    if len(groups) != count:
        raise LoadError(f"{model.name}: {len(groups)} groups of gpu_device_ids for {count} instances")
    for group in groups:
        if len(group) != size or max(group) >= present:
            raise LoadError(f"{model.name}: gpu_device_ids {group} do not fit a world of {size} on {present} GPUs")
    if count > 1 and "tllm_mpi_size" in os.environ:
        raise LoadError(f"{model.name}: (strict double) several instances need a launch without MPI")


def _check_imports(model: Model) -> None:
    """Require every import of a program: next to it (NVIDIA's has helpers.py), in Python, or in the container."""
    folder = model.folder / "1"
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    for path in folder.rglob("*.py"):
        for name in _imports(path):
            if name not in beside | _IN_CONTAINER | sys.stdlib_module_names:
                raise LoadError(f"{model.name}: ModuleNotFoundError: No module named {name!r}")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


def load_llmapi(model: Model, ranks: int, completed: bool, found: Versions, settings: Settings) -> None:
    """Load an llmapi model in a server with `ranks` MPI ranks, or raise LoadError."""
    if found.release < _FIRST:
        raise LoadError(f"{model.name}: the llmapi model is not in TensorRT-LLM {found.tensorrt_llm}")
    config = _read(model)
    backend = config.get("backend", "pytorch")
    if backend not in ({"pytorch", "tensorrt"} if found.release < _NO_TENSORRT else {"pytorch"}):
        raise LoadError(f"{model.name}: backend {backend!r} is not supported")
    _check_imports(model)
    size = _world(config, model)
    _check_front(config, model, completed)
    if ranks > 1:
        raise LoadError(f"{model.name}: (strict double) {ranks} ranks without trtllm-llmapi-launch each load the model")
    launched = os.environ.get("tllm_mpi_size")  # noqa: SIM112 - upstream's spelling
    if launched is not None:
        for name in ("TLLM_SPAWN_PROXY_PROCESS", "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"):
            if name not in os.environ:
                raise LoadError(f"{model.name}: {name} is not set")
        if int(launched) != size:
            raise LoadError(f"{model.name}: AssertionError: MPI world size {launched} != tp * pp = {size}")
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = settings.gpus if visible is None else len([name for name in visible.split(",") if name])
    _check_instances(model, size, present)
