"""The plan of a benchmark: the model to measure, the requests, and when to send them.

Measured are a model of a Triton server, a server with OpenAI's API, or an engine in this process.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.bench.messages import ignores_end, takes_text
from trtserve.bench.records import Traffic, TrafficLimits, limits_of_engine, limits_of_repository, override_limits
from trtserve.bench.statistics import Goals, read_goals
from trtserve.bench.traffic import WRITTEN, TextWriter, arrival_times, dataset_traffic, with_cancellations
from trtserve.bench.transport import LoadTarget, OpenAi, openai_headers
from trtserve.bench.worker import Load
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.http_transport import http_client
from trtserve.client.query import describe_model
from trtserve.client.request import with_named_adapter
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import CORE_MODEL, ModelDescription
from trtserve.client.tokenizer import TokenizerFiles, find_tokenizer, server_adds_special_tokens
from trtserve.client.transport import SyncClient
from trtserve.errors import RequestError, ServerUnreachableError, UsageError
from trtserve.files import LARGEST_TEXT, parse_json
from trtserve.host.ports import web_opener
from trtserve.specs import BenchSpec


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is measured, and its tokenizer."""

    target: LoadTarget | None  # None if the server did not answer; then the core model is assumed
    name: str
    takes_text: bool  # whether prompts are text; a core model gets token ids
    tokenizer: TokenizerFiles | None  # None where no tokenizer is needed or none was found
    adds_special_tokens: bool  # whether the server encodes prompts with special tokens
    limits: TrafficLimits | None = None
    """Limits of an engine in this process; those of a server are in its repository."""

    @property
    def core_model(self) -> str:
        """Name of the core model, whose engine sets the limits."""
        return CORE_MODEL if self.takes_text or self.target is None else self.target.model.name

    def require_tokenizer(self, reason: str) -> TokenizerFiles:
        """Return the tokenizer. If there is none, raise a UsageError that begins with `reason`."""
        if self.tokenizer is None:
            raise UsageError(
                f"{reason}, and the server's tokenizer is not available here.",
                hint="Give the tokenizer's folder with --tokenizer; `trtserve import ID --download-only` fetches one.",
            )
        return self.tokenizer


def find_measured(spec: BenchSpec, endpoint: Endpoint, client: SyncClient, *, offline: bool) -> Measured:
    """Return what `spec` measures. Raises ServerUnreachableError, RequestError and UsageError."""
    if spec.openai is not None and spec.in_process is not None:
        raise UsageError("--openai measures a server and --in-process an engine without one; give one of them.")
    if spec.openai is not None:
        return _openai_server(spec, endpoint, spec.openai)
    if spec.in_process is not None:
        return _engine(spec, endpoint, spec.in_process)
    try:
        if with_named_adapter(QuerySpec(model=spec.model), endpoint.repository).options:
            raise UsageError(
                f"{spec.model} is a LoRA adapter, which bench measures over OpenAI's API alone.",
                hint=f"trtserve bench --openai http://{endpoint.http}/v1 --model {spec.model}",
            )
        model = describe_model(client, spec.model or endpoint.model)
    except ServerUnreachableError:
        if not offline or spec.model not in (None, CORE_MODEL):
            raise
        return Measured(target=None, name=CORE_MODEL, takes_text=False, tokenizer=None, adds_special_tokens=False)
    text = takes_text(model)
    return Measured(
        target=LoadTarget(
            protocol=spec.protocol, endpoint=endpoint, model=model, streams=spec.streaming and model.decoupled
        ),
        name=model.name,
        takes_text=text,
        tokenizer=_tokenizer(spec, endpoint, client, model, needed=text),
        adds_special_tokens=not text or server_adds_special_tokens(client),
    )


def _tokenizer(
    spec: BenchSpec, endpoint: Endpoint, client: SyncClient, model: ModelDescription, *, needed: bool
) -> TokenizerFiles | None:
    if not needed and spec.dataset is None and spec.ignore_eos:
        return None
    tokenizer = find_tokenizer(spec.tokenizer, endpoint, client, model=model)
    if tokenizer is None and endpoint.repository is not None:  # the folder from which the LLM API loads
        folder = endpoint.repository / CORE_MODEL / "1" / "model"
        tokenizer = TokenizerFiles(folder) if any(folder.glob("tokenizer*")) else None
    return tokenizer


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or brackets around something else than an IPv6 address
        return False


def _openai_server(spec: BenchSpec, endpoint: Endpoint, url: str) -> Measured:
    url = url.rstrip("/")
    if not _is_address(url):
        raise UsageError(f"--openai is {url!r}; expected an address such as http://localhost:8000/v1.")
    name = spec.model or _first_model(url, endpoint)
    # There is no Triton model; prompts are texts.
    model = ModelDescription(name=name, decoupled=True, max_batch_size=0, inputs={}, outputs={})
    return Measured(
        target=LoadTarget(
            protocol="openai",
            endpoint=endpoint,
            model=model,
            streams=spec.streaming,
            openai=OpenAi(url=url, model=name, chat=spec.chat, ignore_eos=spec.ignore_eos),
        ),
        name=name,
        takes_text=True,
        tokenizer=find_tokenizer(spec.tokenizer, endpoint, None),
        adds_special_tokens=True,
    )


def _first_model(url: str, endpoint: Endpoint) -> str:
    """Return the name of the only model of a server with OpenAI's API."""
    headers, timeout = openai_headers(endpoint), endpoint.connect_timeout
    try:
        request = urllib.request.Request(f"{url}/models", headers=headers)
        with web_opener(direct=True).open(request, timeout=timeout) as page:
            names = [str(entry["id"]) for entry in parse_json(page.read(LARGEST_TEXT))["data"]]
    except urllib.error.HTTPError as error:
        raise RequestError(
            f"{url}/models answers with status {error.code}.",
            hint="Give the address of OpenAI's API, often with /v1 at its end. If it lists no models: --model NAME.",
        ) from None
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise ServerUnreachableError(f"No server with OpenAI's API answers at {url}: {reason}.") from None
    except (ValueError, KeyError, TypeError, http.client.HTTPException):
        raise RequestError(f"{url}/models does not list models.", hint="Name the model: --model.") from None
    if len(names) != 1:
        raise UsageError(f"Choose the model with --model; {url} has {', '.join(names) or 'none'}.")
    return names[0]


def _engine(spec: BenchSpec, endpoint: Endpoint, name: str) -> Measured:
    from trtserve.server.local_engine import find_local_engine

    if spec.workers > 1:
        raise UsageError("--in-process runs the engine in this process; leave --workers out.")
    engine = find_local_engine(name, spec.tokenizer)
    return Measured(
        target=LoadTarget(
            protocol="in-process",
            endpoint=endpoint,
            model=engine.describe(),
            streams=spec.streaming,
            engine=Path(engine.path),
            tokenizer=engine.tokenizer,
        ),
        name=CORE_MODEL,
        takes_text=False,
        tokenizer=None if engine.tokenizer is None else TokenizerFiles(engine.tokenizer),
        adds_special_tokens=True,
        limits=limits_of_engine(engine.config),
    )


CLOSED_LOOP_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Everything a benchmark sends, and the notes for readers of its figures."""

    spec: BenchSpec
    endpoint: Endpoint
    measured: Measured
    limits: TrafficLimits
    traffic: Traffic
    goals: Goals
    offsets: Sequence[float] | None  # send times in seconds after the start (open loop), or None for a closed loop
    concurrency: int | None  # requests in flight: of a closed loop exactly, of an open loop at most (None: no limit)
    notes: tuple[str, ...]

    @property
    def pace(self) -> str:
        """Describe how fast requests are sent."""
        spec = self.spec
        if self.offsets is None:
            return f"closed loop, concurrency {self.concurrency}"
        cap = f"concurrency {self.concurrency} at most" if self.concurrency else "no limit on concurrency"
        if self.traffic.offsets is not None:
            return f"the times of the trace, {cap}"
        ramp = "" if spec.ramp_to is None else f" to {spec.ramp_to:g}"
        return f"{spec.request_rate:g}{ramp} requests/s, {spec.arrivals}, {cap}"

    def load(self) -> Load:
        """Return what the workers send."""
        target = self.measured.target
        if target is None:
            raise UsageError("This plan was made while the server was down: plan again when it answers.")
        requests = self.traffic.requests
        return Load(
            target=target,
            requests=requests,
            # A warm-up has no conversations and cancels nothing.
            warmup=tuple(
                replace(requests[index % len(requests)], session=None, cancel_after=None)
                for index in range(self.spec.warmup_requests)
            ),
            offsets=self.offsets,
            concurrency=self.concurrency,
            timeout=self.spec.timeout,
            may_be_empty=not self.spec.ignore_eos,
        )


def plan_benchmark(spec: BenchSpec, endpoint: Endpoint, *, offline: bool = False) -> BenchPlan:
    """Describe the model behind `endpoint` and make the traffic of `spec` within its engine's limits.

    `offline`: if the server does not answer, plan for the core model; such a plan cannot be run. The limits come from
    the server's repository or from `spec`. Errors: ServerUnreachableError, RequestError (unknown model, or one without
    prompts), UsageError (no vocabulary size, no tokenizer, invalid dataset).
    """
    goals = read_goals(spec.slo)
    if not endpoint.grpc_port:
        spec = replace(spec, protocol="http")
    make = grpc_client if endpoint.grpc_port else http_client
    with closing(make(endpoint, timeout=endpoint.connect_timeout)) as client:
        measured = find_measured(spec, endpoint, client, offline=offline)
    engine = TrafficLimits()
    if measured.limits is not None:
        engine = measured.limits
    elif endpoint.repository is not None:
        engine = limits_of_repository(endpoint.repository, measured.core_model)
    limits = override_limits(engine, spec)
    traffic = with_cancellations(_make_traffic(spec, limits, measured), spec)
    offsets, concurrency = traffic.offsets, spec.concurrency
    if not spec.open_loop:
        concurrency = concurrency or CLOSED_LOOP_CONCURRENCY
    elif spec.request_rate is not None and offsets is None:
        sessions = [request.session for request in traffic.requests]
        offsets = tuple(
            arrival_times(
                spec.arrivals,
                rate=spec.request_rate,
                count=sessions.count(None) + len({*sessions} - {None}),
                seed=spec.seed,
                burstiness=spec.burstiness,
                ramp_to=spec.ramp_to,
            )
        )
    return BenchPlan(
        spec=spec,
        endpoint=endpoint,
        measured=measured,
        limits=limits,
        traffic=traffic,
        goals=goals,
        offsets=offsets,
        concurrency=concurrency,
        notes=(*traffic.notes, *_notes(spec, limits, traffic, measured)),
    )


def _make_traffic(spec: BenchSpec, limits: TrafficLimits, measured: Measured) -> Traffic:
    end_id = _end_id(spec, measured)
    if spec.traffic in ("dataset", "e2e") or spec.dataset is not None:
        tokenizer = measured.require_tokenizer("The dataset's prompts must be counted in tokens")
        text, special = measured.takes_text, measured.adds_special_tokens
        return dataset_traffic(spec, limits, tokenizer, text=text, special=special, end_id=end_id)
    writer = None
    if measured.takes_text:
        tokenizer = measured.require_tokenizer(f"Prompts of {measured.name!r} are texts of a given number of tokens")
        writer = TextWriter(tokenizer, special=measured.adds_special_tokens, seed=spec.seed)
    return WRITTEN[spec.traffic](spec, limits, write=writer, end_id=end_id)


def _end_id(spec: BenchSpec, measured: Measured) -> int | None:
    """Return the end id to send: text models have a default of their own, core models have none."""
    if measured.takes_text:
        return -1 if spec.ignore_eos else None
    if spec.ignore_eos:
        return None
    tokenizer = measured.require_tokenizer("--no-ignore-eos needs the tokenizer's end token")
    return next(iter(tokenizer.end_ids), None)


def _notes(spec: BenchSpec, limits: TrafficLimits, traffic: Traffic, measured: Measured) -> list[str]:
    notes = []
    if traffic.clipped_inputs:
        bound = f"max_input_len {limits.max_input_len}, max_seq_len {limits.max_seq_len}"
        notes.append(f"{traffic.clipped_inputs} prompts were cut to the engine's limits ({bound}).")
    if traffic.clipped_outputs:
        notes.append(
            f"{traffic.clipped_outputs} answers were shortened to the engine's max_seq_len {limits.max_seq_len}."
        )
    if limits.max_seq_len is None:
        notes.append("The engine's max_seq_len is unknown here: lengths are not limited to it.")
    if spec.warmup_requests:
        notes.append(f"{spec.warmup_requests} warm-up requests come first and are not counted.")
    else:
        notes.append("No warm-up: the first requests include one-time costs of the server.")
    target = measured.target
    if not spec.ignore_eos:
        notes.append("Answers end at the model's end token (--no-ignore-eos).")
    elif measured.takes_text and target and not target.openai and not ignores_end(target.model):
        notes.append(f"The model {measured.name!r} has no input to ignore its end token: answers may be shorter.")
    return notes
