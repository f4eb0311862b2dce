"""Many streams at once through the BLS model: Triton 2.51 has two faults there that the models must keep clear of.

Without the fetched answers (`fetched_answers.py`) the BLS process hangs after some thousand short streams; without the
kept calls (`inner_models.py`) its memory is corrupted and it dies within seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_server import ModelServer, serving
from tests.support.stages import build_engine, make_repository
from trtserve.artifacts import Checkpoint
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import CHANNEL_OPTIONS, grpc_client, infer_request
from trtserve.client.tensors import ModelDescription
from trtserve.specs import BuildSpec, RepositorySpec

pytestmark = pytest.mark.triton

MODEL = "tensorrt_llm_bls"
STREAMS = 64
SECONDS = 5.0
TOKENS = 16
CANCELLED = 0.25
# Far above what a stream takes here; a hang ends the test instead of the suite.
TIMEOUT = 20.0
EXPECTED = {"completed", "cancelled"}


@pytest.fixture(scope="module")
def server(features_root: Path, features_model: Path, features_checkpoint: Checkpoint) -> Iterator[ModelServer]:
    """A separate server, since it may crash; it runs all streams at once."""
    root = features_root / "many"
    spec = BuildSpec(max_batch_size=STREAMS, max_seq_len=128, runtime="openvino")
    engine = build_engine(features_checkpoint, spec, out=root / "engine")
    repository = make_repository(engine, features_model, RepositorySpec(name="many"), out=root / "repository")
    with serving(repository.path, root / "server") as ready:
        yield ready


def description(server: ModelServer) -> ModelDescription:
    """Return the inputs of the BLS model."""
    endpoint = Endpoint(
        host=server.address.host, http_port=server.address.http_port, grpc_port=server.address.grpc_port
    )
    with closing(grpc_client(endpoint, timeout=10)) as client:
        return client.describe(MODEL)


def message(model: ModelDescription, tokens: int) -> Any:
    """A stream of a few tokens."""
    values: dict[str, list[Any]] = {"text_input": ["Hi"], "max_tokens": [tokens], "stream": [True]}
    return infer_request(MODEL, [model.tensor(name, value) for name, value in values.items()], request_id="")


async def streams(server: ModelServer) -> Counter[str]:
    """How the requests of all streams ended."""
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    ended: Counter[str] = Counter()
    model, end = description(server), time.monotonic() + SECONDS
    address = f"{server.address.host}:{server.address.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def one(seed: int) -> None:
            choice = random.Random(seed)
            while time.monotonic() < end and ended.keys() <= EXPECTED:
                cancelled = choice.random() < CANCELLED
                ended[await answer(stub, message(model, choice.randint(1, TOKENS)), cancelled=cancelled)] += 1

        await asyncio.gather(*(one(seed) for seed in range(STREAMS)))
    return ended


async def answer(stub: Any, request: Any, *, cancelled: bool) -> str:
    """Send one request and read its answers, with `cancelled` the first one only."""
    import grpc

    async def once() -> Any:
        yield request

    call = stub.ModelStreamInfer(once(), timeout=TIMEOUT)
    try:
        async for response in call:
            if response.error_message:
                return str(response.error_message)
            if cancelled:
                call.cancel()
                return "cancelled"
    except grpc.aio.AioRpcError as error:
        return str(error.code())
    return "completed"


def test_many_short_streams(server: ModelServer) -> None:
    ended = asyncio.run(streams(server))
    assert ended.keys() <= EXPECTED, ended
    assert ended["completed"] > STREAMS
