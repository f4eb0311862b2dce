"""NVIDIA's container around a command: `docker run` with the same command in it, at the same paths."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.errors import MachineError, MissingDependencyError, TrtserveError, UsageError
from trtserve.launch.end_script import END_SCRIPT
from trtserve.process import Command, Identity, run, spawn
from trtserve.releases.containers import Container, container
from trtserve.releases.installed import OPTION, Installed, installed

DOCKER = "docker"
SQUASHFS = (".sqsh", ".squashfs")
"""Endings of images that are files, which pyxis takes and docker does not."""
SHM_GIB = 2
"""Shared memory of NVIDIA's own examples; docker's default of 64 MB is too little for one Python model."""

# Handed in by name, so that a value stands in no command line, log or manifest.
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_BY_NAME = (*_SECRETS, "HF_ENDPOINT", "HF_HUB_OFFLINE", "NCCL_DEBUG", "TLLM_LOG_LEVEL")
# Folders of the image; a mount there would hide what runs.
_IMAGE_FOLDERS = frozenset(
    map(Path, ("/", "/opt", "/opt/tritonserver", "/app", "/usr", "/bin", "/lib", "/etc", "/tmp"))
)
_TAG = re.compile(r"\d\d\.\d\d")
_TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """A container that a command runs in.

    `image` is what docker runs, `name` what it is stopped by. Folders and files of this machine are seen at the same
    paths inside: `read_only` cannot be changed there, `writable` can. `environment` is set beside the command's own,
    `flags` go to `docker run` behind all others.
    """

    image: str
    name: str
    read_only: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    shm_gib: int = SHM_GIB


def known_container(text: str) -> Container | None:
    """The row of the table for a tag (25.12) or NVIDIA's name of an image; None for any other image.

    UsageError for a tag that the table lacks.
    """
    if _TAG.fullmatch(text):
        return container(text)
    with suppress(UsageError):
        found = container(text)
        return found if text == found.image else None
    return None


def image_of(text: str) -> str:
    """The image that a tag, a name or a digest means; UsageError for what no image can be called."""
    found = known_container(text)
    if found is not None:
        return found.image
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@#+-]*", text):
        hint = "A squashfs file is for --slurm, whose plug-in pyxis runs it." if text.endswith(SQUASHFS) else None
        raise UsageError(f"{text!r} is neither a tag (25.12) nor the name of an image.", hint=hint)
    return text


def installed_in(text: str, version: str | None = None) -> Installed | None:
    """The TensorRT-LLM of a container; None for an image that the table lacks, unless `version` tells it.

    UsageError when the version is not the container's.
    """
    found = known_container(text)
    if found is None:
        return installed(version) if version else None
    if version not in (None, found.tensorrt_llm):
        raise UsageError(
            f"Container {found.tag} has TensorRT-LLM {found.tensorrt_llm}; {OPTION} is {version}.",
            hint=f"Leave {OPTION} out, or choose another container (docs/containers.md).",
        )
    return installed(found.tensorrt_llm)


def require_installed_in(text: str, version: str | None = None) -> Installed:
    """The same; UsageError for an image of which nobody says what is in it."""
    found = installed_in(text, version)
    if found is None:
        raise UsageError(
            f"The image {text} is not in the table of containers, so its TensorRT-LLM is not known.",
            hint=f"Name it: {OPTION} 1.1.0 (or the variable TRTSERVE_TRTLLM_VERSION).",
        )
    return found


def container_name(what: str) -> str:
    """A name that no other container has."""
    return f"trtserve-{re.sub(r'[^A-Za-z0-9_.-]', '-', what)}-{secrets.token_hex(4)}"


def in_container(command: Command, box: Box) -> Command:
    """The same command inside the container, as a value: same working directory, same paths, same user.

    It sees all GPUs (CUDA_VISIBLE_DEVICES chooses among them, with this machine's numbers) and this machine's network,
    so that a server in it listens where one outside would. What the command's environment sets goes in by value,
    tokens by name alone. `--init` passes signals on and reaps what ranks leave behind.
    """
    where = command.cwd or Path.cwd()
    argv = (
        *(DOCKER, "run", "--rm", "--init", "--name", box.name),
        *("--network", "host", "--gpus", "all"),
        *_memory(box),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--user", f"{os.getuid()}:{os.getgid()}"),
        *_mounts(box),
        *_environment(command, box),
        *("--workdir", str(where)),
        *box.flags,
        box.image,
        *command.argv,
    )
    return Command(argv=argv)


def _memory(box: Box) -> tuple[str, ...]:
    """Shared memory of its own, unless a flag says otherwise; docker refuses or ignores two answers."""
    given = any(flag.startswith(("--shm-size", "--ipc")) for flag in box.flags)
    return () if given else (f"--shm-size={box.shm_gib}g",)


def _mounts(box: Box) -> tuple[str, ...]:
    writable = _outermost(box.writable)
    # docker gives the deeper of two mounts the last word: a folder below a writable one needs no mount of its own.
    only_read = [path for path in _outermost(box.read_only) if not any(_within(path, each) for each in writable)]
    mounts = [f"{path}:{path}" for path in writable] + [f"{path}:{path}:ro" for path in only_read]
    return tuple(word for mount in mounts for word in ("--volume", mount))


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Absolute paths without those that lie below another one; UsageError for what cannot be mounted."""
    absolute = sorted({path.absolute() for path in paths})
    for path in absolute:
        _require_mountable(path)
    return [path for path in absolute if not any(_within(path, other) for other in absolute if other != path)]


def _within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _require_mountable(path: Path) -> None:
    if path in _IMAGE_FOLDERS:
        raise UsageError(
            f"{path} cannot be mounted into a container: it would hide the image's own.",
            hint="Put models, engines and repositories into a folder of their own.",
        )
    if ":" in str(path):
        raise UsageError(f"docker cannot mount {path}: a colon ends a path there.", hint="Rename the folder.")


def with_targets(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Paths, and the folders that links in them lead to: a snapshot of the hub's cache is links to its blobs."""
    found: dict[Path, None] = {}
    for path in paths:
        found[path.absolute()] = None
        links = (each for each in path.rglob("*") if each.is_symlink()) if path.is_dir() else ()
        for target in {link.resolve().parent for link in links}:
            if target.is_dir() and not _within(target, path.absolute()):
                found[target] = None
    return tuple(found)


def _environment(command: Command, box: Box) -> tuple[str, ...]:
    """What is set by value, tokens and settings of this process by name.

    A user that the image does not know has no home, and Python asks for the user's name.
    """
    by_name = [name for name in _BY_NAME if name in os.environ or (name in _SECRETS and name in command.env)]
    own = {"HOME": "/tmp", "USER": "trtserve", **box.environment, **command.env}
    by_value = [f"{name}={value}" for name, value in own.items() if name not in by_name]
    return tuple(word for text in (*by_value, *by_name) for word in ("--env", text))


def require_docker(box: Box) -> None:
    """MissingDependencyError without docker, MachineError when its daemon does not answer.

    UsageError for a mount that is not there: docker would make it, as a folder of root's.
    """
    for path in (*box.read_only, *box.writable):
        if not path.exists():
            raise UsageError(f"{path} does not exist, so it cannot be mounted into the container.")
    try:
        ended = run(Command(argv=(DOCKER, "version", "--format", "{{.Server.Version}}")), timeout=_TIMEOUT)
    except MissingDependencyError:
        raise MissingDependencyError(
            "--container runs docker, which was not found on PATH.",
            hint="Install docker and the NVIDIA Container Toolkit, or run trtserve itself inside NVIDIA's image.",
        ) from None
    except TimeoutError:
        raise MachineError(f"docker did not answer within {_TIMEOUT:g} s.") from None
    if ended.code != 0:
        raise _unanswered(ended.stderr.strip().splitlines())


def _unanswered(lines: list[str]) -> MachineError:
    said = lines[-1] if lines else "it said nothing"
    if "permission denied" in said.lower():
        hint = "Add yourself to the group docker and log in again."
    else:
        hint = "Start it: sudo systemctl start docker"
    return MachineError(f"docker is installed, but its daemon does not answer: {said}", hint=hint)


# How docker begins the reason for which it started nothing; it may go on for several lines.
_OWN_WORDS = ("docker: ", "Error response from daemon")
# What docker prints before it has started anything → what to do.
_FAILURES = (
    (
        re.compile(r"could not select device driver|unknown or invalid runtime name: nvidia|nvidia-container-cli"),
        "docker has no access to NVIDIA GPUs",
        "Install the NVIDIA Container Toolkit, run sudo nvidia-ctk runtime configure --runtime=docker, restart docker.",
    ),
    (
        re.compile(r"manifest unknown|pull access denied|Unable to find image|unauthorized|not found: manifest"),
        "docker cannot get the image",
        "Pull it by hand to see why: docker pull IMAGE. Some images need a login first: docker login nvcr.io",
    ),
    (
        re.compile(r"executable file not found in"),
        "the image lacks a program that was to run in it",
        "Use one of NVIDIA's images with TensorRT-LLM: --container 25.12",
    ),
    (
        re.compile(r"no space left on device", re.IGNORECASE),
        "the disk is full",
        "The images take 20 GB and more: docker system df",
    ),
)


def explained(text: str) -> TrtserveError | None:
    """What the output of a `docker run` that failed means; None when it was not docker that failed."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(_OWN_WORDS)), None)
    if first is None:
        return None
    # What ran in a container may end for lack of disk or of a file too, in much the same words.
    own = [*(line for line in lines[:first] if line.startswith("Unable to find image")), *lines[first:]]
    for pattern, what, hint in _FAILURES:
        line = next((line for line in own if pattern.search(line)), None)
        if line is not None:
            return MachineError(f"The container was not started, because {what}: {line.strip()}", hint=hint)
    return None


def ask_container(name: str) -> Identity:
    """Ask the tritonserver of a container to end in order; the process ends when that has ended.

    What docker itself hands on reaches mpirun, which kills its ranks.
    """
    return spawn(Command(argv=(DOCKER, "exec", name, "bash", "-c", END_SCRIPT)), log=Path(os.devnull))


def remove_container(name: str) -> None:
    """End a container by its name, whatever became of the `docker run` that started it; nothing where it is gone."""
    with suppress(TimeoutError, MissingDependencyError):
        run(Command(argv=(DOCKER, "rm", "--force", name)), timeout=_TIMEOUT)
