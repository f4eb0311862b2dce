"""Kinds of traffic: which requests a run sends, and when. Prompts are random or a dataset's, times those of a trace.

Random prompts are token ids for core models, and texts for models that take text. Datasets are upstream's JSON,
ShareGPT's conversations, or JSON lines. Of traces, Mooncake's JSON lines have `timestamp` (ms), `input_length`,
`output_length` and `hash_ids`, one for every 512 tokens: equal ids mean equal tokens. Azure's CSV files have TIMESTAMP,
ContextTokens and GeneratedTokens.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trtserve.bench.records import Traffic, TrafficLimits, TrafficRequest, clip
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import UsageError
from trtserve.files import LARGEST_DATA, is_unicode, parse_json, read_text
from trtserve.specs import BenchSpec

Prompt = tuple[npt.NDArray[np.int32], str | None]  # token ids of a prompt, and its text for a text model


class Writer(Protocol):
    """Writes prompts."""

    def __call__(self, length: int) -> Prompt:
        """Return a new prompt of `length` tokens."""

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        """Return one prompt that consists of `parts`."""


class IdWriter:
    """Writes random token ids within the vocabulary, without special tokens."""

    def __init__(self, limits: TrafficLimits, generator: np.random.Generator) -> None:
        if limits.vocab_size is None:
            raise UsageError(
                "The vocabulary size of the served engine is unknown here.",
                hint="Give it with --vocab-size (and --max-input-len, --max-seq-len to stay within the engine's "
                "limits).",
            )
        special = [token for token in limits.special_ids if token < limits.vocab_size]
        self._ids = np.setdiff1d(np.arange(limits.vocab_size), np.array(special, np.int64))
        self._generator = generator

    def __call__(self, length: int) -> Prompt:
        return self._generator.choice(self._ids, length).astype(np.int32), None

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        return np.concatenate([ids for ids, _ in parts]), None


TRIED_TOKENS = 2048
WORDS = 512
ATTEMPTS = 16


class TextWriter:
    """Writes texts of random words, each of which is one token in any position.

    `special`: the server encodes prompts with special tokens (BOS); they count towards the length, since the engine
    processes them like other tokens.
    """

    def __init__(self, files: TokenizerFiles, *, special: bool, seed: int) -> None:
        self._files = files
        self._special = special
        self._generator: np.random.Generator = np.random.default_rng([seed, 2])
        self._separator, self._words = self._vocabulary()

    def __call__(self, length: int) -> Prompt:
        """Return a text of `length` tokens; if none is found, the longest shorter one, else the shortest.

        Every text has at least one word.
        """
        words, tried = self._draw(length), []
        for _ in range(ATTEMPTS):
            text = self._separator.join(words)
            ids = self._files.encode(text, special=self._special)
            tried.append((ids, text))
            surplus = len(ids) - length
            if surplus == 0:
                break
            kept = len(words) - surplus
            words = words[:kept] + self._draw(kept - len(words)) if kept > 1 else self._draw(1)
        ids, text = min(tried, key=lambda each: (len(each[0]) > length, abs(len(each[0]) - length)))
        return np.array(ids, np.int32), text

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        """Return the texts after each other; at their borders the number of tokens can differ by one."""
        text = " ".join(text or "" for _, text in parts)
        return np.array(self._files.encode(text, special=self._special), np.int32), text

    def _draw(self, count: int) -> list[str]:
        return [self._words[index] for index in self._generator.integers(len(self._words), size=max(0, count))]

    def _vocabulary(self) -> tuple[str, list[str]]:
        """Return the separator of words and the words; the separator is empty if a space is a separate token."""
        tokenizer = self._files.tokenizer
        special = set(tokenizer.all_special_ids)
        for separator in (" ", ""):
            tokens = self._generator.permutation(len(tokenizer))[:TRIED_TOKENS]
            texts = (tokenizer.decode([int(token)]).strip() for token in tokens if int(token) not in special)
            plain = (text for text in texts if text.isascii() and (text.isalpha() if separator else text.isalnum()))
            words = [word for word in dict.fromkeys(plain) if self._is_one_token(separator, word)][:WORDS]
            if words:
                return separator, words
        raise UsageError(
            f"The tokenizer in {self._files.folder} has no words for prompts of an exact length.",
            hint="Use prompts of your own (`trtserve bench dataset`), or measure the core model with token ids.",
        )

    def _is_one_token(self, separator: str, word: str) -> bool:
        once, twice = (len(self._files.encode(separator.join([word] * times), special=False)) for times in (1, 2))
        return twice == once + 1 and (bool(separator) or once == 1)


FIELDS = ("input", "instruction", "output")
_PROMPTS = ("prompt", "text_input", "text")
_ANSWERS = ("output", "completion", "response")
_LENGTHS = ("output_len", "output_length", "max_tokens")
_DATASETS = (
    "It must be a JSON list of objects with the texts `input`, `instruction` and `output`, a list of ShareGPT's "
    "`conversations`, or one JSON object per line with `prompt` and `output` (a text) or `output_len` (tokens)."
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One entry of a dataset."""

    prompt: str
    output: str | None = None  # an answer, whose words set the length of ours
    tokens: int | None = None  # tokens to generate, where the entry has the number itself

    def output_len(self, tokens_per_word: float, default: float) -> int:
        """Tokens to generate: words (split at single spaces, as upstream does) times `tokens_per_word`."""
        if self.tokens is not None:
            return max(1, self.tokens)
        words = None if self.output is None else len(self.output.split(" "))
        return max(1, int(default if words is None else words * tokens_per_word))


def read_dataset(path: Path) -> list[Example]:
    """Read all entries of a dataset; UsageError names the first invalid one."""
    content = _entries(path)
    if not isinstance(content, list) or not content:
        wrong = "is an empty list" if content == [] else "is not a JSON list"
        raise UsageError(f"--dataset is {path}, which {wrong}.", hint=_DATASETS)
    examples = [_example(entry, number, path) for number, entry in enumerate(content)]
    for number, example in enumerate(examples):
        if not is_unicode(f"{example.prompt}{example.output}"):
            raise UsageError(f"Entry {number} of {path} has half a character (\\ud800 … \\udfff).", hint=_DATASETS)
    return examples


def _entries(path: Path) -> Any:
    try:
        text = read_text(path, UsageError, hint=_DATASETS, limit=LARGEST_DATA, pipes=True)
    except FileNotFoundError as error:
        raise UsageError(f"--dataset is {path}: {error.strerror}.") from None
    try:
        content = parse_json(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [parse_json(line) for line in lines]
        except ValueError:
            raise UsageError(f"--dataset is {path}, which is not JSON: {error}.", hint=_DATASETS) from None
    single = isinstance(content, Mapping) and any(name in content for name in _PROMPTS)
    return [content] if single else content


def _example(entry: Any, number: int, path: Path) -> Example:
    if isinstance(entry, Mapping):
        if isinstance(entry.get("conversations"), list):
            return _first_turns(entry["conversations"], number, path)
        prompt = next((entry[name] for name in _PROMPTS if isinstance(entry.get(name), str)), None)
        if prompt is not None:
            return Example(
                prompt=prompt,
                output=next((entry[name] for name in _ANSWERS if isinstance(entry.get(name), str)), None),
                tokens=next((entry[name] for name in _LENGTHS if isinstance(entry.get(name), int)), None),
            )
    missing = [name for name in FIELDS if not isinstance(entry, Mapping) or not isinstance(entry.get(name), str)]
    if missing:
        names = " and ".join(repr(name) for name in missing)
        raise UsageError(f"Entry {number} of {path} has no text for {names}.", hint=_DATASETS)
    return Example(prompt=f"{entry['input']} {entry['instruction']}", output=entry["output"])


def _first_turns(turns: list[Any], number: int, path: Path) -> Example:
    """Return the first question of a ShareGPT conversation, and the answer to it."""
    texts = [turn["value"] for turn in turns if isinstance(turn, Mapping) and isinstance(turn.get("value"), str)]
    if not turns:  # ShareGPT has such entries; prompts without a token are skipped
        return Example(prompt="")
    if not texts:
        raise UsageError(f"Entry {number} of {path} is a conversation without text (`value`).", hint=_DATASETS)
    return Example(prompt=texts[0], output=texts[1] if len(texts) > 1 else None)


def dataset_traffic(
    spec: BenchSpec, limits: TrafficLimits, tokenizer: TokenizerFiles, *, text: bool, special: bool, end_id: int | None
) -> Traffic:
    """Return the dataset's prompts in their order, at most `spec.num_requests` of those within the engine's limits.

    Prompts longer than `max_input_len` are skipped, as upstream does. `special`: prompts are encoded with special
    tokens; `text`: the model gets prompts as text. Raises UsageError when no prompt is left.
    """
    if spec.dataset is None:
        raise UsageError("--dataset is missing.")
    requests: list[TrafficRequest] = []
    words = shortened = skipped = 0
    for example in read_dataset(spec.dataset):
        if len(requests) == spec.num_requests:
            break
        ids = tokenizer.encode(example.prompt, special=special)
        wanted = example.output_len(spec.op_tokens_per_word, spec.output_mean)
        input_len, output_len = clip(len(ids), wanted, limits)
        if not ids or input_len < len(ids):
            skipped += 1
            continue
        shortened += output_len < wanted
        words += len(example.prompt.split())
        prompt = example.prompt if text else None
        requests.append(
            TrafficRequest(token_ids=np.array(ids, np.int32), output_len=output_len, text=prompt, end_id=end_id)
        )
    bounds = f"max_input_len {limits.max_input_len}, max_seq_len {limits.max_seq_len}"
    if not requests:
        raise UsageError(f"None of the {skipped} prompts of {spec.dataset} fits the engine ({bounds}).")
    tokens = sum(len(request.token_ids) for request in requests)
    notes = [f"Tokenizer: tokens per word = {tokens / max(1, words):.3f}."]
    if skipped:
        notes.append(f"{skipped} prompts were skipped: empty, or longer than the engine allows ({bounds}).")
    return Traffic(requests=tuple(requests), clipped_outputs=shortened, notes=tuple(notes))


BLOCK = 512
_TRACES = (
    "Expected Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids), an access log's (time, "
    "prompt_tokens, completion_tokens), or Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens)."
)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    seconds: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of BLOCK tokens; empty: its tokens are shared with no other prompt."""


_LONGEST_TRACE = 366 * 86_400.0


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace in order of time; the first request is at 0. Raises UsageError for another form."""
    try:
        text = read_text(path, UsageError, hint=_TRACES, limit=LARGEST_DATA, pipes=True)
        lines = text.removeprefix("\ufeff").splitlines()
        found = _mooncake(lines) if lines and lines[0].lstrip().startswith("{") else _azure(lines)
    except FileNotFoundError as error:
        raise UsageError(f"--trace is {path}: {error.strerror}.", hint=_TRACES) from None
    except KeyError as error:
        raise UsageError(f"--trace is {path}, which is not a trace: a request has no {error}.", hint=_TRACES) from None
    except (ValueError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        raise UsageError(f"--trace is {path}, which is not a trace: {error}.", hint=_TRACES) from None
    if not found:
        raise UsageError(f"--trace is {path}, which has no requests.", hint=_TRACES)
    found.sort(key=lambda arrival: arrival.seconds)
    moved = [replace(arrival, seconds=arrival.seconds - found[0].seconds) for arrival in found]
    if any(not 0 <= arrival.seconds <= _LONGEST_TRACE for arrival in moved):
        raise UsageError(
            f"--trace is {path}, whose times are not all within {_LONGEST_TRACE / 86400:g} days.", hint=_TRACES
        )
    return moved


def _mooncake(lines: list[str]) -> list[Arrival]:
    found = []
    for line in filter(None, map(str.strip, lines)):
        entry = parse_json(line)
        if "input_length" not in entry and "timestamp" not in entry:
            found += _logged(entry)
            continue
        found.append(
            Arrival(
                seconds=float(entry["timestamp"]) / 1000,
                input_len=int(entry["input_length"]),
                output_len=int(entry["output_length"]),
                blocks=tuple(entry.get("hash_ids", ())),
            )
        )
    return found


def _logged(entry: dict[str, Any]) -> list[Arrival]:
    """Return the request of a line of an access log, whose tokens may stand under `usage` as OpenAI has them.

    Lines without tokens, such as those of refused requests, are not load.
    """
    usage = entry.get("usage") or entry
    if not usage.get("prompt_tokens") or not usage.get("completion_tokens"):
        return []
    moment = entry["time"]
    seconds = float(moment) if isinstance(moment, int | float) else _seconds(str(moment).replace("T", " "))
    return [Arrival(seconds=seconds, input_len=int(usage["prompt_tokens"]), output_len=int(usage["completion_tokens"]))]


def _azure(lines: list[str]) -> list[Arrival]:
    return [
        Arrival(
            seconds=_seconds(row["TIMESTAMP"]),
            input_len=int(row["ContextTokens"]),
            output_len=int(row["GeneratedTokens"]),
        )
        for row in csv.DictReader(lines)
    ]


def _seconds(text: str) -> float:
    """Read Azure's time stamps, which have seven digits after the seconds and sometimes a zone."""
    whole, _, fraction = text.strip().partition(".")
    digits = fraction[: next((place for place, letter in enumerate(fraction) if not letter.isdigit()), len(fraction))]
    moment = datetime.datetime.fromisoformat(whole[:19]).replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp() + float(f"0.{digits or 0}")


def replay(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return the first `num_requests` requests of a trace, `speed` times as fast as recorded."""
    if spec.trace is None:
        raise UsageError("--trace is missing.")
    arrivals = read_trace(spec.trace)[: spec.num_requests]
    writer = write or IdWriter(limits, np.random.default_rng([spec.seed, 4]))
    blocks: dict[int, Prompt] = {}
    requests, clipped_inputs, clipped_outputs = [], 0, 0
    for arrival in arrivals:
        input_len, output_len = clip(max(1, arrival.input_len), max(1, arrival.output_len), limits)
        clipped_inputs += input_len < arrival.input_len
        clipped_outputs += output_len < arrival.output_len
        ids, text = _prompt(arrival, input_len, writer, blocks)
        requests.append(TrafficRequest(token_ids=ids, output_len=output_len, text=text, end_id=end_id))
    return Traffic(
        requests=tuple(requests),
        clipped_inputs=clipped_inputs,
        clipped_outputs=clipped_outputs,
        offsets=tuple(arrival.seconds / spec.speed for arrival in arrivals),
        notes=(f"Replayed {len(arrivals)} requests of {spec.trace}, at {spec.speed:g} × the recorded speed.",),
    )


def _prompt(arrival: Arrival, length: int, write: Writer, blocks: dict[int, Prompt]) -> Prompt:
    """Return a prompt of `length` tokens that consists of the trace's blocks, and random tokens after them."""
    parts, left = [], length
    for block in arrival.blocks:
        if left < BLOCK:
            break
        if block not in blocks:
            blocks[block] = write(BLOCK)
        parts.append(blocks[block])
        left -= BLOCK
    if left:
        parts.append(write(left))
    return parts[0] if len(parts) == 1 else write.join(parts)


Arrivals = Literal["exponential", "constant", "gamma"]


def arrival_times(
    kind: Arrivals, *, rate: float, count: int, seed: int, burstiness: float = 1.0, ramp_to: float | None = None
) -> list[float]:
    """Return the offsets in seconds of `count` arrivals at `rate` per second on average; the first is 0.

    Offsets are absolute, so a request that is sent late never delays those after it. `burstiness` is the shape of
    gamma gaps: 1 equals exponential, less is burstier, more is smoother. With `ramp_to` the rate changes linearly from
    `rate` to that rate.
    """
    if kind == "constant":
        unit: npt.NDArray[np.float64] = np.arange(count, dtype=np.float64)
    else:
        shape = burstiness if kind == "gamma" else 1.0
        gaps = np.random.default_rng([seed, 1]).gamma(shape, 1 / shape, count - 1)
        unit = np.concatenate([[0.0], np.cumsum(gaps)])
    offsets: list[float] = _stretched(unit, rate, rate if ramp_to is None else ramp_to, count).tolist()
    return offsets


def _stretched(unit: npt.NDArray[np.float64], first: float, last: float, count: int) -> npt.NDArray[np.float64]:
    """Turn arrivals at rate 1 into arrivals whose rate goes linearly from `first` to `last` over `count` requests.

    The expected number of arrivals until t is first·t + slope·t²/2; this solves it for t.
    """
    if first == last:
        return unit / first
    slope = (last**2 - first**2) / (2 * count)  # the ramp takes 2·count / (first + last) seconds
    # After the ramp the rate stays at `last`.
    ramp = np.minimum(unit, count)
    ramped = (np.sqrt(np.maximum(0.0, first**2 + 2 * slope * ramp)) - first) / slope
    return np.asarray(ramped + (unit - ramp) / last)


Buckets = list[tuple[int, int, int]]  # shortest and longest length of a bucket, and how often it occurs

# The built-in histogram of benchmark_core_model.py.
EXAMPLE: dict[str, Buckets] = {
    "input": [(151, 175, 220), (176, 200, 225), (201, 225, 150), (226, 250, 150), (251, 275, 140)],
    "output": [(6, 10, 76), (11, 15, 210), (16, 20, 174), (21, 25, 130), (26, 30, 152)],
}
_COLUMNS = ("kind", "from", "to", "count")
_FORM = (
    f"Expected a CSV file with the columns {', '.join(_COLUMNS)} (kind: input or output), or JSON such as "
    '{"input": [[151, 175, 220]], "output": [[6, 10, 76]]}.'
)


def token_norm_dist(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests with normally distributed lengths, max(1, ceil(x)) as in upstream's benchmark.

    Unlike upstream, random ids are inside the vocabulary, lengths above a limit are cut instead of dropped, and the
    same seed gives the same requests. `write` replaces the random ids; the lengths stay the same.
    """
    generator = np.random.default_rng([spec.seed, 0])
    inputs = _lengths(generator.normal(spec.input_mean, spec.input_stdev, spec.num_requests))
    outputs = _lengths(generator.normal(spec.output_mean, spec.output_stdev, spec.num_requests))
    return of_lengths(inputs, outputs, limits, write or IdWriter(limits, generator), end_id=end_id)


def token_from_histogram(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests whose lengths have the frequencies of a histogram, uniform within a bucket."""
    generator = np.random.default_rng([spec.seed, 0])
    buckets = EXAMPLE if spec.histogram == "example" else read_histogram(Path(spec.histogram))
    inputs, outputs = (_drawn(buckets[kind], spec.num_requests, generator) for kind in ("input", "output"))
    return of_lengths(inputs, outputs, limits, write or IdWriter(limits, generator), end_id=end_id)


def of_lengths(
    inputs: Sequence[int], outputs: Sequence[int], limits: TrafficLimits, write: Writer, *, end_id: int | None
) -> Traffic:
    """Return one request for each pair of lengths, cut to the limits."""
    pairs = [clip(*wanted, limits) for wanted in zip(inputs, outputs, strict=True)]
    requests = []
    for input_len, output_len in pairs:
        ids, text = write(input_len)
        requests.append(TrafficRequest(token_ids=ids, output_len=output_len, text=text, end_id=end_id))
    missed = sum(len(request.token_ids) != length for request, (length, _) in zip(requests, pairs, strict=True))
    note = f"{missed} prompts do not have the drawn length: the tokenizer has no text of exactly that many tokens."
    return Traffic(
        requests=tuple(requests),
        clipped_inputs=sum(length < wanted for (length, _), wanted in zip(pairs, inputs, strict=True)),
        clipped_outputs=sum(length < wanted for (_, length), wanted in zip(pairs, outputs, strict=True)),
        notes=(note,) if missed else (),
    )


def read_histogram(path: Path) -> dict[str, Buckets]:
    """Read the buckets of prompt and answer lengths. Raises UsageError for another form."""
    try:
        content = read_text(path, UsageError, pipes=True)
        if content.lstrip().startswith("{"):
            listed = parse_json(content)
            found = {kind: [(int(low), int(high), int(count)) for low, high, count in listed[kind]] for kind in EXAMPLE}
        else:
            found = _of_csv(content)
    except FileNotFoundError as error:
        raise UsageError(f"--histogram is {path}: {error.strerror}.", hint=_FORM) from None
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise UsageError(f"--histogram is {path}, which is not a histogram: {error}.", hint=_FORM) from None
    for kind, buckets in found.items():
        if not buckets or any(low < 1 or high < low or count < 0 for low, high, count in buckets):
            raise UsageError(f"--histogram is {path}, whose {kind} buckets are empty or invalid.", hint=_FORM)
    return found


def _of_csv(content: str) -> dict[str, Buckets]:
    found: dict[str, Buckets] = {kind: [] for kind in EXAMPLE}
    for row in csv.DictReader(content.splitlines()):
        found[row["kind"]].append((int(row["from"]), int(row["to"]), int(row["count"])))
    return found


def _drawn(buckets: Buckets, count: int, generator: Any) -> list[int]:
    weights = [frequency / sum(frequency for *_, frequency in buckets) for *_, frequency in buckets]
    chosen = generator.choice(len(buckets), size=count, p=weights)
    return [int(generator.integers(buckets[index][0], buckets[index][1] + 1)) for index in chosen]


def _lengths(values: Iterable[float]) -> list[int]:
    return [max(1, math.ceil(value)) for value in values]


def shared_prefixes(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests that begin with one of `num_prefixes` prefixes, or at `1 - reuse_rate` with one of their own.

    The lengths of `token_norm_dist` are those of the part after the prefix.
    """
    room = (
        limits.max_input_len
        if limits.max_seq_len is None
        else min(limits.max_seq_len - 1, limits.max_input_len or limits.max_seq_len)
    )
    if room is not None and spec.prefix_len >= room:
        raise UsageError(
            f"--prefix-len is {spec.prefix_len}, but the engine takes prompts of at most {room} tokens.",
            hint="Shorten the prefix, or build the engine for longer prompts (--max-input-len, --max-seq-len).",
        )
    generator = np.random.default_rng([spec.seed, 2])
    writer = write or IdWriter(limits, generator)
    shared = [writer(spec.prefix_len) for _ in range(spec.num_prefixes)]
    own = generator.random(spec.num_requests) >= spec.reuse_rate
    bounds = {name: getattr(limits, name) for name in ("max_input_len", "max_seq_len")}
    after = {name: bound - spec.prefix_len for name, bound in bounds.items() if bound is not None}
    traffic = token_norm_dist(spec, replace(limits, **after), write=writer, end_id=end_id)
    requests = []
    for index, request in enumerate(traffic.requests):
        prefix = writer(spec.prefix_len) if own[index] else shared[int(generator.integers(len(shared)))]
        ids, text = writer.join([prefix, (request.token_ids, request.text)])
        requests.append(replace(request, token_ids=ids, text=text))
    note = f"{int((~own).sum())} of {len(requests)} prompts begin with one of {len(shared)} shared prefixes."
    return replace(traffic, requests=tuple(requests), notes=(*traffic.notes, note))


def sessions(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return conversations of `turns` requests, whose prompts are all prompts and answers before and a new question.

    `num_requests` counts the requests of all turns. Conversations end early where the next turn would not fit.
    """
    generator = np.random.default_rng([spec.seed, 3])
    writer = write or IdWriter(limits, generator)
    drawn = token_norm_dist(spec, limits, write=writer, end_id=end_id)
    requests: list[TrafficRequest] = []
    session, turns, used = 0, 0, 0
    for request in drawn.requests:
        length = len(request.token_ids)
        fits = clip(used + length, request.output_len, limits) == (used + length, request.output_len)
        if turns == spec.turns or (turns and not fits):
            session, turns, used = session + 1, 0, 0
        requests.append(replace(request, session=session))
        turns, used = turns + 1, used + length + request.output_len
    note = f"{len(requests)} requests are the turns of {session + 1} conversations."
    return replace(drawn, requests=tuple(requests), notes=(*drawn.notes, note))


# Kinds whose prompts are written here; a dataset brings its own.
WRITTEN: dict[str, Callable[..., Traffic]] = {
    "token-norm-dist": token_norm_dist,
    "token-from-histogram": token_from_histogram,
    "prefix": shared_prefixes,
    "sessions": sessions,
    "replay": replay,
}


def with_cancellations(traffic: Traffic, spec: BenchSpec) -> Traffic:
    """Return the traffic with a part of its requests, `cancel_rate`, to be cancelled at a random token."""
    if not spec.cancel_rate:
        return traffic
    generator = np.random.default_rng([spec.seed, 5])
    chosen = generator.random(len(traffic.requests)) < spec.cancel_rate
    requests = tuple(
        replace(request, cancel_after=int(generator.integers(1, max(2, request.output_len)))) if cancelled else request
        for request, cancelled in zip(traffic.requests, chosen, strict=True)
    )
    note = f"{int(chosen.sum())} requests are cancelled by the client at a random response (--cancel-rate)."
    return replace(traffic, requests=requests, notes=(*traffic.notes, note))
