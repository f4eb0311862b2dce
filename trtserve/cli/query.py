"""`trtserve query`: one prompt, one answer on stdout."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from trtserve.cli import output
from trtserve.cli.endpoint import (
    GrpcPortOption,
    HostOption,
    HttpPortOption,
    ServerOption,
    UrlOption,
    find_endpoint,
)
from trtserve.cli.options import DryRunOption, JsonOption
from trtserve.errors import TrtserveError, UsageError
from trtserve.specs import QuerySpec, Sampling

if TYPE_CHECKING:
    from trtserve.query import Generation
    from trtserve.triton.client import Endpoint

PromptArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help="The prompt, in quotes (words are joined by spaces); `-` or nothing reads stdin."
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Triton model to ask; default: the served alias.")]
StreamOption = Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="New tokens at most; the engine may allow fewer.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", help="Sampling temperature; has an effect with --top-k or --top-p only."),
]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Sample among the k likeliest tokens.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Sample within this probability mass.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed; default 0: sampling is repeatable.")]
StopWordsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop-words", help="End the answer after these tokens (a word, also inside a sentence); repeatable."
    ),
]
BadWordsOption = Annotated[
    list[str] | None, typer.Option("--bad-words", help="Never generate this text; may be repeated.")
]
ProtocolOption = Annotated[str, typer.Option("--protocol", help="grpc, or http (generate, generate_stream).")]
RequestIdOption = Annotated[str | None, typer.Option("--request-id", help="Request id; default: a unique one.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the whole answer.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print times and tokens/s on stderr.")]


def query(
    prompt: PromptArgument = None,
    model: ModelOption = None,
    stream: StreamOption = False,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop_words: StopWordsOption = None,
    bad_words: BadWordsOption = None,
    protocol: ProtocolOption = "grpc",
    request_id: RequestIdOption = None,
    timeout: TimeoutOption = 600.0,
    server: ServerOption = None,
    host: HostOption = None,
    http_port: HttpPortOption = None,
    grpc_port: GrpcPortOption = None,
    url: UrlOption = None,
    verbose: VerboseOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Ask a served model and print its answer alone: without the prompt, without leading spaces.

    Ctrl-C stops the request in the engine too.
    """
    spec = QuerySpec(
        # A list, since an unquoted prompt comes as several arguments.
        prompt=_read_prompt(" ".join(prompt) if prompt else None),
        model=model,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        stop_words=tuple(stop_words or ()),
        bad_words=tuple(bad_words or ()),
        # Without a stream there is no first token whose time could be told.
        stream=stream or verbose,
        protocol=cast(Literal["grpc", "http"], protocol),
        request_id=request_id,
        timeout=timeout,
    )
    endpoint = find_endpoint(
        server=server, host=host, http_port=http_port, grpc_port=grpc_port, url=url, protocol=spec.protocol
    )
    _say_greedy(spec.sampling)
    if dry_run:
        _describe(spec, endpoint)
        return
    _ask(spec, endpoint, printing=stream and not json, verbose=verbose, json=json)


def _read_prompt(prompt: str | None) -> str:
    """The prompt's bytes as UTF-8, which is what models are asked in, whatever this terminal's encoding is."""
    if prompt is None and sys.stdin.isatty():
        raise UsageError("There is no prompt.", hint='Give one: trtserve query "What is ML?"')
    content = sys.stdin.buffer.read().rstrip(b"\r\n") if prompt is None or prompt == "-" else os.fsencode(prompt)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The prompt is not UTF-8 text: {error.reason} at byte {error.start}.",
            hint="Convert it, for example: iconv -f latin1 -t utf-8 FILE | trtserve query",
        ) from None


def _ask(spec: QuerySpec, endpoint: Endpoint, *, printing: bool, verbose: bool, json: bool) -> None:
    from dataclasses import asdict

    from trtserve.query import generate

    try:
        answer = generate(spec, endpoint, on_text=_write if printing else None)
    except (KeyboardInterrupt, TrtserveError):
        if printing:
            output.print_data("")
        raise
    if json:
        output.print_json("query", {**asdict(answer), "tokens_per_second": answer.tokens_per_second})
    else:
        output.print_data("" if printing else answer.text)
    if printing and not answer.streamed:
        output.say(f"The model {answer.model!r} does not stream (it is served with --no-streaming).")
    _say_limit(spec, endpoint)
    if verbose:
        output.say(_timing(answer))


def _say_greedy(sampling: Sampling) -> None:
    """TensorRT-LLM's rule, which surprises: a temperature alone changes nothing."""
    if sampling.temperature and not sampling.top_k and not sampling.top_p:
        output.say("note: without --top-k or --top-p the likeliest token is taken; --temperature has no effect.")


def _say_limit(spec: QuerySpec, endpoint: Endpoint) -> None:
    """Say that more was asked for than any answer of this engine can have, where its limits are known."""
    from trtserve.bench.traffic import limits_of_repository
    from trtserve.triton.client import CORE_MODEL

    limit = None if endpoint.repository is None else limits_of_repository(endpoint.repository, CORE_MODEL).max_seq_len
    if limit is not None and spec.max_tokens >= limit:
        output.say(
            f"note: --max-tokens {spec.max_tokens} is cut by the engine: prompt and answer have {limit} tokens at most."
        )


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _timing(answer: Generation) -> str:
    first, rate = answer.time_to_first_token, answer.tokens_per_second
    parts = [
        f"TTFT {first * 1000:.1f} ms" if first is not None else "TTFT n/a (not a stream)",
        f"latency {answer.latency * 1000:.1f} ms",
        f"{answer.output_tokens} tokens" if answer.output_tokens is not None else f"{answer.responses} responses",
        f"{rate:.1f} tokens/s" if rate is not None else "tokens/s n/a (this model does not count tokens)",
    ]
    return f"{answer.model}: {', '.join(parts)}; request id {answer.request_id}"


def _describe(spec: QuerySpec, endpoint: Endpoint) -> None:
    """Say which request would be sent; the server is only asked for the model's configuration."""
    from contextlib import closing

    from trtserve.query import connect, describe_text_model, request_tensors
    from trtserve.triton.http_client import generate_body

    with closing(connect(spec, endpoint)) as client:
        described = describe_text_model(client, spec.model or endpoint.model)
    call = "as a stream" if described.decoupled else "with one response"
    address = endpoint.http if spec.protocol == "http" else endpoint.grpc
    output.say(f"Would ask the model {described.name!r} at {address} over {spec.protocol}, {call}:")
    body = generate_body(request_tensors(spec, described), request_id=spec.request_id or "<a unique id>")
    output.print_json("query", body)
