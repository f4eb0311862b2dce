"""Import of architectures that only NVIDIA's converter knows: nothing of the engine can be planned beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.architectures import supported
from trtserve.artifacts import Engine, Model
from trtserve.build import build_engine
from trtserve.convert import Plan, convert_model
from trtserve.import_.plan import is_convertible
from trtserve.pipeline.spec import ImportSpec
from trtserve.progress import Progress
from trtserve.releases.converters import require_converter
from trtserve.runtimes import choose_runtime, openvino
from trtserve.store import Store


def is_foreign(spec: ImportSpec, config: Mapping[str, Any]) -> bool:
    """Whether `--converter upstream` is to convert what our own converter does not take.

    UnsupportedModelError when no tool converts the model, or when the runtime is the embedded one, which runs our
    architectures only.
    """
    if spec.convert.converter != "upstream" or is_convertible(config):
        return False
    if choose_runtime(spec.build.runtime, container=spec.build.container).NAME == openvino.NAME:
        supported(config)  # which says why
    if spec.convert.trtllm_script is None:
        require_converter(str(config["architectures"][0]))
    return True


def make_foreign_engine(spec: ImportSpec, model: Model, plan: Plan, store: Store, progress: Progress) -> Engine:
    """Convert and build; both are reused where they exist, which only the checkpoint can tell of the engine.

    `plan` is of the same conversion, and not needed.
    """
    checkpoint = convert_model(model, spec.convert, name=spec.name, store=store, verify=spec.verify, progress=progress)
    return build_engine(checkpoint, spec.build, name=spec.name, out=spec.engine_out, store=store, progress=progress)
