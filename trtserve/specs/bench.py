"""What `bench` sends to a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from trtserve.specs.options import INT32, Spec, option

_lengths = partial(option, panel="Lengths")
_traffic = partial(option, panel="Traffic")
_target = partial(option, panel="Target")
_load = partial(option, panel="Load")
_runs = partial(option, panel="Runs")
_results = partial(option, panel="Results")
_limits = partial(option, panel="Limits of the engine")

Kind = Literal["token-norm-dist", "token-from-histogram", "dataset", "prefix", "sessions", "replay", "e2e"]
RANDOM: Final[tuple[Kind, ...]] = ("token-norm-dist", "token-from-histogram", "prefix", "sessions")
"""Kinds of traffic that need no file."""
FILE_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "dataset": {"num_requests": 30000, "ignore_eos": False},
    "replay": {"num_requests": 30000},
}
"""Kind of traffic whose prompts or times are in a file → the defaults that differ there."""


@dataclass(frozen=True, kw_only=True)
class BenchSpec(Spec):
    """Requests, their arrival times and the model that gets them.

    With `request_rate` the load is an open loop: requests arrive on a schedule. Without it the loop is closed:
    `concurrency` users each send their next request once the last is answered.
    """

    traffic: Kind = "token-norm-dist"  # the subcommand of `bench`
    dataset: Path | None = None  # prompts of a file instead of random ones
    trace: Path | None = None  # arrivals and lengths of a file
    model: str | None = option(
        None,
        "--model",
        "-m",
        metavar="MODEL",
        help="Model to measure: the core model tensorrt_llm gets token ids, any other one text.",
        unset="the served name",
        common=True,
    )
    num_requests: int = option(100, metavar="N", help="Measured requests.", minimum=1, common=True)
    concurrency: int | None = option(
        None, metavar="N", help="Requests in flight.", minimum=1, unset="8; no limit with --request-rate", common=True
    )
    request_rate: float | None = option(
        None,
        metavar="REQUESTS/S",
        help="Send requests on a schedule (open loop) instead of after each answer.",
        above=0,
        common=True,
    )
    slo: dict[str, str] = option(
        {},
        metavar="ttft=200ms,itl=50ms",
        help="What a good answer meets: ttft, itl, tpot or latency. The report counts good answers.",
        separator=",",
        common=True,
    )
    input_mean: float = option(128, metavar="TOKENS", help="Mean prompt length.", minimum=1, maximum=INT32, common=True)
    output_mean: float = option(32, metavar="TOKENS", help="Mean answer length.", minimum=1, maximum=INT32, common=True)
    input_stdev: float = _lengths(16, metavar="TOKENS", help="Standard deviation of prompt lengths.", minimum=0)
    output_stdev: float = _lengths(4, metavar="TOKENS", help="Standard deviation of answer lengths.", minimum=0)
    op_tokens_per_word: float = _lengths(
        1.3, metavar="TOKENS", help="Tokens to generate for each word of `output`.", above=0
    )
    ignore_eos: bool = _lengths(
        True, "--ignore-eos/--no-ignore-eos", help="Continue after an end token, up to the requested length."
    )
    tokenizer: Path | None = _lengths(
        None,
        "--tokenizer",
        "--tokenizer-dir",
        metavar="DIR",
        help="Tokenizer of texts.",
        unset="that of the server's repository",
    )
    histogram: str = _lengths(
        "example",
        "--histogram",
        "--histogram-key",
        metavar="FILE",
        help="CSV or JSON file with buckets of lengths, or `example`: the one in benchmark_core_model.py.",
    )
    prefix_len: int = _traffic(256, metavar="TOKENS", help="Tokens that prompts have in common.", minimum=1)
    num_prefixes: int = _traffic(1, metavar="N", help="Different shared prefixes.", minimum=1)
    reuse_rate: float = _traffic(
        1.0, metavar="0-1", help="Part of the requests that have a shared prefix.", minimum=0, maximum=1
    )
    turns: int = _traffic(4, metavar="N", help="Turns of a conversation.", minimum=1)
    speed: float = _traffic(1.0, metavar="FACTOR", help="Speed of a trace; 2 plays it twice as fast.", above=0)
    seed: int = _traffic(0, help="Seed of lengths, prompts and arrivals.", minimum=0)
    protocol: Literal["grpc", "http"] = _target(
        "grpc", "--protocol", "-i", help="Protocol to a Triton server; http means generate_stream."
    )
    streaming: bool = _target(
        True, "--streaming/--no-streaming", help="Ask for answers token by token, where the model can."
    )
    openai: str | None = _target(None, metavar="URL", help="Measure a server with OpenAI's API: http://HOST:PORT/v1.")
    chat: bool = _target(False, help="With --openai: chat completions instead of completions.")
    in_process: str | None = _target(
        None, metavar="ENGINE", help="Measure an engine in this process, without a server."
    )
    arrivals: Literal["exponential", "constant", "gamma"] = _load(
        "exponential", help="Gaps between the requests of --request-rate."
    )
    burstiness: float = _load(
        1.0, metavar="SHAPE", help="Shape of gamma gaps: below 1 bursts, above 1 more even.", above=0
    )
    ramp_to: float | None = _load(
        None, metavar="REQUESTS/S", help="Change the rate linearly up or down to this.", above=0
    )
    cancel_rate: float = _load(
        0.0, metavar="0-1", help="Part of the requests that the client cancels.", minimum=0, maximum=1
    )
    workers: int = _load(
        1, metavar="N", help="Processes that send; under mpirun or srun, per rank.", minimum=1, maximum=1024
    )
    warmup_requests: int = _load(10, help="Requests before the measurement starts.", minimum=0)
    timeout: float = _load(600.0, metavar="SECONDS", help="Longest measurement.", above=0)
    calibrate: bool = _load(
        True, "--calibrate/--no-calibrate", help="First measure the client itself on an echo server."
    )
    vocab_size: int | None = _limits(
        None, metavar="TOKENS", help="Random ids are below this.", minimum=1, unset="the engine's"
    )
    max_input_len: int | None = _limits(None, metavar="TOKENS", help="Longest prompt.", minimum=1, unset="the engine's")
    max_seq_len: int | None = _limits(
        None, metavar="TOKENS", help="Longest prompt and answer together.", minimum=1, unset="the engine's"
    )

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive on a schedule."""
        return self.request_rate is not None or self.traffic == "replay"


@dataclass(frozen=True, kw_only=True)
class BenchRuns(Spec):
    """Which runs a benchmark consists of, and what becomes of their results."""

    sweep_rate: tuple[float, ...] = _runs(
        (), metavar="RATE,…", help="One run for each of these rates.", above=0, separator=","
    )
    sweep_concurrency: tuple[int, ...] = _runs(
        (), metavar="N,…", help="One run for each number of requests in flight.", minimum=1, separator=","
    )
    find_rate: bool = _runs(False, help="Search the highest rate at which 99 % of the answers meet --slo.")
    diagnose: bool = _runs(False, help="Measure the engine in this process and the core model too, and name the gaps.")
    strict: bool = _results(
        False,
        help="Fail if the verdict is not `valid`; of a sweep, if one is `client-limited`, `disturbed` or "
        "`implausible`.",
    )
    table: Literal["upstream", "genai-perf"] | None = _results(
        None, help="Table to print; genai-perf's has 95 % intervals.", unset="upstream; a short one on a terminal"
    )
    html: Path | None = _results(
        None, metavar="FILE", help="Write plots and tables as one page (.svg, .png: only the plots).", common=True
    )
    metrics_url: str | None = _results(
        None, metavar="URL", help="Metrics page to sample.", unset="that of a server started here"
    )

    @property
    def several(self) -> bool:
        """Whether there is more than one run."""
        return bool(self.sweep_rate or self.sweep_concurrency or self.find_rate)
