"""How a client of this user reaches a server that was started here."""

from __future__ import annotations

from dataclasses import replace

from trtserve.client.base import Endpoint
from trtserve.server.state import Server


def endpoint_of(server: Server) -> Endpoint:
    """Return the endpoint of a server, with its default model, its key and its certificate."""
    front = server.endpoint
    endpoint = Endpoint(
        host=front.host,
        http_port=front.http_port,
        grpc_port=front.grpc_port,
        model=server.model,
        repository=server.repository,
    )
    return protected(endpoint, server)


def protected(endpoint: Endpoint, server: Server) -> Endpoint:
    """Return the endpoint with the key and the certificate of a server that this user has started."""
    door = server.instances[0].door
    if door is None or not door.settings.is_file():
        return endpoint
    from trtserve.gateway.settings import DoorSettings

    own = DoorSettings.read(door.settings).endpoint
    return replace(endpoint, tls=own.tls, api_key=own.api_key)
