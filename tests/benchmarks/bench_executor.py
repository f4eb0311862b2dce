"""The in-process executor compared with openvino_genai's ContinuousBatchingPipeline: same graph, weights and hints.

Run as `python -m tests.benchmarks.bench_executor --work FOLDER --out FOLDER`; the model is a random Llama of 135 M
parameters, made once in the work folder.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.benchmarks import engines
from tests.benchmarks.engines import make_engine
from tests.benchmarks.results import Figure, benchmark_parser, finish
from trtserve.executor.engine.model import StepInputs
from trtserve.executor.engine.shapes import LoraShape
from trtserve.host.machine import free_memory

SIZES = engines.SIZES["llama-135m"]
MAX_NUM_TOKENS = engines.MAX_NUM_TOKENS
KV_TOKENS = 16 * 1024
WAIT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One measurement; a rate counts new tokens after the first, or prompt tokens when `new` is 1."""

    streams: int
    prompt: int
    new: int
    target: float

    @property
    def counted(self) -> int:
        """Tokens that the measured time produced."""
        return self.streams * (self.prompt if self.new == 1 else self.new - 1)


SHAPES = {
    "decode, 1 stream": Shape(streams=1, prompt=64, new=129, target=0.90),
    "decode, 8 streams": Shape(streams=8, prompt=64, new=65, target=0.95),
    "prefill, 1024 tokens": Shape(streams=1, prompt=1024, new=1, target=0.90),
}


class Side(Protocol):
    """One of the two implementations."""

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first tokens to the last, or from the request to the first when `new` is 1."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the pairs, in tokens per second; `ratio` is the median of ours over theirs pair by pair."""

    case: str
    pairs: int
    executor: float
    genai: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    target: float


class ExecutorSide:
    """Ours, streaming, as a server uses it."""

    def __init__(self, engine: Path, config: Any = None) -> None:
        from trtserve.executor import api

        self._api = api
        self.engine = engine
        config = config or api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=KV_TOKENS))
        self.executor = api.Executor(engine, api.ModelType.DECODER_ONLY, config)

    def requests(self, prompts: list[list[int]], new: int) -> list[Any]:
        """The requests of one measurement."""
        return [self._api.Request(prompt, new, streaming=True) for prompt in prompts]

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        begin = time.perf_counter()
        first, silent = begin, len(prompts)
        seen: set[int] = set()
        for response in self.responses(self.requests(prompts, new)):
            if len(seen) < silent:
                first = time.perf_counter()
                seen.add(response.request_id)
        return time.perf_counter() - (begin if new == 1 else first)

    def run(self, requests: list[Any]) -> None:
        """Let `requests` run to their end."""
        for _ in self.responses(requests):
            pass

    def responses(self, requests: list[Any]) -> Iterator[Any]:
        """Yield every response of `requests` until all have ended; RuntimeError for an error response."""
        running = set(self.executor.enqueue_requests(requests))
        while running:
            for response in self.executor.await_responses(WAIT):
                assert isinstance(response, self._api.Response)
                if response.has_error():
                    raise RuntimeError(response.error_msg)
                if response.result.is_final:
                    running.discard(response.request_id)
                yield response


class GenaiSide:
    """openvino_genai's continuous batching, driven step by step in this thread."""

    def __init__(self, folder: Path, hints: dict[str, str]) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = MAX_NUM_TOKENS
        scheduler.max_num_seqs = 8
        scheduler.dynamic_split_fuse = True
        scheduler.num_kv_blocks = KV_TOKENS // 32
        self._genai = genai
        self.pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", hints)
        self._next = 0

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        import openvino as ov

        config = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        begin = time.perf_counter()
        handles = []
        for prompt in prompts:
            handles.append(self.pipeline.add_request(self._next, ov.Tensor(np.array([prompt], np.int64)), config))
            self._next += 1
        self.pipeline.step()
        first = time.perf_counter()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        assert all(len(handle.read_all()[0].generated_ids) == new for handle in handles)
        return time.perf_counter() - (begin if new == 1 else first)


class _ZeroWork:
    """A model whose step costs nothing, to measure the executor's own time."""

    vocab_size: int = SIZES["vocab_size"]
    hidden_size: int = SIZES["hidden_size"]
    max_prompt_table = 0
    lora: LoraShape | None = None
    max_position = 4096
    tokens_per_block = 32
    bytes_per_block = 1
    kv_memory_fraction = 0.3
    step_costs: tuple[float, ...] = ()

    def free_memory(self) -> int:
        return free_memory()

    def allocate(self, num_blocks: int) -> None:
        self._logits = np.random.default_rng(0).standard_normal((8, self.vocab_size)).astype(np.float32)

    def warm_up(self) -> None:
        """There is nothing to make."""

    def forward(self, step: StepInputs) -> npt.NDArray[np.float32]:
        return self._logits[: len(step.rows)]

    def copy_block(self, source: int, target: int) -> None:
        """Blocks hold nothing."""


def loop_microseconds(streams: int, *, steps: int = 500) -> float:
    """Microseconds per step of planning, filling, choosing and delivering, streaming client included."""
    from trtserve.executor import api
    from trtserve.executor.engine.limits import EngineLimits

    limits = EngineLimits(max_batch_size=8, max_seq_len=4096, max_num_tokens=2048, vocab_size=_ZeroWork.vocab_size)
    config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=8 * 4096))
    with api.Executor.from_model(_ZeroWork(), limits, config) as executor:
        begin = time.perf_counter()
        ids = executor.enqueue_requests([api.Request([1] * 64, steps, streaming=True) for _ in range(streams)])
        running = set(ids)
        while running:
            for response in executor.await_responses(WAIT):
                assert isinstance(response, api.Response)
                if response.result.is_final:
                    running.discard(response.request_id)
        return (time.perf_counter() - begin) / steps * 1e6


def export_for_genai(engine: Path, model: Path, folder: Path) -> dict[str, str]:
    """Write the engine's graph in openvino_genai's layout and return the engine's precision hints."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("xml", "bin"):
        (folder / f"openvino_model.{suffix}").unlink(missing_ok=True)
        os.link(engine / f"rank0.{suffix}", folder / f"openvino_model.{suffix}")
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    own = json.loads((engine / "config.json").read_text(encoding="utf-8"))["trtserve"]
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": own["compute_precision"],
        "KV_CACHE_PRECISION": own["kv_precision"],
    }


def measure(name: str, shape: Shape, ours: Side, theirs: Side, pairs: int) -> Row:
    """Alternate both sides on the same random prompts; whoever begins changes from pair to pair."""
    random = np.random.default_rng(0)
    rates: dict[Side, list[float]] = {ours: [], theirs: []}
    for number in range(pairs + 1):
        prompts = random.integers(3, SIZES["vocab_size"], size=(shape.streams, shape.prompt)).tolist()
        for side in (ours, theirs) if number % 2 else (theirs, ours):
            seconds = side.seconds(prompts, shape.new)
            if number:  # the first pair warms both
                rates[side].append(shape.counted / seconds)
    ratios = [mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True)]
    return Row(
        case=name,
        pairs=pairs,
        executor=statistics.median(rates[ours]),
        genai=statistics.median(rates[theirs]),
        ratio=statistics.median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        target=shape.target,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| Case | Executor, tokens/s | openvino_genai, tokens/s | Ratio | Lowest … highest | Target | Pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.case} | {row.executor:.0f} | {row.genai:.0f} | {row.ratio:.2f} "
        f"| {row.ratio_lowest:.2f} … {row.ratio_highest:.2f} | {row.target:.2f} | {row.pairs} |"
        for row in rows
    ]
    return "\n".join(lines)


def run(work: Path, *, pairs: int) -> dict[str, Any]:
    """Measure every shape; the work folder keeps the model between runs."""
    engine = make_engine(work)
    hints = export_for_genai(engine, work / "llama-135m" / "model", work / "llama-135m" / "genai")
    ours, theirs = ExecutorSide(engine), GenaiSide(work / "llama-135m" / "genai", hints)
    rows = [measure(name, shape, ours, theirs, pairs) for name, shape in SHAPES.items()]
    ours.executor.shutdown()
    overhead = {str(streams): statistics.median(loop_microseconds(streams) for _ in range(5)) for streams in (1, 8)}
    return {"hints": hints, "cpus": os.cpu_count(), "rows": rows, "loop_microseconds": overhead}


def main() -> None:
    arguments = benchmark_parser("executor", __doc__).parse_args()
    report = run(arguments.work.absolute(), pairs=arguments.pairs)
    print(table(report["rows"]))
    for streams, microseconds in report["loop_microseconds"].items():
        print(f"Executor's own time per step at {streams} streams, without the model: {microseconds:.0f} µs")
    figures = [Figure(case=row.case, value=row.ratio, target=row.target) for row in report["rows"]]
    finish(arguments.out or arguments.work, "executor", report, figures)


if __name__ == "__main__":
    main()
