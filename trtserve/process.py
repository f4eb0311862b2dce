"""The one door for processes: command values, processes known by pid and start time, trees stopped in time."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trtserve.errors import MissingDependencyError, ServerStopError
from trtserve.orphans import end_with_parent

if TYPE_CHECKING:
    import psutil

POLL_INTERVAL = 0.05
_CLOCK_DRIFT = 2.0
_ADMINISTRATORS_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
_DESCRIBED = 80

# Children of this very process, kept so that they are reaped when they end.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line as a value: `env` is laid over the environment of this process, `cwd` None means: where we are."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def __str__(self) -> str:
        """The command as one line for a POSIX shell."""
        parts = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = shlex.join(self.argv)
        if parts:
            line = f"env {' '.join(parts)} {line}"
        return line if self.cwd is None else f"cd {shlex.quote(str(self.cwd))} && {line}"

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the process to be."""
        return {**os.environ, **self.env}


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command that has ended: exit code (negative: the signal that killed it) and both outputs."""

    code: int
    stdout: str
    stderr: str


def run(command: Command, *, timeout: float) -> Completed:
    """Run a short command; MissingDependencyError when its program is absent, TimeoutError after `timeout` seconds."""
    try:
        ended = subprocess.run(
            _resolved(command),
            env=command.environment,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command.argv[0]} did not end within {timeout:g} s.") from None
    return Completed(code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)


def become(command: Command) -> NoReturn:
    """Replace this process by a command, which inherits its terminal; MissingDependencyError when it is absent."""
    argv = _resolved(command)
    if command.cwd is not None:
        os.chdir(command.cwd)
    os.execve(argv[0], argv, command.environment)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A process that cannot be mistaken for a later one with the same pid: `started` is psutil's create_time."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Identity of the process that has `pid` now; None when there is none."""
        import psutil

        try:
            return cls(pid=pid, started=psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def matches(self, other: Identity) -> bool:
        """True for the same process; psutil derives start times from the boot time, which drifts by some hundredths."""
        return self.pid == other.pid and abs(self.started - other.started) < _CLOCK_DRIFT

    def alive(self) -> bool:
        """True while this very process runs; a zombie does not run.

        A child of ours is asked by waiting for it: it looks like a zombie when its main thread is dead, and can be
        taken away only when the other threads are.
        """
        child = _children.get(self.pid)
        now = Identity.of(self.pid)
        if now is None or not now.matches(self):
            return False
        if child is not None and child.returncode is None:
            return child.poll() is None
        return _process(self) is not None


def spawn(command: Command, *, log: Path, bound: bool = False) -> Identity:
    """Start a process in a session of its own that outlives us; both its outputs replace the content of `log`.

    Output goes to a file because a pipe that nobody reads stops the writer when it is full. A `bound` process gets a
    SIGTERM from the kernel when we end without having ended it, killed for instance: see `orphans`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            _resolved(command),
            env=command.environment,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent() if bound else None,  # noqa: PLW1509 - two calls of the system, no locks
        )
    _children[child.pid] = child
    # A child that is already dead stays a zombie until it is reaped, so its start time can still be read.
    identity = Identity.of(child.pid)
    if identity is None:
        raise ProcessLookupError(f"{command.argv[0]} vanished while it was started.")
    return identity


def exit_code(identity: Identity) -> int | None:
    """Exit code of a child of this process (negative: signal); None while it runs or when it is no child of ours."""
    child = _children.get(identity.pid)
    return None if child is None else child.poll()


def ending(code: int | None) -> str:
    """An exit code in words, for a sentence such as "it ended with signal 9"."""
    if code is None:
        return "an unknown code"
    return f"signal {-code}" if code < 0 else f"code {code}"


def how_it_ended(code: int | None) -> str:
    """What an exit code says of a process, as a predicate: "was ended by signal 15"."""
    if code is None:
        return "ended"
    if code == -signal.SIGKILL:
        return "was killed (signal 9; the kernel does so when memory runs out)"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def was_killed(code: int | None) -> bool:
    """Whether SIGKILL ended a process, also one behind a shell or in a container: the kernel's way when memory ends."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def children(identity: Identity) -> tuple[Identity, ...]:
    """Direct children of a process."""
    import psutil

    process = _process(identity)
    try:
        found = [] if process is None else process.children()
        return tuple(Identity(pid=child.pid, started=child.create_time()) for child in found)
    except psutil.Error:
        return ()


def tree(identity: Identity) -> set[Identity]:
    """All living descendants of a process and all members of its session, also when it is dead itself.

    Descendants are followed whatever their process group is: mpirun's daemons put ranks into groups of their own.
    Members of the session are what a dead leader left behind; a session id is not given away while it has members,
    so a process with the leader's pid but another start time proves that there are none.
    """
    root = _process(identity)
    found = set() if root is None else _descendants(root)
    now = Identity.of(identity.pid)
    if now is None or now.matches(identity):
        found |= _session(identity)
    return {member for member in found if member.pid != identity.pid and member.alive()}


def stop(identity: Identity, *, grace: float, urgent: Callable[[], bool] = lambda: False) -> bool:
    """End a process and its whole tree; see `stop_all`."""
    return stop_all([identity], grace=grace, urgent=urgent)


def stop_all(
    roots: Collection[Identity],
    *,
    grace: float,
    urgent: Callable[[], bool] = lambda: False,
    asked: Collection[Identity] = (),
) -> bool:
    """End processes and their whole trees: TERM to the roots, after `grace` seconds KILL to all that is left.

    The roots alone get the TERM, so that they can end their children in order; `asked` get it instead where a root
    (mpirun) would kill its children before they can. `urgent` is asked while waiting; True goes to KILL at once.
    Returns False when something survived the KILL for two seconds.
    """
    members = _trees(roots)
    for member in asked or roots:
        _signal(member, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(root.alive() for root in roots) and time.monotonic() < deadline and not urgent():
        members |= _trees(roots)
        time.sleep(POLL_INTERVAL)
    if any(root.alive() for root in roots) or not _wait_gone(members | _trees(roots), 0.5, urgent):
        members |= _trees(roots)
        for member in (*roots, *members):
            _signal(member, signal.SIGKILL)
    return _wait_gone({*roots, *members}, 2.0, lambda: False)


def _trees(roots: Collection[Identity]) -> set[Identity]:
    return {member for root in roots for member in tree(root)}


def program(name: str, path: str | None = None) -> Path | None:
    """Where a program is on `path` (default: this process's PATH)."""
    found = shutil.which(name, path=path)
    return None if found is None else Path(found)


def administrators_program(name: str) -> Path | None:
    """Where a program is on PATH, or where Debian has what only the PATH of an administrator leads to."""
    return program(name, os.pathsep.join((os.environ.get("PATH", os.defpath), *_ADMINISTRATORS_FOLDERS)))


def listeners(port: int) -> list[Identity]:
    """The processes that listen on a TCP port, on whatever address, as far as the kernel tells us."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    listening = (c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port)
    pids = dict.fromkeys(connection.pid for connection in listening if connection.pid is not None)
    return [identity for pid in pids if (identity := Identity.of(pid)) is not None]


def arguments(identity: Identity) -> list[str]:
    """Command line of a process; empty where it has ended or the kernel does not tell us."""
    import psutil

    process = _process(identity)
    try:
        return [] if process is None else process.cmdline()
    except psutil.Error:
        return []


def environment_of(identity: Identity) -> dict[str, str]:
    """Environment that a process was started with; empty where it has ended or the kernel does not tell us."""
    import psutil

    process = _process(identity)
    try:
        return {} if process is None else process.environ()
    except psutil.Error:
        return {}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process uses: resident memory in bytes, and CPU time in percent of one core."""

    memory: int
    cpu: float


def usage(identities: Collection[Identity], *, seconds: float = 0.2) -> dict[Identity, Usage]:
    """Memory and CPU of processes, measured over `seconds`; those that have ended are left out."""
    import psutil

    watched = {identity: process for identity in identities if (process := _process(identity)) is not None}
    measured: dict[Identity, Usage] = {}
    for process in watched.values():
        with suppress(psutil.Error):
            process.cpu_percent()
    time.sleep(seconds)
    for identity, process in watched.items():
        with suppress(psutil.Error):
            measured[identity] = Usage(memory=process.memory_info().rss, cpu=process.cpu_percent())
    return measured


def describe(identity: Identity) -> str:
    """Command line of a process, shortened for a message: the name of its program stays whole."""
    words = arguments(identity)
    line = " ".join(words)
    if len(line) <= _DESCRIBED:
        return line
    named = f"…/{Path(words[0]).name}" if len(words[0]) > _DESCRIBED // 2 and "/" in words[0] else words[0]
    line = " ".join((named, *words[1:]))
    return line if len(line) <= _DESCRIBED else f"{line[: max(_DESCRIBED - 1, len(named))]}…"


def _resolved(command: Command) -> tuple[str, ...]:
    """argv with the program as a path, looked up on the PATH that the process will have."""
    found = program(command.argv[0], command.environment.get("PATH"))
    if found is None:
        raise MissingDependencyError(
            f"The program {command.argv[0]} was not found.", hint="Install it, or put its folder on PATH."
        )
    return (str(found), *command.argv[1:])


def _process(identity: Identity) -> psutil.Process | None:
    import psutil

    try:
        process = psutil.Process(identity.pid)
        same = identity.matches(Identity(pid=process.pid, started=process.create_time()))
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _descendants(root: psutil.Process) -> set[Identity]:
    import psutil

    try:
        return {Identity(pid=child.pid, started=child.create_time()) for child in root.children(recursive=True)}
    except psutil.Error:
        return set()


def _session(identity: Identity) -> set[Identity]:
    import psutil

    members = (Identity.of(pid) for pid in psutil.pids() if _session_of(pid) == identity.pid)
    return {member for member in members if member is not None}


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # ended, or not ours to ask
        return None


def _signal(identity: Identity, number: int) -> None:
    import psutil

    process = _process(identity)
    if process is not None:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return
        except psutil.AccessDenied as error:
            raise ServerStopError(
                f"Process {identity.pid} ({describe(identity)}) is not ours to end: it belongs to {_owner(process)}.",
                hint="Let its owner stop it, or be root.",
            ) from error


def _owner(process: psutil.Process) -> str:
    import psutil

    try:
        return process.username()
    except psutil.Error:
        return "another user"


def _wait_gone(members: set[Identity], seconds: float, urgent: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while any(member.alive() for member in members):
        if time.monotonic() > deadline or urgent():
            return False
        time.sleep(POLL_INTERVAL)
    return True
