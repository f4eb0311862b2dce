"""`trtserve bindings`: run a program that was written for TensorRT-LLM's Python bindings on the embedded executor."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from trtserve.cli.options import JsonOption
from trtserve.cli.output import print_data, print_json
from trtserve.errors import UsageError
from trtserve.nvidia.releases import NEWEST


def bindings(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Program to run, with its arguments.")
    ] = None,
    *,
    release: Annotated[
        str, typer.Option("--release", metavar="RELEASE", help="TensorRT-LLM release whose names and keywords it uses.")
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
