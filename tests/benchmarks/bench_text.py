"""The cost of text per streamed token: ensemble and BLS compared with the core model, on one server.

The model is tiny, so that decoding hides nothing: a cost is the time per new token through a text model minus that
through `tensorrt_llm` with the same tokens, by gRPC streaming and the same client, from the first send to the last
response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.engines import make_repository
from tests.benchmarks.frame import benchmark_parser, compare, finish, table
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


@contextmanager
def server(work: Path) -> Iterator[ModelServer]:
    """The tiny model behind Triton."""
    from tests.support.stages import build_engine, convert_model
    from tests.support.tiny_models import write_tiny_model
    from trtserve.artifacts import Model
    from trtserve.specs import BuildSpec, ConvertSpec

    root = work / "text"
    model = write_tiny_model(root / "model", max_position_embeddings=1024)
    checkpoint = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=root / "checkpoint")
    spec = BuildSpec(max_batch_size=8, max_seq_len=1024, runtime="openvino")
    engine = build_engine(checkpoint, spec, out=root / "engine")
    repository = make_repository(engine.path, model, root / "repository", name="tiny")
    with serving(repository, root / "server") as ready:
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


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    with server(arguments.work) as ready:

        def cost(model: str, streams: int) -> Callable[[int], float]:
            return lambda _: milliseconds(ready, model, streams)

        rows = [
            compare(
                f"{model}, {streams} stream{'s' if streams > 1 else ''}",
                cost(model, streams),
                cost("tensorrt_llm", streams),
                pairs=arguments.pairs,
                difference=True,
                target=target,
                at_most=True,
            )
            for (model, streams), target in TARGETS_MS.items()
        ]
    print(table(rows, measured="To text, ms/token", base="Core model, ms/token", value="Added"))
    finish(arguments, "text", rows)


if __name__ == "__main__":
    main()
