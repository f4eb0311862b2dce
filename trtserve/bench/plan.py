"""The plan of a benchmark: the model to measure, the requests, and when to send them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from trtserve.bench.arrivals import arrival_times
from trtserve.bench.goals import Goals, read_goals
from trtserve.bench.messages import end_input
from trtserve.bench.requests import (
    Limits,
    Traffic,
    limits_of_repository,
    override_limits,
)
from trtserve.bench.targets import Measured, find_measured
from trtserve.bench.traffic import WRITTEN, with_cancellations
from trtserve.bench.traffic.datasets import dataset_traffic
from trtserve.bench.traffic.texts import TextWriter
from trtserve.bench.worker import Load
from trtserve.client.base import Endpoint
from trtserve.client.grpc_client import GrpcClient
from trtserve.errors import UsageError
from trtserve.specs import BenchSpec

CLOSED_LOOP_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Everything a benchmark sends, and the notes for readers of its figures."""

    spec: BenchSpec
    endpoint: Endpoint
    measured: Measured
    limits: Limits
    traffic: Traffic
    goals: Goals
    offsets: Sequence[float] | None
    """Send times in seconds after the start (open loop), or None for a closed loop."""
    concurrency: int | None
    """Requests in flight: of a closed loop exactly, of an open loop at most (None: no limit)."""
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
    with closing(GrpcClient(endpoint, timeout=endpoint.connect_timeout)) as client:
        measured = find_measured(spec, endpoint, client, offline=offline)
    engine = Limits()
    if measured.limits is not None:
        engine = measured.limits
    elif endpoint.repository is not None and spec.openai is None:
        engine = limits_of_repository(endpoint.repository, measured.core_model)
    limits = override_limits(engine, spec)
    traffic = with_cancellations(_make_traffic(spec, limits, measured), spec)
    offsets, concurrency = traffic.offsets, spec.concurrency
    if not spec.open_loop:
        concurrency = concurrency or CLOSED_LOOP_CONCURRENCY
    elif spec.request_rate is not None and offsets is None:
        offsets = tuple(
            arrival_times(
                spec.arrivals,
                rate=spec.request_rate,
                count=_conversations(traffic),
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


def _conversations(traffic: Traffic) -> int:
    alone = sum(request.session is None for request in traffic.requests)
    return alone + len({request.session for request in traffic.requests} - {None})


def _make_traffic(spec: BenchSpec, limits: Limits, measured: Measured) -> Traffic:
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
    end = tokenizer.tokenizer.eos_token_id
    return int(end) if end is not None else next(iter(tokenizer.end_ids()), None)


def _notes(spec: BenchSpec, limits: Limits, traffic: Traffic, measured: Measured) -> list[str]:
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
        notes.append(f"{spec.warmup_requests} warm-up requests are sent before the measured window and not counted.")
    else:
        notes.append("No warm-up: the first requests include one-time costs of the server.")
    target = measured.target
    if not spec.ignore_eos:
        notes.append("Answers end at the model's end token (--no-ignore-eos).")
    elif measured.takes_text and target and not target.openai and end_input(target.model) not in target.model.inputs:
        notes.append(f"The model {measured.name!r} has no input to ignore its end token: answers may be shorter.")
    return notes
