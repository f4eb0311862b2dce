"""How `trtserve query` prints answers: text on stdout, other outputs on stderr, or everything as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.cli import output
from trtserve.errors import RepositoryError, UsageError

if TYPE_CHECKING:
    from trtserve.client.answer import GeneratedSequence, Generation
    from trtserve.client.endpoint import Endpoint
    from trtserve.client.request import RequestContext
    from trtserve.client.spec import QuerySpec

# Outputs with at most this many values are printed; larger ones as a shape, or a file if there is a folder.
_SHOWN = 16
# Attributes that JSON has in another form, such as milliseconds.
_OTHERWISE = ("outputs", "sequences", "latency", "time_to_first_token")


@dataclass(kw_only=True)
class Sink:
    """Prints each complete answer, and the pieces of a streamed one as they arrive."""

    stream: bool
    json: bool
    verbose: bool
    folder: Path | None = None
    names: tuple[str, ...] = ()
    _results: list[dict[str, Any]] = field(default_factory=list)
    _streamed: output.StreamedText | None = None
    _reduced: bool = False

    @property
    def on_text(self) -> Callable[[str], None] | None:
        """Callback for streamed pieces, or None if they are not printed."""
        return self._write if self.stream else None

    def _write(self, piece: str) -> None:
        self._streamed = self._streamed or output.StreamedText()
        self._streamed.write(piece)

    def add(self, generation: Generation, spec: QuerySpec) -> None:
        """Print one answer, or keep it for the JSON document."""
        files = save_outputs(generation, self.folder, self.names) if self.folder is not None else {}
        self._reduced |= _ended_early(generation, spec)
        if self.json:
            self._results.append(as_json(generation, files))
            return
        self._print_texts(generation, labelled=spec.rows > 1 or len(generation.sequences) > 1)
        for line in _facts(generation, files, spec, verbose=self.verbose):
            output.say(line)
        if self.stream and not generation.streamed:
            output.say(f"The model {generation.model!r} does not stream (it is served with --no-streaming).")
        if self.verbose:
            output.say(_timing(generation))

    def _print_texts(self, generation: Generation, *, labelled: bool) -> None:
        if self._streamed is not None:
            self.broken()
            return
        for sequence in generation.sequences:
            label = f"{_label(sequence, generation)}: " if labelled else ""
            ids = ", ".join(map(str, sequence.token_ids or ()))
            output.print_text(f"{label}{ids if sequence.text is None else sequence.text}")
        if not generation.sequences:
            output.print_data("")

    def broken(self) -> None:
        """End the line of an answer that was streamed, or cut off."""
        if self._streamed is not None:
            self._streamed.end()
        self._streamed = None

    def finish(self, spec: QuerySpec, endpoint: Endpoint) -> None:
        """Print the JSON document and notes about the length limit."""
        if self.json:
            output.print_json("query", self._results[0] if len(self._results) == 1 else {"answers": self._results})
        if self._reduced:
            output.say(
                f"note: the engine reduced --max-tokens {spec.max_tokens}: "
                "prompt and answer together reached its max_seq_len."
            )
        else:
            _say_limit(spec, endpoint)


def as_json(generation: Generation, files: dict[tuple[str, int, int], Path]) -> dict[str, Any]:
    """Return an answer as JSON; large arrays become type, shape and file."""
    content = {name: value for name, value in vars(generation).items() if name not in _OTHERWISE}
    first = generation.time_to_first_token
    outputs = [
        {"name": name, "prompt": prompt, "sequence": sequence} | _array_json(array, files.get((name, prompt, sequence)))
        for (name, prompt, sequence), array in generation.outputs.items()
    ]
    return {
        "text": generation.text,
        **content,
        "latency_ms": generation.latency * 1000,
        "time_to_first_token_ms": None if first is None else first * 1000,
        "tokens_per_second": generation.tokens_per_second,
        "sequences": [asdict(sequence) for sequence in generation.sequences],
        "outputs": outputs,
    }


def _array_json(array: Any, path: Path | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": str(array.dtype), "shape": list(array.shape)}
    if array.size <= _SHOWN:
        facts["value"] = array.item() if array.size == 1 else array.tolist()
    return facts if path is None else {**facts, "file": str(path)}


def save_outputs(generation: Generation, folder: Path, names: Sequence[str]) -> dict[tuple[str, int, int], Path]:
    """Write outputs as NAME.npy, or NAME-PROMPT-SEQUENCE.npy if there are several; return their paths."""
    import numpy as np

    missing = set(names) - {name for name, _, _ in generation.outputs}
    if missing:
        there = ", ".join(sorted({name for name, _, _ in generation.outputs})) or "none that can be saved"
        raise UsageError(
            f"--save names {', '.join(sorted(missing))}, which the answer does not have.",
            hint=f"It has {there}; --return-context-logits and --return-generation-logits ask for logits.",
        )
    wanted = {
        key: array for key, array in generation.outputs.items() if (key[0] in names if names else array.size > _SHOWN)
    }
    several = len({key[1:] for key in wanted}) > 1 or any(sequence.prompt for sequence in generation.sequences)
    first = min((sequence.prompt for sequence in generation.sequences), default=0)
    files = {}
    for (name, prompt, sequence), array in wanted.items():
        suffix = f"-{first + prompt}-{sequence}" if several else ""
        files[name, prompt, sequence] = folder / f"{name}{suffix}.npy"
        np.save(files[name, prompt, sequence], array)
    return files


def _label(sequence: GeneratedSequence, generation: Generation) -> str:
    several = [name for name in ("sequence", "beam") if any(getattr(each, name) for each in generation.sequences)]
    return ", ".join(f"{name} {getattr(sequence, name)}" for name in ("prompt", *several))


def _facts(
    generation: Generation, files: dict[tuple[str, int, int], Path], spec: QuerySpec, *, verbose: bool
) -> list[str]:
    # In the words of NVIDIA's client.
    lines = []
    for sequence in generation.sequences:
        where = f" ({_label(sequence, generation)})" if len(generation.sequences) > 1 or spec.rows > 1 else ""
        if verbose and sequence.token_ids is not None and sequence.text is not None:
            lines.append(f"Output sequence{where}: {sequence.token_ids}")
        if verbose and sequence.finish_reason is not None:
            lines.append(f"finish_reason{where}: {sequence.finish_reason}")
        if sequence.cum_log_prob is not None:
            lines.append(f"cum_log_probs{where}: {sequence.cum_log_prob}")
        if sequence.log_probs is not None:
            lines.append(f"output_log_probs{where}: {sequence.log_probs}")
    for key, array in generation.outputs.items():
        if array.size <= _SHOWN:
            lines.append(f"{key[0]}: {array.item() if array.size == 1 else array.tolist()}")
        else:
            saved = f", saved as {files[key]}" if key in files else ""
            lines.append(f"{key[0]}.shape: {tuple(array.shape)}{saved}")
    if generation.input_tokens is not None and ("return_num_input_tokens" in spec.options or verbose):
        lines.append(f"num_input_tokens: {generation.input_tokens}")
    if generation.output_tokens is not None and "return_num_output_tokens" in spec.options:
        lines.append(f"num_output_tokens: {generation.output_tokens}")
    return [*lines, "Stopped by --stop-after-ms."] if generation.stopped else lines


def say_greedy(spec: QuerySpec) -> None:
    """Say that a temperature alone changes nothing, which is TensorRT-LLM's rule."""
    if spec.options.get("temperature") and not spec.options.get("top_k") and not spec.options.get("top_p"):
        output.say(
            "note: A temperature alone has no effect: the likeliest token is taken. Add top-k or top-p: --top-p 0.9"
        )


def _ended_early(generation: Generation, spec: QuerySpec) -> bool:
    """Return whether the executor reduced max_tokens, which it does without an error.

    A sequence ended by its length with fewer tokens then; one that verifies draft tokens does so after every step.
    """
    if spec.options.get("draft_tokens_csv") or any(name == "draft_input_ids" for name, _ in spec.inputs):
        return False
    only = generation.output_tokens if len(generation.sequences) == 1 else None
    counts = [
        only if sequence.token_ids is None else len(sequence.token_ids)
        for sequence in generation.sequences
        if sequence.finish_reason == "length"
    ]
    return any(count is not None and count < spec.max_tokens for count in counts)


def _say_limit(spec: QuerySpec, endpoint: Endpoint) -> None:
    """Say that --max-tokens exceeds what the engine can generate, if its limits are known."""
    from trtserve.bench.records import limits_of_repository
    from trtserve.client.tensors import CORE_MODEL

    if endpoint.repository is None:
        return
    limit = None
    # The answer is printed already; a repository that was damaged meanwhile must not turn it into an error.
    with suppress(RepositoryError):
        limit = limits_of_repository(endpoint.repository, CORE_MODEL).max_seq_len
    if limit is not None and spec.max_tokens >= limit:
        output.say(
            f"note: --max-tokens {spec.max_tokens} is cut by the engine: prompt and answer have {limit} tokens at most."
        )


def _timing(answer: Generation) -> str:
    first, rate = answer.time_to_first_token, answer.tokens_per_second
    uncounted = " (this model does not count tokens)" if answer.output_tokens is None else ""
    parts = [
        f"TTFT {first * 1000:.1f} ms" if first is not None else "TTFT n/a (not a stream)",
        f"latency {answer.latency * 1000:.1f} ms",
        f"{answer.output_tokens} tokens" if answer.output_tokens is not None else f"{answer.responses} responses",
        f"{rate:.1f} tokens/s" if rate is not None else f"tokens/s n/a{uncounted}",
    ]
    return f"{answer.model}: {', '.join(parts)}; request id {answer.request_id}"


def describe(spec: QuerySpec, endpoint: Endpoint) -> None:
    """Print the requests that would be sent; the server is only asked for its models' configuration."""
    from trtserve.client.query import connect, request_contexts

    with closing(connect(spec, endpoint)) as client:
        described = request_contexts(spec, endpoint, client)
        model = described[0].model
    call = "as a stream" if model.decoupled else "with one response"
    over_grpc = spec.protocol == "grpc" and endpoint.grpc_port
    where = f"at {endpoint.grpc} over grpc" if over_grpc else f"at {endpoint.http} over http"
    if endpoint.in_process is not None:
        where = "in this process"
    output.say(f"Would ask the model {model.name!r} {where}, {call}:")
    bodies = [_body(context) for context in described]
    output.print_json("query", bodies[0] if len(bodies) == 1 else {"requests": bodies})


def _body(context: RequestContext) -> dict[str, Any]:
    """Return the inputs of a request: scalars and short lists as values, longer ones as type and shape."""
    from trtserve.client.request import request_tensors

    body: dict[str, Any] = {}
    for tensor in request_tensors(context):
        values = tensor.flat()
        short = values[0] if len(values) == 1 else values
        body[tensor.name] = short if len(values) <= 256 else {"type": tensor.datatype, "shape": list(tensor.shape)}
    return {**body, "id": context.spec.request_id or "<a unique id>"}
