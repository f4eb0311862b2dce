"""An engine without a server: its executor runs in this process, and is asked as a server's core model would be."""

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

from trtserve.artifacts import Engine, Manifest, ModelRepository, looks_like
from trtserve.errors import ArtifactError, MissingDependencyError
from trtserve.process import Command
from trtserve.releases.installed import PACKAGE
from trtserve.repo.engine import is_embedded, read_engine, require_engine_files
from trtserve.repo.options import resolve_options
from trtserve.specs import RepositorySpec
from trtserve.start.mpi import mpirun_program
from trtserve.store import Store
from trtserve.triton.core_models import world_size
from trtserve.triton.local_client import LocalClient, LocalEndpoint
from trtserve.triton.profiles import CORE

# Open MPI's mpirun tells its processes of their world.
_WORLD = "OMPI_COMM_WORLD_SIZE"
_RANK = "OMPI_COMM_WORLD_RANK"
_TOKENIZER = Path("preprocessing", "1", "tokenizer")


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """An engine to ask: its folder, config.json, and the folder of its tokenizer where that is known."""

    path: Path
    config: dict[str, Any]
    tokenizer: Path | None

    @property
    def ranks(self) -> int:
        """Processes that it takes: one for the embedded executor, which merges what was split."""
        return 1 if is_embedded(self.config) else world_size(self.config)

    def needs_mpi(self) -> bool:
        """Whether its ranks are still to be started."""
        return self.ranks > 1 and _WORLD not in os.environ

    def require_runtime(self) -> None:
        """MissingDependencyError when this Python, which every rank runs, has no TensorRT-LLM; nothing is imported."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise MissingDependencyError(
                f"The engine has {self.ranks} ranks, each of which needs TensorRT-LLM, which {sys.executable} cannot "
                "import.",
                hint="Run this in NVIDIA's container, or serve the engine (`trtserve repo`, `trtserve start`).",
            )

    def works_for_leader(self) -> bool:
        """Whether this process is a rank that is asked nothing."""
        return self.ranks > 1 and self.rank != 0

    @property
    def rank(self) -> int:
        """Number of this process among them."""
        return int(os.environ.get(_RANK, "0"))

    def under_mpirun(self, arguments: Sequence[str]) -> Command:
        """This command line once for each rank."""
        argv = (
            mpirun_program(),
            "--allow-run-as-root",
            "-n",
            str(self.ranks),
            sys.executable,
            "-m",
            "trtserve",
            *arguments,
        )
        return Command(argv=argv)

    @contextmanager
    def endpoint(self, *, timeout: float) -> Iterator[LocalEndpoint]:
        """The executor of the engine while it is used; it gives an answer `timeout` seconds.

        MissingDependencyError when the runtime is not installed, RequestError when the engine cannot be loaded.
        """
        client = LocalClient(self.path, _model(self), timeout=timeout)
        try:
            yield LocalEndpoint(client=client, model=CORE)
        finally:
            client.shutdown()

    def work_for_leader(self) -> None:
        """What a rank does that is asked nothing: its executor works until the leader's ends."""
        LocalClient(self.path, _model(self), timeout=math.inf).shutdown()


def find_local(text: str, tokenizer: Path | None, *, store: Store | None = None) -> LocalEngine:
    """The engine in the folder `text`, that of a repository there, or that of an imported name.

    RepositoryError for an engine that is none or incomplete, ModelNotFoundError for a name that nothing has.
    """
    store = store or Store()
    folder = Path(text).expanduser()
    if folder.is_dir() and looks_like(ModelRepository, folder):
        path = folder / CORE / "1"
    else:
        path = store.find(Engine, text).path
    config = read_engine(path)
    require_engine_files(path, config, embedded=is_embedded(config))
    return LocalEngine(path=path.absolute(), config=config, tokenizer=tokenizer or _tokenizer_of(path, store))


def _tokenizer_of(engine: Path, store: Store) -> Path | None:
    """That of the import which made the engine, of the repository in which it lies, or of the model it was made of."""
    for record in store.recorded():
        if record.engine and Path(record.engine).resolve() == engine.resolve():
            served = Path(record.repository) / _TOKENIZER
            return served if served.is_dir() else Path(record.model)
    inside = engine.parent.parent / _TOKENIZER
    return inside if inside.is_dir() else _tokenizer_of_origin(engine)


def _tokenizer_of_origin(engine: Path) -> Path | None:
    """The model's folder as manifests name it, from engine to checkpoint to model; None where it is not there."""
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
    """The configuration that the core model of a repository would have, as JSON."""
    try:
        from google.protobuf.json_format import MessageToDict

        from trtserve.triton.config import build_config
    except ImportError as error:
        raise MissingDependencyError(
            f"The core model's configuration needs a package that is not installed: {error.name}.",
            hint="pip install trtserve again: it is one of its dependencies.",
        ) from error
    spec = RepositorySpec(name="local", triton_backend=None if is_embedded(engine.config) else "python")
    table, options = resolve_options(spec, engine.config, tokenizer=engine.tokenizer)
    message = build_config(table, CORE, options)
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found
