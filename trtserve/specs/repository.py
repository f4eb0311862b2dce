"""What `repo` is asked to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from trtserve.errors import UsageError
from trtserve.specs.fields import require_choice, require_not_negative, require_positive

TritonBackend = Literal["tensorrtllm", "python"]

_SUFFIX = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class RepositorySpec:
    """How a model repository is assembled from an engine and a tokenizer.

    `name` is the alias under which a copy of the BLS model is served. `settings` are parameters of the Triton
    models, keyed `parameter` (core model) or `model.parameter`; the fields from `batching_strategy` to
    `max_queue_size` are another way to give the common ones, None leaves them alone. `lora` maps names to folders.

    `triton_backend`, `trtllm_version` and the paths are for engines of TensorRT-LLM: None takes the C++ backend, the
    release of the engine. `suffix` ends the names of all models but the alias.
    Paths in the configurations are relative to the repository, unless `absolute_paths`, or `container_paths` says
    where a container will see the repository. `bls_instance_count` None follows from the engine.
    """

    name: str
    streaming: bool = True
    release: str | None = None
    triton_max_batch_size: int | None = None
    preprocessing_instance_count: int = 1
    postprocessing_instance_count: int = 1
    bls_instance_count: int | None = None
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_free_gpu_mem_fraction: float | None = None
    batching_strategy: str | None = None
    batch_scheduler_policy: str | None = None
    enable_kv_cache_reuse: bool | None = None
    enable_chunked_context: bool | None = None
    max_attention_window_size: str | None = None
    exclude_input_in_output: bool | None = None
    accumulate_tokens: bool | None = None
    max_queue_size: int | None = None
    lora: dict[str, Path] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    copy: bool = False
    triton_backend: TritonBackend | None = None
    trtllm_version: str | None = None
    suffix: str = ""
    absolute_paths: bool = False
    container_paths: str | None = None

    def __post_init__(self) -> None:
        require_positive(
            self,
            "triton_max_batch_size",
            "preprocessing_instance_count",
            "postprocessing_instance_count",
            "bls_instance_count",
            "max_tokens_in_paged_kv_cache",
        )
        require_not_negative(self, "max_queue_size")
        fraction = self.kv_cache_free_gpu_mem_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise UsageError(f"--kv-cache-free-gpu-mem-fraction is {fraction}; it must lie in (0, 1].")
        if self.triton_backend is not None:
            require_choice("--triton-backend", self.triton_backend, get_args(TritonBackend))
        if self.suffix and not _SUFFIX.fullmatch(self.suffix):
            raise UsageError(f"--suffix is {self.suffix!r}; use letters, digits, '.', '_' and '-'.")
        if self.container_paths is not None:
            self._require_container_paths()

    def _require_container_paths(self) -> None:
        if self.absolute_paths:
            raise UsageError("--absolute-paths and --container-paths contradict each other; give one.")
        if not str(self.container_paths).startswith("/"):
            raise UsageError(
                f"--container-paths is {self.container_paths!r}; expected the absolute path under which the container "
                "sees the repository."
            )
