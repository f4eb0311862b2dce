"""Run, identify and stop processes. Commands are values; a process is identified by pid and start time.

This is the only package that imports subprocess.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from trtserve.errors import MissingDependencyError, ServerStopError
from trtserve.process.signals import end_with_parent

if TYPE_CHECKING:
    import psutil

T = TypeVar("T")
POLL_INTERVAL = 0.05
_MEASURED = 0.2
_KILLED = 10.0
# Python's resource trackers end this soon after those that they serve.
_TRACKED = 2.0
# Fields of /proc/PID/stat, counted from the one after the program's name: the state is the first.
_PARENT = 1
_MAJOR_FAULTS = 9
_CPU_TIMES = slice(11, 13)
_START_TIME = 19
_DESCRIBED = 80
# The key of a server's clients: a program that the server starts, such as a model, could show it.
_SECRET_VARIABLES = ("TRTSERVE_API_KEY", "TRTSERVE_START_API_KEY")

# Children of this process, kept so that they are reaped when they end.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line as a value, which can be printed, wrapped and run."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment of this process."""
    cwd: Path | None = None  # working directory; None: that of this process

    def __str__(self) -> str:
        """Return the command as one line for a POSIX shell."""
        parts = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = shlex.join(self.argv)
        if parts:
            line = f"env {' '.join(parts)} {line}"
        return line if self.cwd is None else f"cd {shlex.quote(str(self.cwd))} && {line}"

    @property
    def environment(self) -> dict[str, str]:
        """The complete environment of the new process, without what only this one may know."""
        own = {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES}
        return {**own, **self.env}


@dataclass(frozen=True, kw_only=True)
class Completed:
    code: int  # exit code; negative: the signal that killed it
    stdout: str
    stderr: str


def run(command: Command, *, timeout: float) -> Completed:
    """Run a short command.

    Raises MissingDependencyError if its program is missing and TimeoutError after `timeout` seconds.
    """
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
            start_new_session=True,  # Ctrl-C is for us: an answer that it cut off would be taken for an empty one
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command.argv[0]} did not end within {timeout:g} s.") from None
    return Completed(code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)


def become(command: Command) -> NoReturn:
    """Replace this process by a command, which inherits its terminal.

    Raises MissingDependencyError if its program is missing.
    """
    argv = _resolved(command)
    if command.cwd is not None:
        os.chdir(command.cwd)
    os.execve(argv[0], argv, command.environment)


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started: float
    """Seconds after the boot of this machine: unlike a time of day it stays the same when the clock is set."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has `pid` now, or None when there is none."""
        with suppress(OSError):
            fields = _fields(pid)
            return None if fields is None else cls(pid=pid, started=_started(fields))
        return None

    def matches(self, other: ProcessId) -> bool:
        return (self.pid, self.started) == (other.pid, other.started)

    def alive(self) -> bool:
        """Return whether this process still runs; a zombie does not count.

        A child of this process is waited for instead: it looks like a zombie as soon as its main thread has ended, but
        can be reaped only when its other threads have ended too.
        """
        child = _children.get(self.pid)
        try:
            fields = _fields(self.pid)
        except OSError:  # no file descriptor is left to look with
            return _exists(self.pid)
        if fields is None or _started(fields) != self.started:
            return False
        if child is not None and child.returncode is None:
            return child.poll() is None
        return _process(self) is not None

    def halted(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped it; one that a debugger holds does not count."""
        with suppress(OSError):
            fields = _fields(self.pid)
            return fields is not None and fields[0] == b"T" and _started(fields) == self.started
        return False


def _fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat that follow the program's name, or None without such a process.

    Raises OSError when it cannot be read for another reason.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _started(fields: list[bytes]) -> float:
    return int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")


def since_boot() -> float:
    """Return the seconds since this machine was booted: the clock of `ProcessId.started`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def work_done(identity: ProcessId) -> float:
    """Return the CPU seconds of a process, and a tenth of one for each page that it had to read from a disk; or 0."""
    fields = _fields(identity.pid)
    if fields is None or _started(fields) != identity.started:
        return 0.0
    return sum(map(int, fields[_CPU_TIMES])) / os.sysconf("SC_CLK_TCK") + int(fields[_MAJOR_FAULTS]) / 10


def spawn(
    command: Command,
    *,
    log: Path,
    bound: bool = False,
    stack: int | None = None,
    keep: Collection[int] = (),
    private: bool = False,
) -> ProcessId:
    """Start a process in its own session that outlives this one; its stdout and stderr replace the content of `log`.

    Output goes to a file because a full pipe that is not read blocks the writer; it is appended, so that the file can
    be emptied meanwhile. A `bound` process gets a SIGTERM from the kernel when this process ends without having stopped
    it, for example because it was killed: see `orphans`. `stack` raises the limit of its threads' stacks to this many
    bytes, where this process may do that. It inherits the file descriptors to `keep`. Other users cannot read the
    log, nor what a `private` process writes.
    """
    prepare = [each for each in (end_with_parent() if bound else None, larger_stack(stack)) if each is not None]

    log.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as output:
        if log.is_file():  # not /dev/null; it may be older
            os.fchmod(output.fileno(), 0o600)
        child = subprocess.Popen(
            _resolved(command),
            env=command.environment,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep),
            umask=0o077 if private else -1,
            preexec_fn=(lambda: [each() for each in prepare]) if prepare else None,  # noqa: PLW1509 - no locks
        )
    _children[child.pid] = child
    # A child that has already ended stays a zombie until it is reaped, so its start time can still be read.
    identity = ProcessId.of(child.pid)
    if identity is None:
        raise ProcessLookupError(f"{command.argv[0]} exited before it could be identified.")
    return identity


def larger_stack(size: int | None) -> Callable[[], None] | None:
    """Return a function for a child to call first, which raises its stack limit; or None when it must stay.

    Stacks count as addresses, so the limit stays where those are limited (ulimit -v).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if size is None or limited or soft == resource.RLIM_INFINITY or soft >= size:
        return None
    wanted = size if hard == resource.RLIM_INFINITY else min(size, hard)
    return lambda: resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def exit_code(identity: ProcessId) -> int | None:
    """Return the exit code of a child of this process; negative: the signal that ended it.

    Returns None while it runs, or if it is not a child of this process.
    """
    child = _children.get(identity.pid)
    return None if child is None else child.poll()


def ending(code: int | None) -> str:
    """Describe an exit code for a sentence such as "it ended with signal 9"."""
    if code is None:
        return "an unknown code"
    return f"signal {-code}" if code < 0 else f"code {code}"


def how_it_ended(code: int | None) -> str:
    """Describe how a process ended, as a predicate: "was ended by signal 15"."""
    if code is None:
        return "ended"
    if code == -signal.SIGKILL:
        return "was killed (signal 9, by the kernel for want of memory or by someone)"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def was_killed(code: int | None) -> bool:
    """Return whether SIGKILL ended a process, also behind a shell or in a container; the OOM killer uses SIGKILL."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def children(identity: ProcessId, *, recursive: bool = False) -> tuple[ProcessId, ...]:
    """Return the direct children of a process, or all its descendants."""
    found = _asked(identity, lambda process: process.children(recursive)) or ()
    return tuple(each for child in found if (each := ProcessId.of(child.pid)) is not None)


def parent(identity: ProcessId) -> ProcessId | None:
    """Return the parent of a process, or None when one of them has ended."""
    fields = _fields(identity.pid)
    return None if fields is None or _started(fields) != identity.started else ProcessId.of(int(fields[_PARENT]))


def tree(identity: ProcessId) -> set[ProcessId]:
    """Return all living descendants of a process and all members of its session, even when it has ended.

    Descendants count whatever their process group is, because mpirun's daemons put ranks into separate groups. Members
    of the session are included because a dead leader leaves them behind. The kernel does not reuse a session id that
    has members, so if a process has the leader's pid but another start time, the session is empty.
    """
    found = set(children(identity, recursive=True))
    now = ProcessId.of(identity.pid)
    if now is None or now.matches(identity):
        import psutil

        members = (ProcessId.of(pid) for pid in psutil.pids() if _session_of(pid) == identity.pid)
        found |= {member for member in members if member is not None}
    return {member for member in found if member.pid != identity.pid and member.alive()}


def stop(identity: ProcessId, *, grace: float, urgent: Callable[[], bool] = lambda: False) -> bool:
    """End a process and its tree; see `stop_all`."""
    return stop_all([identity], grace=grace, urgent=urgent)


def stop_all(
    roots: Collection[ProcessId],
    *,
    grace: float,
    urgent: Callable[[], bool] = lambda: False,
    asked: Collection[ProcessId] = (),
) -> bool:
    """End processes and their trees: TERM to the roots, after `grace` seconds KILL to everything that is left.

    Only the roots get the TERM, so that they can end their children in order. When a root, such as mpirun, would kill
    its children too early, pass the processes that should get the TERM instead as `asked`. When `urgent` returns True,
    the KILL follows at once. Returns False when a process survived the KILL for ten seconds: on a busy machine the
    kernel needs seconds to take back the memory of a large process.
    """
    members = _trees(roots)
    for member in asked or roots:
        _signal(member, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(root.alive() for root in roots) and time.monotonic() < deadline and not urgent():
        members |= _trees(roots)
        time.sleep(POLL_INTERVAL)
    if any(root.alive() for root in roots) or not wait_gone(members | _trees(roots), 0.5, urgent):
        members |= _trees(roots)
        _kill({*roots, *members})
    return wait_gone({*roots, *members}, _KILLED)


def kill_group(group: int) -> None:
    """End all members of a process group with a KILL, as `stop_all` does."""
    import psutil

    members = (ProcessId.of(pid) for pid in psutil.pids() if _group_of(pid) == group)
    with suppress(ServerStopError):  # a member of another user
        _kill({member for member in members if member is not None})
    with suppress(ProcessLookupError, PermissionError):  # what they have started meanwhile
        os.killpg(group, signal.SIGKILL)


def _kill(members: Collection[ProcessId]) -> None:
    """Kill processes; Python's resource trackers last, which remove the shared memory that the others leave."""
    trackers = {member for member in members if any("resource_tracker" in word for word in arguments(member))}
    for member in members:
        if member not in trackers:
            _signal(member, signal.SIGKILL)
    wait_gone(trackers, _TRACKED)
    for tracker in trackers:
        _signal(tracker, signal.SIGKILL)


def _trees(roots: Collection[ProcessId]) -> set[ProcessId]:
    return {member for root in roots for member in tree(root)}


def program(name: str, path: str | None = None) -> Path | None:
    """Return the path of a program on `path` (default: PATH of this process), or None when it is not found."""
    found = shutil.which(name, path=path)
    return None if found is None else Path(found)


def listeners(port: int) -> list[ProcessId]:
    """Return the processes that listen on a TCP port of any address, as far as the kernel shows them."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    listening = (c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port)
    pids = dict.fromkeys(connection.pid for connection in listening if connection.pid is not None)
    return [identity for pid in pids if (identity := ProcessId.of(pid)) is not None]


def arguments(identity: ProcessId) -> list[str]:
    """Return the command line of a process, or [] when it has ended, or the kernel does not show it."""
    return _asked(identity, lambda process: process.cmdline()) or []


def environment_of(identity: ProcessId) -> dict[str, str]:
    """Return the environment that a process was started with, or {} as `arguments`."""
    return _asked(identity, lambda process: process.environ()) or {}


@dataclass(frozen=True, kw_only=True)
class Usage:
    memory: int  # resident memory in bytes
    cpu: float  # CPU time in percent of one core


def usage(identities: Collection[ProcessId]) -> dict[ProcessId, Usage]:
    """Measure the memory and CPU use of processes over a moment; those that have ended are left out."""
    import psutil

    watched = {identity: process for identity in identities if (process := _process(identity)) is not None}
    measured: dict[ProcessId, Usage] = {}
    for process in watched.values():
        with suppress(psutil.Error):
            process.cpu_percent()
    time.sleep(_MEASURED)
    for identity, process in watched.items():
        with suppress(psutil.Error):
            measured[identity] = Usage(memory=process.memory_info().rss, cpu=process.cpu_percent())
    return measured


def describe(identity: ProcessId) -> str:
    """Return the command line of a process, shortened for a message without cutting the program's name."""
    words = arguments(identity)
    line = " ".join(words)
    if len(line) <= _DESCRIBED:
        return line
    named = f"…/{Path(words[0]).name}" if len(words[0]) > _DESCRIBED // 2 and "/" in words[0] else words[0]
    line = " ".join((named, *words[1:]))
    return line if len(line) <= _DESCRIBED else f"{line[: max(_DESCRIBED - 1, len(named))]}…"


def _resolved(command: Command) -> tuple[str, ...]:
    """Return argv with the program's path, looked up on the PATH that the process will have."""
    found = program(command.argv[0], command.environment.get("PATH"))
    if found is None:
        raise MissingDependencyError(
            f"The program {command.argv[0]} was not found.", hint="Install it, or put its folder on PATH."
        )
    return (str(found), *command.argv[1:])


def _process(identity: ProcessId) -> psutil.Process | None:
    import psutil

    try:
        process, now = psutil.Process(identity.pid), ProcessId.of(identity.pid)
        same = now is not None and now.matches(identity)
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _asked(identity: ProcessId, question: Callable[[psutil.Process], T]) -> T | None:
    """Return what psutil says of a process, or None when it has ended, or the kernel does not show it."""
    import psutil

    process = _process(identity)
    try:
        return None if process is None else question(process)
    except psutil.Error:
        return None


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # The process has ended or belongs to another user.
        return None


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def terminate(identity: ProcessId) -> None:
    """Ask a process to end, without waiting for it. Raises ServerStopError when it belongs to another user."""
    _signal(identity, signal.SIGTERM)


def _signal(identity: ProcessId, number: int) -> None:
    import psutil

    process = _process(identity)
    if process is not None:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return
        except psutil.AccessDenied as error:
            raise ServerStopError(
                f"Process {identity.pid} ({describe(identity)}) cannot be stopped: it belongs to "
                f"{_asked(identity, lambda process: process.username()) or 'another user'}.",
                hint="Ask its owner to stop it, or stop it as root.",
            ) from error


def wait_gone(members: Collection[ProcessId], seconds: float, urgent: Callable[[], bool] = lambda: False) -> bool:
    """Wait until processes have ended, at most `seconds`; return whether they have. `urgent` ends the wait."""
    deadline = time.monotonic() + seconds
    while any(member.alive() for member in members):
        if time.monotonic() > deadline or urgent():
            return False
        time.sleep(POLL_INTERVAL)
    return True
