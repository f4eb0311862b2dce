"""The command line of trtllm-build per release, from the product's table, which tests/golden/release_facts.py guards.

Stricter than the real parser in one point: no abbreviated flags. Everything else is argparse as upstream uses it, so an
unknown or removed flag and a wrong form of a value end with its usage text and code 2.
"""

from __future__ import annotations

import argparse

from tests.doubles.flags import SWITCHES, Flag, Release, add_flag
from trtserve.nvidia.releases.options import build_flags

_KINDS = {"enable": "choice", "list": "texts"}


def flags(release: Release) -> tuple[Flag, ...]:
    """Every flag that this release's trtllm-build knows."""
    return tuple(
        Flag(
            names=(name, *known.also),
            kind=_KINDS.get(known.kind, known.kind),
            default=int(known.default) if known.kind == "int" and known.default else known.default,
            choices=known.choices,
            plugin=known.plugin,
        )
        for name, known in build_flags(".".join(map(str, release))).items()
    )


def _kv_cache_type(text: str) -> str:
    """Upstream accepts any case and names the choices in its error."""
    if text.lower() in {"continuous", "paged", "disabled"}:
        return text.upper()
    raise argparse.ArgumentTypeError(f"Invalid value '{text}'. Expected one of ['continuous', 'paged', 'disabled']")


def build_parser(release: Release) -> argparse.ArgumentParser:
    """The parser of one release."""
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False)
    for known in flags(release):
        if known.names == ("--kv_cache_type",):
            parser.add_argument("--kv_cache_type", type=_kv_cache_type, default=None)
        else:
            add_flag(parser, known)
    return parser


def plugin_config(release: Release, arguments: argparse.Namespace) -> dict[str, object]:
    """The object `plugin_config` of the engine: booleans for features, null for a plugin that is off."""
    config: dict[str, object] = {}
    for known in flags(release):
        if not known.plugin:
            continue
        name = known.names[0].removeprefix("--")
        value = getattr(arguments, name)
        if known.choices == SWITCHES:
            value = value == "enable"
        elif value == "disable":
            value = None
        config[name] = value
    return config
