"""`trtserve init`, `up`, `diff` and `down`: one file for the models and servers of a machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.bench_results import print_report, say_notes
from trtserve.cli.bench_runs import metrics_url, require_complete
from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.cli.options import DryRunOption, JsonOption, QuietOption, imports, paths
from trtserve.cli.output import (
    ChangingLine,
    TerminalProgress,
    print_commands,
    print_data,
    print_json,
    print_stages,
    print_stopped,
    say,
)
from trtserve.errors import MissedLimitError, UsageError

if TYPE_CHECKING:
    from trtserve.pipeline.setup_file.plan import BenchmarkResult, Brought, SetupPlan
    from trtserve.progress import Progress

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="YAML file with models and servers; default: trtserve.yaml.", autocompletion=paths
    ),
]
_DEFAULT = Path("trtserve.yaml")


def init(
    file: FileArgument = _DEFAULT,
    imported: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Describe this import, with its options.", autocompletion=imports),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a setup file: with comments, for the demo model, or the record of an import.

    Examples:
        trtserve init
        trtserve init chat.yaml --from llama-2-7b
    """
    from trtserve.files import write_whole
    from trtserve.pipeline.setup_file.reading import setup_of_import, template
    from trtserve.store import Store

    if file.exists():
        raise UsageError(f"{file} exists already.", hint="Edit it, or give another name.")
    text = template() if imported is None else setup_of_import(imported, Store())
    write_whole(file, text)
    if json:
        print_json("init", {"file": str(file)})
    else:
        print_data(str(file))
        say(f"Next: trtserve up {shlex.quote(str(file))}")


def up(
    file: FileArgument = _DEFAULT, json: JsonOption = False, dry_run: DryRunOption = False, quiet: QuietOption = False
) -> None:
    """Import the models of a file, start its servers in the background, and run its benchmarks when they are ready.

    What exists is reused, so an interrupted `up` continues where it was. A running server restarts only if its model
    or its options changed. For a server on a cluster it writes the Slurm job or the Kubernetes manifest. Ends with code
    53 if a benchmark misses its limits.

    Examples:
        trtserve up
        trtserve up chat.yaml --dry-run
    """
    from trtserve.pipeline.setup_file.plan import bring_up, plan_setup
    from trtserve.pipeline.setup_file.reading import read_setup

    progress = TerminalProgress(quiet=quiet)
    plan = plan_setup(read_setup(file), progress=progress)
    if dry_run:
        _print_plan("up", plan, json=json)
        for warning in plan.warnings:
            progress.warn(warning)
        for note in plan.notes:
            progress.step(note)
        return
    _announce(plan, progress)
    with ChangingLine(quiet=quiet) as changing:
        brought = bring_up(plan, progress=changing)
    servers, jobs = brought.servers, brought.jobs
    if not json:
        for server in servers:
            print_data(f"{server.name}  {server.url}")
        for each in jobs:
            print_data(f"{each.server}  {each.job.script}")
    results = _measure(plan, progress, json=json)
    if json:
        ready = [{"name": each.name, "model": each.model, "url": each.url} for each in servers]
        benchmarks = [each.to_json() for each in results]
        models = [model.setup.name for model in plan.models]
        written = [each.to_json() for each in jobs]
        print_json("up", {"models": models, "servers": ready, "jobs": written, "benchmarks": benchmarks})
    _require_limits(results)
    if not quiet and not json:
        _print_next(plan, brought, file)


def _print_next(plan: SetupPlan, brought: Brought, file: Path) -> None:
    for step in (step for each in brought.jobs for step in each.next_steps):
        say(step)
    pages = {each.setup.name for each in plan.servers if each.setup.spec.ui}
    for server in brought.servers:
        if server.name in pages:
            say(f"Page: {server.url}/")
    if brought.servers:
        which = "" if len(brought.servers) == 1 else f" --server {brought.servers[0].name}"
        say(f'Try: trtserve query "What is ML?"{which}')
        say(f"Stop: trtserve down {file}")


def _announce(plan: SetupPlan, progress: Progress) -> None:
    for model in plan.models:
        made = [stage["stage"] for stage in model.stages() if stage["action"] == "make"]
        progress.step(f"Plan: model {model.setup.name}: {', '.join(made) or 'reuse'}")
    for planned in plan.servers:
        progress.step(f"Plan: server {planned.setup.name}: {planned.text}")
    for benchmark in plan.benchmarks:
        progress.step(f"Plan: benchmark {benchmark.name}")
    for note in plan.notes:
        progress.step(note)


def _measure(plan: SetupPlan, progress: Progress, *, json: bool) -> list[BenchmarkResult]:
    from trtserve.pipeline.setup_file.plan import measure

    results = []
    for benchmark in plan.benchmarks:
        connection = Connection(server=benchmark.server)
        result = measure(benchmark, find_endpoint(connection), metrics=metrics_url(connection), progress=progress)
        results.append(result)
        if not json:
            print_report(result.report, table=None)
        say_notes([result.report], progress.step)
        if result.report.interrupted:
            raise KeyboardInterrupt
    return results


def _require_limits(results: list[BenchmarkResult]) -> None:
    """Raise the error of the first benchmark that failed, or MissedLimitError with all limits that were missed."""
    for result in results:
        require_complete(result.report, strict=result.setup.strict)
    missed = [f"{result.setup.name}: {text}" for result in results for text in result.missed]
    if missed:
        raise MissedLimitError(
            f"{'; '.join(missed)}.",
            hint="The servers keep running. Change the load, the model or the limits, and run `up` again.",
        )


def diff(file: FileArgument = _DEFAULT, json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Print what `up` would build, restart or write, and which options changed since the last import.

    Examples:
        trtserve diff
        trtserve diff chat.yaml --json
    """
    from trtserve.pipeline.setup_file.plan import plan_setup
    from trtserve.pipeline.setup_file.reading import read_setup

    progress = TerminalProgress(quiet=quiet)
    plan = plan_setup(read_setup(file), progress=progress)
    if json:
        _print_plan("diff", plan, json=True)
        return
    lines = []
    for model in plan.models:
        made = [stage["stage"] for stage in model.stages() if stage["action"] == "make"]
        lines += [f"model {model.setup.name}: {', '.join(made)}"] if made else []
        lines += [f"  {text}" for text in model.differences]
    lines += [f"server {each.setup.name}: {each.text}" for each in plan.servers if each.action != "keep"]
    if lines:
        print_data("\n".join(lines))
    else:
        progress.step("Nothing to do: all models are built, and all servers run or have their files.")
    for note in plan.notes:
        progress.step(note)


def down(
    file: FileArgument = _DEFAULT,
    drain: Annotated[
        float,
        typer.Option("--drain", metavar="SECONDS", min=0, help="Wait this long for running requests to end."),
    ] = 0.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Stop the servers of a file on this machine; models, engines and files for clusters are kept.

    Examples:
        trtserve down
        trtserve down chat.yaml --drain 30
    """
    from trtserve.pipeline.setup_file.plan import bring_down, stop_command
    from trtserve.pipeline.setup_file.reading import read_setup

    progress, setup = TerminalProgress(quiet=quiet), read_setup(file)
    stopped = [server.name for server in bring_down(setup, drain=drain, progress=progress)]
    for server in setup.servers:
        if server.cluster is not None:
            progress.step(f"Server {server.name} is stopped on its cluster: {stop_command(server.cluster)}")
    if json:
        print_json("down", {"stopped": stopped})
    elif stopped:
        print_stopped(stopped)
    else:
        progress.step("No server of the file is running.")


def _print_plan(command: str, plan: SetupPlan, *, json: bool) -> None:
    if json:
        models = [
            {"name": model.setup.name, "stages": model.stages(), "differences": model.differences}
            for model in plan.models
        ]
        servers = [
            {
                "name": each.setup.name,
                "model": each.setup.model,
                "action": each.action,
                "differences": each.differences,
                "moved": each.moved,
            }
            for each in plan.servers
        ]
        benchmarks = [each.name for each in plan.benchmarks]
        print_json(command, {"models": models, "servers": servers, "benchmarks": benchmarks, "unnamed": plan.unnamed})
        return
    for model in plan.models:
        print_data(f"model {model.setup.name}")
        print_stages(model.stages())
        print_commands(model.stages())
    for server in plan.servers:
        print_data(f"server {server.setup.name}: {server.text}")
    for benchmark in plan.benchmarks:
        print_data(f"benchmark {benchmark.name}: server {benchmark.server}")
