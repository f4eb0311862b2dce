"""Models and artefacts: `trtserve models`, `list`, `remove`, `prune`, `inspect`, `push` and `pull`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtserve.cli.options import DryRunOption, JsonOption, QuietOption, imports
from trtserve.cli.options import models as stored
from trtserve.cli.output import (
    TerminalProgress,
    count,
    cut,
    print_block,
    print_data,
    print_json,
    print_table,
    say,
    with_bytes,
)
from trtserve.errors import ModelNotFoundError, UsageError, counted
from trtserve.host.machine import format_bytes

if TYPE_CHECKING:
    from trtserve.pipeline.inspect import Description
    from trtserve.pipeline.inventory import Removal, StoredName
    from trtserve.pipeline.travel import Transfer


_ROOM = 120  # columns of a terminal that has room for the hub ids


def models(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORDS", help="Parts of the name or the hub id; default: all models.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the short names that import and plan understand: size, licence, and what fits this machine.

    Any other model of the hub is named org/name; `trtserve plan org/name` says whether it fits.

    Examples:
        trtserve models
        trtserve models qwen 0.5b
    """
    from trtserve.pipeline.estimate import list_known

    found = list(list_known(words or ()))
    if words and not found:
        raise ModelNotFoundError(
            f"No short name has {' and '.join(words)}.",
            hint="`trtserve models` lists all. Another model of the hub is named org/name: trtserve plan org/name.",
        )
    if json:
        keys = ("alias", "repository", "parameters", "source_bytes", "licence", "gated")
        print_json(
            "models",
            [
                {**{key: getattr(each, key) for key in keys}, "fits": here.fit, "reason": here.reason}
                for each, here in found
            ],
        )
        return
    shown = sys.stdout.isatty()
    rows: list[tuple[str, ...]] = [
        (
            each.alias,
            each.repository,
            count(each.parameters),
            format_bytes(each.source_bytes),
            f"{each.licence}, gated" if each.gated else each.licence,
            ": ".join(filter(None, (here.fit or "unknown", here.lacks if shown else here.reason))),
        )
        for each, here in found
    ]
    columns: tuple[str, ...] = ("alias", "hub id", "size", "download", "licence", "fits here")
    if shown and get_terminal_size().columns < _ROOM:  # `plan ALIAS` and --json tell where it comes from
        columns, rows = (columns[0], *columns[2:]), [(row[0], *row[2:]) for row in rows]
    print_table(columns, rows)
    say("int8 and int4: with --quantize int8 or int4. Gated: accept the licence on the hub, then `hf auth login`.")
    if shown and any(here.lacks for _, here in found):
        say("`trtserve plan ALIAS` says why a model does not fit.")
    small = [(each.source_bytes, each.alias) for each, here in found if not each.gated and here.fit == "yes"]
    talk = [(size, alias) for size, alias in small if "instruct" in alias or "chat" in alias]
    if talk:
        say(f"Next: trtserve run {min(talk)[1]}")


def list_models(json: JsonOption = False) -> None:
    """List imported models: source, size on disk, engine precision, repository, running server.

    Examples:
        trtserve list
        trtserve list --json
    """
    from trtserve.pipeline.inventory import list_imported

    entries = list_imported()
    if json:
        print_json("list", [with_bytes(asdict(entry)) for entry in entries])
        return
    if not entries:
        say("Nothing has been imported yet. Try: trtserve import demo")
        return
    columns = ("name", "source", "size", "engine", "repository", "server")
    rows = [
        (e.name, e.source, format_bytes(e.size), e.precision or "-", _place(e.repository), _server(e)) for e in entries
    ]
    print_table(columns, rows)


def _server(entry: StoredName) -> str:
    return f"{entry.server} (another build)" if entry.other_build else entry.server or "-"


def _place(repository: str) -> str:
    # A terminal shows only the name of a folder in the store; a pipe gets the full path.
    from trtserve.artifacts import ModelRepository
    from trtserve.store import Store

    path = Path(repository)
    in_store = path.parent == Store().folder(ModelRepository)
    return path.name if repository and in_store and sys.stdout.isatty() else repository or "-"


def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names, as `trtserve list` shows them.", autocompletion=imports),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Remove everything in the store, unfinished downloads included; logs only if no server runs."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Remove imported models and their artefacts; artefacts that other names use stay.

    Examples:
        trtserve remove llama-2-7b --dry-run
        trtserve remove --all
    """
    from trtserve.pipeline import inventory

    if bool(names) == everything:
        raise UsageError("Name what to remove, or give --all (not both).", hint="trtserve list shows the names.")
    removal = inventory.plan_removal(names or (), everything=everything)
    if not dry_run:
        inventory.remove(removal)
    _print_removal("remove", removal, dry_run=dry_run, json=json)


def prune(dry_run: DryRunOption = False, json: JsonOption = False) -> None:
    """Remove what no name reaches: older builds, and what interrupted commands left, unfinished downloads included.

    What `trtserve list` shows with its newest build stays, and so does what a server runs.

    Examples:
        trtserve prune --dry-run
        trtserve prune
    """
    from trtserve.pipeline import inventory

    removal = inventory.plan_prune()
    if not dry_run:
        inventory.remove(removal)
    _print_removal("prune", removal, dry_run=dry_run, json=json)


def _print_removal(command: str, removal: Removal, *, dry_run: bool, json: bool) -> None:
    if json:
        print_json(command, with_bytes(asdict(removal)) | {"removed": not dry_run})
        return
    for folder in removal.folders:
        print_data(str(folder))
    for folder in removal.kept:
        say(f"kept, because another name uses it or it is outside the store: {folder}")
    say(f"{format_bytes(removal.size)} {'would be freed' if dry_run else 'freed'}")


def inspect(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="Folder of an engine, repository or checkpoint, or the name of an imported model.",
            autocompletion=stored,
        ),
    ],
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show an engine's model, limits, ranks, plugins, quantisation and versions; needs no GPU.

    Reads engines of NVIDIA's own trtllm-build and checkpoints, too.

    Examples:
        trtserve inspect llama-2-7b
        trtserve inspect ./engine --json
    """
    from trtserve.pipeline.inspect import describe

    found = describe(engine, progress=TerminalProgress(quiet=quiet))
    if json:
        results = [{**asdict(each), "path": str(each.path), "missing": list(each.missing)} for each in found]
        print_json("inspect", results[0] if len(results) == 1 else {"engines": results})
        return
    print_block("\n\n".join("\n".join(f"{label:<10} {cut(text)}" for label, text in _lines(each)) for each in found))


def _lines(found: Description) -> list[tuple[str, str]]:
    kv, parallel = found.kv_cache, found.parallel
    per_token = kv.get("bytes_per_token")
    blocks = f", {kv['tokens_per_block']} tokens per block" if kv.get("tokens_per_block") else ""
    cache = f"{str(kv.get('type', 'none')).lower()}{blocks}" if found.kind == "engine" else ""
    tokens = f"{per_token} bytes per token of all ranks" if per_token else ""
    lines = [
        (found.kind, str(found.path)),
        ("model", _model(found.model)),
        ("precision", found.precision),
        ("quantised", _pairs(found.quantization) if found.quantization.get("quant_algo") else ""),
        ("limits", _limits(found.limits)),
        ("lengths", _lengths(found.limits)),
        ("features", ", ".join(found.features)),
        ("ranks", f"{parallel['world_size']} ({_pairs({k: v for k, v in parallel.items() if k != 'world_size'})})"),
        ("KV cache", ", ".join(filter(None, (cache, tokens)))),
        ("plugins", _pairs(found.plugins)),
        ("arguments", _pairs(found.arguments)),
        ("built by", _pairs(found.versions) or "unknown"),
        ("built on", _built_on(found)),
        ("built at", (found.created or "").partition(".")[0].replace("T", " ") + " UTC" * bool(found.created)),
        *(("file", f"{file.name}, {format_bytes(file.size) if file.size else 'MISSING'}") for file in found.files),
    ]
    return [(label, text) for label, text in lines if text]


def _model(model: Mapping[str, Any]) -> str:
    words = [
        str(model.get("architecture")),
        *([f"{count(model['parameters'])} parameters"] if model.get("parameters") else []),
        f"{model.get('num_hidden_layers')} layers of {model.get('hidden_size')}",
        f"{model.get('num_attention_heads')} heads, {model.get('num_key_value_heads')} for keys and values",
        f"vocabulary {model.get('vocab_size')}",
    ]
    return ", ".join(words)


def _limits(limits: Mapping[str, Any] | None) -> str:
    if not limits:
        return ""
    return f"{limits.get('max_batch_size')} requests, {limits.get('max_num_tokens')} tokens per step, " + counted(
        limits.get("max_beam_width", 1), "beam"
    )


def _lengths(limits: Mapping[str, Any] | None) -> str:
    if not limits or not {"max_input_len", "max_seq_len"} <= limits.keys():
        return ""
    longest = limits["max_seq_len"]
    prompt = min(limits["max_input_len"], longest - 1)  # an answer has at least one token
    return f"prompts up to {prompt} tokens, prompt and answer up to {longest}"


def _built_on(found: Description) -> str:
    if found.built_on.get("gpu"):
        return f"{found.built_on['gpu']}, SM {found.built_on.get('sm')}"
    if found.built_on.get("machine"):
        machine = found.built_on["machine"]
        where = f"{machine.get('system', '')} {machine.get('machine', '')}".strip()
        return f"{where}, {'with' if machine.get('bfloat16') else 'without'} bfloat16 arithmetic"
    return "unknown: no manifest of trtserve" if found.kind == "engine" else ""


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(name if value is True else f"{name} {value}" for name, value in values.items())


_TARGET_HELP = (
    "oci://HOST/NAME[:TAG] of a registry, s3://BUCKET/PATH[:TAG], gs://BUCKET/PATH[:TAG], or a folder[:TAG]; without "
    "a tag: latest."
)


def push(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of an import, or folder of an artefact.", autocompletion=stored),
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
            then = f"start {done.artifact.name}" if command == "pull" else f"pull {shlex.quote(target)}"
            say(f"Next: trtserve {then}")
