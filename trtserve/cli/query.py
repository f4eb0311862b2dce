"""`trtserve query`: ask a model; the prompts come from words, options, a file or stdin."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli import output, query_output
from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.cli.options import DryRunOption, JsonOption
from trtserve.client.spec import PROMPTS, REQUEST_OPTIONS, QuerySpec, RequestOptions
from trtserve.errors import TrtserveError, UsageError, counted
from trtserve.files import LARGEST_TEXT, is_unicode, make_folder, parse_json, read_text
from trtserve.specs.options import Spec, given_flags, option

if TYPE_CHECKING:
    from trtserve.client.endpoint import Endpoint
    from trtserve.server.local_engine import LocalEngine

SAVING = "Saving outputs"
_LOCAL = "Without a server"
# Seconds that the other ranks wait, so that the leader reports an engine error first.
_LEADER_FIRST = 3.0


@dataclass(frozen=True, kw_only=True)
class QueryPlaces(Spec):
    """Where prompts come from, where answers go, and the engine that is asked without a server."""

    prompts: tuple[str, ...] = option(
        (), "--prompt", "--text", metavar="TEXT", help="A prompt; repeat it for several.", panel=PROMPTS
    )
    input_file: Path | None = option(
        None,
        metavar="FILE",
        help="Prompts: one per line, or a JSON list of texts; - is stdin. Or requests in OpenAI's batch format.",
        panel=PROMPTS,
    )
    output_file: Path | None = option(
        None,
        metavar="FILE",
        help="Write one JSON line per answer as it comes, in order of completion; what the file has is not asked "
        "again, but for errors that may pass.",
        panel=SAVING,
    )
    input_tokens_csv: str | None = option(
        None,
        metavar="FILE",
        help="Prompts as token ids for a core model: one CSV line each, or the ids themselves.",
        panel=PROMPTS,
    )
    inputs: tuple[str, ...] = option(
        (),
        "--input",
        metavar="NAME=VALUE",
        help="Any other input of the model: a scalar, a comma list, a JSON list, @FILE.npy, @FILE.json; repeatable.",
        panel=PROMPTS,
    )
    save: tuple[str, ...] = option((), metavar="NAME", help="Save this output as NAME.npy; repeatable.", panel=SAVING)
    output_dir: Path | None = option(
        None,
        metavar="DIR",
        help="Folder for saved outputs; without --save, logits and other arrays are saved.",
        panel=SAVING,
    )
    local: bool = option(False, help="Run the engine of --engine in this process.", panel=_LOCAL)
    engine: str | None = option(
        None,
        metavar="ENGINE",
        help="With --local: folder of an engine or repository, or an imported name.",
        panel=_LOCAL,
    )


def query(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt; several words are joined by spaces, `-` or nothing reads stdin."
        ),
    ] = None,
    *,
    spec: QuerySpec,
    request: RequestOptions,
    connection: Connection,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print times, ids and tokens/s on stderr.")] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    places: QueryPlaces,
) -> None:
    """Send prompts to a served model and print the answers.

    Chat models get the prompt in their chat template. An answer is printed without the prompt and without leading
    spaces. Ctrl-C stops the request in the engine too. With --local an engine answers without a server.

    Examples:
        trtserve query "What is ML?"
        trtserve query --stream --temperature 0.7 --top-p 0.9 "Tell me a story"
        cat prompts.txt | trtserve query --input-file - --json
        trtserve query --input-file requests.jsonl --output-file answers.jsonl
    """
    _require_two_files(places)
    found = _local_engine(places, spec.tokenizer, dry_run=dry_run) if _asks_locally(places, connection) else None
    if found is not None and found.is_worker():
        _run_worker(found)
        return
    if places.input_file is not None and _is_batch(places.input_file):
        if dry_run or found is not None or request.given():
            raise UsageError(
                "The requests of a batch file go to a server as they are.",
                hint="Remove --dry-run, --local and the request options.",
            )
        _send_batch(places.input_file, places.output_file, find_endpoint(connection, "http"), spec)
        return
    spec = _complete(spec, request, places, prompt)
    place: AbstractContextManager[Endpoint]
    if found is None:
        place = nullcontext(find_endpoint(connection, spec.protocol, model=spec.model))
    else:
        spec, place = replace(spec, tokenizer=found.tokenizer), found.endpoint(timeout=spec.timeout)
    streams = spec.stream and not json
    sink = query_output.Sink(stream=streams, json=json, verbose=verbose, folder=_folder(places), names=places.save)
    query_output.say_greedy(spec)
    with place as endpoint:
        if dry_run:
            query_output.describe(spec, endpoint)
        elif places.output_file is not None:
            _write_answers(spec, endpoint, places.output_file)
        else:
            # Without a stream there is no first token to time.
            _ask(replace(spec, stream=spec.stream or verbose), endpoint, sink)


def _complete(spec: QuerySpec, request: RequestOptions, places: QueryPlaces, words: list[str] | None) -> QuerySpec:
    """Add prompts, request options and further inputs to `spec`, all in UTF-8 whatever the terminal's encoding is."""
    from trtserve.client.request import split_input

    texts, token_ids = read_prompts(
        words, prompts=places.prompts, file=places.input_file, tokens=places.input_tokens_csv
    )
    return replace(
        spec,
        prompts=texts,
        token_ids=token_ids,
        options={name: _as_utf8(REQUEST_OPTIONS[name].flag, value) for name, value in request.given().items()},
        inputs=tuple(split_input(as_utf8(text, "--input")) for text in places.inputs),
        system=_as_utf8("--system", spec.system),
    )


def _as_utf8(flag: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_utf8(flag, each) for each in value]
    return as_utf8(value, flag) if isinstance(value, str) else value


def _asks_locally(places: QueryPlaces, connection: Connection) -> bool:
    """Return whether an engine in this process is asked. Raises UsageError for options that contradict it."""
    local = places.local
    if (places.engine is None) == local:
        flag, other = ("--local", "--engine ENGINE") if local else ("--engine", "--local")
        raise UsageError(f"{flag} needs {other}: an engine is asked in this process, without a server.")
    given = given_flags(connection, ("server", "host", "http_port", "grpc_port", "url", "ssl"))
    if local and given:
        raise UsageError(
            f"{given[0]} is for servers, but --local asks an engine in this process.", hint="Leave it out."
        )
    return local


def _local_engine(places: QueryPlaces, tokenizer: Path | None, *, dry_run: bool) -> LocalEngine:
    """Return the engine to ask in this process; mpirun replaces the process first if the engine has several ranks."""
    from trtserve.process import become
    from trtserve.server.local_engine import find_local_engine  # loads what runs engines

    found = find_local_engine(str(places.engine), tokenizer)
    if found.needs_mpi():
        command = found.under_mpirun(sys.argv[1:])
        if dry_run:
            output.print_data(str(command))
            raise typer.Exit
        found.require_runtime()
        become(command)
    return found


def _run_worker(engine: LocalEngine) -> None:
    """Run a rank that is not the leader.

    Every rank reports the same engine error, so this one waits: the leader's error ends the others through mpirun.
    """
    try:
        engine.run_worker()
    except TrtserveError as error:
        time.sleep(_LEADER_FIRST)
        error.message = f"Rank {engine.rank}: {error.message}"
        raise


def _folder(places: QueryPlaces) -> Path | None:
    """Return the folder for outputs, made before the request."""
    folder = places.output_dir if places.output_dir is not None else Path() if places.save else None
    if folder is not None:
        make_folder(folder)
    return folder


def _require_two_files(places: QueryPlaces) -> None:
    source, out = places.input_file, places.output_file
    with suppress(OSError):
        if source is not None and out is not None and out.samefile(source):
            raise UsageError(f"--output-file: {out} is the file of --input-file.", hint="Name another file.")


def _is_batch(path: Path) -> bool:
    from trtserve.client.batch import is_batch

    return is_batch(path)


def _send_batch(path: Path, out: Path | None, endpoint: Endpoint, spec: QuerySpec) -> None:
    """Send a batch file; without a file for the answers they are printed."""
    import asyncio

    from trtserve.client.batch import AnswerFile, read_batch, send_batch

    requests = read_batch(path)
    with nullcontext() if out is None else AnswerFile(out) as answers:
        done = set() if answers is None else {line["custom_id"] for line in answers.lines}
        left = [request for request in requests if request.custom_id not in done]
        write = answers.write if answers is not None else lambda line: output.print_data(json.dumps(line))
        failed = asyncio.run(send_batch(path, left, endpoint, write, model=spec.model, timeout=spec.timeout))
    errors = (
        "it is an error" if len(left) == 1 else f"{failed} of them {'is an error' if failed == 1 else 'are errors'}"
    )
    output.say(f"{_answers(len(left), len(requests) - len(left))}{f'; {errors}' if failed else ''}.")


def _answers(new: int, before: int) -> str:
    return counted(new, "answer") + (f", {before} {'was' if before == 1 else 'were'} there" if before else "")


def _write_answers(spec: QuerySpec, endpoint: Endpoint, out: Path) -> None:
    """Write a line for each prompt that has none yet."""
    from trtserve.client.batch import AnswerFile
    from trtserve.client.query import generate_each

    if spec.batch:
        raise UsageError("--batch asks for all answers at once, and --output-file writes them as they come.")
    prompts = [*spec.prompts, *map(list, spec.token_ids)]
    with AnswerFile(out) as answers:
        done = {line["prompt"]: line["input"] for line in answers.lines}
        if any(number not in range(len(prompts)) or prompts[number] != text for number, text in done.items()):
            raise UsageError(f"--output-file: {out} has answers to other prompts.", hint="Name another file.")
        left = [number for number in range(len(prompts)) if number not in done]
        asked = replace(
            spec,
            prompts=tuple(spec.prompts[number] for number in left) if spec.prompts else (),
            token_ids=tuple(spec.token_ids[number] for number in left) if spec.token_ids else (),
        )
        for number, generation in zip(left, generate_each(asked, endpoint) if left else (), strict=True):
            for sequence in generation.sequences:
                sequence.prompt = number
            answers.write({"prompt": number, "input": prompts[number], **query_output.as_json(generation, {})})
    output.say(f"{_answers(len(left), len(done))}.")


def _ask(spec: QuerySpec, endpoint: Endpoint, sink: query_output.Sink) -> None:
    from trtserve.client.query import generate_each

    try:
        for generation in generate_each(spec, endpoint, on_text=sink.on_text):
            sink.add(generation, spec)
    except (KeyboardInterrupt, TrtserveError):
        sink.broken()
        raise
    sink.finish(spec, endpoint)


Prompts = tuple[str, ...]
TokenIds = tuple[tuple[int, ...], ...]

_STDIN = Path("-")
_CONVERT = "Convert it, for example: iconv -f latin1 -t utf-8 FILE | trtserve query"
_BINARY = "It looks like a binary file, such as a table or an archive. Give text: one prompt per line, or a JSON list."
_SPLIT = "Split it (split -l 10000 FILE), or write it in OpenAI's batch format, which is read line by line."
# Start of a JSON list or object; "[INST] …", "[1] …", "[[ ## …" and "{name} …" are prompts.
_LIST = re.compile(r"""\s*(\[[\s\[]*(["'{]|$)|(\[\s*){3}|\{\s*("|$))""")


def read_prompts(
    words: Sequence[str] | None, *, prompts: Sequence[str] | None, file: Path | None, tokens: str | None
) -> tuple[Prompts, TokenIds]:
    """Return prompts as texts or as token ids. Raises UsageError when they come from two places."""
    ways = {"the words": words, "--prompt": prompts, "--input-file": file, "--input-tokens-csv": tokens}
    used = [name for name, value in ways.items() if value]
    if len(used) > 1:
        raise UsageError(f"Prompts come from {' and '.join(used)}; use one of them.")
    if tokens is not None:
        from trtserve.client.request import read_token_ids

        return (), read_token_ids(tokens, "--input-tokens-csv")
    if prompts:
        return tuple(_decoded(os.fsencode(prompt)) for prompt in prompts), ()
    if file is not None:
        return _of_file(file), ()
    # An unquoted prompt arrives as several arguments.
    prompt = " ".join(words) if words else None
    piped = prompt is None and not sys.stdin.isatty()
    content = _stdin().rstrip(b"\r\n") if piped or prompt == "-" else os.fsencode(prompt or "")
    if prompt is None and not content:
        raise UsageError("There is no prompt.", hint='Give one: trtserve query "What is ML?"')
    return (_decoded(content),), ()


def as_utf8(text: str, flag: str) -> str:
    """Return an argument as UTF-8, which models expect, whatever this terminal's encoding is."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} is not UTF-8 text: {error.reason} at byte {error.start}.") from None


def _stdin() -> bytes:
    content = sys.stdin.buffer.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise UsageError(f"stdin is larger than {LARGEST_TEXT >> 20} MiB: it is not read further.")
    return content


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The prompt is not UTF-8 text: {error.reason} at byte {error.start}.",
            hint=_text_hint(content),
        ) from None


def _text_hint(content: bytes) -> str:
    return _BINARY if b"\0" in content[:4096] else _CONVERT


def _of_file(path: Path) -> Prompts:
    """Return the texts of a JSON list, or the non-empty lines of any other file."""
    if path.is_dir():
        raise UsageError(f"--input-file: {path} is a folder; expected a file of prompts.")
    try:
        text = _decoded(_stdin()) if path == _STDIN else read_text(path, UsageError, hint=_SPLIT, pipes=True)
    except FileNotFoundError as error:
        raise UsageError(f"--input-file: {path} cannot be read: {error.strerror}.") from None
    except UsageError as error:
        if isinstance(damage := error.__cause__, UnicodeDecodeError):
            error.hint = _text_hint(damage.object)
        raise
    text = text.removeprefix("\ufeff")  # of editors on Windows
    prompts = _json_texts(text, path)
    if prompts is None:
        prompts = tuple(line for line in text.splitlines() if line.strip())
    if not prompts:
        raise UsageError(f"--input-file: {path} holds no prompt.")
    return prompts


def _json_texts(text: str, path: Path) -> Prompts | None:
    """Return the texts of a JSON list, or None for lines, which may begin with a bracket too ("[INST] …")."""
    named = path.suffix.lower() == ".json"
    if not named and not text.lstrip().startswith(("[", "{")):
        return None
    try:
        content = parse_json(text)
    except ValueError as error:
        if not named and not _LIST.match(text):
            return None
        raise UsageError(
            f"--input-file: {path} should be a JSON list of texts but is not: {error}.",
            hint="Fix the list. For one prompt per line, give the file another name than .json, and put a line first "
            "that does not look like a list.",
        ) from None
    if not isinstance(content, list):
        kinds: dict[type, str] = {dict: "a JSON object", str: "one JSON text"}
        kind = kinds.get(type(content), "JSON")
        raise UsageError(f"--input-file: {path} is {kind}; expected a JSON list of texts, or one prompt per line.")
    wrong = [item for item in content if not isinstance(item, str) or not is_unicode(item)]
    if wrong:
        raise UsageError(
            f"--input-file: {path} is a JSON list with {json.dumps(wrong[0])[:200]} in it; expected only texts."
        )
    return tuple(content)
