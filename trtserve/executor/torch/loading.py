"""Load an engine: all of it in one process, or the part that belongs to this rank."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from trtserve.executor.engine.model import Follower, ModelRunner
from trtserve.executor.engine.options import EngineOptions
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.torch import model
from trtserve.executor.torch.choosing_model import ChoosingTorchModel
from trtserve.executor.torch.ranked_model import FollowingModel, LeadingChooser, LeadingModel
from trtserve.executor.torch.ranks import join


def load_model(engine: Path, options: EngineOptions) -> ModelRunner | Follower:
    """Load the engine; `loaders.MODELS` names this module. With ranks, return when all of them are there."""
    content = read_engine_config(engine)
    tp_size, stages = content.mapping.tp_size, content.mapping.pp_size
    windows = options.kv_cache.windows
    if tp_size * stages == 1:
        return model.load_model(engine, windows, model_class=ChoosingTorchModel)
    ranks = join(tp_size, stages, content.trtserve.device, options.device_ids)
    if stages > 1:
        part = model.load_model(engine, windows, ranks)
        return LeadingModel(part, ranks) if ranks.rank == 0 else FollowingModel(part, ranks)
    chooser = cast("ChoosingTorchModel", model.load_model(engine, windows, ranks, model_class=ChoosingTorchModel))
    return LeadingChooser(chooser, ranks) if ranks.rank == 0 else FollowingModel(chooser, ranks)
