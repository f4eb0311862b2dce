"""The cost of text per streamed token: ensemble and BLS compared with the core model, on one server.

Run as `python -m tests.benchmarks.bench_text --work FOLDER --out FOLDER`. The model is tiny, so that decoding hides
nothing: a cost is the time per new token through a text model minus that through `tensorrt_llm` with the same tokens,
by gRPC streaming and the same client, from the first send to the last response.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.results import Figure, benchmark_parser, finish
from tests.support.model_server import ModelServer, Tensors, integers, serving
from tests.support.release_client import NEWEST

PROMPT = "What is machine learning?"
NEW = 400
# (Model, streams) → the most milliseconds that text may add to a token.
TARGETS_MS = {
    ("ensemble", 1): 0.15,
    ("ensemble", 8): 0.06,
    ("tensorrt_llm_bls", 1): 0.30,
    ("tensorrt_llm_bls", 8): 0.15,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the pairs, in milliseconds per new token over all streams; `added` pair by pair."""

    case: str
    pairs: int
    text_ms: float
    core_ms: float
    added_ms: float
    added_lowest: float
    added_highest: float
    target_ms: float


@contextmanager
def server(work: Path) -> Iterator[ModelServer]:
    """The tiny model behind Triton."""
    from tests.support.tiny_models import write_tiny_model
    from trtserve.artifacts import Model
    from trtserve.pipeline.build import build_engine
    from trtserve.pipeline.convert import convert_model
    from trtserve.repository.assembling import assemble_repository, plan_repository
    from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

    root = work / "text"
    model = write_tiny_model(root / "model", max_position_embeddings=1024)
    checkpoint = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=root / "checkpoint")
    engine = build_engine(
        checkpoint, BuildSpec(max_batch_size=8, max_seq_len=1024, runtime="openvino"), out=root / "engine"
    )
    repository = assemble_repository(
        plan_repository(engine, model, RepositorySpec(name="tiny", ngram_max_draft_len=0), out=root / "repository")
    )
    with serving(repository.path, root / "server") as ready:
        yield ready


def request(model: str) -> Tensors:
    """A stream of NEW tokens to the prompt, which never ends before."""
    if model == "tensorrt_llm":
        ids = [1, *(byte + 3 for byte in PROMPT.encode())]
        return NEWEST.core(ids, NEW, streaming=True, end_id=-1)
    return {**NEWEST.text(PROMPT, NEW, streaming=True), "end_id": integers(-1)}


def milliseconds(ready: ModelServer, model: str, streams: int) -> float:
    """Time per new token of `streams` equal requests at once."""
    tensors = request(model)

    def one(_: int) -> int:
        with ready.stream() as stream:
            return len(stream.all(model, tensors))

    begin = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        responses = sum(pool.map(one, range(streams)))
    taken = time.perf_counter() - begin
    assert responses > streams  # streamed; how many responses depends on what waits together
    return 1000 * taken / (streams * NEW)


def measure(ready: ModelServer, model: str, streams: int, pairs: int) -> Row:
    """Alternate both; whoever begins changes from pair to pair, and the first pair warms both."""
    text: list[float] = []
    core: list[float] = []
    for number in range(pairs + 1):
        for name in (model, "tensorrt_llm") if number % 2 else ("tensorrt_llm", model):
            (core if name == "tensorrt_llm" else text).append(milliseconds(ready, name, streams))
    added = (np.array(text) - np.array(core))[1:]
    return Row(
        case=f"{model}, {streams} stream{'s' if streams > 1 else ''}",
        pairs=pairs,
        text_ms=statistics.median(text[1:]),
        core_ms=statistics.median(core[1:]),
        added_ms=float(np.median(added)),
        added_lowest=float(added.min()),
        added_highest=float(added.max()),
        target_ms=TARGETS_MS[model, streams],
    )


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| Case | To text, ms/token | Core model, ms/token | Added | Lowest … highest | Target | Pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.case} | {row.text_ms:.3f} | {row.core_ms:.3f} | {row.added_ms:.3f} "
        f"| {row.added_lowest:.3f} … {row.added_highest:.3f} | ≤ {row.target_ms:.2f} | {row.pairs} |"
        for row in rows
    ]
    return "\n".join(lines)


def run(work: Path, *, pairs: int) -> dict[str, Any]:
    """Make the repository, start the server, measure."""
    with server(work) as ready:
        rows = [measure(ready, model, streams, pairs) for model, streams in TARGETS_MS]
    return {"cpus": os.cpu_count(), "rows": rows}


def main() -> None:
    """Parse, measure, print the table, and write it as JSON."""
    arguments = benchmark_parser("text", __doc__).parse_args()
    report = run(arguments.work.absolute(), pairs=arguments.pairs)
    print(table(report["rows"]))
    figures = [Figure(case=row.case, value=row.added_ms, target=row.target_ms, at_most=True) for row in report["rows"]]
    finish(arguments.out or arguments.work, "text", report, figures)


if __name__ == "__main__":
    main()
