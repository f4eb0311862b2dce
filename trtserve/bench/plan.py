"""What a benchmark will send to which model, worked out before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from trtserve.bench.arrivals import schedule
from trtserve.bench.dataset import dataset_traffic
from trtserve.bench.messages import IDS_INPUT, TEXT_INPUT, end_input, takes_text
from trtserve.bench.texts import TextWriter
from trtserve.bench.traffic import Limits, Traffic, limits_of_repository, override_limits, token_norm_dist
from trtserve.errors import RequestError, ServerUnreachableError, UsageError
from trtserve.query.tokenizer import TokenizerFiles, find_tokenizer, server_adds_special_tokens
from trtserve.specs import BenchSpec
from trtserve.triton.client import CORE_MODEL, Client, Endpoint, GrpcClient, ModelDescription

CLOSED_LOOP_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a benchmark will send, and what must be said about it."""

    limits: Limits
    traffic: Traffic
    offsets: Sequence[float] | None
    concurrency: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model that is measured (None: the core model, not asked) and the tokenizer, where one is needed.

    `text`: it takes prompts as text; `special`: they are encoded with special tokens.
    """

    model: ModelDescription | None
    text: bool
    files: TokenizerFiles | None
    special: bool

    @property
    def core(self) -> str:
        """Name of the core model behind it, whose engine's limits hold."""
        return CORE_MODEL if self.text or self.model is None else self.model.name

    def tokenizer(self, why: str) -> TokenizerFiles:
        """The tokenizer; UsageError that begins with `why` when there is none."""
        if self.files is None:
            raise UsageError(
                f"{why}, and the server's tokenizer is not known here.",
                hint="Give the tokenizer's folder with --tokenizer; `trtserve import ID --download-only` fetches one.",
            )
        return self.files


def plan_benchmark(spec: BenchSpec, endpoint: Endpoint) -> Plan:
    """Make the traffic of `spec` within the limits of the engine behind `endpoint`; sends no request.

    Limits come from the recorded repository of the server, or from `spec`; UsageError without a vocabulary size, or
    without a tokenizer where text is tokenised. A server that does not answer is taken to have a core model.
    """
    with closing(GrpcClient(endpoint, timeout=endpoint.connect_timeout)) as client:
        try:
            model = client.describe(spec.model)
        except ServerUnreachableError:
            if spec.model != CORE_MODEL:
                raise
            model = None
        return make_plan(spec, endpoint, find_target(spec, endpoint, client, model))


def find_target(spec: BenchSpec, endpoint: Endpoint, client: Client, model: ModelDescription | None) -> Target:
    """What `spec` is about; RequestError for a model that takes no prompts. `model` None: the core model."""
    if model is not None and not model.has(IDS_INPUT, TEXT_INPUT):
        raise RequestError(
            f"The model {model.name!r} takes neither text nor token ids: it has no input {TEXT_INPUT!r}.",
            hint="Measure the core model `tensorrt_llm`, the ensemble, the BLS model or its alias: --model NAME.",
        )
    text = model is not None and takes_text(model)
    tokenized = text or spec.dataset is not None or not spec.ignore_eos
    return Target(
        model=model,
        text=text,
        files=_find_files(spec, endpoint, client) if tokenized else None,
        special=not text or server_adds_special_tokens(client),
    )


def _find_files(spec: BenchSpec, endpoint: Endpoint, client: Client) -> TokenizerFiles | None:
    """The tokenizer that preprocessing has, else that of the Hugging Face folder from which the LLM API loads."""
    found = find_tokenizer(spec.tokenizer, endpoint, client)
    if found is not None or endpoint.repository is None:
        return found
    folder = endpoint.repository / CORE_MODEL / "1" / "model"
    return TokenizerFiles(folder) if any(folder.glob("tokenizer*")) else None


def make_plan(spec: BenchSpec, endpoint: Endpoint, target: Target) -> Plan:
    """Traffic and schedule; see `plan_benchmark`."""
    known = limits_of_repository(endpoint.repository, target.core) if endpoint.repository is not None else Limits()
    limits = override_limits(known, spec)
    traffic = _traffic(spec, limits, target)
    offsets, concurrency = None, spec.concurrency
    if spec.request_rate is None:
        concurrency = concurrency or CLOSED_LOOP_CONCURRENCY
    else:
        offsets = schedule(spec.arrivals, rate=spec.request_rate, count=len(traffic.requests), seed=spec.seed)
    notes = (*traffic.notes, *_clip_notes(traffic, limits), *_warmup_notes(spec), *_end_notes(spec, target))
    return Plan(limits=limits, traffic=traffic, offsets=offsets, concurrency=concurrency, notes=notes)


def _traffic(spec: BenchSpec, limits: Limits, target: Target) -> Traffic:
    end_id = _end_id(spec, target)
    if spec.dataset is not None:
        files = target.tokenizer("The lengths of the dataset's prompts are counted in tokens")
        return dataset_traffic(spec, limits, files, text=target.text, special=target.special, end_id=end_id)
    if not target.text:
        return token_norm_dist(spec, limits, end_id=end_id)
    files = target.tokenizer(f"The model {spec.model!r} takes text, which is made of tokens")
    return token_norm_dist(spec, limits, write=TextWriter(files, special=target.special, seed=spec.seed), end_id=end_id)


def _end_id(spec: BenchSpec, target: Target) -> int | None:
    """Text models find the end id by themselves unless they are told another one, core models end by none."""
    if target.text:
        return -1 if spec.ignore_eos else None
    if spec.ignore_eos:
        return None
    files = target.tokenizer("Answers end by the tokenizer's end token (--no-ignore-eos)")
    end = files.tokenizer.eos_token_id
    return int(end) if end is not None else next(iter(files.end_ids()), None)


def pace(spec: BenchSpec, plan: Plan) -> str:
    """How fast requests are sent, in words."""
    if spec.request_rate is None:
        return f"closed loop, concurrency {plan.concurrency}"
    cap = f"concurrency {plan.concurrency} at most" if plan.concurrency else "no cap on concurrency"
    return f"{spec.request_rate:g} requests/s, {spec.arrivals}, {cap}"


def _clip_notes(traffic: Traffic, limits: Limits) -> list[str]:
    notes = []
    if traffic.clipped_inputs:
        bound = f"max_input_len {limits.max_input_len}, max_seq_len {limits.max_seq_len}"
        notes.append(f"{traffic.clipped_inputs} prompts were cut to the engine's limits ({bound}).")
    if traffic.clipped_outputs:
        notes.append(
            f"{traffic.clipped_outputs} answers were shortened to the engine's max_seq_len {limits.max_seq_len}."
        )
    if limits.max_seq_len is None:
        notes.append("The engine's max_seq_len is not known here: lengths are not held to it.")
    return notes


def _warmup_notes(spec: BenchSpec) -> list[str]:
    if not spec.warmup_requests:
        return ["No warm-up: the first requests carry the server's first-use costs."]
    return [f"{spec.warmup_requests} warm-up requests go before the measured window and are not counted."]


def _end_notes(spec: BenchSpec, target: Target) -> list[str]:
    if not spec.ignore_eos:
        return ["Answers end at the model's end token (--no-ignore-eos)."]
    if target.text and target.model is not None and end_input(target.model) not in target.model.inputs:
        return [f"The model {spec.model!r} cannot be told to go on after its end token: answers may be shorter."]
    return []
