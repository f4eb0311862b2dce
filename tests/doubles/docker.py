"""Double of `docker`: run, exec, rm, pull, image inspect, version, info (docker's manual).

Images: `nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3` of a known tag, and those of the setting `images`. The
command runs here, with a container's environment: only what -e passes in, PATH of the doubles, the container's tag
as a setting. Stricter than the real one: see mounts.py; an image that was not pulled is still known.
As with the real one the processes inside are not children of `docker run`, which passes SIGTERM and SIGINT on to them:
they outlive a client that is killed, until `docker rm --force NAME`. Without --init a signal that the first process
does not handle is lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.doubles.containers import CONTAINERS
from tests.doubles.mounts import VARIABLE, Mount, MountError, check_mounts, export, parse_mount, translate
from tests.doubles.settings import PREFIX, Settings, read_settings, record_call

_IMAGE = re.compile(r"nvcr\.io/nvidia/tritonserver:(\d\d\.\d\d)-trtllm-python-py3")
_SWITCHES = frozenset({"rm", "interactive", "tty", "detach", "init", "privileged"})
_VALUE_NAMES = """
network ipc shm-size ulimit gpus volume workdir env name entrypoint user publish runtime cap-add security-opt
hostname label stop-timeout env-file pull cidfile pid device
"""
_VALUES = frozenset(_VALUE_NAMES.split())
_SHORT = {"i": "interactive", "t": "tty", "d": "detach", "v": "volume", "w": "workdir", "e": "env", "u": "user"}
_SHORT |= {"p": "publish", "h": "hostname", "l": "label"}
_ALIASES = {"net": "network"}
_PAUSE = 0.02
_SIZE = re.compile(r"\d+[bkmgBKMG]?")
_ULIMIT = re.compile(r"(memlock|stack|nofile|core|nproc)=-?\d+(:-?\d+)?")
_GPUS = re.compile(r'all|\d+|"?device=[\w,-]+"?')


class UsageError(Exception):
    """The message that docker prints before it exits with 125."""


@dataclass
class Run:
    """A parsed `docker run`."""

    options: dict[str, list[str]] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    image: str = ""
    command: list[str] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        """Last value of an option."""
        return self.options[name][-1] if name in self.options else None


def _long_names(argument: str) -> tuple[list[str], str | None]:
    """Long names of one argument, and the value written in it: -it, --net=host, -w/path."""
    if argument.startswith("--"):
        name, equals, value = argument.removeprefix("--").partition("=")
        return [_ALIASES.get(name, name)], value if equals else None
    letters = argument.removeprefix("-")
    names: list[str] = []
    for place, letter in enumerate(letters):
        if letter not in _SHORT:
            raise UsageError(f"unknown shorthand flag: '{letter}' in {argument}")
        names.append(_SHORT[letter])
        if _SHORT[letter] in _VALUES:
            rest = letters[place + 1 :]
            return names, rest.removeprefix("=") if rest else None
    return names, None


def parse_run(arguments: list[str]) -> Run:
    """Parse `docker run`'s arguments: options, image, command."""
    run = Run()
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            run.image, run.command = argument, list(rest)
            break
        names, value = _long_names(argument)
        for name in names:
            if name in _SWITCHES:
                run.switches.add(name)
            elif name not in _VALUES:
                raise UsageError(f"unknown flag: --{name}")
        if names[-1] in _SWITCHES:
            if value not in (None, "true", "false"):
                raise UsageError(f"invalid boolean value {value!r} for --{names[-1]}")
            continue
        if value is None and (value := next(rest, None)) is None:
            raise UsageError(f"flag needs an argument: --{names[-1]}")
        run.options.setdefault(names[-1], []).append(value)
    if not run.image:
        raise UsageError("'docker run' requires at least 1 argument")
    return run


def _check_values(run: Run) -> None:
    checks = {"shm-size": _SIZE, "ulimit": _ULIMIT, "gpus": _GPUS}
    for name, pattern in checks.items():
        for value in run.options.get(name, []):
            if pattern.fullmatch(value) is None:
                raise UsageError(f'invalid argument "{value}" for "--{name}" flag')
    if run.last("network") == "host" and "publish" in run.options:
        raise UsageError("(strict double) published ports are discarded when using host network mode")
    if run.last("ipc") == "host" and "shm-size" in run.options:
        raise UsageError("(strict double) --shm-size has no effect with --ipc=host")
    if "detach" in run.switches and run.switches & {"tty", "interactive"}:
        raise UsageError("(strict double) a detached container has no terminal")
    for value in run.options.get("env", []):
        if not re.match(r"[A-Za-z_]\w*(=|$)", value):
            raise UsageError(f"invalid environment variable: {value}")


def _tag(image: str, settings: Settings) -> str | None:
    """Return the container's tag; None for another image of the settings."""
    if image in settings.images.split(","):
        return None
    match = _IMAGE.fullmatch(image)
    if match is None or match.group(1) not in CONTAINERS:
        raise UsageError(f"Unable to find image '{image}' locally\nError response from daemon: manifest unknown")
    return match.group(1)


def container_environment(mounts: list[Mount], tag: str | None, given: list[str], folder: Path) -> dict[str, str]:
    """Return the environment inside: the image's variables, those passed in, and those that the doubles need."""
    kept = {name: text for name, text in os.environ.items() if name.startswith(PREFIX)}
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "HOME": "/root",
        "HOSTNAME": "container",
        VARIABLE: export(mounts),
        **kept,
    }
    if tag is not None:
        environment |= {PREFIX + "CONTAINER": tag, "NVIDIA_TRITON_SERVER_VERSION": tag}
    for value in given:
        name, equals, text = value.partition("=")
        if equals:
            environment[name] = text
        elif name in os.environ:
            environment[name] = os.environ[name]
    return environment


def _of_image(word: str, tag: str | None, folder: Path) -> str:
    """Return what the image has at a path: tritonserver, or the examples of its release if a test made them."""
    if word == "/opt/tritonserver/bin/tritonserver":
        return str(folder / "bin" / "tritonserver")
    release = ".".join(map(str, CONTAINERS[tag].release)) if tag else ""
    inside = "/app/examples" if release in ("0.17", "0.18") else "/app/tensorrt_llm/examples"
    if word.startswith(inside + "/"):
        return str(folder / f"source-{release}" / "examples") + word.removeprefix(inside)
    return word


def _run(arguments: list[str], folder: Path, settings: Settings) -> int:
    run = parse_run(arguments)
    _check_values(run)
    tag = _tag(run.image, settings)
    mounts = [parse_mount(text) for text in run.options.get("volume", [])]
    check_mounts(mounts)
    if "tty" in run.switches and not sys.stdin.isatty():
        sys.stderr.write("the input device is not a TTY\n")
        return 1
    if "gpus" in run.options and settings.gpus == 0:
        raise UsageError('could not select device driver "" with capabilities: [[gpu]].')
    if not run.command:
        raise UsageError("(strict double) no command: the image's own shell would wait for input")
    entry = run.last("entrypoint")
    inside_image = [_of_image(word, tag, folder) for word in run.command]
    words = [*([entry] if entry else []), *(translate(word, mounts, known=str(folder)) for word in inside_image)]
    workdir = run.last("workdir")
    inside = Path(translate(workdir, mounts)) if workdir else folder / "scratch"
    environment = container_environment(mounts, tag, run.options.get("env", []), folder)
    name = run.last("name") or f"container-{os.getpid()}"
    record = folder / "scratch" / f"container-{name}"
    if record.exists():
        raise UsageError(f'Conflict. The container name "/{name}" is already in use')
    if shutil.which(words[0], path=environment["PATH"]) is None:
        sys.stderr.write(f'docker: exec: "{words[0]}": executable file not found in $PATH\n')
        return 127
    record_call(folder, "container", words)
    return _attached(_detached(words, environment, inside, record), record)


def _detached(words: list[str], environment: dict[str, str], inside: Path, record: Path) -> int:
    """Start the container's first process in its own session, not as our child, and return its pid.

    Its parent there is a keeper that writes the exit code, as docker's daemon does.
    """
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        process = subprocess.Popen(words, env=environment, cwd=inside)
        record.write_text(str(process.pid), encoding="utf-8")
        os.write(tell, str(process.pid).encode())
        os.close(tell)
        code = process.wait()
        record.with_suffix(".code").write_text(str(code if code >= 0 else 128 - code), encoding="utf-8")
        record.unlink(missing_ok=True)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(tell)
    return int(os.read(told, 20))


def _attached(pid: int, record: Path) -> int:
    """Wait for the container as `docker run` does; its signals are ours."""

    def hand_on(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGINT, hand_on)
    code = record.with_suffix(".code")
    while not code.exists() or not code.read_text(encoding="utf-8"):
        time.sleep(_PAUSE)
    found = int(code.read_text(encoding="utf-8"))
    code.unlink()
    return found


def _remove(name: str, folder: Path) -> int:
    """`docker rm --force`: every process of a container is killed."""
    record = folder / "scratch" / f"container-{name}"
    if not record.exists():
        sys.stderr.write(f"Error response from daemon: No such container: {name}\n")
        return 1
    first = int(record.read_text(encoding="utf-8"))
    with suppress(psutil.Error):
        for process in (psutil.Process(first), *psutil.Process(first).children(recursive=True)):
            process.kill()
    sys.stdout.write(f"{name}\n")
    return 0


def _execute(name: str, words: list[str], folder: Path) -> int:
    """`docker exec NAME COMMAND`: the processes of the container are all that it sees, and there is a /proc of them."""
    record = folder / "scratch" / f"container-{name}"
    if not record.exists():
        sys.stderr.write(f"Error response from daemon: No such container: {name}\n")
        return 1
    first = psutil.Process(int(record.read_text(encoding="utf-8")))
    inside = [first.pid, *(process.pid for process in first.children(recursive=True))]
    seen = " ".join(f"/proc/{pid}" for pid in inside)
    return subprocess.run([word.replace("/proc/[0-9]*", seen) for word in words], check=False).returncode


def _other(arguments: list[str], settings: Settings, folder: Path) -> int:
    match arguments:
        case ["pull", *flags, image] if set(flags) <= {"-q", "--quiet"}:
            _tag(image, settings)
            sys.stdout.write(f"Status: Image is up to date for {image}\n")
        case ["image", "inspect", *flags, image] if all(flag.startswith("--format") for flag in flags):
            _tag(image, settings)
            sys.stdout.write(json.dumps([{"Id": "sha256:0", "RepoTags": [image]}]) + "\n")
        case ["rm", "--force", name]:
            return _remove(name, folder)
        case ["exec", name, *words] if words and not name.startswith("-"):
            return _execute(name, words, folder)
        case ["version" | "info", *_]:
            sys.stdout.write("27.5.1\n")
        case _:
            raise UsageError(f"(strict double) unknown command: docker {' '.join(arguments[:2])}")
    return 0


def main(arguments: list[str], folder: Path) -> int:
    """Run the double; returns the exit code."""
    record_call(folder, "docker", arguments)
    settings = read_settings(folder)
    try:
        if arguments[:1] == ["run"]:
            return _run(arguments[1:], folder, settings)
        return _other(arguments, settings, folder)
    except (UsageError, MountError) as error:
        sys.stderr.write(f"docker: {error}\n\nRun 'docker run --help' for more information\n")
        return 125
