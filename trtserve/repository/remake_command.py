"""The command that makes a repository again with an engine for the machine that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.errors import TrtserveError
from trtserve.repository.core_models import CoreModel
from trtserve.repository.engine_match import rebuild_command
from trtserve.repository.names import VERSION, model_names
from trtserve.repository.profiles import CORE, PREPROCESSING
from trtserve.specs import RepositorySpec
from trtserve.specs.command_line import given_values, option_words, spec_of

# The new repository is for another TensorRT-LLM.
_WITHOUT = ("release", "trtllm_version")


def remake_command(repository: Path, core: CoreModel, *, container: str | None = None) -> str | None:
    """Return the command `trtserve repo "$(trtserve build …)"` that makes a repository of one engine again.

    It uses the repository's own tokenizer. Returns None for a repository with several engines, one whose checkpoint is
    unknown or gone, and one that trtserve did not make.
    """
    try:
        manifest = load_artifact(ModelRepository, repository).manifest
    except TrtserveError:
        return None
    if manifest is None or manifest.facts.get("members") or manifest.facts.get("draft"):
        return None
    names = model_names(str(manifest.facts.get("suffix") or ""))
    entry: Mapping[str, Any] = (manifest.facts.get("core_models") or {}).get(core.name) or {}
    checkpoint, tokenizer = entry.get("built_as"), repository / names[PREPROCESSING] / VERSION / "tokenizer"
    if core.name != names[CORE] or not checkpoint or not Path(checkpoint).is_dir() or not tokenizer.is_dir():
        return None
    build = rebuild_command(core, str(checkpoint), container=container)
    spec = spec_of(RepositorySpec, manifest.spec)
    words = ["--name", shlex.quote(spec.name), "--tokenizer", shlex.quote(str(tokenizer))]
    return " ".join([f'trtserve repo "$({build})"', *words, *option_words(given_values(spec, without=_WITHOUT))])
