"""What a name on the command line means: a running server, its log and its endpoint, or a repository."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import Model, ModelRepository, load_artifact
from trtserve.client.endpoint import Endpoint
from trtserve.errors import ModelNotFoundError, RepositoryError, ServerAmbiguousError, ServerNotFoundError, UsageError
from trtserve.files import read_text
from trtserve.nvidia.containers import known_container
from trtserve.process import tree
from trtserve.progress import Progress
from trtserve.repository.check import require_sound
from trtserve.repository.served import ServedRepository
from trtserve.server.state import Server, failure_of, forget, list_servers, log_file, recorded_server, recorded_servers
from trtserve.server.triton import server_log
from trtserve.server.triton.server_log import last_lines
from trtserve.specs import ServerSpec
from trtserve.specs.command_line import import_command
from trtserve.store import NameRecord, Store


def find_server(name: str | None = None, *, store: Store | None = None, hint: str = "") -> Server:
    """Return the running server `name`; without a name, the only one.

    Raises ServerNotFoundError when there is none, ServerAmbiguousError (with `hint`) when several run and none was
    named.
    """
    store = store or Store()
    living = list_servers(store)
    if name is not None:
        found = next((server for server in living if server.name == name), None)
        if found is None:
            raise _not_found(name, living, store)
        return found
    if not living:
        message = "No server is running."
        if dead := recorded_servers(store):
            names = ", ".join(server.name for server in dead)
            message += f" {names} ended without being stopped: see `trtserve status`."
        raise ServerNotFoundError(message, hint=_how_to_start(store))
    if len(living) > 1:
        names = ", ".join(server.name for server in living)
        raise ServerAmbiguousError(
            f"{len(living)} servers are running: {names}.",
            hint=hint or "Name one of them: --server NAME.",
        )
    return living[0]


def find_log(name: str | None = None, *, store: Store | None = None) -> Path:
    """Return the log of the server `name`, also when it has ended; `name@2` is the second instance of a server.

    Without a name: of the only server that runs, or when none runs of the last one that ran.
    """
    store = store or Store()
    if name is not None:
        log: Path | None = log_file(name, store)
    else:
        logs = [] if list_servers(store) else store.servers.glob("*.log")
        log = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    if log is None or not log.exists():
        log = find_server(name, store=store).instances[0].log
    if not log.exists():
        raise ServerNotFoundError(
            f"The log {log} was removed while its server runs.",
            hint="It begins again when the server is started again: trtserve stop, then trtserve start.",
        )
    return log


def follow_log(log: Path, *, position: int, pause: Callable[[], None], store: Store | None = None) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until its server has ended."""
    server = recorded_server(log.stem.split("@", maxsplit=1)[0], store or Store())
    return server_log.follow(log, position=position, ended=lambda: server is None or not server.alive(), pause=pause)


def _not_found(name: str, living: list[Server], store: Store) -> ServerNotFoundError:
    dead = recorded_server(name, store)
    if dead is not None:
        log = dead.instances[0].log
        message = f"The server {name} ended without being stopped. Its last lines:\n{last_lines(log)}"
        if dead.state == "failed" and dead.failure is not None:
            message = f"The server {name} has failed. {dead.failure.message}"
        error = ServerNotFoundError(
            message, hint=f"Start it again: trtserve start --name {name} --model-repository {dead.repository}", log=log
        )
        if dead.state != "failed" and not any(root.alive() or tree(root) for root in dead.roots):
            forget(dead, store, failure=failure_of(error))
        return error
    if living:
        names = ", ".join(server.name for server in living)
        return ServerNotFoundError(f"No server {name} is running; running: {names}.", hint="Name one of these.")
    return ServerNotFoundError(f"No server {name} is running, nor any other.", hint=_how_to_start(store))


def _how_to_start(store: Store) -> str:
    text = "Import a model and start it: trtserve import demo && trtserve start --detach"
    if store.recorded():
        text = "Start one: trtserve start --detach"
    return f"{text}{chosen_store()}"


def chosen_store() -> str:
    """Return a remark for messages when the user chose a store: servers of other stores are not listed."""
    home = os.environ.get("TRTSERVE_HOME")
    return f" (only the store of $TRTSERVE_HOME was searched: {home})" if home else ""


def endpoint_of(server: Server) -> Endpoint:
    """Return the endpoint of a server, with its default model, its key and its certificate."""
    front = server.endpoint
    endpoint = Endpoint(
        host=front.host,
        http_port=front.http_port,
        grpc_port=front.grpc_port,
        model=server.model,
        repository=server.repository,
    )
    return protected(endpoint, server)


def protected(endpoint: Endpoint, server: Server) -> Endpoint:
    """Return the endpoint with the key and the certificate of a server that this user has started."""
    gateway = server.instances[0].gateway
    if gateway is None or not gateway.settings.is_file():
        return endpoint
    from trtserve.gateway.settings import GatewaySettings

    own = GatewaySettings.read(gateway.settings).endpoint
    return replace(endpoint, tls=own.tls, api_key=own.api_key)


_VERSION = ("trtllm_version",)
_STRING = re.compile(r"""string_value:\s*["'](/[^"']+)["']""")
_YAML = re.compile(r"""^(?:model|tokenizer):\s*["']?(/[^"'\s#]+)""", re.MULTILINE)
_PATH_IN_FLAG = re.compile(r"(?<![^=:,\s])/[^=:,\s]+")


def find_repository(
    name: str | None = None, *, path: Path | None = None, store: Store | None = None
) -> ModelRepository:
    """Return the model repository at `path`, or of the import or repository `name`, or of the last import.

    Raises ModelNotFoundError when nothing was imported or made (under that name).
    """
    if path is not None:
        if name is not None:
            raise UsageError(f"Both a name ({name}) and --model-repository were given; give one.")
        return _open(path)
    store = store or Store()
    records = store.recorded()
    chosen = [record for record in records if name is None or record.name == name]
    if chosen:
        return _open(Path(chosen[0].repository))
    made = store.by_name(ModelRepository)
    if name in made:
        return _open(made[name].path)
    downloaded = store.by_name(Model).get(name or "")
    if downloaded is not None:
        raise _only_downloaded(downloaded)
    if name is not None and (os.sep in name or Path(name).is_dir()):
        # A Hugging Face folder has a config.json, a model repository does not.
        if (Path(name) / "config.json").is_file():
            hint = f"Import the model first: trtserve import {name}"
        else:
            hint = f"Serve a model repository by its path: trtserve start --model-repository {name}"
        raise ModelNotFoundError(f"{name} is a path, not the name of an import.", hint=hint)
    imported = [record.name for record in records]
    others = sorted(set(made) - set(imported))
    lists = [f"Imported: {', '.join(imported)}."] if imported else []
    lists += [f"Made by `trtserve repo`: {', '.join(others)}."] if others else []
    known = " ".join(lists) or "Import a model: trtserve import demo"
    if name is None:
        raise ModelNotFoundError("Nothing has been imported yet.", hint=known)
    from trtserve.store.sources import ALIASES, DEMO

    if name in ALIASES or name == DEMO:
        raise ModelNotFoundError(f"{name} has not been imported yet.", hint=f"Import it first: trtserve import {name}")
    raise ModelNotFoundError(f"Nothing was imported under the name {name}.", hint=known)


def chosen_by(repository: Path, store: Store) -> str:
    """Return the words that choose this repository on the command line: its import's name, else its path."""
    record = _record(repository, store)
    return f"--model-repository {repository}" if record is None else record.name


def import_again(repository: Path, store: Store) -> str | None:
    """Return the command that makes an import's repository again, under the same name.

    Returns None for a repository that no import made, and for one that several imports made together.
    """
    together = sum(Path(record.repository) == repository for record in store.recorded()) > 1
    record = None if together else _record(repository, store)
    # The new one is for another TensorRT-LLM.
    return None if record is None else import_command(record.name, record.source, record.spec, without=_VERSION)


def _record(repository: Path, store: Store) -> NameRecord | None:
    return next((record for record in store.recorded() if Path(record.repository) == repository), None)


def _only_downloaded(model: Model) -> ModelNotFoundError:
    source = model.name if model.manifest is None else str(model.manifest.spec.get("source", model.name))
    named = "" if source == model.name else f" --name {model.name}"
    return ModelNotFoundError(
        f"{model.name} was only downloaded; it has no model repository yet.",
        hint=f"Import it: trtserve import {source}{named}",
    )


def _open(path: Path) -> ModelRepository:
    repository = load_artifact(ModelRepository, path)
    return ModelRepository(path=repository.path, manifest=repository.manifest)


def named_paths(repository: Path) -> tuple[Path, ...]:
    """Return the absolute paths in the configurations that exist here and are outside the repository, each once."""
    return tuple(path for path in _outside(repository) if path.exists())


def engine_paths(repository: Path, served: ServedRepository) -> tuple[Path, ...]:
    """Return the paths outside the repository that its core models need: named files and engine folders."""
    return named_paths(repository) + tuple(core.engine for core in served.core_models if core.engine)


def hub_cache() -> Path | None:
    """Return the folder of the Hugging Face hub's downloads, for models named by their id, or None if there is none."""
    folder = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return folder if folder.is_dir() else None


def require_sound_files(
    repository: ModelRepository, spec: ServerSpec, progress: Progress, *, volume: Path | None = None
) -> None:
    """Raise RepositoryError for faults that keep Triton from starting.

    A `volume`, mounts in docker flags, and a user's own image may have files that are not on this machine. Where the
    repository names such a file the check would be a guess, so a warning replaces it.
    """
    folders = [Path(text) for flag in spec.container_flags for text in _PATH_IN_FLAG.findall(flag)]
    if volume is not None:
        folders.append(volume)
    if spec.container is not None and known_container(spec.container) is None:
        folders = [Path("/")]
    hidden = next((path for path in _missing(repository) if any(path.is_relative_to(each) for each in folders)), None)
    if hidden is None:
        require_sound(repository, progress)
    else:
        progress.warn(
            f"The repository names {hidden}, which is not on this machine: its files are not checked before the start. "
            "Run `trtserve check` where that file exists."
        )


def _missing(repository: ModelRepository) -> Iterator[Path]:
    """Yield named files that are not on this machine, except for those in the repository under another path."""
    facts = repository.manifest.facts if repository.manifest is not None else {}
    members = [facts, *(entry["facts"] for entry in (facts.get("members") or {}).values())]
    inside = [Path(each["container_paths"]) for each in members if each.get("container_paths")]
    for path in _outside(repository.path):
        if not path.exists() and not any(path.is_relative_to(each) for each in inside):
            yield path


def _outside(repository: Path) -> Iterator[Path]:
    texts = [(path, _STRING) for path in repository.glob("*/config.pbtxt")]
    texts += [(path, _YAML) for path in repository.glob("*/1/model.yaml")]
    named = (Path(text) for path, pattern in texts for text in pattern.findall(read_text(path, RepositoryError)))
    # Files of the image keep their meaning there, even where this machine has them too.
    own = (repository.absolute(), Path("/opt/tritonserver"))
    yield from dict.fromkeys(path for path in named if not any(path.is_relative_to(folder) for folder in own))
