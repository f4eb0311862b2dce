"""`trtserve doctor`, what this machine lacks, and `trtserve bindings`, a program on the embedded executor."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import JsonOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_data, print_json, print_table, terminal, wrapped
from trtserve.errors import UsageError
from trtserve.nvidia.releases import NEWEST
from trtserve.specs import RuntimeName, ServerSpec
from trtserve.specs.options import ForRelease

if TYPE_CHECKING:
    from rich.text import Text

    from trtserve.server.doctor import CheckResult
    from trtserve.server.doctor.examination import Examination

_TITLES = {
    "machine": "Machine",
    "python": "Python",
    "triton": "Triton",
    "gpu": "NVIDIA GPUs",
    "tensorrt_llm": "TensorRT-LLM",
    "mpi": "MPI",
    "tools": "Tools for some launches",
    "hub": "Hugging Face",
}
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "unneeded": "dim"}
_COLUMNS = ("group", "name", "state", "evidence", "fix")
_STATE_WIDTH = max(map(len, _STYLES)) + 2
_LEAST_WIDTH = 40


def doctor(
    runtime: Annotated[
        RuntimeName,
        typer.Option(
            "--runtime",
            help="Runtime that must work here; what it does not need is reported as unneeded. auto: the one that "
            "`import` would choose.",
        ),
    ] = "auto",
    *,
    release: ForRelease,
    online: Annotated[bool, typer.Option("--online", help="Ask the hub whether it accepts the token.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the runtime's speed here instead, for the predictions of `tune`."),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check this machine for problems that would fail silently later, with the fix of each.

    Ends with exit code 30 if the runtime cannot work here.

    Examples:
        trtserve doctor
        trtserve doctor --measure
        trtserve doctor --runtime tensorrt_llm --json
    """
    from trtserve.server.doctor import raise_failed
    from trtserve.server.doctor.examination import examine
    from trtserve.server.triton.tritonserver import Address

    if measure:
        _measure(runtime, json=json, quiet=quiet)
        return
    spec = ServerSpec()
    examination = examine(
        Address(host=spec.host, http_port=spec.http_port, grpc_port=spec.grpc_port, metrics_port=spec.metrics_port),
        runtime=runtime,
        trtllm_version=release.trtllm_version,
        online=online,
        progress=TerminalProgress(quiet=quiet),
    )
    if json:
        print_json("doctor", _described(examination))
    elif sys.stdout.isatty():
        _print(examination)
    else:
        print_table(_COLUMNS, [[getattr(finding, column) for column in _COLUMNS] for finding in examination.findings])
    raise_failed(examination.findings)


def _measure(runtime: RuntimeName, *, json: bool, quiet: bool) -> None:
    from trtserve.pipeline.tuning.trials import measure_speed

    name, speed = measure_speed(runtime, progress=TerminalProgress(quiet=quiet))
    if json:
        print_json("doctor", {"runtime": name, **asdict(speed)})
        return
    rows = [
        ("weights are read at", f"{speed.bytes_per_second / 1e9:.3g} GB/s"),
        ("matrices compute", f"{speed.operations_per_second / 1e9:.4g} G operations/s"),
        ("fixed cost of a step", f"{1000 * speed.step_seconds:.3g} ms"),
        ("a sequence in a step", f"{1000 * speed.sequence_seconds:.3g} ms"),
        ("a request", f"{1000 * speed.request_seconds:.3g} ms"),
    ]
    print_table((name, "here"), rows)


def _described(examination: Examination) -> dict[str, object]:
    findings = [{**asdict(finding), "needed_by": sorted(finding.needed_by)} for finding in examination.findings]
    return {
        "runtime": examination.runtime,
        "reason": examination.reason,
        "works": examination.works,
        "findings": findings,
    }


def _print(examination: Examination) -> None:
    """Print a block per group: state, name and evidence of each finding, and the fix below it."""
    from rich.text import Text

    console = terminal(soft_wrap=True)
    names = max(len(finding.name) for finding in examination.findings) + 2
    for group, findings in groupby(examination.findings, key=lambda finding: finding.group):
        console.print(Text(_TITLES[group], style="bold"))
        for finding in findings:
            console.print(_lines(finding, names, max(_LEAST_WIDTH, console.width - 1)))
    works = ("works here", "bold green") if examination.works else ("cannot work here", "bold red")
    console.print()
    if any(finding.state == "unneeded" and finding.fix for finding in examination.findings):
        console.print(Text("What is unneeded: `trtserve doctor --json` says how to get it.", style="dim"))
    console.print(Text.assemble("Runtime ", (examination.runtime, "bold"), f" ({examination.reason}) ", works, "."))


def _lines(finding: CheckResult, names: int, width: int) -> Text:
    from rich.text import Text

    indent = 2 + _STATE_WIDTH + names
    room = max(_LEAST_WIDTH, width - indent)
    if width - indent < _LEAST_WIDTH or max(map(len, finding.evidence.split()), default=0) > room:
        indent, room = 4, width - 4  # a path stays whole
    evidence = wrapped(finding.evidence, room)
    fix = wrapped(finding.fix, room - 2) if finding.fix and finding.state != "unneeded" else []
    text = Text.assemble("  ", (f"{finding.state:<{_STATE_WIDTH}}", _STYLES[finding.state]), f"{finding.name:<{names}}")
    below = [*evidence, *(("→ " if number == 0 else "  ") + line for number, line in enumerate(fix))]
    if indent > 4:
        text.append(below.pop(0))
    for line in below:
        text.append("\n" + " " * indent + line)
    return text


def bindings(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Program to run, with its arguments.")
    ] = None,
    *,
    release: Annotated[
        str, typer.Option("--release", metavar="RELEASE", help="TensorRT-LLM release that it asks for.")
    ] = NEWEST,
    json: JsonOption = False,
) -> None:
    """Run a program that imports tensorrt_llm.bindings.executor on the embedded executor.

    Triton servers that the program starts serve such models too. Without a program the command prints a folder for
    PYTHONPATH, which Python reads, but not Triton.

    Examples:
        trtserve bindings --release 0.16 -- trtserve start --model-repo models
        trtserve bindings --release 0.16 -- python3 program.py
        PYTHONPATH=$(trtserve bindings --release 0.16) python3 program.py
    """
    from trtserve.executor.interface.bindings import bindings_environment
    from trtserve.process import Command, become
    from trtserve.store import Store

    environment = bindings_environment(release, Store())
    environment.prepare()
    if not command:
        if json:
            print_json("bindings", {"release": environment.release, "packages": environment.packages})
        else:
            print_data(str(environment.packages))
        return
    if json:
        raise UsageError("--json is for the folder; the program's output is its own.", hint="Leave it out.")
    path = os.pathsep.join([str(environment.programs), os.environ.get("PATH", os.defpath)])
    become(Command(argv=tuple(command), env={"PATH": path, "TRTSERVE_START_BINDINGS": environment.release}))
