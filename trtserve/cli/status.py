"""`trtserve status`, `logs` and `stop`: the servers that run, what they print, and their end."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from json import dumps
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.cli.options import JsonOption, QuietOption, ServerArgument, ServerOption, one_name, servers
from trtserve.cli.output import TerminalProgress, print_data, print_json, print_stopped, print_table
from trtserve.errors import ServerDiedError, ServerNotFoundError, ServerNotReadyError, UsageError, counted
from trtserve.server.triton.server_log import described, is_noise, significant, summary, tail

if TYPE_CHECKING:
    from trtserve.server.state import Server
    from trtserve.server.status import Status

_COLUMNS = (
    *("name", "state", "uptime", "model", "models", "http", "grpc", "metrics", "pid", "answers", "engine"),
    *("requests", "kv cache", "restarts"),
)


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of a server; default: all.", autocompletion=servers)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the servers that were started here.

    Ends with 0 if all are ready, 33 if there is none, 35 if one has failed, else 37.

    Examples:
        trtserve status
        trtserve status demo --json
    """
    from trtserve.server.discovery import how_to_start
    from trtserve.server.status import server_status
    from trtserve.store import Store

    found = server_status(name)
    progress = TerminalProgress()
    if json:
        print_json("status", [{**asdict(one), "server": server_record(one.server)} for one in found])
    elif found:
        print_table(_COLUMNS, [_row(one) for one in found])
    if not found:
        raise ServerNotFoundError("No server is running.", hint=how_to_start(Store()))
    for one in found:
        _remark(one, progress)
    errors = [_not_ready(one) for one in found if one.state != "ready"]
    errors.sort(key=lambda error: isinstance(error, ServerDiedError))
    for error in errors[:-1]:
        progress.warn(" ".join(filter(None, (error.message, error.hint, f"Log: {error.log}"))))
    if errors:
        raise errors[-1]


def _remark(one: Status, progress: TerminalProgress) -> None:
    """Say what the table of servers has no column for."""
    if one.page or one.key:
        facts = [f"page {one.server.url}/"] * one.page + ["clients need its API key"] * one.key
        progress.step(f"{one.server.name}: {', '.join(facts)}")
    if one.ignored_parameters:
        progress.step(f"{one.server.name}: parameters ignored on this runtime: {', '.join(one.ignored_parameters)}")
    for warning in one.warnings:
        progress.warn(f"{one.server.name}: {warning}")
    if one.state != "failed" and (failure := one.server.failure) is not None:
        progress.warn(f"{one.server.name} failed at {_iso(failure.time)} and was started again: {failure.message}")


def _not_ready(one: Status) -> ServerDiedError | ServerNotReadyError:
    name, log = one.server.name, one.log
    again = shlex.join(["trtserve", "start", "--name", name, "--model-repository", str(one.server.repository)])
    if one.state == "failed":
        stop = f"trtserve stop {name}"
        why = one.reason.removeprefix(f"{name}: ")  # the message of a recorded failure begins with the name
        return ServerDiedError(
            f"{name} has failed: {why}", hint=f"Clean up and start it again: {stop} && {again}", log=log
        )
    reason = f": {one.reason}" if one.reason else ""
    hint = f"Start it again: {again}" if one.state == "stopped" else None
    return ServerNotReadyError(f"{name} is {one.state}{reason}", hint=hint, log=log)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat("T", "seconds")


def server_record(server: Server) -> dict[str, object]:
    """Return a server as JSON: addresses, processes by id, and times in ISO format."""
    from trtserve.server.state import transaction_policy

    instances = [
        {
            "http_port": each.address.http_port,
            "grpc_port": each.address.grpc_port,
            "metrics_port": each.address.metrics_port,
            "pid": each.process.pid,
            "ranks": [rank.pid for rank in each.ranks],
            "container": each.container,
            "log": each.log,
        }
        for each in server.instances
    ]
    proxy, failure = server.proxy, server.failure
    return {
        "name": server.name,
        "model": server.model,
        "repository": server.repository,
        "mode": server.mode,
        "transaction_policy": transaction_policy(server.streaming),
        "host": server.address.host,
        "http_port": server.endpoint.http_port,
        "grpc_port": server.endpoint.grpc_port,
        "ready_since": None if server.ready_since is None else _iso(server.ready_since),
        "supervisor": None if server.supervisor is None else server.supervisor.pid,
        "restarts": server.restarts,
        "failure": None if failure is None else {**asdict(failure), "time": _iso(failure.time)},
        "instances": instances,
        "proxy": None
        if proxy is None
        else {
            "file": proxy.gateway.settings,
            "log": proxy.gateway.log,
            "running": not proxy.gateway.dead,
        },
    }


def _row(one: Status) -> tuple[object, ...]:
    from trtserve.server.state import how_answers_come

    server, addresses = one.server, [instance.address for instance in one.server.instances]
    proxy = "" if server.endpoint == server.address else f"{server.endpoint.http_port} → "
    return (
        server.name,
        one.state,
        "-" if one.uptime is None else str(timedelta(seconds=int(one.uptime))),
        server.model,
        _models_text(one) or "-",
        f"{server.address.host}:{proxy}" + ",".join(str(each.http_port) for each in addresses),
        ",".join(str(each.grpc_port or "-") for each in addresses),
        ",".join(str(each.metrics_port or "-") for each in addresses),
        ",".join(str(each.process.pid) for each in server.instances),
        how_answers_come(server.streaming),
        ", ".join(f"{key.removesuffix('_precision')} {value}" for key, value in one.precision.items()) or "-",
        f"{one.requests['running']} running, {one.requests['finished']} done" if one.requests else "-",
        _kv_text(one) or "-",
        server.restarts,
    )


def _models_text(one: Status) -> str:
    # Such as: 6 of 6 ready; of a port for many models: 0 of 2 loaded, the others at their first request.
    ready = sum(state == "READY" for state in one.models.values())
    if one.server.kept is not None and one.models:
        later = "" if ready == len(one.models) else ", the others at their first request"
        return f"{ready} of {len(one.models)} loaded{later}"
    return f"{ready} of {len(one.models)} ready" if one.models else ""


def _kv_text(one: Status) -> str:
    # Such as: 12 of 96 blocks of 32 tokens.
    blocks = one.kv_blocks
    # The gauges are 0 until the core model sets them for the first time.
    if not blocks.get("max"):
        return ""
    size = f" of {blocks['tokens_per']} tokens" if blocks.get("tokens_per") else ""
    return f"{blocks.get('used', 0)} of {blocks['max']} blocks{size}"


def logs(
    name: ServerArgument = None,
    *,
    server: ServerOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the server ends or Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", "--tail", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    everything: Annotated[
        bool, typer.Option("--all", help="Every line as it is: also tables, and that this machine has no GPU.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option("--log-format", help="json: one JSON object for each line.")
    ] = "text",
    json: JsonOption = False,
) -> None:
    """Print the end of a server's log, also of a server that has ended.

    NAME@2 is the log of a second instance, NAME@proxy that of the gateway in front of several,
    NAME@supervisor that of `start --detach`.

    Examples:
        trtserve logs
        trtserve logs demo --follow
    """
    from trtserve.server.discovery import find_log, follow_log

    if json and follow:
        raise UsageError("--json is one document; it cannot be combined with --follow.")
    log = find_log(one_name(name, server))
    position = log.stat().st_size
    last = tail(log, lines)
    if json:
        print_json("logs", {"log": log, "lines": last})
        return
    short = sys.stdout.isatty() and log_format == "text" and not everything
    form = summary if short else _json_line if log_format == "json" else str

    def shown(text: list[str]) -> list[str]:
        return [form(line) for line in text if everything or (significant(line) if short else not is_noise(line))]

    if text := shown(last):
        print_data("\n".join(text))
    if left_out := len(last) - len(text):
        tables = "are tables, or " if short else ""
        TerminalProgress().step(
            f"{counted(left_out, 'line')} left out that {tables}only say that this machine has no GPU, which the CPU "
            "runtime does not need (--all shows them)."
        )
    if short:
        TerminalProgress().step(f"Log: {log}")
    if follow:
        for added in follow_log(log, position=position, pause=lambda: time.sleep(0.2)):
            if text := shown(added.splitlines()):
                print_data("\n".join(text))


def _json_line(line: str) -> str:
    return dumps(described(line))


def _every_server() -> Iterator[str]:
    """Yield the servers that run, then those that another command has begun to start."""
    from trtserve.server.state import await_record, recorded_servers
    from trtserve.store import Store

    yield from [server.name for server in recorded_servers()]
    await_record(None, Store())
    yield from [server.name for server in recorded_servers()]


def stop(
    name: ServerArgument = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            metavar="SECONDS",
            min=0,
            help="Refuse new requests, and wait this long for running ones to end.",
        ),
    ] = 0.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Stop a server.

    Prints its name once no process, port or shared memory of it is left.

    Examples:
        trtserve stop
        trtserve stop demo --drain 30
        trtserve stop --all
    """
    from trtserve.server.discovery import searched
    from trtserve.server.shutdown import stop_server
    from trtserve.server.state import list_servers

    if everything and name is not None:
        raise UsageError(f"Both a name ({name}) and --all were given; give one.")
    progress = TerminalProgress(quiet=quiet)
    stopped: list[str] = []
    try:
        for one in _every_server() if everything else (name,):
            # The port of many models ends the servers of those that are loaded.
            with suppress(ServerNotFoundError) if stopped else nullcontext():
                stopped.append(stop_server(one, drain=drain, progress=progress).name)
    except ServerNotFoundError as error:
        if error.log is None and not list_servers():
            error.hint = f"There is nothing to stop{searched()}."
        raise
    if json:
        print_json("stop", {"stopped": stopped})
    elif stopped:
        print_stopped(stopped)
    else:
        progress.step("No server is running.")
