"""Run a command in NVIDIA's container: `docker run` with the same command at the same paths."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.errors import MachineError, MissingDependencyError, TrtserveError, UsageError
from trtserve.nvidia.releases.containers import REPOSITORY, Container, container, vllm_containers
from trtserve.nvidia.releases.installed import OPTION, Installed, installed
from trtserve.process import Command, ProcessId, run, spawn

DOCKER = "docker"
SQUASHFS = (".sqsh", ".squashfs")
"""Suffixes of images that are files, which pyxis can run and docker cannot."""
SHM_GIB = 2
"""Shared memory of NVIDIA's own examples; docker's default of 64 MB is too little for one Python model."""

# Passed by name, so that their values appear in no command line, log or manifest.
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_BY_NAME = (*_SECRETS, "HF_ENDPOINT", "HF_HUB_OFFLINE", "NCCL_DEBUG", "TLLM_LOG_LEVEL")
# Folders of the image; a mount there would hide its programs.
_IMAGE_FOLDERS = frozenset(
    map(Path, ("/", "/opt", "/opt/tritonserver", "/app", "/usr", "/bin", "/lib", "/etc", "/tmp"))
)
_TAG = re.compile(r"\d\d\.\d\d")
_TIMEOUT = 60.0

END_SCRIPT = """\
# Ends the tritonserver of rank 0 and waits for it. Launchers and stubs also have its name in their arguments.
for process in /proc/[0-9]*; do
    words="$(tr '\\0' ' ' 2> /dev/null < "${process}/cmdline")" || continue
    first="${words%% *}"
    case "${first##*/}" in mpirun | prte* | orte* | bash | sh | *_stub) continue ;; esac
    case "${words}" in *tritonserver\\ --*) ;; *) continue ;; esac
    rank="$(tr '\\0' '\\n' 2> /dev/null < "${process}/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')"
    [ "${rank:-0}" = 0 ] || continue
    kill -TERM "${process#/proc/}" 2> /dev/null || continue
    while [ -n "$(tr -d '\\0' 2> /dev/null < "${process}/cmdline")" ]; do sleep 0.2; done
done
"""
"""Bash script that ends the server of a container in order, run inside of it.

mpirun, which is the process that docker or Kubernetes asks to end, kills its ranks a moment later. So the tritonserver
that answers clients is asked first: it finishes its requests, and the other ranks end after it.
"""


@dataclass(frozen=True, kw_only=True)
class ContainerRun:
    """How docker runs a command in a container."""

    image: str
    name: str
    """Name by which the container is stopped."""
    read_only: tuple[Path, ...] = ()
    """Folders and files of this machine that are visible at the same paths inside."""
    writable: tuple[Path, ...] = ()
    """Folders and files that the command may change, mounted in the same way."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the command's own."""
    flags: tuple[str, ...] = ()
    """Further flags of `docker run`, after all others."""
    shm_gib: int = SHM_GIB
    """Size of /dev/shm in GiB."""


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
