"""Rules about files: what must exist, can be read, matches the manifest, and is as it was when it was made."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from trtserve.artifacts import Artifact, Checksums, Engine, ModelRepository, damages, load_artifact
from trtserve.errors import ArtifactError, CorruptFileError, listing
from trtserve.executor.loaders import is_embedded_runtime
from trtserve.executor.runtimes import RUNTIMES
from trtserve.files import read_text
from trtserve.progress import Progress
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, every_model, model_rule, of_role, refusal, rule
from trtserve.repository.config import unfilled_parameters, wrong_placeholders
from trtserve.repository.profiles import CLASSES_FILE, CORE, DRAFT, ENSEMBLE, MODELS, POSTPROCESSING, classes_json
from trtserve.repository.programs import (
    PACKAGE,
    SOURCES,
    import_statements,
    imported_modules,
    model_names,
    require_program,
)
from trtserve.specs.command_line import import_command
from trtserve.store import Store, remembered_checksums

_MAKE_AGAIN = "Rebuild the repository with trtserve repo or trtserve import."
_MOST_FILES = 100_000
_OF_NVIDIA = frozenset({"lib", "helpers"})  # names under which NVIDIA's programs keep their own modules


@rule("no-model", "there is a model", stops=True)
def no_models(repository: Repository) -> Iterator[Finding]:
    if not repository.models and not repository.unread:
        yield Finding(
            what=f"{repository.path} holds no model: no <model>/config.pbtxt was found.",
            fix="Give the folder that holds the models' folders.",
        )


@rule(
    "placeholder", "no `${…}` of NVIDIA's templates is left outside of quotes or in a mandatory parameter", stops=True
)
def unfilled_placeholders(repository: Repository) -> Iterator[Finding]:
    for name in repository.unread:
        file = repository.path / name / "config.pbtxt"
        for line, placeholder in wrong_placeholders(_text(file)):
            yield Finding(
                model=name,
                file=file,
                what=f"Line {line}: the placeholder {placeholder} was never filled in.",
                fix="Give it a value, or remove the parameter: trtserve repo --from-template",
            )


@model_rule("placeholder-unset", "no `${…}` is left in an optional parameter", every_model, severity="warning")
def unset_placeholders(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if names := unfilled_parameters(model.config):
        yield model.finding(
            f"The placeholder of NVIDIA's template is left in {listing(names)}; the backends read it as unset.",
            "Leave it, or remove the entries: trtserve repo --from-template --drop-unset.",
        )


@rule("config-syntax", "config.pbtxt can be read", stops=True)
def invalid_configs(repository: Repository) -> Iterator[Finding]:
    for name, error in repository.unread.items():
        file = repository.path / name / "config.pbtxt"
        if next(wrong_placeholders(_text(file)), None) is None:
            yield Finding(
                model=name,
                file=file,
                what=error.message.replace(str(file), file.name),
                fix=error.hint or "Correct the line, or rebuild the repository with trtserve repo or trtserve import.",
            )


@rule("stray-folder", "every folder is a model", stops=True)
def stray_folders(repository: Repository) -> Iterator[Finding]:
    for folder in repository.folders:
        if not (folder / "config.pbtxt").exists():
            yield Finding(
                model=folder.name,
                file=folder,
                what=f"The folder {folder.name} has no config.pbtxt, and Triton loads every folder here as a model.",
                fix="Move it out of the repository, or restore its config.pbtxt.",
            )


@model_rule("model-name", "`name` is that of the folder", every_model, stops=True)
def wrong_names(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if model.config.name not in ("", model.name):
        yield model.finding(
            f"It has name: {model.config.name!r}, and its folder is {model.name!r}.",
            f'Write name: "{model.name}", or rename the folder.',
        )


@model_rule("backend", "backend or platform fits the model's name and tensors", every_model, stops=True)
def wrong_backends(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    """Every model has the backend of its role, and NVIDIA's names are not used for other models."""
    config, role = model.config, model.role
    backends = {ENSEMBLE: ("",), CORE: ("tensorrtllm", "python")}.get(role)
    if backends is None and role in (*MODELS, LLMAPI):
        backends = ("python",)
    found, expected = config.backend or config.platform or "none", None
    if model.name == ENSEMBLE and config.platform != "ensemble":
        expected = "platform: ensemble"
    elif backends is not None and config.backend not in backends:
        expected = " or ".join(f"backend: {each}" for each in backends if each)
    elif model.name in MODELS and role not in ("", model.name, LLMAPI if model.name == CORE else ""):
        found, expected = role, f"the model {model.name}, whose name is reserved"
    elif found == "none":
        expected = "a backend"
    if expected is not None:
        yield model.finding(
            f"The model {model.name} is of kind {found!r}; expected {expected}.",
            "Write the backend (or platform) of NVIDIA's template; give your own models other names.",
        )


@model_rule("version-folder", "every model has a version", every_model, stops=True)
def missing_versions(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if not any(int(path.name) > 0 for path in model.versions):
        yield model.finding(
            f"The model {model.name} has no version folder such as {model.name}/1.",
            "Create it. For an ensemble it is empty, and some copy tools drop empty folders.",
            model.path,
        )


@model_rule("program-missing", "python models have their model.py", every_model, stops=True)
def missing_programs(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    error = refusal(partial(require_program, model.path, model.config)) if model.versions else None
    if error is not None:
        yield model.finding(error.message, _MAKE_AGAIN, model.version)


@model_rule("program-syntax", "programs are Python", every_model)
def invalid_programs(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    for name, file, text in _programs(model):
        if isinstance(error := _imports(text), str):
            yield model.finding(f"{name} is not valid Python: {error}.", _MAKE_AGAIN, file)


@model_rule("program-module", "programs find their own modules", every_model, stops=True)
def missing_modules(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    for name, file, text in _programs(model):
        imports = _imports(text)
        if isinstance(imports, str):
            continue
        needed = sorted(imports & ({PACKAGE} | _OF_NVIDIA))
        missing = [each for each in needed if not list(model.version.glob(f"{each}*"))]
        missing += [str(path) for path in imported_modules(name, text) if not (model.version / path).is_file()]
        for each in missing:
            yield model.finding(
                f"{name} imports {each}, which is not in {model.version}.",
                f"Copy every file of the model's version folder. {_MAKE_AGAIN}",
                file,
            )


@model_rule("program-package", "programs import packages that exist", every_model, severity="warning")
def unknown_packages(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    """trtserve's programs import what they import in this installation, or what is installed here."""
    for name, file, text in _programs(model) if model.own else ():
        imports = _imports(text)
        others = set() if isinstance(imports, str) else imports - sys.stdlib_module_names - _own_imports()
        for package in sorted(others - {path.stem for path in model.version.iterdir()} - _OF_NVIDIA):
            if find_spec(package) is None:
                yield model.finding(
                    f"{name} imports {package}, which trtserve's own program does not, and which is not installed "
                    "here.",
                    f"Install it where the server runs, or correct the line. {_MAKE_AGAIN}",
                    file,
                )


@model_rule(
    "program-slow", "no answer counts the vocabulary, as in release 0.13", of_role(POSTPROCESSING), severity="warning"
)
def slow_programs(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    """The postprocessing of 0.13 counts the vocabulary for each answer, which takes about 40 ms a token."""
    for file in sorted(model.version.glob("*.py")):
        if _counts_vocabulary(_text(file)):
            yield model.finding(
                f"{file.name} counts the tokenizer's vocabulary for every answer, which takes milliseconds.",
                "Count it once, in initialize, or use the program of another release.",
                file,
            )


@lru_cache(maxsize=256)
def _counts_vocabulary(source: str) -> bool:
    """Return whether a function other than `initialize` calls `len(….vocab)`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "len"
        and any(isinstance(each, ast.Attribute) and each.attr == "vocab" for each in ast.walk(call))
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name != "initialize"
        for call in ast.walk(function)
    )


@lru_cache(maxsize=16)  # three rules ask for the same files
def _programs(model: ModelFolder) -> list[tuple[PurePosixPath, Path, str]]:
    """Path below the version folder, file and text of every Python file of a model's program."""
    files = [*model.version.glob("*.py"), *(model.version / PACKAGE).rglob("*.py")]
    return [(PurePosixPath(file.relative_to(model.version)), file, _text(file)) for file in sorted(files)]


def _text(file: Path) -> str:
    try:
        return read_text(file, errors="replace")
    except (OSError, ArtifactError):
        return ""


@cache
def _own_imports() -> frozenset[str]:
    """Top-level names of everything that trtserve's programs import."""
    found = (_imports(_text(file)) for file in SOURCES.rglob("*.py"))
    return frozenset().union(*(names for names in found if not isinstance(names, str)))


@lru_cache(maxsize=256)
def _imports(source: str) -> frozenset[str] | str:
    """Top-level names of the modules that a program imports, or why it is not a program."""
    try:
        statements = import_statements(source)
    except (SyntaxError, ValueError) as error:
        return str(error)
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return frozenset(found)


@rule("file-access", "files can be read, links lead somewhere", stops=True)
def unreadable_files(repository: Repository) -> Iterator[Finding]:
    count, walked = 0, set()
    for folder, names, files in os.walk(repository.path, followlinks=True):
        status = Path(folder).stat()
        if (place := (status.st_dev, status.st_ino)) in walked:  # a link leads back to it
            names.clear()
            continue
        walked.add(place)
        count += len(names) + len(files)
        if count > _MOST_FILES:
            yield Finding(
                file=repository.path,
                what=f"It has more than {_MOST_FILES} files and folders, with those that its links lead to.",
                fix="Remove links to folders that are not engines: every start reads all of this.",
            )
            return
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.exists():
                problem = f"is a link to {path.readlink()}, which does not exist"
            elif path.exists() and not (path.stat().st_mode & 0o444 and os.access(path, os.R_OK)):
                problem = "cannot be read: this user lacks the permission"
            elif path.exists() and not (path.is_file() or path.is_dir()):
                problem = "is not a regular file: a pipe or a device, which may never end"
            else:
                continue
            relative = path.relative_to(repository.path)
            yield Finding(
                model=relative.parts[0],
                file=path,
                what=f"{relative} {problem}.",
                fix="Copy the file itself (trtserve repo --copy), or chmod -R a+rX the repository.",
            )


@rule("manifest-models", "the models that the manifest lists exist")
def missing_models(repository: Repository) -> Iterator[Finding]:
    members = repository.facts.get("members") or {}
    names = set(repository.facts.get("core_models") or {})
    for part in [entry["facts"] for entry in members.values()] or [repository.facts]:
        names |= {str(part["alias"])} if "alias" in part else set()
        if part.get("runtime") in RUNTIMES and "model_yaml" not in part:  # it has the five models
            own = model_names(str(part.get("suffix") or ""))
            names |= {own[model] for model in (*MODELS, *([DRAFT] if part.get("draft") else []))}
    for name in sorted(names - {folder.name for folder in repository.folders}):
        yield Finding(
            model=name,
            file=repository.path / "manifest.json",
            what=f"The manifest lists a model {name}, and there is no such folder.",
            fix=_MAKE_AGAIN,
        )


@model_rule("manifest-engine", "the engine is the one that the manifest records", of_role(CORE), stops=True)
def changed_engines(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    entry, folder = repository.core_entry(model), model.engine_folder
    if not entry or folder is None or not model.engine:
        return
    for what, recorded, found in _compared(repository, model, entry, folder):
        if recorded is not None and recorded != found:
            yield model.finding(
                f"The manifest records an engine with {what} {recorded}; this one has {found}.",
                f"Was a file cut off, or replaced by another engine's? {_MAKE_AGAIN}",
                folder,
            )


def _compared(
    repository: Repository, model: ModelFolder, entry: Mapping[str, Any], folder: Path
) -> Iterator[tuple[str, object, object]]:
    """What, recorded in the manifest, found in the engine."""
    yield "world size", entry.get("world_size"), model.engine.mapping.ranks
    yield "the builder TensorRT-LLM", (entry.get("origin") or {}).get("tensorrt_llm"), model.engine.version
    for name, size in (entry.get("files") or {}).items():
        if (folder / name).is_file():  # another rule reports a missing one
            yield f"a {name} of bytes", size, (folder / name).stat().st_size
    part = repository.part(model.name)
    if model.name == model_names(str(part.get("suffix") or ""))[CORE]:
        yield "vocab_size", part.get("vocab_size"), model.engine.model.vocab_size or None
        for name, limit in (part.get("limits") or {}).items():
            yield name, limit, model.engine.build_keys.get(name)


@model_rule("parameter-classes", "parameter_classes.json is up to date", every_model, severity="warning")
def outdated_classes(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    """parameter_classes.json is what trtserve would write for the release."""
    release, file = repository.parameter_release(model), model.version / CLASSES_FILE
    if release is None or model.role not in MODELS:
        return
    if not is_embedded_runtime(repository.part(model.name).get("runtime")):
        return
    if (classes_json(model.role, release) or "") != _text(file):
        yield model.finding(
            f"{CLASSES_FILE} is not that of release {release}: parameters without effect are not reported.",
            _MAKE_AGAIN,
            file,
        )


@rule("file-content", "files are as they were when they were made", needs="contents")
def damaged_contents(repository: Repository) -> Iterator[Finding]:
    """Compare every byte, also of files that were compared before."""
    for artifact in _artifacts(repository.path, (model.engine_folder for model in repository.models.values())):
        for path, what in damages(artifact, Checksums()).items():
            inside = path.is_relative_to(repository.path)
            name = path.relative_to(repository.path).parts[0] if inside else None
            yield Finding(model=name, file=path, what=f"{path.name} {what}.", fix=_repair(artifact))


def require_intact(repository: Path, engines: Iterable[Path | None], progress: Progress) -> None:
    """Raise CorruptFileError when a file is not as it was when the repository or one of its engines was made.

    A file that was compared before is read again only when its size, time of change or inode differ.
    """
    for artifact in _artifacts(repository, engines):
        if artifact.manifest is not None and artifact.manifest.files:
            progress.step(f"Comparing the files of {artifact.path.name} with their checksums")
        if found := damages(artifact, remembered_checksums()):
            raise CorruptFileError(
                f"{artifact.path} is damaged: "
                + listing([f"{path.relative_to(artifact.path)} {what}" for path, what in found.items()], "; ")
                + ".",
                hint=f"{_repair(artifact)} To serve it as it is: --no-verify",
            )


def _artifacts(repository: Path, engines: Iterable[Path | None]) -> Iterator[Artifact]:
    """Yield the repository and the engines outside of it."""
    outside = {path.absolute() for path in engines if path is not None and path.is_dir()}
    yield load_artifact(ModelRepository, repository)
    for path in sorted(outside):
        if not path.is_relative_to(repository.absolute()):
            try:
                yield load_artifact(Engine, path)
            except ArtifactError:  # other rules say what is wrong with this folder
                continue


def _repair(artifact: Artifact) -> str:
    """Return how to make an artefact again; `import` replaces damaged artefacts, also the engine it was linked from."""
    for record in Store().recorded():
        if str(artifact.path) in (record.repository, record.engine):
            return f"Repair it: {import_command(record.name, record.source, record.spec)}"
    command = "trtserve repo" if isinstance(artifact, ModelRepository) else "trtserve build"
    return f"Make it again with `{command}`: a damaged artefact is not reused."
