"""Run one of NVIDIA's tools, here or in its container (`docker run` at the same paths), and explain how it failed."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trtserve import process
from trtserve.errors import (
    BuildError,
    ConversionError,
    DiskSpaceError,
    MachineError,
    MemoryLimitError,
    MissingDependencyError,
    TrtserveError,
    UsageError,
)
from trtserve.host.machine import format_bytes, free_memory
from trtserve.nvidia.releases.containers import REPOSITORY, Container, container, vllm_containers
from trtserve.nvidia.releases.installed import OPTION, Installed, installed
from trtserve.process import Command, ProcessId, run, spawn
from trtserve.process.signals import stop_signals
from trtserve.progress import Progress

DOCKER = "docker"
SQUASHFS = (".sqsh", ".squashfs")  # suffixes of images that are files, which pyxis can run and docker cannot
SHM_GIB = 2  # shared memory of NVIDIA's own examples; docker's default of 64 MB is too little for one Python model

# Passed by name, so that their values appear in no command line, log or manifest.
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_BY_NAME = (*_SECRETS, "HF_ENDPOINT", "HF_HUB_OFFLINE", "NCCL_DEBUG", "TLLM_LOG_LEVEL")
# Folders of the image; a mount there would hide its programs.
_IMAGE_FOLDERS = frozenset(
    map(Path, ("/", "/opt", "/opt/tritonserver", "/app", "/usr", "/bin", "/lib", "/etc", "/tmp"))
)
_TAG = re.compile(r"\d\d\.\d\d")
_TIMEOUT = 60.0

END_SCRIPT = Path(__file__).with_name("end_server.sh").read_text(encoding="utf-8")
"""Bash script that ends the server of a container in order, run inside of it.

mpirun, which is the process that docker or Kubernetes asks to end, kills its ranks a moment later. So the tritonserver
that answers clients is asked first: it finishes its requests, and the other ranks end after it.
"""


@dataclass(frozen=True, kw_only=True)
class ContainerRun:
    """How docker runs a command in a container."""

    image: str
    name: str  # name by which the container is stopped
    read_only: tuple[Path, ...] = ()  # folders and files of this machine that are visible at the same paths inside
    writable: tuple[Path, ...] = ()  # folders and files that the command may change, mounted in the same way
    environment: Mapping[str, str] = field(default_factory=dict)  # variables in addition to the command's own
    flags: tuple[str, ...] = ()  # further flags of `docker run`, after all others
    shm_gib: int = SHM_GIB  # size of /dev/shm in GiB


def is_tag(text: str) -> bool:
    """Return whether the text is a tag of NVIDIA's, such as 25.12, known or not."""
    return _TAG.fullmatch(text) is not None


def known_container(text: str) -> Container | None:
    """Return the known container of a tag (25.12) or of NVIDIA's image name, or None for any other image.

    Raises UsageError for an unknown tag.
    """
    if is_tag(text):
        return container(text)
    with suppress(UsageError):
        found = container(text)
        return found if text == found.image else None
    return None


def image_of(text: str) -> str:
    """Return the image for a tag, a name or a digest. Raises UsageError for text that cannot name an image."""
    found = known_container(text)
    if found is not None:
        return found.image
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@#+-]*", text):
        hint = "A squashfs file needs --slurm, whose plug-in pyxis runs it." if text.endswith(SQUASHFS) else None
        raise UsageError(f"{text!r} is neither a tag (25.12) nor the name of an image.", hint=hint)
    return text


def vllm_image_of(text: str) -> str:
    """Return NVIDIA's image with vLLM for a tag, or the image that is named. Raises UsageError for an unknown tag."""
    if not is_tag(text):
        return image_of(text)
    if text not in (known := vllm_containers()):
        raise UsageError(
            f"{text!r} is not a known container with vLLM; known are {', '.join(known)}.",
            hint=f"A newer one is given by its name: --container {REPOSITORY}:{text}-vllm-python-py3",
        )
    return f"{REPOSITORY}:{text}-vllm-python-py3"


def installed_in(text: str, version: str | None = None) -> Installed | None:
    """Return the TensorRT-LLM of a container: for an unknown image the given `version`, which may be None.

    Raises UsageError when the version is not the container's.
    """
    found = known_container(text)
    if found is None:
        return installed(version) if version else None
    if version not in (None, found.tensorrt_llm):
        raise UsageError(
            f"Container {found.tag} has TensorRT-LLM {found.tensorrt_llm}; {OPTION} is {version}.",
            hint=f"Leave {OPTION} out, or choose another container (`trtserve help how-to/containers`).",
        )
    return installed(found.tensorrt_llm)


def require_installed_in(text: str, version: str | None = None) -> Installed:
    """Return the TensorRT-LLM of a container. Raises UsageError for an unknown image without a version."""
    found = installed_in(text, version)
    if found is None:
        raise UsageError(
            f"The TensorRT-LLM version of the image {text} is unknown: it is not one of NVIDIA's containers.",
            hint=f"Give its version: {OPTION} 1.1.0 (or the variable TRTSERVE_TRTLLM_VERSION).",
        )
    return found


def container_name(what: str) -> str:
    """Return a name that no other container has."""
    return f"trtserve-{re.sub(r'[^A-Za-z0-9_.-]', '-', what)}-{secrets.token_hex(4)}"


def in_container(command: Command, container_run: ContainerRun) -> Command:
    """Return the command that runs `command` in the container, with the same working directory, paths and user.

    It sees all GPUs (CUDA_VISIBLE_DEVICES chooses among them, with this machine's numbers) and this machine's network,
    so that a server in it listens where one outside would. The command's environment is passed by value, tokens only
    by name. `--init` passes signals on and reaps processes that ranks leave behind.
    """
    # docker refuses or ignores a second size of shared memory.
    sized = any(flag.startswith(("--shm-size", "--ipc")) for flag in container_run.flags)
    where = command.cwd or Path.cwd()
    # Settings go by value, tokens and variables of this process by name. A user that is missing in the image has no
    # home and no name, but Python asks for both.
    by_name = [name for name in _BY_NAME if name in os.environ or (name in _SECRETS and name in command.env)]
    own = {"HOME": "/tmp", "USER": "trtserve", **container_run.environment, **command.env}
    by_value = [f"{name}={value}" for name, value in own.items() if name not in by_name]
    argv = (
        *(DOCKER, "run", "--rm", "--init", "--name", container_run.name),
        *("--network", "host", "--gpus", "all"),
        *(() if sized else (f"--shm-size={container_run.shm_gib}g",)),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--user", f"{os.getuid()}:{os.getgid()}"),
        *_mounts(container_run),
        *(word for text in (*by_value, *by_name) for word in ("--env", text)),
        *("--workdir", str(where)),
        *container_run.flags,
        container_run.image,
        *command.argv,
    )
    return Command(argv=argv)


def _mounts(container_run: ContainerRun) -> tuple[str, ...]:
    writable = _outermost(container_run.writable)
    # In docker the deeper of two mounts wins, so a folder below a writable one must not be mounted again.
    only_read = [
        path for path in _outermost(container_run.read_only) if not any(_within(path, each) for each in writable)
    ]
    mounts = [f"{path}:{path}" for path in writable] + [f"{path}:{path}:ro" for path in only_read]
    return tuple(word for mount in mounts for word in ("--volume", mount))


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return absolute paths, without those below another one. Raises UsageError for paths that cannot be mounted."""
    absolute = sorted({path.absolute() for path in paths})
    for path in absolute:
        if path in _IMAGE_FOLDERS:
            raise UsageError(
                f"{path} cannot be mounted into a container: it would hide files of the image.",
                hint="Put models, engines and repositories into another folder.",
            )
        if ":" in str(path):
            raise UsageError(
                f"docker cannot mount {path}: docker treats a colon as a separator.", hint="Rename the folder."
            )
    return [path for path in absolute if not any(_within(path, other) for other in absolute if other != path)]


def _within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def with_targets(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the paths and the folders that their links lead to; the hub's cache links files to blobs."""
    found: dict[Path, None] = {}
    for path in paths:
        found[path.absolute()] = None
        links = (each for each in path.rglob("*") if each.is_symlink()) if path.is_dir() else ()
        targets = (link.resolve() for link in links)
        for target in {each if each.is_dir() else each.parent for each in targets}:
            if target.is_dir() and not _within(target, path.absolute()):
                found[target] = None
    return tuple(found)


def require_docker(container_run: ContainerRun) -> None:
    """Raise MissingDependencyError without docker, and MachineError when its daemon does not answer.

    Raises UsageError for a missing mount: docker would create it as a folder that belongs to root.
    """
    for path in (*container_run.read_only, *container_run.writable):
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
        raise MachineError(
            f"docker did not answer within {_TIMEOUT:g} s.", hint="Restart it: sudo systemctl restart docker"
        ) from None
    if ended.code != 0:
        message = (ended.stderr.strip().splitlines() or ["no error message"])[-1]
        denied = "permission denied" in message.lower()
        raise MachineError(
            f"docker is installed, but its daemon does not answer: {message}",
            hint="Add yourself to the group docker and log in again."
            if denied
            else "Start it: sudo systemctl start docker",
        )


# Prefix of docker's own errors, which may span several lines.
_DOCKER_ERRORS = ("docker: ", "Error response from daemon")
# Errors of docker before it starts anything, with their meaning and what to do.
_FAILURES = (
    (
        re.compile(r"could not select device driver|unknown or invalid runtime name: nvidia|nvidia-container-cli"),
        "docker has no access to NVIDIA GPUs",
        "Install the NVIDIA Container Toolkit, run sudo nvidia-ctk runtime configure --runtime=docker, restart docker.",
    ),
    (
        re.compile(r"manifest unknown|pull access denied|Unable to find image|unauthorized|not found: manifest"),
        "docker cannot pull the image",
        "Pull it yourself to see why: docker pull IMAGE. Some images need a login first: docker login nvcr.io",
    ),
    (
        re.compile(r"executable file not found in"),
        "the image lacks the program to run",
        "Use one of NVIDIA's images with TensorRT-LLM: --container 25.12",
    ),
    (
        re.compile(r"no space left on device", re.IGNORECASE),
        "the disk is full",
        "Images have 20 GB and more; see what docker stores: docker system df",
    ),
)


def explained(text: str) -> TrtserveError | None:
    """Return what the output of a failed `docker run` means, or None when the command in the container failed."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(_DOCKER_ERRORS)), None)
    if first is None:
        return None
    # The command in the container may fail with similar messages, for example when the disk is full.
    own = [*(line for line in lines[:first] if line.startswith("Unable to find image")), *lines[first:]]
    for pattern, what, hint in _FAILURES:
        line = next((line for line in own if pattern.search(line)), None)
        if line is not None:
            return MachineError(f"The container was not started because {what}: {line.strip()}", hint=hint)
    return None


def ask_container(name: str) -> ProcessId:
    """Ask the tritonserver of a container to shut down gracefully; the returned process ends when it has.

    A signal that docker itself passes on reaches mpirun, which kills its ranks.
    """
    return spawn(Command(argv=(DOCKER, "exec", name, "bash", "-c", END_SCRIPT)), log=Path(os.devnull))


def remove_container(name: str) -> None:
    """End a container by its name, even if the `docker run` that started it is gone; do nothing if it has ended."""
    with suppress(TimeoutError, MissingDependencyError):
        run(Command(argv=(DOCKER, "rm", "--force", name)), timeout=_TIMEOUT)


_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_LAST_LINES = 12
# What Python and PyTorch print when the host's memory runs out; the last one, when one of several workers was killed.
_NO_MEMORY = re.compile(r"\bMemoryError|DefaultCPUAllocator: |terminated abruptly")
_NO_GPU_MEMORY = re.compile(r"out of memory|GPU memory", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ToolMemory:
    """How much memory a tool needs, for the error that it ran out."""

    words: str  # the start of a sentence that goes on with the free memory
    advice: str  # what to do when the host's memory ran out
    gpu_advice: str  # what to do when the GPU's memory ran out


def announce(command: Command, box: ContainerRun | None, progress: Progress) -> Command:
    """Return `command` as it runs in the container `box`, if any, and print it.

    Raises MissingDependencyError, MachineError or UsageError when docker cannot run it.
    """
    if box is not None:
        require_docker(box)
        command = in_container(command, box)
    progress.step(str(command))
    return command


def run_tool(
    name: str,
    command: Command,
    *,
    follow: Callable[[], None],
    memory: ToolMemory,
    log: Path,
    failure: type[BuildError] | type[ConversionError],
    box: ContainerRun | None = None,
) -> None:
    """Run an announced command to its end; `follow` is called while it runs, and once after.

    Raises `failure`, with the last lines of the log, unless it ends with 0, and MemoryLimitError or DiskSpaceError when
    memory or disk ran out. Ctrl-C, SIGTERM and SIGHUP end the tool too: none of its processes outlives this call.
    """
    free, ended = free_memory(), False
    with stop_signals() as signals:
        tool = process.spawn(command, log=log, bound=True)
        try:
            while not ended:
                if signals():
                    raise KeyboardInterrupt
                ended = not tool.alive()
                follow()
                if not ended:
                    time.sleep(_POLL_SECONDS)
            code = process.exit_code(tool)
        finally:
            process.stop(tool, grace=_GRACE_SECONDS)
            if box is not None:
                remove_container(box.name)
    if code == 0:
        return
    if box is not None and (reason := explained(last_lines(log))) is not None:
        raise reason
    raise _explained(name, code, command, memory, free, log, failure)


def _explained(
    name: str,
    code: int | None,
    command: Command,
    memory: ToolMemory,
    free: int,
    log: Path,
    failure: type[BuildError] | type[ConversionError],
) -> TrtserveError:
    """Return the error that the exit code and the end of the log stand for."""
    tail = last_lines(log)
    ended, lines = f"{name} ended with {process.ending(code)}", f"Its last lines:\n{tail}"
    if process.was_killed(code) or _NO_MEMORY.search(tail):
        return MemoryLimitError(
            f"{ended}: it ran out of memory. {memory.words} {format_bytes(free)} were free. {lines}",
            hint=memory.advice,
            log=log,
        )
    if "No space left on device" in tail:
        return DiskSpaceError(
            f"{ended}: the disk is full. {lines}", hint="Free some space, or choose another --out.", log=log
        )
    hint = memory.gpu_advice if _NO_GPU_MEMORY.search(tail) else f"The command was: {command}"
    return failure(f"{ended}. {lines}", hint=hint, log=log)


def last_lines(log: Path) -> str:
    """Return the end of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (none)"
