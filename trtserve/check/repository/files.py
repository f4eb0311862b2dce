"""Rules about files: what must be there, can be read, and is what the manifest says."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtserve.check.repository.findings import Fault, refusal
from trtserve.check.repository.subject import LLMAPI, ModelFolder, Subject
from trtserve.repo.placement import model_names
from trtserve.triton.core_models import world_size
from trtserve.triton.parameters import CLASSES_FILE, classes_json
from trtserve.triton.preflight import placeholders, require_program
from trtserve.triton.profiles import CORE, DRAFT, ENSEMBLE, MODELS, POSTPROCESSING

_AGAIN = "Make the repository again: trtserve repo, or trtserve import."
_PROGRAMS = Path(__file__).parents[2] / "triton" / "models"
# Names under which NVIDIA's programs keep their own modules.
_NVIDIAS = frozenset({"lib", "helpers"})


def no_models(subject: Subject) -> Iterator[Fault]:
    """A folder without any model."""
    if not subject.models and not subject.unread:
        yield Fault(
            what=f"{subject.path} holds no model: no <model>/config.pbtxt was found.",
            fix="Give the folder that holds the models' folders.",
        )


def unfilled(subject: Subject) -> Iterator[Fault]:
    """Placeholders of NVIDIA's templates."""
    for name in subject.unread:
        file = subject.path / name / "config.pbtxt"
        for line, left in placeholders(_text(file)):
            yield Fault(
                model=name,
                file=file,
                what=f"Line {line}: the placeholder {left} was never filled in.",
                fix="Give it a value, or leave the parameter out: trtserve repo --from-template",
            )


def unparsed(subject: Subject) -> Iterator[Fault]:
    """Files that are no model configuration."""
    for name, error in subject.unread.items():
        file = subject.path / name / "config.pbtxt"
        if next(placeholders(_text(file)), None) is None:
            yield Fault(
                model=name,
                file=file,
                what=error.message.replace(str(file), file.name),
                fix=error.hint or f"Mend the line, or m{_AGAIN[1:]}",
            )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def stray_folders(subject: Subject) -> Iterator[Fault]:
    """Triton takes every folder for a model."""
    for folder in subject.folders:
        if not (folder / "config.pbtxt").exists():
            yield Fault(
                model=folder.name,
                file=folder,
                what=f"The folder {folder.name} has no config.pbtxt, and Triton takes every folder here for a model.",
                fix="Move it out of the repository, or give it the configuration that it lost.",
            )


def wrong_names(subject: Subject) -> Iterator[Fault]:
    """The name in a configuration is that of its folder."""
    for model in subject.models.values():
        if model.config.name not in ("", model.name):
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"It says name: {model.config.name!r}, and its folder is {model.name!r}.",
                fix=f'Write name: "{model.name}", or rename the folder.',
            )


def no_versions(subject: Subject) -> Iterator[Fault]:
    """Every model has the folder of a version, the ensemble too."""
    for model in subject.models.values():
        if not any(int(path.name) > 0 for path in model.versions):
            yield Fault(
                model=model.name,
                file=model.path,
                what=f"The model {model.name} has no version folder such as {model.name}/1.",
                fix="Make it; an ensemble's is empty, and tools that drop empty folders take it away.",
            )


def no_programs(subject: Subject) -> Iterator[Fault]:
    """A python model has its file."""
    for model in subject.models.values():
        error = refusal(partial(require_program, model.path, model.config)) if model.versions else None
        if error is not None:
            yield Fault(model=model.name, file=model.version, what=error.message, fix=_AGAIN)


def broken_programs(subject: Subject) -> Iterator[Fault]:
    """The files of a program are Python."""
    for model in subject.models.values():
        for file in sorted(model.version.glob("*.py")):
            found = _imports(_text(file))
            if isinstance(found, str):
                yield Fault(model=model.name, file=file, what=f"{file.name} is not Python: {found}.", fix=_AGAIN)


def lacking_modules(subject: Subject) -> Iterator[Fault]:
    """A program finds the modules of its own folder."""
    for model in subject.models.values():
        present = {path.stem for path in model.version.iterdir()} if model.version.is_dir() else set()
        for file in sorted(model.version.glob("*.py")):
            found = _imports(_text(file))
            for name in sorted((_local_names() & set(found if isinstance(found, frozenset) else ())) - present):
                yield Fault(
                    model=model.name,
                    file=file,
                    what=f"{file.name} imports {name}, which is not beside it.",
                    fix="Copy every file of the model's version folder. " + _AGAIN,
                )


def unknown_packages(subject: Subject) -> Iterator[Fault]:
    """The programs of trtserve import what they imported when they were written, or what is installed here."""
    for model in subject.models.values():
        for file in sorted(model.version.glob("*.py")) if model.own else ():
            found = _imports(_text(file))
            others = set() if isinstance(found, str) else found - sys.stdlib_module_names - _own_imports()
            for name in sorted(others - {path.stem for path in model.version.iterdir()} - _local_names()):
                if find_spec(name) is None:
                    yield Fault(
                        model=model.name,
                        file=file,
                        what=f"{file.name} imports {name}, which trtserve's own program does not, and which is not "
                        "installed here.",
                        fix=f"Install it where the server runs, or correct the line. {_AGAIN}",
                    )


@cache
def _own_imports() -> frozenset[str]:
    """Top names of everything that trtserve's programs import."""
    found = (_imports(_text(file)) for file in _PROGRAMS.glob("*/**/*.py"))
    return frozenset().union(*(names for names in found if not isinstance(names, str)))


def slow_programs(subject: Subject) -> Iterator[Fault]:
    """No program counts the vocabulary for each answer: about 40 ms a token in the postprocessing of 0.13."""
    for model in subject.of(POSTPROCESSING):
        for file in sorted(model.version.glob("*.py")):
            if _counting(_text(file)):
                yield Fault(
                    model=model.name,
                    file=file,
                    what=f"{file.name} counts the tokenizer's vocabulary for every answer, which takes milliseconds.",
                    fix="Count it once, in initialize, or take the program of another release.",
                )


@lru_cache(maxsize=256)
def _counting(source: str) -> bool:
    """Whether a function other than `initialize` calls `len(….vocab)`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "initialize"]
    return any(_counts(node) for function in functions for node in ast.walk(function))


def _counts(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    return named and any(isinstance(each, ast.Attribute) and each.attr == "vocab" for each in ast.walk(node))


@cache
def _local_names() -> frozenset[str]:
    return frozenset(path.stem for path in _PROGRAMS.glob("*/**/*.py") if path.stem != "model") | _NVIDIAS


@lru_cache(maxsize=256)
def _imports(source: str) -> frozenset[str] | str:
    """Top names of the modules that a program imports; why it is no program."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return str(error)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return frozenset(found)


def unreadable(subject: Subject) -> Iterator[Fault]:
    """Files that somebody may read, and links that lead somewhere."""
    for folder, names, files in os.walk(subject.path, followlinks=True):
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.exists():
                what = f"is a link to {path.readlink()}, which is not there"
            elif path.exists() and not (path.stat().st_mode & 0o444 and os.access(path, os.R_OK)):
                what = "cannot be read: nobody has the permission, or not this user"
            else:
                continue
            yield Fault(
                model=path.relative_to(subject.path).parts[0],
                file=path,
                what=f"{path.relative_to(subject.path)} {what}.",
                fix="Copy the file itself (trtserve repo --copy), or chmod -R a+rX the repository.",
            )


def lacking_models(subject: Subject) -> Iterator[Fault]:
    """The models that the manifest names."""
    for facts in _members(subject):
        names = {str(facts["alias"])} if "alias" in facts else set()
        if facts.get("runtime") in ("openvino", "tensorrt_llm"):
            own = model_names(str(facts.get("suffix") or ""))
            names |= {own[model] for model in (*MODELS, *([DRAFT] if facts.get("draft") else []))}
        yield from _lacking(subject, names)
    yield from _lacking(subject, set(subject.facts.get("core_models") or {}))


def _lacking(subject: Subject, names: set[str]) -> Iterator[Fault]:
    for name in sorted(names - {folder.name for folder in subject.folders}):
        yield Fault(
            model=name,
            file=subject.path / "manifest.json",
            what=f"The manifest says that there is a model {name}, and there is no such folder.",
            fix=_AGAIN,
        )


def _members(subject: Subject) -> list[Mapping[str, Any]]:
    members = subject.facts.get("members") or {}
    return [entry["facts"] for entry in members.values()] or ([subject.facts] if subject.facts else [])


def stale_engines(subject: Subject) -> Iterator[Fault]:
    """The engine is the one that the manifest tells of: its builder, limits, vocabulary, ranks, sizes of its files."""
    for model in subject.of(CORE):
        entry = (subject.facts.get("core_models") or {}).get(model.name)
        if entry is None or model.core is None or model.core.engine is None or not model.engine:
            continue
        for what, told, found in _compared(subject, model, entry):
            if told is not None and told != found:
                yield Fault(
                    model=model.name,
                    file=model.core.engine,
                    what=f"The manifest tells of an engine with {what} {told}; this one has {found}.",
                    fix="Was a file cut off, or replaced by another engine's? " + _AGAIN,
                )


def _compared(subject: Subject, model: ModelFolder, entry: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    assert model.core is not None
    assert model.core.engine is not None
    yield "world size", entry.get("world_size"), world_size(model.engine)
    yield "the builder TensorRT-LLM", (entry.get("origin") or {}).get("tensorrt_llm"), model.engine.get("version")
    folder = model.core.engine
    for name, size in (entry.get("files") or {}).items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else size  # a missing one is another fault
        yield f"{name} of bytes", size, found
    facts = subject.member(model.name)
    first = model.name == model_names(str(facts.get("suffix") or ""))[CORE]
    if not first:
        return
    yield "vocab_size", facts.get("vocab_size"), model.pretrained.get("vocab_size")
    for name, limit in (facts.get("limits") or {}).items():
        yield name, limit, model.build.get(name)


def stale_classes(subject: Subject) -> Iterator[Fault]:
    """parameter_classes.json says what the tables of the release say."""
    for model in subject.models.values():
        embedded = subject.member(model.name).get("runtime") == "openvino"
        release = subject.parameter_release(model)
        if not embedded or release is None or model.role not in MODELS:
            continue
        file = model.version / CLASSES_FILE
        if (classes_json(model.role, release) or "") != _text(file):
            yield Fault(
                model=model.name,
                file=file,
                what=f"{CLASSES_FILE} is not that of release {release}: parameters without meaning are not told.",
                fix=_AGAIN,
            )


def wrong_kind(subject: Subject) -> Iterator[Fault]:
    """Every model has the backend of its kind, and NVIDIA's names mean what they say."""
    for model in subject.models.values():
        config = model.config
        kinds = {ENSEMBLE: ("",), CORE: ("tensorrtllm", "python")}
        expected = kinds.get(model.role, ("python",) if model.role in (*MODELS, LLMAPI) else None)
        said = config.backend or config.platform
        if model.name == ENSEMBLE and config.platform != "ensemble":
            yield _kind(model, said, "platform: ensemble")
        elif expected is not None and config.backend not in expected:
            yield _kind(model, said, " or ".join(f"backend: {each}" for each in expected if each))
        elif model.name in MODELS and model.role not in ("", model.name, LLMAPI if model.name == CORE else ""):
            yield _kind(model, model.role, f"the model {model.name}, whose name is reserved")
        elif not said:
            yield _kind(model, "none", "a backend")


def _kind(model: ModelFolder, said: str, expected: str) -> Fault:
    return Fault(
        model=model.name,
        file=model.file,
        what=f"The model {model.name} is of kind {said or 'none'!r}; expected {expected}.",
        fix="Write the backend (or platform) that it has in NVIDIA's templates; give your own models other names.",
    )
