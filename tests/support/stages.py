"""Each stage planned and run in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Adapter, Checkpoint, Engine, Model, ModelRepository
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.convert import plan_conversion
from trtserve.pipeline.lora import plan_adapter, run_adapter_conversion
from trtserve.pipeline.model import plan_model
from trtserve.progress import SILENT, Progress
from trtserve.repository.assembling import plan_repository
from trtserve.repository.publishing import assemble_repository
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec


def pull_model(source: str, *, progress: Progress = SILENT, **options: Any) -> Model:
    return plan_model(source, progress=progress, **options).run(progress)


def convert_model(model: Model, spec: ConvertSpec, *, progress: Progress = SILENT, **options: Any) -> Checkpoint:
    return plan_conversion(model, spec, **options).run(progress)


def build_engine(checkpoint: Checkpoint, spec: BuildSpec, *, progress: Progress = SILENT, **options: Any) -> Engine:
    return plan_build(checkpoint, spec, progress=progress, **options).run(progress)


def convert_adapter(adapter: str | Path, *, progress: Progress = SILENT, **options: Any) -> Adapter:
    return run_adapter_conversion(plan_adapter(adapter, **options), progress=progress)


def make_repository(engine: Engine, tokenizer: Path, spec: RepositorySpec, **options: Any) -> ModelRepository:
    return assemble_repository(plan_repository(engine, tokenizer, spec, **options))


def tiny_repository(folder: Path, build: BuildSpec, *, tp_size: int = 1, **options: Any) -> Path:
    """Return the repository of a tiny model in float32, made in `folder`; `options` are those of RepositorySpec."""
    model = write_tiny_model(folder / "model")
    spec = ConvertSpec(dtype="float32", tp_size=tp_size)
    checkpoint = convert_model(Model(path=model), spec, out=folder / "checkpoint")
    engine = build_engine(checkpoint, build, out=folder / "engine")
    return make_repository(engine, model, RepositorySpec(name="tiny", **options), out=folder / "repository").path
