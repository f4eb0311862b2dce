"""The door with the OpenAI API in a thread of the tests, in front of a real Triton server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn

from tests.support.model_server import ModelServer
from tests.support.waiting import wait_until
from trtserve.door.app import Door
from trtserve.door.settings import DoorSettings


@contextmanager
def openai_endpoint(server: ModelServer, *, repository: Path | None = None, ui: bool = False) -> Iterator[str]:
    """Serve the API as `trtserve door` does; yields its base URL."""
    address = server.address
    with closing(socket.socket()) as listening:
        listening.bind((address.host, 0))
        port = listening.getsockname()[1]
        settings = DoorSettings(
            name="door",
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
        door = uvicorn.Server(uvicorn.Config(Door(settings), log_level="warning", lifespan="on"))
        thread = threading.Thread(target=door.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: door.started)
            yield f"http://{address.host}:{port}/v1"
        finally:
            door.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
