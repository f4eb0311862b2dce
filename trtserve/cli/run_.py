"""`trtserve run`: import, start and chat in one word."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.chat import IN_CHAT, converse
from trtserve.cli.options import QuietOption, sources
from trtserve.cli.output import BriefLine, say
from trtserve.client.spec import QuerySpec, RequestOptions
from trtserve.errors import ServerNotFoundError

if TYPE_CHECKING:
    from trtserve.server.state import Server


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A server, an import, or what `trtserve import` takes: demo, an alias, org/name, a folder.",
            autocompletion=sources,
        ),
    ],
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Answer this and end, instead of a conversation.")
    ] = None,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    request: Annotated[RequestOptions, IN_CHAT],
    plain: Annotated[bool, typer.Option("--plain", help="Print answers as they are, without Markdown.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each step of import and start.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Talk to a model: it is imported and started first where needed, with the defaults.

    The server keeps running in the background for the next `run`, until `trtserve stop`. Ports that are taken are
    replaced by free ones. For other options than the defaults use `trtserve import` and `trtserve start` first.

    Examples:
        trtserve run demo
        trtserve run demo "What is ML?"
        trtserve run smollm2-135m --system "Answer briefly."
    """
    from trtserve.server.discovery import endpoint_of

    with BriefLine(quiet=quiet, verbose=verbose) as progress:
        server = _running(model, progress)
    converse(endpoint_of(server), QuerySpec(options=request.given()), system=system, plain=plain, question=question)
    if not quiet:
        say(f"{server.name} keeps running on {server.url}. Stop: trtserve stop {server.name}")


def _running(model: str, progress: BriefLine) -> Server:
    """Return the server of a model, started in the background if there is none."""
    from trtserve.pipeline.import_spec import resolve_import
    from trtserve.pipeline.importing import import_to_repository
    from trtserve.server.detach import start_in_background
    from trtserve.server.discovery import find_server
    from trtserve.server.plan import with_free_ports
    from trtserve.server.repositories import find_repository
    from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec, ServerSpec
    from trtserve.store import Store
    from trtserve.store.sources import parse_source

    store = Store()
    recorded = {record.name for record in store.recorded()}
    for name in dict.fromkeys((model, *(() if model in recorded else (parse_source(model).name,)))):
        with suppress(ServerNotFoundError):
            return find_server(name, store=store)
    if name not in recorded:
        progress.stage(f"Importing {name}")
        specs: Any = {"convert": ConvertSpec(), "build": BuildSpec(), "repository": RepositorySpec()}
        import_to_repository(resolve_import(model, **specs, progress=progress), progress=progress)
    repository = find_repository(name)
    progress.stage(f"Starting {name}")
    with store.in_use(repository.path):
        return start_in_background(repository, with_free_ports(ServerSpec(auto_ports=True)), progress=progress)
