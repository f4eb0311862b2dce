"""What the gateway asks Triton."""

from __future__ import annotations

import asyncio
import socket

import pytest

from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.triton import TritonHttp


def test_a_triton_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.gateway.triton._ANSWER_SECONDS", 0.1)

    async def ask(address: str) -> None:
        triton = TritonHttp(address, address)
        try:
            assert not await triton.is_ready()
            with pytest.raises(RefusedError, match="does not answer"):
                await triton.model("demo")
        finally:
            await triton.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(asyncio.wait_for(ask(f"127.0.0.1:{listening.getsockname()[1]}"), timeout=5))
