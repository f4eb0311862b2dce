"""Each stage planned and run in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtserve.artifacts import Adapter, Checkpoint, Engine, Model
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.convert import plan_conversion
from trtserve.pipeline.lora import plan_adapter, run_adapter_conversion
from trtserve.pipeline.model import plan_model
from trtserve.progress import SILENT, Progress
from trtserve.specs import BuildSpec, ConvertSpec


def pull_model(source: str, *, progress: Progress = SILENT, **options: Any) -> Model:
    return plan_model(source, progress=progress, **options).run(progress)


def convert_model(model: Model, spec: ConvertSpec, *, progress: Progress = SILENT, **options: Any) -> Checkpoint:
    return plan_conversion(model, spec, **options).run(progress)


def build_engine(checkpoint: Checkpoint, spec: BuildSpec, *, progress: Progress = SILENT, **options: Any) -> Engine:
    return plan_build(checkpoint, spec, progress=progress, **options).run(progress)


def convert_adapter(adapter: str | Path, *, progress: Progress = SILENT, **options: Any) -> Adapter:
    return run_adapter_conversion(plan_adapter(adapter, **options), progress=progress)
