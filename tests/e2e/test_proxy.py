"""The reverse proxy of several instances: a real nginx between a real client and a real Triton, HTTP and gRPC."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.model_server import ModelServer
from tests.support.release_client import NEWEST
from tests.support.servers import HOST
from tests.support.text_requests import ENDLESS, is_idle
from tests.support.waiting import wait_until
from trtserve.cli import run
from trtserve.host.ports import free_ports, is_free
from trtserve.process import find_sbin_program
from trtserve.server.front import proxy_config

pytestmark = [pytest.mark.triton, pytest.mark.needs("nginx")]

PROMPT = [1, 30, 31]


@pytest.fixture(scope="module")
def proxied(features: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """The server as it is seen through nginx, which counts it as two instances."""
    nginx = find_sbin_program("nginx")
    file = tmp_path_factory.mktemp("proxy") / "nginx.conf"
    http_port, grpc_port = free_ports(HOST, 2)
    addresses = (features.address, features.address)
    file.write_text(proxy_config(addresses, file=file, http_port=http_port, grpc_port=grpc_port))
    with subprocess.Popen([str(nginx), "-e", "stderr", "-p", str(file.parent), "-c", str(file)]) as process:
        try:
            _wait_for(HOST, grpc_port)
            yield replace(features, address=replace(features.address, http_port=http_port, grpc_port=grpc_port))
        finally:
            process.terminate()


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + 30
    while is_free(host, port):
        assert time.monotonic() < deadline, "nginx does not listen"
        time.sleep(0.05)


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
    """The proxy closes the call of the instance, which stops the request: `stop` is the other way, to one instance."""
    wait_until(lambda: is_idle(features))
    before = features.metric("nv_llm_output_token_len_sum")
    with proxied.stream() as stream:
        # So much that it would be under way for seconds.
        stream.send("tensorrt_llm", NEWEST.core(PROMPT, ENDLESS, streaming=True, end_id=-1, num_return_sequences=8))
        stream.next()
    wait_until(lambda: is_idle(features))
    assert features.metric("nv_llm_output_token_len_sum") - before < 8 * ENDLESS
