"""The gateway with the OpenAI API in a thread of the tests, in front of a real Triton server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.support.model_server import ModelServer
from tests.support.waiting import wait_until
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.gateway.app import Gateway
from trtserve.gateway.settings import GatewaySettings

PROMPTS = ("What is machine learning?", "é–字", "x")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@contextmanager
def openai_endpoint(server: ModelServer, *, repository: Path | None = None, ui: bool = False) -> Iterator[str]:
    """Serve the API as `trtserve gateway` does; yields its base URL."""
    address = server.address
    with closing(socket.socket()) as listening:
        listening.bind((address.host, 0))
        port = listening.getsockname()[1]
        settings = GatewaySettings(
            name="gateway",
            host=address.host,
            port=port,
            triton_http=f"{address.host}:{address.http_port}",
            triton_grpc=f"{address.host}:{address.grpc_port}",
            metrics=f"{address.host}:{address.metrics_port}",
            model="",
            repository=repository,
            own=False,
            ui=ui,
        )
        gateway = uvicorn.Server(uvicorn.Config(Gateway(settings), log_level="warning", lifespan="on"))
        thread = threading.Thread(target=gateway.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: gateway.started)
            yield f"http://{address.host}:{port}/v1"
        finally:
            gateway.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def expected(endpoint: Endpoint, prompt: str, count: int = 24, **options: Any) -> tuple[str, int | None, str | None]:
    """Text without leading spaces, number of tokens and reason of `trtserve query` on the core model."""
    spec = QuerySpec(prompts=(prompt,), model="tensorrt_llm", options={"max_tokens": count, **options})
    answer = generate(spec, endpoint)
    return answer.text, answer.output_tokens, answer.sequences[0].finish_reason
