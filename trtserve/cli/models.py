"""`trtserve models`: list the models that have a short name."""

from __future__ import annotations

from dataclasses import asdict

from trtserve.cli.options import JsonOption
from trtserve.cli.output import (
    count,
    print_json,
    print_table,
    say,
)
from trtserve.host.machine import format_bytes


def models(json: JsonOption = False) -> None:
    """List the short names that import and plan understand: size, licence, and what fits this machine.

    Any other model of the hub is named org/name; `trtserve plan org/name` says whether it fits.

    Examples:
        trtserve models
        trtserve models --json
    """
    from trtserve.pipeline.catalogue import list_known

    found = list(list_known())
    if json:
        print_json("models", [asdict(each) for each in found])
        return
    rows = [
        (
            each.alias,
            each.repository,
            count(each.parameters),
            format_bytes(each.source_bytes),
            f"{each.licence}, gated" if each.gated else each.licence,
            each.fits or "unknown",
        )
        for each in found
    ]
    print_table(("alias", "hub id", "parameters", "download", "licence", "fits here"), rows)
    say("int8 and int4: with --quantize int8 or int4. Gated: accept the licence on the hub, then `hf auth login`.")
    ungated = next((each.alias for each in found if not each.gated and each.fits == "yes"), None)
    if ungated is not None:
        say(f"Next: trtserve import {ungated}")
