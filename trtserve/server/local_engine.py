"""An engine without a server: run its executor in this process and query it like a server's core model."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts import (
    Engine,
    Manifest,
    ModelRepository,
    looks_like,
)
from trtserve.client.base import ModelDescription
from trtserve.errors import ArtifactError, MissingDependencyError
from trtserve.executor.loaders import is_embedded, merges_ranks
from trtserve.host.mpi import mpirun_program
from trtserve.nvidia.releases.installed import PACKAGE
from trtserve.process import Command
from trtserve.repository.core_models import world_size
from trtserve.repository.engine import read_engine, require_engine_files
from trtserve.repository.options import resolve_options
from trtserve.repository.profiles import CORE
from trtserve.server.local_client import LocalClient, LocalEndpoint
from trtserve.specs import RepositorySpec
from trtserve.store import Store

# Open MPI's mpirun sets these for each process.
_WORLD = "OMPI_COMM_WORLD_SIZE"
_RANK = "OMPI_COMM_WORLD_RANK"
_TOKENIZER = Path("preprocessing", "1", "tokenizer")


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """An engine to query in this process."""

    path: Path
    config: dict[str, Any]  # config.json
    tokenizer: Path | None

    @property
    def ranks(self) -> int:
        """Number of processes it needs."""
        return 1 if merges_ranks(self.config) else world_size(self.config)

    def needs_mpi(self) -> bool:
        """Return whether mpirun still has to start its ranks."""
        return self.ranks > 1 and _WORLD not in os.environ

    def require_runtime(self) -> None:
        """Raise MissingDependencyError if this Python, which every rank uses, cannot import TensorRT-LLM for it."""
        if not is_embedded(self.config) and importlib.util.find_spec(PACKAGE) is None:
            raise MissingDependencyError(
                f"The engine has {self.ranks} ranks; each needs TensorRT-LLM, which {sys.executable} cannot import.",
                hint="Run this in NVIDIA's container, or serve the engine (`trtserve repo`, `trtserve start`).",
            )

    def is_worker(self) -> bool:
        """Return whether this process is a rank other than the leader, which receives no requests."""
        return self.ranks > 1 and self.rank != 0

    @property
    def rank(self) -> int:
        """Rank of this process; 0 is the leader."""
        return int(os.environ.get(_RANK, "0"))

    def under_mpirun(self, arguments: Sequence[str]) -> Command:
        """Return the command that runs this command line once per rank."""
        argv = (
            mpirun_program(),
            "--allow-run-as-root",
            *(("--bind-to", "none") if is_embedded(self.config) else ()),
            "-n",
            str(self.ranks),
            sys.executable,
            "-m",
            "trtserve",
            *arguments,
        )
        return Command(argv=argv)

    def describe(self) -> ModelDescription:
        """Return the description of the core model that a server would have for the engine, without loading it."""
        return ModelDescription.from_config(_model(self))

    @contextmanager
    def endpoint(self, *, timeout: float) -> Iterator[LocalEndpoint]:
        """Load the engine into an executor and yield its endpoint; `timeout` is the limit of an answer in seconds.

        Raises MissingDependencyError when the runtime is not installed and RequestError when the engine cannot be
        loaded.
        """
        client = LocalClient(self.path, _model(self), timeout=timeout)
        try:
            yield LocalEndpoint(client=client, model=CORE)
        finally:
            client.shutdown()

    def run_worker(self) -> None:
        """Run a rank other than the leader until the leader's executor shuts down."""
        LocalClient(self.path, _model(self), timeout=math.inf).shutdown()


def find_local_engine(text: str, tokenizer: Path | None, *, store: Store | None = None) -> LocalEngine:
    """Return the engine in the folder `text`, in the repository there, or of the imported model `text`.

    Raises RepositoryError for an incomplete or invalid engine and ModelNotFoundError for an unknown name.
    """
    store = store or Store()
    folder = Path(text).expanduser()
    if folder.is_dir() and looks_like(ModelRepository, folder):
        path = folder / CORE / "1"
    else:
        path = store.find(Engine, text).path
    config = read_engine(path)
    require_engine_files(path, config)
    return LocalEngine(path=path.absolute(), config=config, tokenizer=tokenizer or _tokenizer_of(path, store))


def _tokenizer_of(engine: Path, store: Store) -> Path | None:
    """Return the tokenizer of the import, of the repository or of the model that the engine belongs to."""
    for record in store.recorded():
        if record.engine and Path(record.engine).resolve() == engine.resolve():
            served = Path(record.repository) / _TOKENIZER
            return served if served.is_dir() else Path(record.model)
    inside = engine.parent.parent / _TOKENIZER
    return inside if inside.is_dir() else _tokenizer_of_origin(engine)


def _tokenizer_of_origin(engine: Path) -> Path | None:
    """Follow the manifests from engine to checkpoint to model; return the model's folder if it has a tokenizer."""
    folder = engine
    for fact in ("checkpoint", "model"):
        try:
            made_of = Manifest.read(folder).facts.get(fact)
        except ArtifactError:
            return None
        if made_of is None:
            return None
        folder = Path(made_of)
    return folder if any(folder.glob("tokenizer*")) else None


def _model(engine: LocalEngine) -> dict[str, Any]:
    """Return the configuration that the engine's core model would have in a repository, as JSON."""
    try:
        from google.protobuf.json_format import MessageToDict

        from trtserve.repository.config import build_config
    except ImportError as error:
        raise MissingDependencyError(
            f"The core model's configuration needs a package that is not installed: {error.name}.",
            hint="Install trtserve again: the package is one of its dependencies.",
        ) from error
    spec = RepositorySpec(name="local", triton_backend=None if is_embedded(engine.config) else "python")
    table, options = resolve_options(spec, engine.config, tokenizer=engine.tokenizer)
    message = build_config(table, CORE, options)
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found
