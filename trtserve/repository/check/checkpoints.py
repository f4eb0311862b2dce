"""Whether a checkpoint loads in a release of TensorRT-LLM, from its config and the headers of its files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets, family
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.sharding import check_parallel_sizes, name_in_stage, shard, stage_layers, stage_of
from trtserve.checkpoint.tensor_files import DTYPES, Entry, TensorFile
from trtserve.checkpoint.unified import HEAD, read_config
from trtserve.errors import CheckError, TrtserveError, listing
from trtserve.nvidia.releases.installed import require_engine_path
from trtserve.nvidia.releases.loaders import Evidence, Problem, evidence, name_in_release, problems

_LAYER = re.compile(r"transformer\.layers\.\d+\.")
_CONVERT_AGAIN = "Convert the model again"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Whether a checkpoint loads in a release, and why not."""

    path: Path
    version: str
    release: str
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]  # differences that the loader ignores
    evidence: Evidence | None = None  # how it is known what the release accepts; None: config.json cannot be read

    @property
    def loads(self) -> bool:
        """Whether the release loads the checkpoint."""
        return not self.problems

    def described(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "trtllm_version": self.version,
            "release": self.release,
            "loads": self.loads,
            "because": [{"what": problem.what, "fix": problem.fix} for problem in self.problems],
            "warnings": list(self.warnings),
            "evidence": None if self.evidence is None else asdict(self.evidence),
        }


def check_loading(folder: Path, version: str) -> LoadReport:
    """Judge a checkpoint as the loader of TensorRT-LLM `version` does; nothing is run.

    Raises UsageError for a version without engines and UnsupportedModelError for an architecture that trtserve does not
    know.
    """
    release = require_engine_path(version)
    found, warnings = list[Problem](), list[str]()
    try:
        config = read_config(folder)
    except TrtserveError as error:
        return LoadReport(path=folder, version=version, release=release, problems=(_problem(error),), warnings=())
    family(config.architecture)  # raises for an unknown one
    found += [*problems(config, release), *_config_problems(config)]
    try:
        targets = checkpoint_targets(config)
    except (TrtserveError, KeyError) as error:
        found.append(_problem(error))
    else:
        expected = _Expected(config, targets, release)
        for rank in range(expected.ranks):
            _check_rank(folder, rank, expected, found, warnings)
    return LoadReport(
        path=folder,
        version=version,
        release=release,
        problems=tuple(found),
        warnings=tuple(warnings),
        evidence=evidence(config.architecture, release),
    )


def require_loading(report: LoadReport) -> None:
    """Raise CheckError when the release does not load the checkpoint."""
    if not report.loads:
        raise CheckError(f"{report.path} does not load in TensorRT-LLM {report.version}.", hint=report.problems[0].fix)


def _problem(error: Exception) -> Problem:
    if isinstance(error, TrtserveError):
        return Problem(what=str(error).rstrip("."), fix=error.hint or f"{_CONVERT_AGAIN}.")
    return Problem(what=f"config.json lacks {error}", fix=f"{_CONVERT_AGAIN}.")


def _config_problems(config: CheckpointConfig) -> Iterator[Problem]:
    """Yield what the config classes of all releases refuse."""
    mapping = config.mapping
    if not config.dtype:
        yield Problem(what="config.json lacks dtype", fix=f"{_CONVERT_AGAIN}.")
    if mapping.product != mapping.world_size:
        product = f"tp_size {mapping.tp_size} · pp_size {mapping.pp_size} · cp_size {mapping.cp_size}"
        yield Problem(
            what=f"config.json's mapping has world_size {mapping.world_size}, but {product}", fix=f"{_CONVERT_AGAIN}."
        )
    else:
        try:
            check_parallel_sizes(config, mapping.tp_size, mapping.pp_size, mapping.moe_ep_size)
        except TrtserveError as error:
            yield _problem(error)


class _Expected:
    """The tensors that the model class of a release has on each rank."""

    def __init__(self, config: CheckpointConfig, targets: Sequence[Target], release: str) -> None:
        self.release = release
        self.config = config
        self.tp_size, self.ep_size = config.mapping.tp_size, config.mapping.moe_ep_size
        self.stages = stage_layers(config.num_hidden_layers, config.mapping.pp_size)
        self.ranks = self.tp_size * len(self.stages)
        self._targets = [
            replace(target, name=name_in_release(target.name, config.architecture, release)) for target in targets
        ]

    def on(self, rank: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """Return shape and type (None: config.json's) of each tensor on a rank."""
        stage, tp_rank = divmod(rank, self.tp_size)
        return {
            name_in_stage(target, self.stages): (shard(target, self.tp_size, tp_rank, self.ep_size).shape, target.dtype)
            for target in self._targets
            if stage_of(target, self.stages) == stage
        }


def _check_rank(folder: Path, rank: int, expected: _Expected, found: list[Problem], warnings: list[str]) -> None:
    """Compare a rank's file with what the model class has there."""
    path = folder / f"rank{rank}.safetensors"
    if not path.is_file():
        found.append(
            Problem(
                what=f"{path.name} is missing; the checkpoint has {expected.ranks} ranks",
                fix=f"Copy every file of the checkpoint. {_CONVERT_AGAIN} if it is lost.",
            )
        )
        return
    try:
        entries = TensorFile(path).entries
    except TrtserveError as error:
        found.append(_problem(error))
        return
    wanted = expected.on(rank)
    missing = [name for name in wanted if name not in entries]
    if HEAD in missing and any(name.endswith("vocab_embedding.weight") for name in entries):
        missing.remove(HEAD)
    missing += _missing_scales(entries)
    again = f"{_CONVERT_AGAIN} with --trtllm-version {expected.release}."
    if missing:
        found.append(Problem(what=f"{path.name} lacks {listing(missing)}", fix=again))
    shapes = [
        f"{name} has shape {list(entries[name].shape)}, expected {list(shape)}"
        for name, (shape, _) in wanted.items()
        if name in entries and entries[name].shape != shape and not _is_quantised(name, entries)
    ]
    if shapes:
        found.append(Problem(what=f"{path.name}: {listing(shapes)}", fix=again))
    unknown = [name for name in entries if name not in wanted and not _is_scale(name, wanted)]
    if unknown:
        warnings.append(f"{path.name} has tensors that the model does not use: {listing(unknown)}")
    types = [
        f"{name} is {DTYPES.get(entries[name].code, entries[name].code)}"
        for name, (_, dtype) in wanted.items()
        if name in entries
        and not _is_quantised(name, entries)
        and DTYPES.get(entries[name].code) != (dtype or expected.config.dtype)
    ]
    if types:
        warnings.append(f"{path.name} has other types than config.json says: {listing(types)}")


def _is_scale(name: str, wanted: Mapping[str, object]) -> bool:
    """Return whether a tensor belongs to a quantised matrix or cache: it stands next to a matrix of the model."""
    prefix = name.rpartition(".")[0]
    return f"{prefix}.weight" in wanted or f"{prefix}.qkv.weight" in wanted


def _is_quantised(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a matrix is stored as codes: integers, FP8, or with scales next to it."""
    prefix = name.removesuffix("weight")
    return name.endswith(".weight") and (
        not entries[name].code.startswith(("F16", "F32", "BF16", "F64"))
        or any(f"{prefix}{part}" in entries for part in ("weights_scaling_factor", "per_channel_scale"))
    )


def _missing_scales(entries: Mapping[str, Entry]) -> list[str]:
    """Return the tensors that a quantised matrix has in another layer but not in this one."""
    parts, layers = defaultdict[str, set[str]](set), set[str]()
    for name in entries:
        if layer := _LAYER.match(name):
            layers.add(layer[0])
            module, _, part = name[layer.end() :].rpartition(".")
            parts[module].add(part)
    quantised = {
        module: names for module, names in parts.items() if names & {"weights_scaling_factor", "per_channel_scale"}
    }
    return [
        name
        for layer in sorted(layers)
        for module, names in quantised.items()
        for part in sorted(names)
        if (name := f"{layer}{module}.{part}") not in entries and part != "weight"
    ]
