"""Servers in the background: `start --detach`, whose supervisor reports over a pipe, and units of systemd."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trtserve import errors
from trtserve.artifacts import ModelRepository
from trtserve.errors import ServerStartError, TrtserveError, UsageError
from trtserve.files import decode_as, file_error, locked, parse_json
from trtserve.process import Command, exit_code, how_it_ended, spawn, stop, wait_gone
from trtserve.process.signals import stop_signals
from trtserve.progress import SILENT, Progress, Task, Unit
from trtserve.server.render import render
from trtserve.server.shutdown import end_server
from trtserve.server.state import Server, launch_lock, log_file, recorded_server, server_name
from trtserve.server.triton import server_log
from trtserve.server.triton.server_log import rotate
from trtserve.server.triton.tritonserver import STOP_GRACE
from trtserve.specs import ServerSpec
from trtserve.specs.command_line import spec_arguments
from trtserve.store import Store

_POLL = 0.1


@dataclass(frozen=True, kw_only=True)
class Report:
    """One line of the pipe, as JSON."""

    kind: str  # `step`, `warn`, `task`, `at`, `end`, `ready`, or the class of the error that ended the start
    text: str = ""
    number: int = 0  # of a task: how much work it is; of `at`: how much more is done
    unit: Unit = "items"
    hint: str | None = None
    log: Path | None = None

    @property
    def failed(self) -> bool:
        """Whether an error ended the start."""
        return hasattr(errors, self.kind)

    @property
    def error(self) -> TrtserveError:
        kind: type[TrtserveError] = getattr(errors, self.kind, TrtserveError)
        return kind(self.text, hint=self.hint, log=self.log)


class StartReport:
    """The Progress of a supervisor in the background: it tells the command that started it, as long as that listens."""

    def __init__(self, descriptor: int, own: Progress) -> None:
        """Report to the file `descriptor` and to `own`, the supervisor's log."""
        self._pipe: int | None = descriptor
        self._own = own
        os.set_inheritable(descriptor, False)

    def step(self, text: str) -> None:
        self._own.step(text)
        self._send(Report(kind="step", text=text))

    def warn(self, text: str) -> None:
        self._own.warn(text)
        self._send(Report(kind="warn", text=text))

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        self._send(Report(kind="task", text=text, number=total, unit=unit))
        with self._own.task(text, total=total, unit=unit, done=done) as own:
            yield _ReportedTask(own, self._send, done)
        self._send(Report(kind="end"))

    def ready(self) -> None:
        """Report that the server is ready. Nothing is reported afterwards."""
        self._send(Report(kind="ready"))
        self._close()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report the error that ends the block, also one of the file system."""
        try:
            yield
        except (TrtserveError, OSError) as error:
            told = error if isinstance(error, TrtserveError) else file_error(error, Path(error.filename or "A log"))
            if told is not None:
                self._send(Report(kind=type(told).__name__, text=told.message, hint=told.hint, log=told.log))
                self._close()
            raise

    def _send(self, report: Report) -> None:
        if self._pipe is not None:
            try:
                os.write(self._pipe, f"{json.dumps(asdict(report), default=str)}\n".encode())
            except OSError:  # the command that started us was killed: the server starts nevertheless
                self._close()

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class _ReportedTask:
    def __init__(self, own: Task, send: Callable[[Report], None], done: int) -> None:
        self._own, self._send, self._more = own, send, done
        self._text = self._said = ""

    def advance(self, amount: int) -> None:
        self._own.advance(amount)
        self._more += amount
        if self._more or self._text != self._said:
            self._send(Report(kind="at", text=self._text, number=self._more))
            self._more, self._said = 0, self._text

    def describe(self, text: str) -> None:
        self._own.describe(text)
        self._text = text


class ReportDisplay:
    """Shows what a supervisor reports; a task that runs is left with `tasks`."""

    def __init__(self, progress: Progress, tasks: ExitStack) -> None:
        """Show reports with `progress`."""
        self._progress, self._tasks = progress, tasks
        self._task: Task | None = None

    def show(self, report: Report) -> bool:
        """Show it; return False for a report that ends the start, which has nothing to show."""
        if report.kind == "step":
            self._progress.step(report.text)
        elif report.kind == "warn":
            self._progress.warn(report.text)
        elif report.kind == "task":
            task = self._progress.task(report.text, total=report.number, unit=report.unit)
            self._task = self._tasks.enter_context(task)
        elif report.kind == "at" and self._task is not None:
            self._task.describe(report.text)
            self._task.advance(report.number)
        elif report.kind == "end":
            self._tasks.close()
        else:
            return False
        return True


def start_in_background(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    bound: bool = False,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> Server:
    """Start a server with a supervisor that outlives this process, and return it when all its models are ready.

    With `bound` the supervisor stops the server when this process ends without having done so. Raises what the
    supervisor raised. SIGINT, SIGTERM and SIGHUP end the start and raise KeyboardInterrupt.
    """
    return run_in_background(
        server_name(repository, spec),
        lambda pipe: start_arguments(repository, spec, report_to=pipe),
        spec,
        bound=bound,
        store=store or Store(),
        progress=progress,
    )


def run_in_background(
    name: str,
    arguments: Callable[[int], Sequence[str]],
    spec: ServerSpec,
    *,
    bound: bool = False,
    store: Store,
    progress: Progress = SILENT,
) -> Server:
    """Start a supervisor as `start_in_background` does: `trtserve` with `arguments` of the pipe that it reports to."""
    log = log_file(f"{name}@supervisor", store)
    reading, writing = os.pipe()
    command = Command(
        argv=(sys.executable, "-m", "trtserve", *arguments(writing)),
        # No command line shows the key.
        env={"TRTSERVE_HOME": str(store.root), **({} if spec.api_key is None else {"TRTSERVE_API_KEY": spec.api_key})},
    )
    rotate(log)
    with (
        stop_signals() as signals,
        os.fdopen(reading, "rb", buffering=0),
        locked(launch_lock(name, store), shared=True) as lock,
        ExitStack() as tasks,
    ):
        shown = ReportDisplay(progress, tasks)
        try:
            supervisor = spawn(command, log=log, bound=bound, keep=(writing, lock))
        finally:
            os.close(writing)
        for report in reports(reading, signals):
            if shown.show(report):
                continue
            if report.kind != "ready":
                raise report.error
            if (server := recorded_server(name, store)) is None:
                raise ServerStartError(f"The server {name} was stopped as soon as it was ready.")
            return server
        grace = STOP_GRACE + spec.exit_timeout
        if signals():
            stop(supervisor, grace=grace, urgent=lambda: signals() > 1)
        wait_gone([supervisor], grace)  # it has closed the pipe, so it is about to end
        remains = recorded_server(name, store)
        if remains is not None and remains.supervisor is not None and remains.supervisor.matches(supervisor):
            end_server(remains, store)  # it was killed
        if signals():
            raise KeyboardInterrupt
    lines = "\n".join(f"  {line}" for line in server_log.tail(log, 5)) or "  (it wrote nothing)"
    raise ServerStartError(f"The supervisor {how_it_ended(exit_code(supervisor))}. Last lines:\n{lines}", log=log)


def reports(pipe: int, signals: Callable[[], int]) -> Iterator[Report]:
    """Yield what the supervisor reports until it closes the pipe or a signal comes."""
    received, waiting = b"", select.poll()  # unlike select(2), in a process with many files open too
    waiting.register(pipe, select.POLLIN)
    while not signals():
        if not waiting.poll(1000 * _POLL):
            continue
        chunk = os.read(pipe, 65536)
        if not chunk:
            return
        *lines, received = (received + chunk).split(b"\n")
        yield from (decode_as(parse_json(line), Report, "a supervisor's report", "the pipe") for line in lines)


def start_arguments(repository: ModelRepository, spec: ServerSpec, *, report_to: int | None = None) -> list[str]:
    """Return the arguments of the `trtserve` that serves `repository`, and that reports to an open file."""
    words = ["start", "--model-repository", str(repository.path.absolute()), "--no-rebuild", *spec_arguments(spec)]
    words += ["--name", server_name(repository, spec)]
    words += [] if report_to is None else ["--report-to", str(report_to)]
    return [*words, "--", *spec.extra_arguments] if spec.extra_arguments else words


_DRAIN = 30


def plan_unit(repository: ModelRepository, spec: ServerSpec, *, out: Path | None, store: Store) -> tuple[Path, str]:
    """Return the file of a server's unit and its text. Raises UsageError for what a unit cannot have."""
    if spec.api_key is not None:
        raise UsageError("A unit would show the API key to everyone.", hint="Give it in a file: --api-key-file FILE")
    name = server_name(repository, spec)
    path = (out or Path(f"trtserve-{name}.service")).absolute()
    if path.suffix != ".service":
        raise UsageError(f"--out {path} is not a unit file.", hint="Its name must end with .service.")
    program = [sys.executable, "-m", "trtserve"]
    return path, render(
        "server.service.j2",
        name=name,
        start=[*program, *start_arguments(repository, spec)],
        stop=[*program, "stop", name, "--drain", str(_DRAIN)],
        home=f"TRTSERVE_HOME={store.root}",
        start_seconds=int(spec.ready_timeout) + 60,
        stop_seconds=_DRAIN + 60,
    )


def notify(message: str) -> None:
    """Send systemd a message, such as READY=1; do nothing when it did not start this process (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)
        try:
            # A leading @ names an abstract socket.
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendall(message.encode())
        except OSError:  # systemd has gone, or its socket is full: the next message will do
            return
