"""`trtserve push` and `pull`: what was built here is served elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.cli.options import DryRunOption, JsonOption, QuietOption, models
from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.host.machine import format_bytes

if TYPE_CHECKING:
    from trtserve.pipeline.travel import Transfer

_TARGET_HELP = (
    "oci://HOST/NAME[:TAG] of a registry, s3://BUCKET/PATH[:TAG], gs://BUCKET/PATH[:TAG], or a folder[:TAG]; without "
    "a tag: latest."
)


def push(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of an import, or folder of an artefact.", autocompletion=models)
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET_HELP)],
    *,
    kind: Annotated[
        Literal["repository", "engine", "checkpoint", "model", "adapter"],
        typer.Option("--kind", help="Which artefact of that name."),
    ] = "repository",
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Copy what was built to a registry, an object store or a folder, for `trtserve pull` on other machines.

    Only what is not there yet is sent, so an interrupted push continues. The login of a registry is that of `docker
    login`; object stores take their own (AWS_PROFILE, gcloud), and need `pip install 'trtserve[cloud]'`.

    Examples:
        trtserve push llama oci://registry.example.com/models/llama:2026-11
        trtserve push llama s3://bucket/models --dry-run
    """
    from trtserve.artifacts import KINDS
    from trtserve.pipeline import travel

    chosen = next(each for each, word in KINDS.items() if word == kind)
    done = travel.push(name, target, kind=chosen, dry_run=dry_run, progress=TerminalProgress(quiet=quiet))
    _print("push", done, target, dry_run=dry_run, json=json, quiet=quiet)


def pull(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{_TARGET_HELP} Or @sha256:… in place of the tag.")],
    *,
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="Pull what this machine cannot serve, too.")
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Copy what `trtserve push` stored into this machine's store; then `trtserve start NAME` serves it.

    The small files come first: if TensorRT-LLM, GPUs or memory of this machine do not fit, no weights are moved. Every
    file is compared with its digest and with the checksum that it was made with. An interrupted pull continues.
    A model repository is a program that will run as you: pull from where you would take a program.

    Examples:
        trtserve pull oci://registry.example.com/llama:2026 && trtserve start llama
        trtserve pull s3://bucket/models
    """
    from trtserve.pipeline import travel

    done = travel.pull(target, any_machine=any_machine, dry_run=dry_run, progress=TerminalProgress(quiet=quiet))
    _print("pull", done, target, dry_run=dry_run, json=json, quiet=quiet)


def _print(command: str, done: Transfer, target: str, *, dry_run: bool, json: bool, quiet: bool) -> None:
    kind = done.artifact.manifest.kind if done.artifact.manifest else ""
    if json:
        print_json(
            command,
            {
                "name": done.artifact.name,
                "kind": kind,
                "path": str(done.artifact.path),
                "fingerprint": done.artifact.fingerprint,
                "digest": done.digest,
                "bytes": done.total,
                "moved_bytes": done.missing,
                "dry_run": dry_run,
            },
        )
        return
    print_data(str(done.artifact.path) if command == "pull" else done.digest)
    if not quiet:
        moved = "would be moved" if dry_run else "moved"
        say(f"{done.artifact.name} ({kind}): {format_bytes(done.missing)} of {format_bytes(done.total)} {moved}")
        if kind == "repository" and not dry_run:
            say(f"Next: trtserve {f'start {done.artifact.name}' if command == 'pull' else f'pull {target}'}")
