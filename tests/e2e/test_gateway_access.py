"""A server with an API key and TLS: who comes in, and where the key is kept."""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tritonclient import grpc as tritongrpc
from tritonclient import http as tritonhttp
from tritonclient.utils import InferenceServerException

from tests.support.certificates import certificates
from tests.support.echo_server import write_echo_repository
from tests.support.servers import running_server
from tests.support.tiny_models import write_tiny_model
from trtserve.cli.app import run
from trtserve.client.endpoint import grpc_metadata
from trtserve.errors import RequestError
from trtserve.process import arguments, environment_of, tree
from trtserve.server.state import Server

pytestmark = pytest.mark.triton

KEY = secrets.token_urlsafe(32)
TOKEN = f"hf_{secrets.token_hex(17)}"
BODY = {"text_input": "one two", "max_tokens": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    own = certificates()
    options: dict[str, Any] = {"api_key": KEY, "tls_certificate": own.server, "tls_key": own.server_key}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSERVE_API_KEY", KEY)
        patch.setenv("HF_TOKEN", TOKEN)
        with running_server(write_echo_repository(home), home=home, name="guarded", gateway=True, **options) as server:
            yield server


@pytest.fixture(autouse=True)
def commands_use_its_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(home))
    monkeypatch.delenv("TRTSERVE_API_KEY", raising=False)


def ask(server: Server, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> int:
    context = ssl.create_default_context(cafile=certificates().root)
    method = "GET" if body is None else "POST"
    with closing(http.client.HTTPSConnection("localhost", server.address.http_port, context=context)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
        response = connection.getresponse()
        response.read()
        return response.status


def test_requests_need_the_key(server: Server) -> None:
    path = "/v2/models/echo/generate"
    assert ask(server, path, BODY) == 401
    assert ask(server, path, BODY, {"Authorization": f"Bearer {KEY[:-1]}"}) == 401
    assert ask(server, path, BODY, {"Authorization": f"Basic {KEY}"}) == 401
    assert ask(server, path, BODY, {"Authorization": f"Bearer {KEY}"}) == 200
    assert ask(server, path, BODY, {"X-API-Key": KEY}) == 200
    assert ask(server, "/metrics") == 401
    assert ask(server, "/v2/models/echo/config") == 401


def test_load_balancers_need_no_key(server: Server) -> None:
    assert [ask(server, path) for path in ("/health", "/v2/health/live", "/v2/health/ready")] == [200, 200, 200]


def test_a_plain_connection_is_refused(server: Server) -> None:
    with closing(http.client.HTTPConnection("localhost", server.address.http_port, timeout=30)) as connection:
        connection.request("GET", "/v2/health/live")
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse()


def test_tritonclient_over_http(server: Server) -> None:
    where, trusted = f"localhost:{server.address.http_port}", {"ca_certs": str(certificates().root)}
    with closing(tritonhttp.InferenceServerClient(where, ssl=True, ssl_options=trusted)) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("echo", headers={"Authorization": f"Bearer {KEY}"})["name"] == "echo"
        with pytest.raises(InferenceServerException, match="API key"):
            client.get_model_metadata("echo")


def test_tritonclient_over_grpc(server: Server) -> None:
    where = f"localhost:{server.address.grpc_port}"
    with closing(
        tritongrpc.InferenceServerClient(where, ssl=True, root_certificates=str(certificates().root))
    ) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("echo", headers=dict(grpc_metadata(KEY))).name == "echo"
        for headers in (None, dict(grpc_metadata(KEY[:-1])), {"triton-grpc-protocol-trtserve-key": KEY}):
            with pytest.raises(InferenceServerException, match="protocol is restricted"):
                client.get_model_metadata("echo", headers=headers)
        with pytest.raises(InferenceServerException, match="protocol is restricted"):
            client.get_log_settings(headers=dict(grpc_metadata(KEY)))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_commands_of_this_user_need_no_flags(server: Server, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.url.startswith("https://")
    assert run(["query", "--protocol", protocol, "--raw", "Hello"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == "Echo: Hello\n"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_command_with_a_wrong_key_says_how_to_give_it(
    server: Server, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server.address.grpc_port if protocol == "grpc" else server.address.http_port
    where = ["--url", f"localhost:{port}", "--ssl", "--root-certificates", str(certificates().root)]
    assert run(["query", "--protocol", protocol, *where, "--api-key", f"not-{KEY}", "Hello"]) == RequestError.code
    shown = capsys.readouterr().err
    assert "next:  Give it: --api-key KEY, or TRTSERVE_API_KEY." in shown
    assert "restricted" not in shown


def test_other_commands_work_too(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["result"]
    assert found["state"] == "ready"
    assert found["models"]["echo"] == "READY"
    assert run(["metrics"]) == 0, capsys.readouterr().err


def test_a_remote_client_gives_key_and_roots(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path))
    for protocol, port in (("http", server.address.http_port), ("grpc", server.address.grpc_port)):
        line = ["query", "--url", f"localhost:{port}", "--protocol", protocol, "--model", "echo", "--raw", "Hello"]
        line += ["--ssl", "--root-certificates", str(certificates().root)]
        assert run(line) != 0
        capsys.readouterr()
        monkeypatch.setenv("TRTSERVE_API_KEY", KEY)
        assert run(line) == 0, capsys.readouterr().err
        assert capsys.readouterr().out == "Echo: Hello\n"
        monkeypatch.delenv("TRTSERVE_API_KEY")


def test_commands_print_and_write_neither_key_nor_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TRTSERVE_API_KEY", KEY)
    tokenizer = write_tiny_model(tmp_path / "tiny")
    measured = ["bench", "token-norm-dist", "--num-requests", "2", "--model", "echo", "--tokenizer", str(tokenizer)]
    measured += ["--no-calibrate", "--out", str(tmp_path / "out")]
    for line in (
        ["status", "--json"],
        ["logs", server.name],
        ["metrics", "--json"],
        ["query", "--json", "Hello"],
        ["query", "--protocol", "http", "--model", "absent", "Hello"],
        ["start", "--model-repository", str(server.repository), "--name", server.name],
        measured,
    ):
        run(line)
        printed = capsys.readouterr()
        assert printed.out or printed.err
        assert KEY not in printed.out + printed.err
        assert TOKEN not in printed.out + printed.err
    assert (tmp_path / "out").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and _holds(path, KEY, TOKEN)]


def _holds(path: Path, *secret: str) -> bool:
    content = path.read_bytes()
    return any(each.encode() in content for each in secret)


def test_the_key_is_in_one_private_file_only(server: Server, home: Path) -> None:
    processes = {each for root in server.roots for each in (root, *tree(root))}
    assert len(processes) > len(server.roots)
    for process in processes:
        assert KEY not in " ".join(arguments(process))
        assert TOKEN not in " ".join(arguments(process))
        assert KEY not in " ".join(environment_of(process).values())
    holders = [path for path in home.rglob("*") if path.is_file() and _holds(path, KEY, TOKEN)]
    assert [path.name for path in holders] == ["key"]
    assert holders[0].stat().st_mode & 0o077 == 0
    assert holders[0].parent.stat().st_mode & 0o077 == 0
