"""`trtserve bench`: measure a served model with one kind of traffic per subcommand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trtserve.cli import output
from trtserve.cli.bench_runs import Results, run_benchmarks
from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.cli.options import Fields, paths
from trtserve.errors import UsageError
from trtserve.specs import BenchRuns, BenchSpec
from trtserve.specs.bench import FILE_DEFAULTS

_CONNECTION = Fields(
    "server", "host", "http_port", "grpc_port", "url", "connect_timeout", "api_key", "ssl", "root_certificates"
)
_HISTOGRAM = ("histogram",)
_PREFIX = ("prefix_len", "num_prefixes", "reuse_rate")
_TURNS = ("turns",)
_WORDS = ("op_tokens_per_word",)
_TRACE = ("speed",)
_DRAWN = ("input_mean", "input_stdev", "output_mean", "output_stdev")
_RATE = ("request_rate", "arrivals", "burstiness", "ramp_to")


def _without(*kept: tuple[str, ...], also: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the fields of one kind of traffic that a subcommand lacks: all but those of `kept`."""
    special = (_HISTOGRAM, _PREFIX, _TURNS, _WORDS, _TRACE)
    return (*(name for names in special if names not in kept for name in names), *also)


DatasetOption = Annotated[
    Path,
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="JSON list of objects with the texts input, instruction and output; ShareGPT's conversations; or JSON "
        "lines with prompt and output or output_len.",
        autocompletion=paths,
    ),
]


def token_norm_dist(
    *,
    spec: Annotated[BenchSpec, Fields(without=_without())],
    runs: Annotated[BenchRuns, Fields()],
    connection: Annotated[Connection, _CONNECTION],
    results: Annotated[Results, Fields()],
) -> None:
    """Measure a model with random prompts whose lengths are normally distributed.

    A core model gets random token ids, any other model texts of random words that have exactly as many tokens.
    Ctrl-C stops the requests in flight and prints what was measured.

    Examples:
        trtserve bench token-norm-dist
        trtserve bench token-norm-dist --model tensorrt_llm --concurrency 1
        trtserve bench token-norm-dist --request-rate 4 --input-mean 512
        trtserve bench token-norm-dist --sweep-rate 1,2,4,8 --html curve.html
    """
    run_benchmarks(spec, runs, connection, results)


def token_from_histogram(
    *,
    spec: Annotated[BenchSpec, Fields(without=_without(_HISTOGRAM, also=_DRAWN))],
    runs: Annotated[BenchRuns, Fields()],
    connection: Annotated[Connection, _CONNECTION],
    results: Annotated[Results, Fields()],
) -> None:
    """Measure a model with random prompts whose lengths follow a histogram.

    Examples:
        trtserve bench token-from-histogram
        trtserve bench token-from-histogram --histogram lengths.csv
    """
    spec = replace(spec, traffic="token-from-histogram")
    run_benchmarks(spec, runs, connection, results)


def dataset(
    *,
    dataset: DatasetOption,
    spec: Annotated[
        BenchSpec,
        Fields(
            without=_without(_WORDS, also=(*_DRAWN, "vocab_size")),
            defaults=FILE_DEFAULTS["dataset"],
        ),
    ],
    runs: Annotated[BenchRuns, Fields()],
    connection: Annotated[Connection, _CONNECTION],
    results: Annotated[Results, Fields()],
) -> None:
    """Measure a model with the prompts of a file.

    A prompt is `input`, a space, `instruction`, and an answer gets as many tokens as `output` has words, times
    --op-tokens-per-word. Prompts longer than --max-input-len are left out. Ctrl-C stops the requests in flight and
    prints what was measured.

    Examples:
        trtserve bench dataset --dataset questions.json --num-requests 100
        trtserve bench dataset --dataset ShareGPT.json --request-rate 2
    """
    spec = replace(spec, dataset=dataset, traffic="dataset")
    run_benchmarks(spec, runs, connection, results)


def prefix(
    *,
    spec: Annotated[BenchSpec, Fields(without=_without(_PREFIX))],
    runs: Annotated[BenchRuns, Fields()],
    connection: Annotated[Connection, _CONNECTION],
    results: Annotated[Results, Fields()],
) -> None:
    """Measure a model with prompts that share their beginnings, as system prompts do.

    --input-mean is the length of the part after the prefix.

    Examples:
        trtserve bench prefix --prefix-len 512
        trtserve bench prefix --num-prefixes 10 --reuse-rate 0.8
    """
    run_benchmarks(replace(spec, traffic="prefix"), runs, connection, results)


def sessions(
    *,
    spec: Annotated[BenchSpec, Fields(without=_without(_TURNS))],
    runs: Annotated[BenchRuns, Fields()],
    connection: Annotated[Connection, _CONNECTION],
    results: Annotated[Results, Fields()],
) -> None:
    """Measure a model with conversations: each turn's prompt holds all questions and answers before it.

    A schedule (--request-rate) sets when conversations begin; their turns follow each other.

    Examples:
        trtserve bench sessions --turns 4 --input-mean 40
    """
    run_benchmarks(replace(spec, traffic="sessions"), runs, connection, results)


def replay(
    *,
    trace: Annotated[
        Path,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Mooncake's JSON lines, Azure's CSV, or an access log's JSON lines.",
            autocompletion=paths,
        ),
    ],
    spec: Annotated[
        BenchSpec,
        Fields(without=_without(_TRACE, also=(*_DRAWN, *_RATE)), defaults=FILE_DEFAULTS["replay"]),
    ],
    runs: Annotated[BenchRuns, Fields(without=("sweep_rate", "find_rate"))],
    connection: Annotated[Connection, _CONNECTION],
    results: Annotated[Results, Fields()],
) -> None:
    """Measure a model with the arrival times and lengths of a recorded trace.

    Examples:
        trtserve bench replay --trace mooncake_trace.jsonl --num-requests 500
        trtserve bench replay --trace AzureLLMInferenceTrace_conv.csv --speed 0.1
    """
    spec = replace(spec, trace=trace, traffic="replay")
    run_benchmarks(spec, runs, connection, results)


def e2e(
    *,
    dataset: DatasetOption,
    spec: Annotated[
        BenchSpec,
        Fields(
            without=_without(_WORDS, also=(*_DRAWN, "vocab_size", "openai", "chat", "in_process", "protocol")),
            defaults=FILE_DEFAULTS["dataset"],
        ),
    ],
    runs: Annotated[BenchRuns, Fields()],
    connection: Annotated[Connection, _CONNECTION],
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens", metavar="N", min=1, help="Also compare with speculative decoding (BLS model)."
        ),
    ] = None,
    results: Annotated[Results, Fields(without=("dry_run",))],
) -> None:
    """Check that the models one by one answer like the whole pipeline, then measure it, as end_to_end_test.py does.

    Examples:
        trtserve bench e2e --dataset questions.json
        trtserve bench e2e --dataset questions.json --num-draft-tokens 5
    """
    from trtserve.bench.plan import plan_benchmark
    from trtserve.bench.run import check_pipeline

    spec = replace(spec, dataset=dataset, traffic="e2e")
    plan = plan_benchmark(spec, find_endpoint(connection, model=spec.model))
    if not plan.measured.takes_text:
        raise UsageError(
            f"{plan.measured.name!r} takes token ids; the check compares texts.",
            hint="Leave --model out, or name the ensemble or the BLS model.",
        )
    progress = output.TerminalProgress(quiet=results.quiet)
    number = check_pipeline(plan, draft_tokens=draft_tokens, progress=progress)
    progress.step(f"[INFO] Functionality test succeed. ({number} answers)")
    run_benchmarks(spec, runs, connection, results)
