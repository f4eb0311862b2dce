"""Import and serve models from Python: `trtserve.import_model` and `trtserve.serve`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.errors import LockedError, UsageError, did_you_mean
from trtserve.files import locked
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.pipeline.world_size import repository_for
from trtserve.progress import SILENT, Progress
from trtserve.server.detach import start_in_background
from trtserve.server.plan import with_free_ports
from trtserve.server.repositories import find_repository
from trtserve.server.shutdown import stop_server
from trtserve.server.state import Server, recorded_server
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.command_line import spec_of
from trtserve.specs.options import options_of
from trtserve.store import Store


@contextmanager
def serve(
    model: str | Path | ModelRepository | None = None,
    *,
    name: str | None = None,
    triton_arguments: tuple[str, ...] = (),
    progress: Progress = SILENT,
    **options: Any,
) -> Iterator[Server]:
    """Serve a model with Triton until the end of the `with` block.

    Several servers, also of other processes, do not disturb each other: each gets ports and a name of its own. The
    server ends with this process, also when that is killed.

    Args:
        model: Name of an import, path of a model repository, or what `import_model` returned; default: the last import.
        name: Name of the server; default: the model's, with a number while another server has it.
        triton_arguments: Flags for tritonserver, passed on unchanged.
        progress: Receives the steps and warnings; default: nothing is reported.
        options: The options of `trtserve start` with underscores, such as `ui=True` or `ready_timeout=60`. A port that
            is taken is replaced by the next free one, unless `auto_ports=False`.

    Yields:
        The server, when all its models are ready: `url` is where it answers HTTP (OpenAI's API under `/v1`),
        `address.grpc_port` and `address.metrics_port` are its other ports, `name` and `model` its names.

    Raises:
        UsageError: an option does not exist, or its value cannot work.
        ModelNotFoundError, RepositoryError: there is no such model, or its repository is damaged.
        ServerStartError, PortInUseError, MachineError: the server did not become ready; the message quotes its log.
    """
    require_known(options, set(options_of(ServerSpec)), "trtserve.serve")
    spec = replace(spec_of(ServerSpec, {"auto_ports": True, **options}), extra_arguments=tuple(triton_arguments))
    repository = repository_for(_repository(model), spec, progress=progress)
    with _name_of(repository, name) as chosen:
        placed = with_free_ports(spec) if spec.auto_ports else spec
        placed = replace(placed, name=chosen)
        server = start_in_background(repository, placed, bound=True, progress=progress)
        try:
            yield server
        finally:
            if recorded_server(chosen, Store()) is not None:
                stop_server(chosen, progress=progress)


def _repository(model: str | Path | ModelRepository | None) -> ModelRepository:
    if isinstance(model, ModelRepository):
        return find_repository(path=model.path)
    if isinstance(model, Path) or (model is not None and "/" in model):
        return find_repository(path=Path(model).expanduser())
    return find_repository(model)


@contextmanager
def _name_of(repository: ModelRepository, name: str | None) -> Iterator[str]:
    """Keep a name for the length of the block, so that servers that start at the same time do not choose the same."""
    if name is not None:
        yield name
        return
    store = Store()
    with ExitStack() as held:
        for number in itertools.count(1):
            chosen = repository.name if number == 1 else f"{repository.name}-{number}"
            other = recorded_server(chosen, store)
            if other is None or not other.alive():
                try:
                    held.enter_context(locked(store.root / "locks" / f"serve-{chosen}.lock", wait=False))
                except LockedError:
                    continue
                yield chosen
                return


_SPECS = (ConvertSpec, BuildSpec, RepositorySpec)


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
            hint = did_you_mean(name, known, f"Known: {', '.join(sorted(known))}.")
            raise UsageError(f"{function} has no option {name!r}.", hint=hint)
