"""`1/model.json` and `1/multi_lora.json` of a model of NVIDIA's Triton backend `vllm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError
from trtserve.executor.vllm.arguments import shape_of
from trtserve.files import optional_json_object, read_json_object
from trtserve.specs.build import Device

BACKEND = "vllm"
"""The word in `config.pbtxt`."""
MODEL_JSON, ADAPTERS = "model.json", "multi_lora.json"
PYTHON = "vllm_python"
"""Parameter of our own in `config.pbtxt`: the interpreter that has vLLM. NVIDIA's backend does not read it."""
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
"""Their product is the number of ranks, here and in the model.yaml of TensorRT-LLM's LLM API."""


@dataclass(frozen=True)
class ModelJson:
    """The arguments of vLLM's engine."""

    arguments: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ModelJson:
        """Read the file. Raises RepositoryError when it is missing, names no model, or has a wrong parallel size."""
        try:
            found = cls(read_json_object(path, RepositoryError))
        except FileNotFoundError:
            raise RepositoryError(f"{path} does not exist.", hint='It needs at least {"model": "ORG/MODEL"}.') from None
        if not isinstance(found.arguments.get("model"), str):
            raise RepositoryError(f"{path} names no model.", hint='Add "model": a hub id, or a folder.')
        parallel_sizes(found.arguments, path)
        return found

    @property
    def model(self) -> str:
        """A hub id, or a folder."""
        return str(self.arguments["model"])

    @property
    def sizes(self) -> tuple[int, int]:
        """Tensor and pipeline parallelism."""
        tp_size, pp_size = (int(self.arguments.get(name) or 1) for name in PARALLEL_SIZES)
        return tp_size, pp_size

    @property
    def adapters(self) -> bool:
        """Whether LoRA is on, which is a text in some files."""
        return str(self.arguments.get("enable_lora", False)).lower() == "true"

    @property
    def pools(self) -> bool:
        """Whether the model makes vectors, not texts."""
        return self.arguments.get("runner") == "pooling"

    def engine_config(self, repository: Path, device: Device, python: str) -> EngineConfig:
        """Return what an engine of the vllm runtime with these arguments and this interpreter would record."""
        folder = repository / self.model
        hf = optional_json_object(folder / "config.json", RepositoryError) if folder.is_dir() else {}
        tp_size, pp_size = self.sizes
        dtype = str(self.arguments.get("dtype", "auto"))
        # Of a model on the hub only the ranks are known here.
        shape = {"mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}}
        if hf:
            shape = shape_of(hf, dtype=dtype, tp_size=tp_size, pp_size=pp_size)
        longest = self.arguments.get("max_model_len")
        content = {
            "pretrained_config": shape,
            "build_config": {"max_seq_len": longest if isinstance(longest, int) and longest > 0 else 0},
            "trtserve": {
                "runtime": BACKEND,
                "device": device,
                "compute_precision": shape.get("dtype", ""),
                "engine_arguments": self.arguments,
                "vllm_python": python,
            },
        }
        return EngineConfig.of(content)


def parallel_sizes(settings: Mapping[str, Any], path: Path) -> list[int]:
    """Return tensor and pipeline parallelism of a file of settings; RepositoryError names every wrong value."""
    found = {key: 1 if settings.get(key) is None else settings[key] for key in PARALLEL_SIZES}
    wrong = [key for key, value in found.items() if type(value) is not int or value < 1]
    if wrong:
        given = " and ".join(f"{key} is {found[key]!r}" for key in wrong)
        raise RepositoryError(
            f"{path}: {given}; expected a whole number of 1 or more.", hint=f"Correct it in {path.name}."
        )
    return list(found.values())


def read_adapters(folder: Path) -> dict[str, str]:
    """Return name → folder of the adapters. Raises RepositoryError when the file is missing or says something else."""
    path = folder / ADAPTERS
    try:
        found = read_json_object(path, RepositoryError)
    except FileNotFoundError:
        raise RepositoryError(
            f"{path} does not exist, and {MODEL_JSON} has enable_lora.",
            hint='It lists the adapters: {"NAME": "FOLDER"}.',
        ) from None
    if not all(isinstance(folder, str) for folder in found.values()):
        raise RepositoryError(f"{path} must have a folder for each name.")
    return {name: str(folder) for name, folder in found.items()}
