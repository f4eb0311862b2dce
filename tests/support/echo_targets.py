"""The built-in echo server as a target of `bench`: a server whose answers and times are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from tests.support.described_models import described
from trtserve.bench.echo_server import Echo, running_echo
from trtserve.bench.records import TrafficRequest
from trtserve.bench.transport import LoadTarget, OpenAi
from trtserve.client.endpoint import Endpoint


@contextmanager
def echo_target(echo: Echo) -> Iterator[LoadTarget]:
    """Run an echo server and yield what sends to it."""
    with running_echo(echo) as port:
        yield target_at(echo, port)


def target_at(echo: Echo, port: int) -> LoadTarget:
    """Return the target for an echo server at a port of this machine."""
    endpoint = Endpoint(host="127.0.0.1", http_port=port, grpc_port=port)
    model = described("tensorrt_llm_bls" if echo.text else "tensorrt_llm", decoupled=echo.spoken != "grpc-unary")
    target = LoadTarget(protocol="grpc", endpoint=endpoint, model=model, streams=echo.spoken.endswith("-stream"))
    if echo.spoken.startswith("openai"):
        server = OpenAi(url=f"http://127.0.0.1:{port}/v1", model="echo")
        return replace(target, protocol="openai", openai=server)
    return replace(target, protocol="http" if echo.spoken.startswith("http") else "grpc")


def requests(count: int, *, tokens: int = 16, text: bool = False) -> list[TrafficRequest]:
    """Requests for answers of `tokens` tokens."""
    return [
        TrafficRequest(
            token_ids=np.arange(20, dtype=np.int32), output_len=tokens, text=f"prompt {number}" if text else None
        )
        for number in range(count)
    ]
