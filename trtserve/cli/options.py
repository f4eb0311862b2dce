"""Options and arguments that several commands share and that no spec declares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtserve.cli.completion import models, paths, servers
from trtserve.errors import UsageError

JSON_HELP = "Print the result as JSON (versioned envelope)."
DRY_RUN_HELP = "Print what would be done, with every external command."
QUIET_HELP = "No progress on stderr."
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of the result.",
        show_default="a folder of the store",
        autocompletion=paths,
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option("--verify", help="Compare the checkpoint with the model, as `check` does, and stop if they differ."),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL",
        help="Hugging Face folder with the tokenizer, or the name of an imported model.",
        autocompletion=models,
    ),
]
ServerArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Name of the server; default: the only one.", autocompletion=servers),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="NAME", help="Same as NAME, as `query` and `bench` take it.", autocompletion=servers
    ),
]


def one_name(name: str | None, server: str | None) -> str | None:
    """Return the server that was named as argument or with --server. Raises UsageError for two different ones."""
    if name is not None and server not in (None, name):
        raise UsageError(f"{name} and --server {server} name two servers; give one.")
    return name or server
