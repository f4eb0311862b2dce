"""`trtserve start`: start a server here, or write, print or submit it for a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.options import DryRunOption, JsonOption, QuietOption, imports, paths
from trtserve.cli.output import (
    ChangingLine,
    TerminalProgress,
    print_commands,
    print_data,
    print_json,
    print_stages,
    say,
)
from trtserve.cli.status import server_record
from trtserve.errors import TrtserveError, UsageError, counted
from trtserve.host.machine import format_bytes
from trtserve.specs import ServerSpec
from trtserve.specs.cluster import OPTIONS, ClusterSpec, KubernetesOptions, SlurmOptions
from trtserve.specs.options import Spec, given_flags
from trtserve.specs.server import GPUS, SUPERVISION, ManySpec

if TYPE_CHECKING:
    from trtserve.artifacts import ModelRepository
    from trtserve.pipeline import StageSummary
    from trtserve.server.many import ManyPlan
    from trtserve.server.plan import ServerPlan
    from trtserve.server.state import Server
    from trtserve.specs import ServerSpec

_KEY = "  key      clients need it: export OPENAI_API_KEY=KEY ANTHROPIC_API_KEY=KEY"


def start(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of an import or a repository; default: the last import.", autocompletion=imports
        ),
    ] = None,
    triton_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME… -- FLAG…",
            help="Further imports for the same port, and flags for tritonserver, passed on unchanged.",
        ),
    ] = None,
    *,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the server is ready.")] = False,
    systemd: Annotated[
        bool,
        typer.Option(
            "--systemd",
            help="Write a systemd unit (--out FILE) instead of starting here.",
            rich_help_panel=SUPERVISION,
        ),
    ] = False,
    report_to: Annotated[int | None, typer.Option("--report-to", hidden=True)] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(
            "--model-repository",
            "--model-repo",
            metavar="DIR",
            help="Serve this folder instead of an import.",
            autocompletion=paths,
        ),
    ] = None,
    spec: ServerSpec,
    many: ManySpec,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild/--no-rebuild", help="Whether --world-size may convert and build again.", rich_help_panel=GPUS
        ),
    ] = True,
    cluster: ClusterSpec,
    slurm: SlurmOptions,
    kubernetes: KubernetesOptions,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve a model with Triton; with --detach in the background, otherwise until Ctrl-C.

    It answers OpenAI's, Anthropic's and Ollama's APIs and Triton's own on the HTTP port, and Triton's on the gRPC port.

    Examples:
        trtserve start
        trtserve start --detach --ui
        trtserve start llama-2-7b --detach --http-port 9000 --restart on-failure
        trtserve start llama-2-7b -- --log-verbose=1
        trtserve start llama-2-7b qwen3-4b --idle-unload 600
        trtserve start llama-2-7b --slurm --nodes 2 --account research
    """
    from trtserve.server.plan import with_free_ports
    from trtserve.server.repositories import find_repository
    from trtserve.store import Store

    call = ClusterCall(
        cluster=cluster, options={"slurm": slurm, "kubernetes": kubernetes}, json=json, dry_run=dry_run, quiet=quiet
    )
    call.require_sense(spec, detach=detach, systemd=systemd)
    extra = tuple(triton_arguments or ())
    if model is not None and model.startswith("-"):  # `start -- --flag` puts the first flag where a name is expected
        extra, model = (model, *extra), None
    more = tuple(takewhile(lambda word: not word.startswith("-"), extra))
    spec = replace(spec, extra_arguments=extra[len(more) :])
    spec = with_free_ports(spec) if spec.auto_ports else spec
    if more or given_flags(many):
        call.require_one_port(systemd=systemd, model_repository=model_repository)
        _serve_many(() if model is None else (model, *more), spec, many, call, detach=detach, report_to=report_to)
        return
    found = find_repository(model, path=model_repository)
    with Store().in_use(found.path):
        found = find_repository(model, path=model_repository)  # `remove` may have been faster
        if cluster.kind is not None or systemd:
            _write(found, spec, call, rebuild=rebuild)
        elif dry_run:
            _dry_run(found, spec, TerminalProgress(quiet=quiet), rebuild=rebuild, json=json)
        else:
            with ChangingLine(quiet=quiet) as progress:
                _serve(found, spec, progress, rebuild=rebuild, detach=detach, report_to=report_to, json=json)


def _serve(
    found: ModelRepository,
    spec: ServerSpec,
    progress: ChangingLine,
    *,
    rebuild: bool,
    detach: bool,
    report_to: int | None,
    json: bool,
) -> None:
    """Serve until Ctrl-C, or until the server in the background is ready."""
    from trtserve.pipeline.world_size import repository_for
    from trtserve.server.detach import start_in_background

    repository = repository_for(found, spec, rebuild=rebuild, on_this_machine=True, progress=progress)

    def print_server(server: Server) -> None:
        progress.end()
        if json:
            print_json("start", {**server_record(server), "url": server.url})
        else:
            print_data(server.url)
        if not progress.quiet and spec.log_format != "json":
            _print_summary(server, page=spec.ui, key=spec.has_key, detached=detach)

    if detach:
        print_server(start_in_background(repository, spec, progress=progress))
    else:
        _supervise(repository, spec, report_to, progress, print_server)


def _serve_many(
    names: Sequence[str], spec: ServerSpec, many: ManySpec, call: ClusterCall, *, detach: bool, report_to: int | None
) -> None:
    """Serve several models behind one port, until Ctrl-C or in the background."""
    from trtserve.server.detach import StartReport, run_in_background
    from trtserve.server.many import plan_many, serve_many
    from trtserve.server.repositories import find_repository
    from trtserve.store import Store

    store = Store()
    if many.every and names:
        raise UsageError(f"Both names ({', '.join(names)}) and --all were given; give one.")
    names = sorted(record.name for record in store.recorded()) if many.every else names
    if not names:
        raise UsageError("No model is named.", hint="Name imports, or serve all of them: --all")
    progress = TerminalProgress(quiet=call.quiet)
    plan = plan_many({name: find_repository(name) for name in names}, spec, many, store=store)
    if call.dry_run:
        _print_many(plan, json=call.json)
        return

    def print_server(server: Server) -> None:
        if call.json:
            print_json("start", {**server_record(server), "url": server.url})
        else:
            print_data(server.url)
        if not call.quiet:
            say(f"{server.name}: {counted(len(plan.models), 'model')}, each loaded at its first request.")
            api = f"  API      export OPENAI_BASE_URL={server.url}/v1 ANTHROPIC_BASE_URL={server.url}"
            say("\n".join([api, *([_KEY] if spec.has_key else [])]))
            say(f'  try      trtserve query --model {next(iter(plan.models))} "What is ML?"{_which(server)}')
            say(f"  stop     {f'trtserve stop {server.name}' if detach else 'Ctrl-C'}")

    if detach:
        print_server(run_in_background(plan.name, plan.arguments, spec, store=store, progress=progress))
    elif report_to is None:
        serve_many(plan, on_ready=print_server, progress=progress)
    else:
        report = StartReport(report_to, progress)
        with report.reporting():
            serve_many(plan, on_ready=lambda _: report.ready(), progress=report)


def _print_many(plan: ManyPlan, *, json: bool) -> None:
    memory = {name: plan.memory(name) for name in plan.models}
    if json:
        print_json("start", {"name": plan.name, "budget": plan.budget, "models": memory, "dry_run": True})
        return
    lines = [f"name: {plan.name}", f"budget: {format_bytes(plan.budget)}"]
    print_data("\n".join([*lines, *(f"model: {name}, {format_bytes(size)}" for name, size in memory.items())]))


def _supervise(
    repository: ModelRepository,
    spec: ServerSpec,
    report_to: int | None,
    progress: TerminalProgress,
    on_ready: Callable[[Server], None],
) -> None:
    """Be the supervisor of a server, for the user or for the `start --detach` that listens at `report_to`."""
    from trtserve.cli.json_log import JsonLog
    from trtserve.host.machine import parse_cpus, pin
    from trtserve.server.detach import StartReport
    from trtserve.server.plan import plan_server
    from trtserve.server.supervision import serve_foreground

    own = JsonLog() if spec.log_format == "json" else progress
    report = None if report_to is None else StartReport(report_to, own)
    try:
        with nullcontext() if report is None else report.reporting():
            if spec.cpus is not None or spec.numa is not None:
                pin(parse_cpus(spec.cpus) if spec.cpus else (), spec.numa)
            plan = plan_server(repository, spec)
            with own.following([each.log for each in plan.instances]) if isinstance(own, JsonLog) else nullcontext():
                tell = on_ready if report is None else lambda _: report.ready()
                serve_foreground(plan, on_ready=tell, progress=report or own)
    except TrtserveError as error:
        if isinstance(own, JsonLog):
            own.error(error)
            raise typer.Exit(error.code) from error
        raise


def _write(found: ModelRepository, spec: ServerSpec, call: ClusterCall, *, rebuild: bool) -> None:
    """Write, print or submit what starts the server elsewhere or later."""
    from trtserve.pipeline.world_size import repository_for

    progress, kind = TerminalProgress(quiet=call.quiet), call.cluster.kind
    repository = repository_for(
        found, spec, rebuild=rebuild and not call.dry_run, on_this_machine=kind is None, progress=progress
    )
    if kind is None:
        _write_unit(repository, spec, call, progress)
    else:
        write_for_cluster(repository, spec, kind, call)


def _write_unit(repository: ModelRepository, spec: ServerSpec, call: ClusterCall, progress: TerminalProgress) -> None:
    from trtserve.files import write_whole
    from trtserve.server.checks import announce_risks
    from trtserve.server.detach import plan_unit
    from trtserve.server.plan import plan_server
    from trtserve.store import Store

    announce_risks(plan_server(repository, spec), progress)  # raises what the service would end with
    path, text = plan_unit(repository, spec, out=call.cluster.out, store=Store())
    if call.dry_run:
        print_files({path: text}, json=call.json)
        return
    write_whole(path, text)
    if call.json:
        print_json("start", {"unit": path})
    else:
        print_data(str(path))
    if not call.quiet:
        copied, unit = shlex.quote(str(path)), shlex.quote(path.stem)
        say(f"Install it: cp {copied} ~/.config/systemd/user/ && systemctl --user enable --now {unit}")


def _dry_run(
    repository: ModelRepository, spec: ServerSpec, progress: TerminalProgress, *, rebuild: bool, json: bool
) -> None:
    """Print what `start` would do; another --world-size runs the stages of the import first."""
    from trtserve.pipeline.world_size import plan_rebuild, planned_stages
    from trtserve.repository.served import inspect_repository
    from trtserve.server.checks import announce_risks, rehearse
    from trtserve.server.plan import plan_server

    served = inspect_repository(repository)
    again = plan_rebuild(repository, served, spec)
    if again is None:
        plan = plan_server(repository, spec, served=served, on_this_machine=False)
        rehearse(plan, progress)
        _print_plan(plan, [], json=json)
        return
    again.require_allowed(rebuild=rebuild)
    progress.step(f"World size {spec.world_size}: {again.reason}; first these stages are run with {again.size}.")
    stages, made = planned_stages(again, progress)
    exists = made.path.is_dir()
    plan = plan_server(made, spec, served=None if exists else again.served, on_this_machine=False)
    if exists:
        rehearse(plan, progress)
    else:
        announce_risks(plan, progress)
        progress.step("The repository's files are checked when they are made.")
    _print_plan(plan, stages, json=json)


def _print_plan(plan: ServerPlan, stages: Sequence[StageSummary], *, json: bool) -> None:
    commands = [str(instance.launch.command) for instance in plan.instances]
    gateways = [str(instance.gateway.command) for instance in plan.instances if instance.gateway is not None]
    if json:
        more = {"commands": commands} if len(commands) > 1 else {}
        more |= {"gateways": gateways} if gateways else {}
        imported = {"stages": stages} if stages else {}
        print_json("start", {**_described(plan), **imported, "command": commands[0], **more, "dry_run": True})
        return
    print_stages(stages)
    print_commands(stages)
    lines = [f"{key}: {value}" for key, value in _described(plan).items()]
    print_data(
        "\n".join(
            [*lines, *(f"command: {command}" for command in commands), *(f"gateway: {gateway}" for gateway in gateways)]
        )
    )


def _described(plan: ServerPlan) -> dict[str, Any]:
    from trtserve.server.state import transaction_policy

    return {
        "name": plan.name,
        "repository": plan.repository.path.absolute(),
        "model": plan.served.model,
        "transaction_policy": transaction_policy(plan.served.streaming),
        "mode": plan.mode,
        "processes": plan.processes,
        "log": plan.instances[0].log,
        **({} if plan.proxy is None else {"proxy": plan.proxy.file}),
    }


def _print_summary(server: Server, *, page: bool, key: bool, detached: bool) -> None:
    """Say what a person needs: addresses, what to try, and how to stop."""
    say(f"{server.name} is ready.")
    if server.endpoint != server.address:
        grpc = f"{server.address.host}:{server.endpoint.grpc_port}"
        say(f"  balance  {len(server.instances)} instances share the requests, gRPC on {grpc}")
    if any(instance.gateway is not None for instance in server.instances):
        say(f"  page     {f'{server.url}/' if page else 'start with --ui for a chat in the browser'}")
        say(f"  OpenAI   export OPENAI_BASE_URL={server.url}/v1")
        say(f"  Claude   export ANTHROPIC_BASE_URL={server.url}")
    if key:
        say(_KEY)
    for instance in server.instances:
        host, address = instance.address.host, instance.address
        also = f"HTTP {host}:{address.http_port}, " if len(server.instances) > 1 else ""
        metrics = f"metrics {address.metrics_host}:{address.metrics_port}"
        say(f"  Triton   {also}gRPC {host}:{address.grpc_port}, {metrics}")
    say(f'  try      trtserve query "What is ML?"{_which(server)}{"" if detached else "   (in a second terminal)"}')
    say(f"  stop     {f'trtserve stop {server.name}' if detached else 'Ctrl-C'}")


def _which(server: Server) -> str:
    """Return the option that `query` needs to find a server, or nothing when it is the only one."""
    from trtserve.server.state import list_servers

    return f" --server {server.name}" if any(each.name != server.name for each in list_servers()) else ""


@dataclass(frozen=True, kw_only=True)
class ClusterCall:
    """Cluster options of `start`, and how to report what was written."""

    cluster: ClusterSpec
    options: Mapping[str, Spec]
    """Kind of cluster → its own options."""
    json: bool
    dry_run: bool
    quiet: bool

    def require_one_port(self, *, systemd: bool, model_repository: Path | None) -> None:
        """Raise UsageError for what only the server of one model can have."""
        given = {
            f"--{self.cluster.kind}": self.cluster.kind is not None,
            "--systemd": systemd,
            "--model-repository": model_repository is not None,
        }
        if wrong := [flag for flag, there in given.items() if there]:
            raise UsageError(f"{wrong[0]} is for the server of one model.", hint="Name one model only.")

    def require_sense(self, spec: ServerSpec, *, detach: bool, systemd: bool) -> None:
        """Raise UsageError for options that contradict each other, or that belong to a cluster nobody asked for."""
        from trtserve.server.launch.cluster import require_options

        kind = self.cluster.kind
        for name, options in self.options.items():
            if name != kind and (given := given_flags(options)):
                raise UsageError(f"{given[0]} belongs to --{name}.", hint=f"Give --{name} with it.")
        # --systemd has an --out too.
        given = given_flags(self.cluster, ("nodes", "ntasks_per_node", *(() if systemd else ("out",))))
        if given and kind is None:
            owners = [*OPTIONS, "systemd"] if given[0] == "--out" else list(OPTIONS)
            raise UsageError(
                f"{given[0]} belongs to {' and '.join(f'--{name}' for name in owners)}.",
                hint="Here a server runs on one machine, with as many ranks as its engine has.",
            )
        if kind is not None and (detach or systemd):
            flag = "--detach" if detach else "--systemd"
            raise UsageError(f"{flag} is for a server on this machine.", hint="Leave it out.")
        if systemd and detach:
            raise UsageError("--systemd starts nothing, so there is nothing to detach.", hint="Leave --detach out.")
        if kind is not None:
            require_options(spec, kind)


def write_for_cluster(repository: ModelRepository, spec: ServerSpec, kind: str, call: ClusterCall) -> None:
    """Write, print or submit the files that start the server on a cluster of this kind."""
    from trtserve.server.launch.cluster import write_job
    from trtserve.server.launch.clusters import CLUSTERS
    from trtserve.server.state import server_name

    cluster, options = CLUSTERS[kind], call.options[kind]
    settings = cluster.settings(call.cluster, options, spec)
    place = (call.cluster.out or Path(f"{server_name(repository, spec)}{OPTIONS[kind].SUFFIX}")).absolute()
    progress = TerminalProgress(quiet=call.quiet)
    job = cluster.plan_job(repository, spec, settings, place, progress=progress)
    if call.dry_run:
        print_files(job.files, json=call.json)
        return
    write_job(job)
    for note in job.notes:
        progress.step(note)
    submitted = job.submit() if job.submit is not None and getattr(options, "submit", False) else None
    if call.json:
        print_json("start", job.record if submitted is None else {**job.record, "number": submitted.number})
    else:
        print_data(str(job.script) if submitted is None else submitted.number)
    if not call.quiet:
        for line in (submitted or job).next_steps:
            say(line)


def print_files(files: Mapping[Path, str], *, json: bool) -> None:
    """Print the files that a dry run does not write."""
    if json:
        print_json("start", {"files": {str(path): text for path, text in files.items()}, "dry_run": True})
    elif len(files) == 1:
        print_data("".join(files.values()).rstrip("\n"))
    else:
        print_data("\n".join(f"# --- {path}\n{text}" for path, text in files.items()).rstrip("\n"))
