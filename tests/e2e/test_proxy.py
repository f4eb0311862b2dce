"""Several copies behind one gateway: a real client, our gateway, and a real Triton, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.gateways import running_gateway
from tests.support.model_server import ModelServer
from tests.support.release_client import NEWEST
from tests.support.servers import HOST
from tests.support.text_requests import ENDLESS, is_idle
from tests.support.waiting import wait_until
from trtserve.cli import run
from trtserve.host.ports import free_ports, is_free

pytestmark = pytest.mark.triton

PROMPT = [1, 30, 31]


@pytest.fixture(scope="module")
def proxied(features: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """The server as it is seen through a gateway of two processes, which counts it as two copies."""
    (grpc_port,) = free_ports(HOST, 1)
    address = features.address
    with running_gateway(
        tmp_path_factory.mktemp("proxy"),
        address.http_port,
        grpc_port=address.grpc_port,
        own=False,
        model="",
        replicas=(f"localhost:{address.grpc_port}:{address.http_port}",),
        grpc_front_port=grpc_port,
        processes=2,
    ) as gateway:
        wait_until(lambda: not is_free(HOST, grpc_port))
        yield replace(features, address=replace(address, http_port=gateway.port, grpc_port=grpc_port))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_query_goes_through(
    protocol: str, features: ModelServer, proxied: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("query", "Through a proxy", "--model", "tiny", "--max-tokens", "6", "--protocol", protocol, "--host", HOST)
    answers = []
    for server in (features, proxied):
        ports = ("--http-port", str(server.address.http_port), "--grpc-port", str(server.address.grpc_port))
        assert run([*asked, *ports]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


def test_streams_come_in_pieces(features: ModelServer, proxied: ModelServer) -> None:
    request = NEWEST.core(PROMPT, 6, streaming=True, end_id=-1)
    with features.stream() as direct, proxied.stream() as stream:
        expected = [answer["output_ids"].tolist() for answer in direct.all("tensorrt_llm", request)]
        assert [answer["output_ids"].tolist() for answer in stream.all("tensorrt_llm", request)] == expected
        # The same stream takes further requests.
        assert [answer["output_ids"].tolist() for answer in stream.all("tensorrt_llm", request)] == expected
    assert len(expected) == 6


def test_a_disconnected_client_stops_its_request(features: ModelServer, proxied: ModelServer) -> None:
    """The gateway closes the call of the copy, which stops the request: `stop` is the other way, to one copy."""
    wait_until(lambda: is_idle(features))
    before = features.metric("nv_llm_output_token_len_sum")
    with proxied.stream() as stream:
        # So much that it would be under way for seconds.
        stream.send("tensorrt_llm", NEWEST.core(PROMPT, ENDLESS, streaming=True, end_id=-1, num_return_sequences=8))
        stream.next()
    wait_until(lambda: is_idle(features))
    assert features.metric("nv_llm_output_token_len_sum") - before < 8 * ENDLESS
