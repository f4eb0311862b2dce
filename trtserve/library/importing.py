"""`trtserve.import_model`: from a checkpoint to a model repository."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.progress import SILENT, Progress
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import Spec, options_of

_SPECS = (ConvertSpec, BuildSpec, RepositorySpec)

S = TypeVar("S", bound=Spec)


def import_model(
    source: str | Path,
    *,
    name: str | None = None,
    tokenizer: str | Path | None = None,
    draft: str | Path | None = None,
    out: str | Path | None = None,
    token: str | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> ModelRepository:
    """Download a model, convert it, build its engine and assemble its Triton model repository.

    What exists is reused, so calling it again returns at once. Artefacts are kept in `$TRTSERVE_HOME`.

    Args:
        source: `demo`, an alias (`trtserve models`), `org/name` or `org/name@revision` of the hub, or a folder.
        name: Name of the model; default: the alias, the last part of the id, or the folder.
        tokenizer: Folder of another tokenizer, or the name of an imported model.
        draft: Engine of a smaller model that proposes tokens: a folder, or the name of an imported model.
        out: Folder of the repository; default: in the store.
        token: Token of the hub for gated models; default: the one of `hf auth login` or `$HF_TOKEN`.
        progress: Receives the steps and warnings; default: nothing is reported.
        options: The options of `trtserve import` with underscores, such as `quantize="int8"` or `max_batch_size=8`.

    Raises:
        UsageError: an option does not exist, or its value cannot work.
        ModelNotFoundError, AccessDeniedError, NetworkError: the model cannot be downloaded.
        UnsupportedModelError, ConversionError, BuildError, RepositoryError: a stage failed.
        DiskSpaceError, MemoryLimitError: the model is too large for this machine.
    """
    known = {key for spec in _SPECS for key in options_of(spec)} - {"name"}
    require_known(options, known, "trtserve.import_model")
    spec = resolve_import(
        str(source),
        name=name,
        convert=spec_of(ConvertSpec, options),
        build=spec_of(BuildSpec, options),
        repository=spec_of(RepositorySpec, options),
        tokenizer=None if tokenizer is None else str(tokenizer),
        draft=None if draft is None else str(draft),
        out=None if out is None else Path(out),
        progress=progress,
    )
    return import_to_repository(spec, token=token, progress=progress)


def require_known(options: dict[str, Any], known: set[str], function: str) -> None:
    """Raise UsageError for an option that `function` does not have."""
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(sorted(known))}."
            raise UsageError(f"{function} has no option {name!r}.", hint=hint)


def spec_of(kind: type[S], options: dict[str, Any]) -> S:
    """Return the spec with those of the options that it has; a path may be a text, and a tuple any sequence."""
    known = options_of(kind)
    return kind(**{name: known[name].from_json(value) for name, value in options.items() if name in known})
