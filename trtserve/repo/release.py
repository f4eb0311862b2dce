"""Which TensorRT-LLM release a repository is made for, and what its tensors' types follow from in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.errors import RepositoryError, UsageError
from trtserve.releases import NEWEST, RELEASES, normalize_release, order
from trtserve.releases import release_of as release_of_version
from trtserve.releases.installed import require_engine_path
from trtserve.specs import RepositorySpec
from trtserve.triton.profiles import Profile

_TYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}


def release_of_engine(spec: RepositorySpec, config: Mapping[str, Any]) -> str:
    """`--release`, else the release of `--trtllm-version`, else that of the engine, else the newest.

    UsageError for a release that no table covers and for two that contradict each other; RepositoryError for an engine
    of such a release.
    """
    asked = None if spec.release is None else normalize_release(spec.release)
    installed = None if spec.trtllm_version is None else _installed(spec.trtllm_version)
    if asked is not None and installed is not None and asked != installed:
        raise UsageError(
            f"--release {spec.release} and --trtllm-version {spec.trtllm_version} are different releases.",
            hint="Give one of them: --release names the tensors, --trtllm-version what the server has installed.",
        )
    return asked or installed or _built_by(config) or NEWEST


def _installed(version: str) -> str:
    require_engine_path(version)
    return normalize_release(release_of_version(version), option="--trtllm-version")


def _built_by(config: Mapping[str, Any]) -> str | None:
    version = config.get("version")
    if version is None:
        return None
    try:
        release = release_of_version(str(version))
    except UsageError:
        release = ""
    if release not in RELEASES:
        raise RepositoryError(
            f"The engine was built by TensorRT-LLM {version}; the tables cover {RELEASES[0]} … {NEWEST}.",
            hint="Build it with a release of these, or give the one whose tensors you want: --release 1.2",
        )
    return release


def engine_types(table: Profile, config: Mapping[str, Any]) -> dict[str, str]:
    """Fields of ConfigOptions with the types of logits and prompt tables that follow from the engine."""
    model = config.get("pretrained_config", {})
    types = {}
    if order(table.release) >= order("0.17"):
        # The C++ backend refuses logits of another type than the engine's, and knows these two only.
        types["logits_datatype"] = "FP16" if model.get("logits_dtype") == "float16" else "FP32"
    if order(table.release) >= order("0.20"):
        types["prompt_embedding_table_data_type"] = _TYPES.get(str(model.get("dtype")), "FP16")
    return types
