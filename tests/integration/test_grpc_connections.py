"""Connections to a gRPC server that is not there yet."""

from __future__ import annotations

import asyncio

from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import open_channel
from trtserve.host.ports import free_ports

# gRPC's own pauses between attempts are 1, 1.6, 2.6 … seconds: by then it would wait another two.
AWAY = 2.8
FOUND = 1.5


def test_a_server_that_was_away_is_found_soon() -> None:
    import grpc

    async def connect() -> None:
        (port,) = free_ports("127.0.0.1", 1)
        channel = open_channel(Endpoint(grpc_port=port))
        server = grpc.aio.server()
        for _ in range(int(AWAY / 0.05)):
            channel.get_state(try_to_connect=True)
            await asyncio.sleep(0.05)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            await asyncio.wait_for(channel.channel_ready(), FOUND)
        finally:
            await channel.close()
            await server.stop(None)

    asyncio.run(connect())
