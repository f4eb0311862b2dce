"""`trtserve query`: prompts in, answers on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli import output, query_output
from trtserve.cli.endpoint import (
    CONNECTION,
    CertificateChainOption,
    ConnectTimeoutOption,
    GrpcPortOption,
    HostOption,
    HttpPortOption,
    PrivateKeyOption,
    RootCertificatesOption,
    ServerOption,
    SslOption,
    UrlOption,
    find_endpoint,
    find_tls,
)
from trtserve.cli.filled import filled
from trtserve.cli.options import DryRunOption, JsonOption
from trtserve.cli.query_options import CHECKING, ENDING, PROMPTS, given_options, with_request_options
from trtserve.cli.query_prompts import as_utf8, read_prompts
from trtserve.errors import TrtserveError, UsageError
from trtserve.query.options import RETURNED
from trtserve.query.spec import QuerySpec
from trtserve.triton.first_contact import CONNECT_TIMEOUT

if TYPE_CHECKING:
    from trtserve.query.checking import Expectation
    from trtserve.query.local import LocalEngine
    from trtserve.triton.client import Endpoint

PromptArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help="The prompt, in quotes (words are joined by spaces); `-` or nothing reads stdin."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "--model-name", help="Triton model to ask; default: the served alias."),
]
StreamOption = Annotated[
    bool, typer.Option("--stream", "--streaming", "-S", help="Print the answer as it comes (of one sequence).")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print times, ids and tokens/s on stderr.")]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", "--text", help="A prompt; repeat it for several.", rich_help_panel=PROMPTS),
]
InputFileOption = Annotated[
    Path | None,
    typer.Option(
        "--input-file",
        metavar="FILE",
        help="Prompts: a line each, or a JSON list of texts; - is stdin.",
        rich_help_panel=PROMPTS,
    ),
]
InputTokensOption = Annotated[
    str | None,
    typer.Option(
        "--input-tokens-csv",
        metavar="FILE",
        help="Prompts as token ids for a core model: a CSV line each, or the ids themselves.",
        rich_help_panel=PROMPTS,
    ),
]
BatchOption = Annotated[
    bool,
    typer.Option("--batch", "--batch-inputs", help="Send all prompts as one request.", rich_help_panel=PROMPTS),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="System message of a chat model.", rich_help_panel=PROMPTS)
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Send the prompt as it is, without a chat template.", rich_help_panel=PROMPTS)
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        "--tokenizer-dir",
        metavar="DIR",
        help="Folder of the model's tokenizer; default: that of the server's repository, or of the engine's model.",
        rich_help_panel=PROMPTS,
    ),
]
ExcludeInputOption = Annotated[
    bool,
    typer.Option(
        "--exclude-input/--include-input",
        "--exclude-input-in-output",
        help="Leave the prompt out of the answer.",
        rich_help_panel=PROMPTS,
    ),
]
FurtherInputsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="Any other input of the model: a scalar, a comma list, a JSON list, @FILE.npy, @FILE.json; repeatable.",
        rich_help_panel=PROMPTS,
    ),
]
RequestedOutputsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--requested-outputs",
        metavar="NAME",
        help="Ask for these outputs only; repeatable.",
        rich_help_panel=RETURNED,
    ),
]
SaveOption = Annotated[
    list[str] | None,
    typer.Option("--save", metavar="NAME", help="Save this output as NAME.npy; repeatable.", rich_help_panel=CHECKING),
]
OutputDirOption = Annotated[
    Path | None,
    typer.Option(
        "--output-dir", metavar="DIR", help="Where to; alone: save logits and other arrays.", rich_help_panel=CHECKING
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check-output", "--check-outputs", "-c", help="Compare with the expected answer.", rich_help_panel=CHECKING
    ),
]
OutputTokensOption = Annotated[
    str | None,
    typer.Option("--output-tokens-csv", metavar="FILE", help="Expected token ids.", rich_help_panel=CHECKING),
]
ExpectedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--expected-output", "--expected-outputs", metavar="TEXT", help="Expected text.", rich_help_panel=CHECKING
    ),
]
ThresholdOption = Annotated[
    float,
    typer.Option(
        "--correctness-threshold", help="Share of tokens that must be equal, 0 … 1.", rich_help_panel=CHECKING
    ),
]
StopAfterOption = Annotated[
    int | None,
    typer.Option("--stop-after-ms", help="End the request after so many milliseconds.", rich_help_panel=ENDING),
]
StopViaCancelOption = Annotated[
    bool,
    typer.Option(
        "--stop-via-request-cancel", help="By cancelling the call, not by a stop request.", rich_help_panel=ENDING
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", "--stream-timeout", "-t", help="Seconds to wait for the whole answer.", rich_help_panel=ENDING
    ),
]
RequestIdOption = Annotated[
    str | None, typer.Option("--request-id", help="Request id; default: a unique one.", rich_help_panel=ENDING)
]
ProtocolOption = Annotated[
    str, typer.Option("--protocol", "-i", help="grpc, or http (generate, infer).", rich_help_panel=CONNECTION)
]
CompressionOption = Annotated[
    str | None,
    typer.Option(
        "--grpc-compression-algorithm",
        "-C",
        metavar="NAME",
        help="none, deflate or gzip.",
        rich_help_panel=CONNECTION,
    ),
]


EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="ENGINE", help="With --local: folder of an engine or repository, or an imported name."
    ),
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="Ask --engine in this process: the executor runs here, without a server.")
]


# Seconds that another rank waits with its error.
_LEADER_FIRST = 3.0


@with_request_options
def query(
    prompt: PromptArgument = None,
    model: ModelOption = None,
    stream: StreamOption = False,
    verbose: VerboseOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    requested_outputs: RequestedOutputsOption = None,
    prompts: PromptsOption = None,
    input_file: InputFileOption = None,
    input_tokens_csv: InputTokensOption = None,
    batch: BatchOption = False,
    system: SystemOption = None,
    raw: RawOption = False,
    tokenizer: TokenizerOption = None,
    exclude_input: ExcludeInputOption = True,
    input: FurtherInputsOption = None,  # noqa: A002 - the flag's name
    save: SaveOption = None,
    output_dir: OutputDirOption = None,
    check_output: CheckOption = False,
    output_tokens_csv: OutputTokensOption = None,
    expected_output: ExpectedOption = None,
    correctness_threshold: ThresholdOption = 1.0,
    stop_after_ms: StopAfterOption = None,
    stop_via_request_cancel: StopViaCancelOption = False,
    timeout: TimeoutOption = 600.0,
    request_id: RequestIdOption = None,
    engine: EngineOption = None,
    local: LocalOption = False,
    server: ServerOption = None,
    protocol: ProtocolOption = "grpc",
    host: HostOption = None,
    http_port: HttpPortOption = None,
    grpc_port: GrpcPortOption = None,
    url: UrlOption = None,
    connect_timeout: ConnectTimeoutOption = CONNECT_TIMEOUT,
    ssl: SslOption = False,
    root_certificates: RootCertificatesOption = None,
    private_key: PrivateKeyOption = None,
    certificate_chain: CertificateChainOption = None,
    grpc_compression_algorithm: CompressionOption = None,
    **options: Any,
) -> None:
    """Ask a served model, or with --local an engine, and print the answer alone.

    The prompt and leading spaces are left out. Chat models get the prompt in their chat template.
    Ctrl-C stops the request in the engine too.
    """
    given = locals()  # before anything else has a name here
    from trtserve.query.checking import expectation

    address = {"--server": server, "--host": host, "--http-port": http_port, "--grpc-port": grpc_port, "--url": url}
    found = None
    if _asks_locally(engine, local, {**address, "--ssl": ssl}):
        found = _local_engine(engine, tokenizer, dry_run=dry_run)
    if found is not None and found.works_for_leader():
        _work_for_leader(found)
        return
    spec = _spec(given, found)
    place = _remote(given) if found is None else found.endpoint(timeout=timeout)
    expected = expectation(check_output, output_tokens_csv, expected_output or (), correctness_threshold)
    sink = query_output.Sink(
        stream=stream and not json,
        json=json,
        verbose=verbose,
        folder=_folder(output_dir, save),
        names=tuple(save or ()),
    )
    query_output.say_greedy(spec)
    with place as endpoint:
        if dry_run:
            query_output.describe(spec, endpoint)
            return
        # Without a stream there is no first token whose time could be told.
        _ask(replace(spec, stream=stream or verbose), endpoint, sink, expected)


def _spec(given: Mapping[str, Any], found: LocalEngine | None) -> QuerySpec:
    """What is asked; most options have the name of the field that they fill."""
    from trtserve.query.values import split_input

    texts, token_ids = read_prompts(
        given["prompt"], prompts=given["prompts"], file=given["input_file"], tokens=given["input_tokens_csv"]
    )
    others = {
        "prompts": texts,
        "token_ids": token_ids,
        "options": given_options(given["options"]),
        "inputs": tuple(split_input(as_utf8(text, "--input")) for text in given["input"] or ()),
        "outputs": tuple(given["requested_outputs"] or ()),
        "system": None if given["system"] is None else as_utf8(given["system"], "--system"),
        "tokenizer": given["tokenizer"] if found is None else found.tokenizer,
        "compression": given["grpc_compression_algorithm"],
        "stop_via_cancel": given["stop_via_request_cancel"],
    }
    return filled(QuerySpec, {**given, **others})


def _remote(given: Mapping[str, Any]) -> AbstractContextManager[Endpoint]:
    names = ("server", "host", "http_port", "grpc_port", "url", "protocol", "connect_timeout")
    tls = find_tls(*(given[name] for name in ("ssl", "root_certificates", "private_key", "certificate_chain")))
    return nullcontext(find_endpoint(**{name: given[name] for name in names}, tls=tls))


def _asks_locally(engine: str | None, local: bool, of_servers: Mapping[str, object]) -> bool:
    """Whether the question goes to an engine in this process; UsageError for half a wish, or options `of_servers`."""
    if (engine is None) == local:
        flag, other = ("--local", "--engine ENGINE") if local else ("--engine", "--local")
        raise UsageError(f"{flag} needs {other}: an engine is asked in this process, without a server.")
    given = [name for name, value in of_servers.items() if value not in (None, False)]
    if local and given:
        raise UsageError(f"{given[0]} belongs to servers, and --local asks none.", hint="Leave it out.")
    return local


def _local_engine(engine: str | None, tokenizer: Path | None, *, dry_run: bool) -> LocalEngine:
    """The engine to be asked here; where it has several ranks, mpirun takes the place of this process first."""
    from trtserve.process import become
    from trtserve.query.local import find_local  # loads what runs engines

    found = find_local(str(engine), tokenizer)
    if found.needs_mpi():
        command = found.under_mpirun(sys.argv[1:])
        if dry_run:
            output.print_data(str(command))
            raise typer.Exit
        found.require_runtime()
        become(command)
    return found


def _work_for_leader(engine: LocalEngine) -> None:
    """What a rank does that is asked nothing.

    What ails an engine ails all of its ranks. The leader's error goes first, and ends the others through mpirun; so a
    rank speaks only of what the leader does not know.
    """
    try:
        engine.work_for_leader()
    except TrtserveError as error:
        time.sleep(_LEADER_FIRST)
        error.message = f"Rank {engine.rank}: {error.message}"
        raise


def _folder(output_dir: Path | None, save: list[str] | None) -> Path | None:
    """Where outputs go; a folder that cannot be written is said before the answer and not after it."""
    folder = output_dir if output_dir is not None else Path() if save else None
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir is {folder}; no folder can be made there: {error.strerror}.") from None
    return folder


def _ask(spec: QuerySpec, endpoint: Endpoint, sink: query_output.Sink, expected: Expectation | None) -> None:
    from trtserve.query import generate_each

    generations = []
    try:
        for generation in generate_each(spec, endpoint, on_text=sink.on_text):
            sink.add(generation, spec)
            generations.append(generation)
    except (KeyboardInterrupt, TrtserveError):
        sink.broken()
        raise
    sink.finish(spec, endpoint)
    if expected is not None:
        output.say(expected.check([sequence for each in generations for sequence in each.sequences]))
