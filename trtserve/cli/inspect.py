"""`trtserve inspect`: describe an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.options import JsonOption, QuietOption, models
from trtserve.cli.output import TerminalProgress, count, print_block, print_json
from trtserve.errors import counted
from trtserve.host.machine import format_bytes

if TYPE_CHECKING:
    from trtserve.pipeline.inspect import Description


def inspect(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="Folder of an engine, repository or checkpoint, or the name of an imported model.",
            autocompletion=models,
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
    print_block("\n\n".join("\n".join(f"{label:<10} {text}" for label, text in _lines(each)) for each in found))


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
        ("takes", ", ".join(found.features)),
        ("ranks", f"{parallel['world_size']} ({_pairs({k: v for k, v in parallel.items() if k != 'world_size'})})"),
        ("KV cache", ", ".join(filter(None, (cache, tokens)))),
        ("plugins", _pairs(found.plugins)),
        ("arguments", _pairs(found.arguments)),
        ("built by", _pairs(found.versions) or "unknown"),
        ("built on", _built_on(found)),
        ("built at", found.created or ""),
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
        return _pairs(found.built_on["machine"])
    return "unknown: no manifest of trtserve" if found.kind == "engine" else ""


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(name if value is True else f"{name} {value}" for name, value in values.items())
