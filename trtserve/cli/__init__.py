"""The command line: the only code that knows Typer and Rich. One file per command; each calls one library function."""

from trtserve.cli.app import run

__all__ = ["run"]
