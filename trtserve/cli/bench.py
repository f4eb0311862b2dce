"""`trtserve bench`: one subcommand per kind of traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli import output
from trtserve.cli.endpoint import (
    CONNECTION,
    ConnectTimeoutOption,
    GrpcPortOption,
    HostOption,
    ServerOption,
    find_endpoint,
)
from trtserve.cli.filled import filled
from trtserve.cli.options import DryRunOption, JsonOption, QuietOption
from trtserve.errors import BenchmarkError, UsageError
from trtserve.specs import BenchSpec
from trtserve.triton.first_contact import CONNECT_TIMEOUT

if TYPE_CHECKING:
    from trtserve.bench import Report
    from trtserve.progress import Progress
    from trtserve.triton.client import Endpoint

InputMean = Annotated[float, typer.Option("--input-mean", help="Mean prompt length in tokens.")]
InputStdev = Annotated[float, typer.Option("--input-stdev", help="Standard deviation of prompt lengths.")]
OutputMean = Annotated[float, typer.Option("--output-mean", help="Mean answer length in tokens.")]
OutputStdev = Annotated[float, typer.Option("--output-stdev", help="Standard deviation of answer lengths.")]
NumRequests = Annotated[int, typer.Option("--num-requests", help="Measured requests.")]
RequestRate = Annotated[
    float | None, typer.Option("--request-rate", help="Requests per second on a schedule (open loop).")
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", help="Requests in flight: 8; with --request-rate a cap, default none.")
]
ArrivalsOption = Annotated[
    str, typer.Option("--arrivals", help="Gaps of the schedule: exponential or constant.", metavar="KIND")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of traffic and arrivals.")]
WarmupOption = Annotated[int, typer.Option("--warmup-requests", help="Requests before the measured window.")]
ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", help="The core model gets token ids; ensemble, tensorrt_llm_bls or an alias text."),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", "--tokenizer-dir", metavar="DIR", help="Tokenizer of texts; default: the server's repository's."
    ),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Go on after an end token, to the length that was asked for."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds that the measured window may take.")]
VocabularyOption = Annotated[
    int | None, typer.Option("--vocab-size", help="Random ids are below this; default: the engine's.")
]
MaxInputOption = Annotated[
    int | None, typer.Option("--max-input-len", help="Longest prompt in tokens; default: the engine's.")
]
MaxSequenceOption = Annotated[
    int | None, typer.Option("--max-seq-len", help="Longest prompt and answer in tokens; default: the engine's.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        rich_help_panel=CONNECTION,
        metavar="HOST:PORT",
        help="The same as --host and --grpc-port (gRPC only).",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write report.json and requests.jsonl there.")
]
DatasetOption = Annotated[
    Path,
    typer.Option(
        "--dataset", metavar="FILE", help="JSON list of objects with the texts input, instruction and output."
    ),
]
MostRequests = Annotated[int, typer.Option("--num-requests", help="Measured requests at most, in the file's order.")]
TokensPerWord = Annotated[
    float, typer.Option("--op-tokens-per-word", help="Tokens to generate for each word of `output`.")
]


def token_norm_dist(
    input_mean: InputMean = 128,
    input_stdev: InputStdev = 16,
    output_mean: OutputMean = 32,
    output_stdev: OutputStdev = 4,
    num_requests: NumRequests = 100,
    request_rate: RequestRate = None,
    concurrency: Concurrency = None,
    arrivals: ArrivalsOption = "exponential",
    seed: SeedOption = 0,
    warmup_requests: WarmupOption = 10,
    model: ModelOption = "tensorrt_llm",
    tokenizer: TokenizerOption = None,
    ignore_eos: IgnoreEosOption = True,
    timeout: TimeoutOption = 600.0,
    vocab_size: VocabularyOption = None,
    max_input_len: MaxInputOption = None,
    max_seq_len: MaxSequenceOption = None,
    server: ServerOption = None,
    host: HostOption = None,
    grpc_port: GrpcPortOption = None,
    url: UrlOption = None,
    connect_timeout: ConnectTimeoutOption = CONNECT_TIMEOUT,
    out: OutOption = None,
    quiet: QuietOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Measure a model with random prompts whose lengths are normally distributed.

    The core model gets random token ids, any other model texts of random words that have exactly as many tokens.
    Ctrl-C stops the requests in flight and prints what was measured.
    """
    options = locals()  # before anything else has a name here
    spec = filled(BenchSpec, options)
    endpoint = find_endpoint(
        server=server, host=host, http_port=None, grpc_port=grpc_port, url=url, connect_timeout=connect_timeout
    )
    _bench(spec, endpoint, out=out, quiet=quiet, dry_run=dry_run, json=json)


def dataset(
    dataset: DatasetOption,
    op_tokens_per_word: TokensPerWord = 1.3,
    num_requests: MostRequests = 30000,
    request_rate: RequestRate = None,
    concurrency: Concurrency = None,
    arrivals: ArrivalsOption = "exponential",
    seed: SeedOption = 0,
    warmup_requests: WarmupOption = 10,
    model: ModelOption = "tensorrt_llm",
    tokenizer: TokenizerOption = None,
    ignore_eos: IgnoreEosOption = False,
    timeout: TimeoutOption = 600.0,
    max_input_len: MaxInputOption = None,
    max_seq_len: MaxSequenceOption = None,
    server: ServerOption = None,
    host: HostOption = None,
    grpc_port: GrpcPortOption = None,
    url: UrlOption = None,
    connect_timeout: ConnectTimeoutOption = CONNECT_TIMEOUT,
    out: OutOption = None,
    quiet: QuietOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Measure a model with the prompts of a file: `input`, a space, `instruction`.

    An answer gets as many tokens as `output` has words, times --op-tokens-per-word. Prompts longer than
    --max-input-len are left out. Ctrl-C stops the requests in flight and prints what was measured.
    """
    options = locals()  # before anything else has a name here
    spec = filled(BenchSpec, options)
    endpoint = find_endpoint(
        server=server, host=host, http_port=None, grpc_port=grpc_port, url=url, connect_timeout=connect_timeout
    )
    _bench(spec, endpoint, out=out, quiet=quiet, dry_run=dry_run, json=json)


def _bench(spec: BenchSpec, endpoint: Endpoint, *, out: Path | None, quiet: bool, dry_run: bool, json: bool) -> None:
    if dry_run:
        _describe(spec, endpoint, json=json)
    else:
        _measure(spec, endpoint, out=out, quiet=quiet, json=json)


def _measure(spec: BenchSpec, endpoint: Endpoint, *, out: Path | None, quiet: bool, json: bool) -> None:
    from trtserve.bench import run_benchmark

    _require_folder(out)
    progress = output.TerminalProgress(quiet=quiet)
    report = run_benchmark(spec, endpoint, progress=progress)
    if out is not None:
        report.write(out)
    _print(report, progress, json=json)
    if out is not None:
        progress.step(f"Written: {out / 'report.json'}, {out / 'requests.jsonl'}")
    if report.interrupted:
        raise KeyboardInterrupt
    _check(report)


def _require_folder(out: Path | None) -> None:
    """A folder that cannot be written is said before the benchmark and not after it."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out is {out}; no folder can be made there: {error.strerror}.") from None


def _print(report: Report, progress: Progress, *, json: bool) -> None:
    from trtserve.bench.report import COLUMNS

    if json:
        output.print_json(f"bench {report.spec.traffic}", report.to_json())
    else:
        output.print_table(COLUMNS, report.rows())
    for note in report.notes:
        progress.step(f"note: {note}")
    if report.interrupted:
        progress.step("Interrupted: the figures cover what had been sent.")


def _check(report: Report) -> None:
    failed = [record for record in report.records if record.status == "failed"]
    if report.timed_out:
        counts = report.statistics.counts
        ended = f"--timeout {report.spec.timeout:g} was over before all {counts.offered} requests were answered"
        raise BenchmarkError(
            f"{ended}: {counts.completed} completed, {counts.failed} failed, {counts.unsent} never sent.",
            hint="Raise --timeout, or send fewer or shorter requests: --num-requests, --output-mean.",
        )
    if failed:
        reasons = {record.error: None for record in failed}
        raise BenchmarkError(
            f"{len(failed)} of {len(report.records)} requests failed: {'; '.join(map(str, list(reasons)[:3]))}",
            hint="The figures above include them as infinitely slow; `trtserve logs` shows the server's side.",
        )


def _describe(spec: BenchSpec, endpoint: Endpoint, *, json: bool) -> None:
    """Say what would be sent; nothing is."""
    from trtserve.bench import pace, plan_benchmark

    plan = plan_benchmark(spec, endpoint)
    requests = plan.traffic.requests
    tokens = sum(len(request.token_ids) for request in requests), sum(request.output_len for request in requests)
    if json:
        described = {"model": spec.model, "endpoint": endpoint.grpc, "requests": len(requests)}
        described |= {"input_tokens": tokens[0], "output_tokens": tokens[1], "concurrency": plan.concurrency}
        described |= {"request_rate": spec.request_rate, "notes": plan.notes, "dry_run": True}
        output.print_json(f"bench {spec.traffic}", described)
        return
    output.print_data(
        f"Would send {len(requests)} requests to {spec.model!r} at {endpoint.grpc} ({pace(spec, plan)}): "
        f"{tokens[0]} prompt tokens, {tokens[1]} tokens to generate."
    )
    for note in plan.notes:
        output.say(f"note: {note}")
