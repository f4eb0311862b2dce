"""Files of requests and files of answers: OpenAI's batch format over HTTP, what is written as it comes, and again."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from tests.support.scripted_endpoint import write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from tests.support.waiting import wait_until
from trtserve.cli.app import run
from trtserve.client.batch import AnswerFile
from trtserve.errors import ServerUnreachableError, UsageError
from trtserve.gateway.openai.answering import Measures
from trtserve.gateway.openai.router import openai_router


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> ScriptedTriton:
    return ScriptedTriton(write_chat_model(tmp_path_factory.mktemp("batch") / "model"))


@pytest.fixture(scope="module")
def port(triton: ScriptedTriton) -> Iterator[int]:
    app = FastAPI()
    app.include_router(openai_router(triton, Measures()))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        yield int(listening.getsockname()[1])
        server.should_exit = True
        thread.join(30)


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": name}]
    asked = {"messages": messages} if url.startswith("/v1/chat") else {"prompt": name}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": NAME, **asked, **body}}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def query(port: int, *words: str | Path) -> int:
    return run(["query", "--host", "127.0.0.1", "--http-port", str(port), *map(str, words)])


def test_answers_have_openais_form_and_refusals_are_lines_too(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [line("a"), line("b", "/v1/completions"), line("c", temperature=9), line("d", "/v1/unknown")]
    file, out = written(tmp_path / "in.jsonl", *asked), tmp_path / "out.jsonl"
    assert query(port, "--input-file", file, "--output-file", out) == 0
    found = answers(out)
    assert [found[name]["response"]["status_code"] for name in "abcd"] == [200, 200, 400, 404]
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert found["b"]["response"]["body"]["object"] == "text_completion"
    assert "temperature" in found["c"]["response"]["body"]["error"]["message"]
    assert all(each["id"].startswith("batch_req_") and each["error"] is None for each in found.values())
    assert found["a"]["response"]["request_id"]
    assert "4 answers; 2 of them are errors" in capsys.readouterr().err


def test_half_a_character_is_written_as_json_has_it(port: int, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in.jsonl", line("\ud800"), line("é")), tmp_path / "out.jsonl"
    assert query(port, "--input-file", file, "--output-file", out) == 0
    assert answers(out).keys() == {"\ud800", "é"}
    assert "é" in out.read_text(encoding="utf-8")


def test_a_batch_goes_on_where_it_was_interrupted(port: int, triton: ScriptedTriton, tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", *(line(f"q{number}") for number in range(40)))
    out = tmp_path / "out.jsonl"
    before = len(triton.requests)
    assert query(port, "--input-file", file, "--output-file", out) == 0
    assert len(triton.requests) == before + 40
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:25]) + whole[25][:20])  # the last line was cut
    assert query(port, "--input-file", file, "--output-file", out) == 0
    assert len(triton.requests) == before + 40 + 15
    assert answers(out).keys() == {f"q{number}" for number in range(40)}
    assert query(port, "--input-file", file, "--output-file", out) == 0
    assert len(triton.requests) == before + 55


def test_another_model_for_all_lines_and_answers_on_stdout(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in.jsonl", line("a", model="gpt-4o"))
    assert query(port, "--input-file", file) == 0
    assert json.loads(capsys.readouterr().out)["response"]["status_code"] == 404
    assert query(port, "--input-file", file, "--model", NAME) == 0
    assert json.loads(capsys.readouterr().out)["response"]["status_code"] == 200


def test_a_server_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.client.batch._PAUSES", (0.01, 0.01))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = int(unused.getsockname()[1])
    out = tmp_path / "out.jsonl"
    file = written(tmp_path / "in.jsonl", *(line(str(number)) for number in range(30)))
    assert query(port, "--input-file", file, "--output-file", out) == ServerUnreachableError.code
    assert out.read_text() == ""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("a"), line("a")], "line 2 needs a custom_id"),
        ([line("a"), {**line("b"), "url": "/v2/models"}], "line 2 is not a POST to a url below /v1"),
        ([{**line("a"), "method": "GET"}], "line 1 is not a POST"),
        ([line("a", stream=True)], "without stream"),
        ([line("a"), {**line("b"), "body": 5}], "line 2 needs a body"),
        ([line("a"), ["b"]], "line 2 is not a JSON object"),
    ],
)
def test_wrong_lines_are_named_before_anything_is_sent(
    lines: list[Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in.jsonl", *lines)
    assert query(1, "--input-file", file) == UsageError.code
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["in.jsonl", "in.NDJSON"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{broken\n{"custom_id": "a"}\n', "line 1 is not JSON"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}\n', "line 1 is not JSON"),
        ('\0\0{"custom_id"', "line 1 is not JSON"),
        ('{"custom_id": 1\n', "line 1 is not JSON: Expecting ',' delimiter at column 16."),
        ('{"prompt": "x"}\n{"prompt": "y"}\n', "line 1 needs a custom_id"),
        ('["a"]\n["b"]\n', "line 1 is not a JSON object"),
        ("What is ML?\n", "line 1 is not JSON"),
        ("\n \n", "holds no request"),
    ],
)
def test_a_file_that_is_named_lines_of_json_is_never_sent_as_prompts(
    name: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert query(1, "--input-file", tmp_path / name) == UsageError.code
    told = " ".join(capsys.readouterr().err.split())
    assert words in told
    assert "Prompts, one per line, are in a file with another name" in told


def test_a_batch_takes_no_request_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "in.jsonl", line("a"))
    assert query(1, "--input-file", file, "--max-tokens", "5") == UsageError.code
    assert "Remove --dry-run, --local and the request options." in " ".join(capsys.readouterr().err.split())


def test_a_file_with_something_else_is_not_overwritten(tmp_path: Path) -> None:
    for content in ("my notes\n", "my notes", json.dumps(line("a")) + "\n", json.dumps(line("a")), '{"id": 5}\n{"id'):
        (tmp_path / "notes").write_text(content)
        with pytest.raises(UsageError, match="has lines that are not answers"):
            AnswerFile(tmp_path / "notes")
        assert (tmp_path / "notes").read_text() == content
    for content in (_answer("a", 200) + '{"i', '{"id": "batch_req_5', '{"prompt": 0, "inp', '{"id"'):
        (tmp_path / "notes").write_text(content)
        with AnswerFile(tmp_path / "notes"):
            assert (tmp_path / "notes").read_text() == content[: content.rfind("\n") + 1]


def test_the_input_is_not_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (json.dumps(line("a")), "What is ML?"):
        (tmp_path / "in").write_text(content)
        (tmp_path / "out").unlink(missing_ok=True)
        (tmp_path / "out").symlink_to(tmp_path / "in")
        assert query(1, "--input-file", tmp_path / "in", "--output-file", tmp_path / "out") == UsageError.code
        assert "is the file of --input-file" in " ".join(capsys.readouterr().err.split())
        assert (tmp_path / "in").read_text() == content


def _answer(name: str, status: int | None) -> str:
    response = None if status is None else {"status_code": status, "request_id": "", "body": {}}
    error = {"code": "request_timeout", "message": ""} if status is None else None
    return json.dumps({"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": error}) + "\n"


def test_errors_that_may_pass_are_asked_again(
    port: int, triton: ScriptedTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = {"fine": 200, "wrong": 400, "unknown": 404}
    passing = {"key": 401, "closed": 403, "slow": 408, "busy": 429, "broken": 500, "away": 503, "late": None}
    file, out = written(tmp_path / "in.jsonl", *map(line, [*passing, *statuses])), tmp_path / "out.jsonl"
    both = {**passing, **statuses}
    out.write_text("".join(_answer(name, both[name]) for name in sorted(both)) + '{"id": "bat')
    out.chmod(0o640)
    before = len(triton.requests)
    assert query(port, "--input-file", file, "--output-file", out) == 0
    assert len(triton.requests) == before + len(passing)
    assert {name: each["response"]["status_code"] for name, each in answers(out).items()} == {
        **dict.fromkeys(passing, 200),
        **statuses,
    }
    assert out.stat().st_mode & 0o777 == 0o640
    assert "7 answers, 3 were there.\n" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_a_batch_has_a_bound(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.client.batch._MOST_REQUESTS", 2)
    file, out = written(tmp_path / "in.jsonl", line("a"), line("b")), tmp_path / "out.jsonl"
    assert query(port, "--input-file", file, "--output-file", out) == 0
    written(file, line("a"), line("b"), line("c"))
    assert query(port, "--input-file", file, "--output-file", tmp_path / "other") == UsageError.code


def test_a_connection_that_is_not_made_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("trtserve.client.batch._PAUSES", (0.01,))
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", never)
    file, out = written(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    assert query(1, "--input-file", file, "--output-file", out, "--timeout", "0.2") == ServerUnreachableError.code
    assert out.read_text() == ""


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([line("a")], "1 answer.\n"),
        ([line("a", temperature=9)], "1 answer; it is an error.\n"),
        ([line("a"), line("b", temperature=9)], "2 answers; 1 of them is an error.\n"),
    ],
)
def test_the_last_words_count_right(
    asked: list[dict[str, Any]], words: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in.jsonl", *asked)
    assert query(port, "--input-file", file, "--output-file", tmp_path / "out.jsonl") == 0
    assert words in capsys.readouterr().err


def test_prompts_that_are_no_text_or_too_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1\0\0\xff\xfe\0")
    assert query(1, "--input-file", tmp_path / "table.parquet") == UsageError.code
    assert "looks like a binary file" in capsys.readouterr().err
    (tmp_path / "latin").write_bytes("Grüße".encode("latin-1"))
    assert query(1, "--input-file", tmp_path / "latin") == UsageError.code
    assert "iconv" in capsys.readouterr().err
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert query(1, "--input-file", tmp_path / "large") == UsageError.code
    error = capsys.readouterr().err
    assert "larger than 64 MiB" in error
    assert "split -l" in error
    assert "iconv" not in error
