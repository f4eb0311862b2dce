"""Options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON (versioned envelope).")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, with every external command.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder of the artefact; default: a folder of the store.", metavar="DIR")
]
