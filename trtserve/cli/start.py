"""`trtserve start`: a model repository becomes a running server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.cluster_options import (
    AccountOption,
    ClaimOption,
    ClusterOutOption,
    GpuClockOption,
    HfSecretOption,
    JobNameOption,
    KubernetesOption,
    MountOption,
    MpiOption,
    NamespaceOption,
    NodesOption,
    OutputOption,
    PartitionOption,
    PullSecretOption,
    SbatchFlagOption,
    SlurmOption,
    SshSecretOption,
    SubmitOption,
    TasksOption,
    TimeOption,
    WorkerTimeoutOption,
    require_cluster_options,
    write_kubernetes,
    write_slurm,
)
from trtserve.cli.options import (
    ContainerFlagOption,
    ContainerOption,
    DryRunOption,
    JsonOption,
    QuietOption,
    TrtllmVersionOption,
)
from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.cli.stages import print_commands, print_stages
from trtserve.specs import ServerSpec

if TYPE_CHECKING:
    from trtserve.artifacts import ModelRepository
    from trtserve.pipeline.stages import Stage
    from trtserve.start import Plan, Server

_GPUS = "Engines on GPUs"


def start(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of an import or a repository; default: the last import.")
    ] = None,
    triton_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAG", help="Flags for tritonserver itself.")
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(
            "--model-repository", "--model-repo", help="Serve this folder instead of an import.", metavar="DIR"
        ),
    ] = None,
    server_name: Annotated[
        str | None, typer.Option("--name", help="Name of the server; default: the repository's.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", help="Port of the HTTP service.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="Port of the gRPC service.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", help="Port of the metrics service.")] = 8002,
    auto_ports: Annotated[
        bool, typer.Option("--auto-ports", help="Replace each port that is taken by the next free one.")
    ] = False,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            help="Number of ranks; default: what the engine needs. For another number an imported model is converted "
            "and built again.",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild/--no-rebuild", help="Whether --world-size may convert and build again.")
    ] = True,
    instances: Annotated[
        int,
        typer.Option(
            "--instances",
            help="Servers of this model, each with its own GPUs and ports, behind one reverse proxy (nginx).",
            rich_help_panel=_GPUS,
        ),
    ] = 1,
    proxy_port: Annotated[
        int,
        typer.Option("--proxy-port", help="HTTP port of that proxy; the next one is for gRPC.", rich_help_panel=_GPUS),
    ] = 8080,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Devices to use, for example 0,1; default: all.", rich_help_panel=_GPUS),
    ] = None,
    multi_model: Annotated[
        bool,
        typer.Option(
            "--multi-model",
            help="Orchestrator mode: one server spawns the workers of several models.",
            rich_help_panel=_GPUS,
        ),
    ] = False,
    disable_spawn_processes: Annotated[
        bool,
        typer.Option(
            "--disable-spawn-processes",
            help="With --multi-model: all workers are started with the orchestrator, as participant_ids says.",
            rich_help_panel=_GPUS,
        ),
    ] = False,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe", help="Let mpirun start more ranks than there are cores.", rich_help_panel=_GPUS
        ),
    ] = False,
    gpu0_pool_bytes: Annotated[
        int,
        typer.Option(
            "--multimodal-gpu0-cuda-mem-pool-bytes", help="CUDA memory pool of GPU 0 on rank 0.", rich_help_panel=_GPUS
        ),
    ] = 0,
    exit_timeout: Annotated[
        int,
        typer.Option("--exit-timeout", help="Seconds that tritonserver has to end in order.", rich_help_panel=_GPUS),
    ] = 3,
    trtllm_version: TrtllmVersionOption = None,
    container: ContainerOption = None,
    container_flags: ContainerFlagOption = None,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", help="Seconds until all models must be ready.")
    ] = 600.0,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the server is ready.")] = False,
    slurm: SlurmOption = False,
    kubernetes: KubernetesOption = False,
    nodes: NodesOption = 1,
    ntasks_per_node: TasksOption = None,
    out: ClusterOutOption = None,
    submit: SubmitOption = False,
    account: AccountOption = None,
    partition: PartitionOption = None,
    time: TimeOption = None,
    job_name: JobNameOption = None,
    output: OutputOption = None,
    gpu_clock: GpuClockOption = None,
    mpi: MpiOption = None,
    sbatch_flags: SbatchFlagOption = None,
    claim: ClaimOption = None,
    mount_path: MountOption = "/models",
    namespace: NamespaceOption = None,
    hf_secret: HfSecretOption = None,
    ssh_secret: SshSecretOption = None,
    pull_secret: PullSecretOption = None,
    worker_timeout: WorkerTimeoutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve a model with Triton, in the foreground until Ctrl-C, or with --detach in the background."""
    options = locals()  # before anything else has a name here
    from trtserve.pipeline.world_size import repository_for
    from trtserve.start import find_repository, serve_foreground, start_server, with_free_ports

    require_cluster_options(options)
    imported, spec = _server_spec(options)
    spec = with_free_ports(spec) if auto_ports else spec
    progress = TerminalProgress(quiet=quiet)
    found = find_repository(imported, path=model_repository)
    elsewhere = slurm or kubernetes
    if dry_run and not elsewhere:
        _dry_run(found, spec, progress, rebuild=rebuild, json=json)
        return
    repository = repository_for(found, spec, rebuild=rebuild and not dry_run, elsewhere=elsewhere, progress=progress)
    if slurm:
        write_slurm(repository, spec, options)
    elif kubernetes:
        write_kubernetes(repository, spec, options)
    elif detach:
        _print_server(start_server(repository, spec, progress=progress), json=json, quiet=quiet, detached=True)
    else:
        serve_foreground(
            repository,
            spec,
            on_ready=lambda server: _print_server(server, json=json, quiet=quiet, detached=False),
            progress=progress,
        )


def _server_spec(options: Mapping[str, Any]) -> tuple[str | None, ServerSpec]:
    """The import's name and what the options ask for; most have the name of the field that they fill."""
    from trtserve.launch.gpus import parse_gpus

    imported, extra = _split_arguments(options["name"], options["triton_arguments"] or [])
    derived = {
        "name": options["server_name"],
        "gpus": parse_gpus(options["gpus"]) if options["gpus"] is not None else (),
        "spawn_processes": not options["disable_spawn_processes"],
        "extra_arguments": extra,
        "container_flags": tuple(options["container_flags"] or ()),
        # `with_free_ports` sets it with the ports.
        "auto_ports": False,
    }
    same = {field.name: options[field.name] for field in fields(ServerSpec) if field.name not in derived}
    return imported, ServerSpec(**same, **derived)


def _split_arguments(name: str | None, rest: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """`start -- --flag` puts the first flag where a name is expected."""
    if name is not None and name.startswith("-"):
        return None, (name, *rest)
    return name, tuple(rest)


def _dry_run(
    repository: ModelRepository, spec: ServerSpec, progress: TerminalProgress, *, rebuild: bool, json: bool
) -> None:
    """What `start` would do: for another --world-size the stages of the import first."""
    from trtserve.pipeline.world_size import plan_rebuild, planned_stages, repository_for
    from trtserve.start import plan_server, rehearse

    again = plan_rebuild(repository, spec)
    if again is None or not rebuild:
        fitting = repository_for(repository, spec, rebuild=False)
        plan = plan_server(fitting, spec, elsewhere=True)
        rehearse(plan, fitting, spec, progress)
        _print_plan(plan, [], json=json)
        return
    progress.step(f"World size {spec.world_size}: {again.reason}; first these stages are run with {again.size}.")
    stages, made = planned_stages(again, progress=progress)
    exists = made.path.is_dir()
    plan = plan_server(made, spec, served=None if exists else again.served, elsewhere=True)
    if exists:
        rehearse(plan, made, spec, progress)
    else:
        progress.step("The repository's files are checked when they are made.")
    _print_plan(plan, stages, json=json)


def _print_plan(plan: Plan, stages: Sequence[Stage], *, json: bool) -> None:
    commands = [str(instance.launch.command) for instance in plan.instances]
    if json:
        more = {"commands": commands} if len(commands) > 1 else {}
        imported = {"stages": stages} if stages else {}
        print_json("start", {**_described(plan), **imported, "command": commands[0], **more, "dry_run": True})
        return
    print_stages(stages)
    print_commands(stages)
    lines = [f"{key}: {value}" for key, value in _described(plan).items()]
    print_data("\n".join([*lines, *(f"command: {command}" for command in commands)]))


def _described(plan: Plan) -> dict[str, Any]:
    from trtserve.start import transaction_policy

    return {
        "name": plan.name,
        "repository": plan.repository,
        "model": plan.served.model,
        "transaction_policy": transaction_policy(plan.served.streaming),
        "mode": plan.mode,
        "processes": plan.processes,
        "log": plan.log,
        **({} if plan.proxy is None else {"proxy": plan.proxy.file}),
    }


def _print_server(server: Server, *, json: bool, quiet: bool, detached: bool) -> None:
    from trtserve.triton.server import client_host

    url = f"http://{client_host(server.host)}:{server.endpoint.http_port}"
    if json:
        print_json("start", {**asdict(server), "url": url})
    else:
        print_data(url)
    if not quiet:
        _print_hints(server, detached=detached)


def _print_hints(server: Server, *, detached: bool) -> None:
    from trtserve.start import list_servers

    if server.endpoint != server.address:
        say(f"{server.name}: nginx hands requests to all instances, gRPC on {server.host}:{server.endpoint.grpc_port}")
    for instance in server.instances:
        ports = f"gRPC {server.host}:{instance.grpc_port}, metrics {server.host}:{instance.metrics_port}"
        also = f"HTTP {server.host}:{instance.http_port}, " if server.more else ""
        say(f"{server.name} is ready: {also}{ports}")
    which = f" --server {server.name}" if len(list_servers()) > 1 else ""
    say(f'{"Try" if detached else "Try in a second terminal"}: trtserve query "What is ML?"{which}')
    say(f"Stop: trtserve stop {server.name}" if detached else "Stop: Ctrl-C")
