"""Ports that servers are given: free, different, and out of the kernel's own range; connections that take no proxy."""

from __future__ import annotations

import inspect
import os
import socket
from pathlib import Path

import pytest

from tests.support.http_pages import answering
from trtserve.cli.endpoint import split_address
from trtserve.client.endpoint import Endpoint, unreachable
from trtserve.errors import PortInUseError, UsageError
from trtserve.host import ports
from trtserve.host.ports import free_ports, is_free, is_here, listening_socket, web_opener

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def all_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw from the whole range, not from this test process's share."""
    monkeypatch.setattr(ports, "_drawn_from", inspect.unwrap(ports._drawn_from))


def test_ports_are_drawn_below_the_range_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server comes up a second after its port was chosen: no outgoing connection may take it in between."""
    (tmp_path / "range").write_text("20000\t60999\n")
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    drawn = free_ports(HOST, 6)
    assert len(set(drawn)) == 6
    assert all(10000 <= port < 20000 and is_free(HOST, port) for port in drawn)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("0.0.0.0", True),
        (socket.gethostname(), True),
        ("192.0.2.1", False),
        ("host.example", False),
        ("localhost.example", False),
    ],
)
def test_hosts_that_are_this_machine(host: str, here: bool) -> None:
    assert is_here(host) is here


def test_urls_are_opened_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with (
        answering(lambda path: path) as port,
        web_opener(direct=True).open(f"http://127.0.0.1:{port}/v1", timeout=10) as page,
    ):
        assert page.read() == b"/v1"


def test_an_unreachable_server_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("https_proxy", "http://p:1")
    assert "https_proxy is set: gRPC goes through that proxy" in str(unreachable("host.example:8001", "no").hint)
    assert "proxy" not in str(unreachable("127.0.0.1:8001", "no").hint)


def test_two_processes_that_draw_ports_at_once_get_different_ones() -> None:
    assert free_ports(HOST, 6) != free_ports(HOST, 6)


def test_a_taken_port_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("10003\t60999\n")
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    monkeypatch.setattr(ports, "is_free", lambda _host, port: port != 10001)
    assert sorted(free_ports(HOST, 2)) == [10000, 10002]


@pytest.mark.parametrize("text", ["1024 65535", "10001 65535", "", None])
def test_the_kernel_chooses_where_its_range_leaves_too_few(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    drawn = free_ports(HOST, 3)
    assert len(set(drawn)) == 3
    assert all(is_free(HOST, port) for port in drawn)


def test_a_taken_port_is_refused_with_the_program_that_has_it() -> None:
    with listening_socket(HOST, 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(
            PortInUseError, match=rf":{port}' cannot be opened: .* by process {os.getpid()} "
        ) as refused:
            listening_socket(HOST, port)
    assert refused.value.hint == "Choose another port."


@pytest.mark.parametrize("host", ["../..", "a..b", "9" * 64, "\udcff"])
def test_what_is_no_host_name_is_refused_before_it_is_looked_up(host: str) -> None:
    assert not is_here(host)
    for ask in (lambda: Endpoint(host=host), lambda: split_address(f"{host}:8001")):
        with pytest.raises(UsageError, match=r"is no host name|expected HOST:PORT"):
            ask()


def test_an_address_with_a_scheme_is_said_without_it() -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT") as refused:
        split_address("http://127.0.0.1:9001/v1")
    assert refused.value.hint == "Without what is around it: --url 127.0.0.1:9001"
