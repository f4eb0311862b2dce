"""`trtserve metrics`: show a server's metrics as a table or as a live view."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.endpoint import require_port, split_address
from trtserve.cli.options import JsonOption, ServerArgument, ServerOption, one_name
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, print_table, say, terminal
from trtserve.errors import UsageError
from trtserve.host.machine import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtserve.client.metrics import CoreMetrics, GpuMetrics, ModelMetrics
    from trtserve.server.status import MetricsSource, Reading

_CORE_COLUMNS = ("model", "family", "value of", "value")
_MODEL_COLUMNS = ("model", "requests", "failed", "pending", "executions", "request ms", "queue ms")


def metrics(
    name: ServerArgument = None,
    *,
    server: ServerOption = None,
    url: Annotated[str | None, typer.Option("--url", metavar="HOST:PORT", help="Metrics port of any Triton.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print the metrics page unchanged.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show KV cache, requests and tokens per second until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two readings.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="How many readings --watch takes.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the metrics of a running server: the core model's (nv_trt_llm_…) and Triton's (nv_inference_…).

    Examples:
        trtserve metrics
        trtserve metrics demo --watch
        trtserve metrics --url localhost:8002 --json
    """
    from trtserve.server.status import read_metrics

    if watch and (json or raw):
        raise UsageError("--watch prints one reading after another; it cannot be combined with --json or --raw.")
    source = _source(one_name(name, server), url)
    if watch:
        _watch(source, interval, count)
        return
    reading = read_metrics(source)
    if raw:
        print_data(reading.text)
    elif json:
        print_json(
            "metrics",
            {
                "server": source.name,
                "core": [{"model": each.model, "version": each.version, **each.families} for each in reading.core],
                "models": [{"model": each.model, "version": each.version, **each.values} for each in reading.models],
                "gpus": [{"uuid": each.uuid, **each.values} for each in reading.gpus],
            },
        )
    else:
        _print(reading)


def _source(name: str | None, url: str | None) -> MetricsSource:
    from trtserve.server.status import find_source, remote_source

    if url is None:
        source = find_source(name)
        if source.server is not None and source.server.kept is not None:
            loaded = ", ".join(each for each, state in source.server.kept.items() if state == "loaded")
            raise UsageError(
                f"{source.name} is a port for many models; the metrics of Triton are those of each loaded one.",
                hint=f"Name a loaded model ({loaded or 'none yet'}), or read {source.server.url}/metrics.",
            )
        return source
    if name is not None:
        raise UsageError("The name of a server cannot be combined with --url.")
    host, port = split_address(url)
    require_port(host, port, "metrics")
    return remote_source(host, port)


def _print(reading: Reading) -> None:
    """Print what a person reads on a terminal; elsewhere one table of all: model, family, value of, value."""
    if not sys.stdout.isatty():
        core = [row for each in reading.core for row in _core_rows(each)]
        counted = [
            (each.model, f"nv_inference_{name}", "-", _number(value))
            for each in reading.models
            for name, value in each.values.items()
        ]
        gpus = [
            (each.uuid, f"nv_gpu_{name}", "-", _number(value))
            for each in reading.gpus
            for name, value in each.values.items()
        ]
        print_table(_CORE_COLUMNS, [*core, *counted, *gpus])
        return
    for each in reading.core:
        print_block("\n".join((each.model, *(f"  {label:<9} {words}" for label, words in _core_lines(each) if words))))
    print_table(_MODEL_COLUMNS, [_model_row(each) for each in reading.models])
    say("Triton counts the time of a streaming model only until the model has taken the request.")
    if reading.gpus:
        print_table(("GPU", "busy", "memory used", "of"), [_gpu_row(each) for each in reading.gpus])


def _core_rows(core: CoreMetrics) -> Iterator[tuple[object, ...]]:
    for family, values in core.families.items():
        for kind, value in values.items():
            yield core.model, family, kind, _number(value)


def _core_lines(core: CoreMetrics) -> Iterator[tuple[str, str]]:
    """Yield a label and what there is to say of the core model; --raw has every metric under its own name."""
    from trtserve.client.metrics import GENERAL, KV_BLOCKS, LENGTHS, TOKENS

    yield "requests", _request_words(core)
    if blocks := core.families.get(KV_BLOCKS):
        reused = f", {_number(blocks['reused'])} reused" if "reused" in blocks else ""
        yield "KV cache", f"{_kv_words(core)} of {_number(blocks.get('tokens_per', 0))} tokens{reused}"
    for label, family in (("tokens", TOKENS), ("drafts", "nv_trtserve_draft_tokens_total")):
        yield label, ", ".join(f"{_number(value)} {kind}" for kind, value in core.families.get(family, {}).items())
    means = (
        f"{values['sum'] / values['count']:.0f} tokens in {words}"
        for family, words in zip(LENGTHS, ("a prompt", "an answer"), strict=True)
        if (values := core.families.get(family, {})).get("count")
    )
    yield "mean", ", ".join(means)
    memory = core.families.get("nv_trt_llm_runtime_memory_metrics", {})
    yield "memory", ", ".join(f"{format_bytes(int(value))} {kind}" for kind, value in memory.items() if value)
    steps = core.value(GENERAL, "iteration_counter")
    yield "steps", "" if steps is None else _number(steps)


def _model_row(model: ModelMetrics) -> tuple[object, ...]:
    names = ("request_success", "request_failure", "pending_request_count", "exec_count")
    means = ("request_duration_us", "queue_duration_us")
    return (
        model.model,
        *(_number(model.values[name]) if name in model.values else "-" for name in names),
        *("-" if (mean := model.mean_ms(name)) is None else f"{mean:.1f}" for name in means),
    )


def _gpu_row(gpu: GpuMetrics) -> tuple[object, ...]:
    sizes = (gpu.values.get(name) for name in ("memory_used_bytes", "memory_total_bytes"))
    busy = gpu.values.get("utilization")
    return (
        gpu.uuid,
        "-" if busy is None else f"{busy:.0%}",
        *("-" if size is None else format_bytes(int(size)) for size in sizes),
    )


def _number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def _watch(source: MetricsSource, interval: float, count: int | None) -> None:
    from trtserve.client.metrics import TOKENS
    from trtserve.server.status import watch_metrics

    readings = watch_metrics(source, interval=interval, count=count, pause=time.sleep)
    first = next(readings)
    if not any(each.families.get(TOKENS) for each in first.core):
        TerminalProgress().warn(f"{source.name} has no {TOKENS}: tokens per second are not shown.")
    if sys.stdout.isatty():
        _watch_live(source, first, readings)
        return
    for reading in _all(first, readings):
        for core in reading.core:
            print_data(_line(core, reading.rates.get(core.model, {})))


def _all(first: Reading, rest: Iterator[Reading]) -> Iterator[Reading]:
    yield first
    yield from rest


def _line(core: CoreMetrics, rates: dict[str, float]) -> str:
    cells = (
        time.strftime("%H:%M:%S"),
        core.model,
        f"kv {_kv_words(core)}",
        _request_words(core),
        *_rate_words(rates),
    )
    return "\t".join(cells)


def _watch_live(source: MetricsSource, first: Reading, readings: Iterator[Reading]) -> None:
    from rich.live import Live

    with Live(_view(source, first), console=terminal(), auto_refresh=False) as live:
        for reading in _all(first, readings):
            live.update(_view(source, reading), refresh=True)


def _view(source: MetricsSource, reading: Reading) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    title = Text(f"{source.name}   {time.strftime('%H:%M:%S')}", style="dim")
    panels = [_core_panel(each, reading.rates.get(each.model, {})) for each in reading.core]
    # Keep the last line short: otherwise the terminal's echo of Ctrl-C would scroll the view by a line.
    return Group(title, *(panels or [Text("No core model reports metrics.")]), Text("Ctrl-C ends", style="dim"))


def _core_panel(core: CoreMetrics, rates: dict[str, float]) -> RenderableType:
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    from trtserve.client.metrics import KV_BLOCKS

    blocks = core.families.get(KV_BLOCKS, {})
    bar = ProgressBar(total=blocks.get("max") or 1, completed=blocks.get("used", 0), width=30)
    usage = Table.grid(padding=(0, 2))
    usage.add_row(bar, _kv_words(core))
    grid = Table.grid(padding=(0, 2))
    grid.add_row("KV cache", usage)
    grid.add_row("requests", _request_words(core))
    grid.add_row("speed", ", ".join(_rate_words(rates)))
    memory = core.value("nv_trt_llm_runtime_memory_metrics", "cpu")
    if memory:
        grid.add_row("memory", format_bytes(int(memory)))
    return Panel(grid, title=core.model, title_align="left")


def _kv_words(core: CoreMetrics) -> str:
    from trtserve.client.metrics import KV_BLOCKS

    blocks = core.families.get(KV_BLOCKS, {})
    used, most = blocks.get("used", 0), blocks.get("max", 0)
    share = f" ({used / most:.0%})" if most else ""
    return f"{_number(used)} of {_number(most)} blocks{share}"


def _request_words(core: CoreMetrics) -> str:
    from trtserve.client.metrics import REQUESTS

    values = core.families.get(REQUESTS, {})
    shown = [f"{_number(values[kind])} {kind}" for kind in ("active", "waiting", "scheduled") if kind in values]
    return ", ".join(shown) + (f" of at most {_number(values['max'])}" if "max" in values else "")


def _rate_words(rates: dict[str, float]) -> Iterator[str]:
    for name, words in (
        ("generated_tokens", "tokens/s"),
        ("prompt_tokens", "prompt tokens/s"),
        ("iterations", "iterations/s"),
    ):
        yield f"{rates[name]:.1f} {words}" if name in rates else f"- {words}"
