"""Planned jobs of Slurm and manifests of Kubernetes around engines of the doubles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.support.double_engines import core_config, write_core_model, write_engine_folder
from trtserve.artifacts import ModelRepository
from trtserve.server.launch import kubernetes
from trtserve.server.launch.cluster import ClusterJob
from trtserve.server.launch.slurm import SlurmSpec, plan_job
from trtserve.specs import ServerSpec

TAG = "25.04"


def repository_of(tmp_path: Path, tp: int = 4, gpus_per_node: int = 8, **parameters: str) -> ModelRepository:
    engine = write_engine_folder(tmp_path / "engine", tp=tp, gpus_per_node=gpus_per_node)
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(engine), **parameters)
    return ModelRepository(path=tmp_path / "repository")


def planned(tmp_path: Path, *, slurm: SlurmSpec | None = None, per_node: int = 8, **spec: object) -> ClusterJob:
    wanted = ServerSpec(**{"container": TAG, "host": "0.0.0.0", **spec})  # type: ignore[arg-type]
    repository = repository_of(tmp_path, gpus_per_node=per_node)
    return plan_job(repository, wanted, slurm or SlurmSpec(), tmp_path / "job")


def relocatable(folder: Path, tp: int = 4, container: str = "25.04", **parameters: str) -> ModelRepository:
    """A repository with the engine inside and relative paths, as trtllm-build left it for 8 GPUs per node."""
    model = folder / "tensorrt_llm"
    write_engine_folder(model / "1", tp=tp, container=container)
    (model / "config.pbtxt").write_text(core_config("tensorrt_llm", "tensorrt_llm/1", **parameters), encoding="utf-8")
    return ModelRepository(path=folder)


def manifest_of(repository: ModelRepository, spec: ServerSpec | None = None, **given: Any) -> ClusterJob:
    cluster = kubernetes.KubernetesSpec(**{"claim": "models", **given})
    return kubernetes.plan_job(repository, spec or ServerSpec(), cluster, repository.path.parent / "server.yaml")


def documents(manifest: ClusterJob) -> dict[str, dict[str, Any]]:
    """Objects of the file by kind, as a cluster would read them."""
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.files[manifest.script])}


def srun_lines(text: str) -> list[list[str]]:
    """Arguments of each srun in a script."""
    joined = text.replace("\\\n", " ").replace("|| code=$?", "").replace("|| true", "")
    return [line.replace("'", "").split()[1:] for line in joined.splitlines() if line.startswith("srun ")]
