"""The command line with all commands, for what documents it."""

from trtserve.cli.commands import application

app = application()
