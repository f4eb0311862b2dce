"""The command line of `trtserve query`: sources of prompts, encodings, options and usage errors."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from trtserve.__main__ import prepare_streams
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.cli import run
from trtserve.cli.query_output import Sink
from trtserve.client.spec import QuerySpec
from trtserve.errors import RequestError
from trtserve.server.local_engine import LocalEngine

LATIN1 = "café".encode("latin1")


def set_stdin(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize("arguments", [["-"], ["--input-file", "-"]])
def test_stdin_without_an_end_is_not_read(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trtserve.cli.query.LARGEST_TEXT", 1 << 20)
    with open("/dev/zero") as endless:  # noqa: PTH123 - as a shell opens it
        monkeypatch.setattr("sys.stdin", endless)
        assert run(["query", *arguments]) == 2
    assert "stdin is larger than 1 MiB: it is not read further" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["argument", "stdin"])
def test_prompt_that_is_not_utf8_is_a_usage_error(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(LATIN1, monkeypatch)
    assert run(["query", os.fsdecode(LATIN1) if source == "argument" else "-", "--url", "127.0.0.1:1"]) == 2
    printed = capsys.readouterr()
    assert "not UTF-8 text: unexpected end of data at byte 3" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(("text", "prompt"), [("What is ML?\n", "What is ML?"), ("😀\r\n", "😀")])
def test_stdin_is_read_as_utf8_in_any_locale(text: str, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(text.encode(), monkeypatch)
    assert asked(["-"], monkeypatch).prompts == (prompt,)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--temperature", "5"], True),
        (["--temperature", "5", "--top-k", "0"], True),
        (["--temperature", "5", "--top-p", "0.9"], False),
        (["--temperature", "0"], False),
        ([], False),
    ],
)
def test_temperature_without_effect_is_reported(
    options: list[str], reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing listens on port 1; the note is printed before the connection fails.
    assert run(["query", "hi", "--url", "127.0.0.1:1", "--timeout", "5", *options]) == 40
    assert ("A temperature alone has no effect" in capsys.readouterr().err) == reported


@pytest.mark.parametrize("words", [["what", "is", "ml"], ["what is ml"]])
def test_words_without_quotes_are_one_prompt(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(spec: QuerySpec, *rest: object, **settings: object) -> None:
        asked.append(spec.prompts)

    monkeypatch.setattr("trtserve.cli.query._ask", ask)
    assert run(["query", *words, "--url", "127.0.0.1:1"]) == 0
    assert asked == [("what is ml",)]


def test_sampling_out_of_range_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--top-p", "5"]) == 2
    assert "--top-p is 5.0" in capsys.readouterr().err


def asked(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> QuerySpec:
    """Return the spec that a command line results in."""
    specs: list[QuerySpec] = []
    monkeypatch.setattr("trtserve.cli.query._ask", lambda spec, *rest: specs.append(spec))
    assert run(["query", *arguments, "--url", "127.0.0.1:1"]) == 0
    return specs[0]


def test_flags_of_nvidias_clients_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    core = "--text Hi -S --request-output-len 7 -b 2 -n 3 --top-k 0 --temperature 0.5 --model-name tensorrt_llm"
    core += " --lora-task-id 4 --return-log-probs --prompt_table_extra_id 5 --vocab_size 9 --end-id -1 -t 3"
    spec = asked(core.split(), monkeypatch)
    assert (spec.prompts, spec.stream, spec.model, spec.timeout) == (("Hi",), True, "tensorrt_llm", 3.0)
    assert spec.options == {
        "max_tokens": 7,
        "beam_width": 2,
        "num_return_sequences": 3,
        "top_k": 0,
        "temperature": 0.5,
        "lora_task_id": 4,
        "return_log_probs": True,
        "prompt_table_extra_id": 5,
        "vocab_size": 9,
        "end_id": -1,
    }
    text = "--prompt a --prompt b --batch-inputs -o 5 --exclude-input-in-output --return-kv-cache-reuse-stats"
    spec = asked([*text.split(), "--guided-decoding-guide-type", "json", "--stop-words", " x"], monkeypatch)
    assert (spec.prompts, spec.batch, spec.exclude_input) == (("a", "b"), True, True)
    assert spec.options == {
        "max_tokens": 5,
        "return_perf_metrics": True,
        "guide_type": "json",
        "stop_words": [" x"],
    }


def test_seed_zero_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(["hi", "--seed", "0", "--top-k", "1"], monkeypatch).options == {"seed": 0, "top_k": 1}


def test_switches_and_inputs_reach_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = asked(["hi", "--include-input", "--raw", "--input", "a=b=c", "--requested-outputs", "x"], monkeypatch)
    assert (spec.exclude_input, spec.raw, spec.inputs, spec.outputs) == (False, True, (("a", "b=c"),), ("x",))


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("one\n\ntwo é\n", ("one", "two é")),
        ('["a\\nb", "c"]', ("a\nb", "c")),
        ("[not json\n", ("[not json",)),
        ("[1, 2] Add these.\n{name} is here\n", ("[1, 2] Add these.", "{name} is here")),
        ("[INST] one [/INST]\n[INST] two [/INST]\n", ("[INST] one [/INST]", "[INST] two [/INST]")),
        ("[[ ## question ## ]]\n", ("[[ ## question ## ]]",)),
    ],
)
def test_prompts_are_read_from_a_file(
    content: str, prompts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").write_text(content, encoding="utf-8")
    assert asked(["--input-file", str(tmp_path / "prompts")], monkeypatch).prompts == prompts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('["a",\n"b\n', "should be a JSON list of texts but is not"),
        ('[\n  "a" "b"\n]\n', "should be a JSON list of texts but is not"),
        ("[" * 5000, "should be a JSON list of texts but is not"),
        ("[[[1, 2], [3", "should be a JSON list of texts but is not"),
        ("[ 'a', 'b' ]", "should be a JSON list of texts but is not"),
        ('{"prompts": ["a"', "should be a JSON list of texts but is not"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "should be a JSON list of texts but is not"),
        ('{"prompts": ["a"]}', "is a JSON object; expected a JSON list of texts"),
        ('\ufeff{"prompt": "a"}\r\n', "is a JSON object; expected a JSON list of texts"),
        ('["a", {"text": "b"}]', 'is a JSON list with {"text": "b"} in it'),
        ("[1, 2]", "is a JSON list with 1 in it"),
        ('{"a": ' + "9" * 5000 + "}", "one of its numbers has thousands of digits"),
    ],
)
def test_invalid_json_list_is_not_sent_line_by_line(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(content, encoding="utf-8")
    assert run(["query", "--input-file", str(tmp_path / "prompts")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [("one\ntwo\n", "should be a JSON list"), ('"one"', "is one JSON text"), ("[not json\n", "should be a JSON list")],
)
def test_a_file_that_is_named_json_is_json(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.json").write_text(content, encoding="utf-8")
    assert run(["query", "--input-file", str(tmp_path / "prompts.json")]) == 2
    assert words in capsys.readouterr().err


def test_token_ids_from_a_file_or_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ids.csv").write_text("1,2\n3\n")
    assert asked(["--input-tokens-csv", str(tmp_path / "ids.csv")], monkeypatch).token_ids == ((1, 2), (3,))
    assert asked(["--input-tokens-csv", "4,5"], monkeypatch).token_ids == ((4, 5),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "--prompt", "there"], "use one of them"),
        (["hi", "--input-file", "/nowhere"], "use one of them"),
        (["--input-file", "/nowhere"], "cannot be read"),
        (["--input-file", "/dev/null"], "holds no prompt"),
        (["--input-tokens-csv", "/nowhere.csv"], "cannot be read"),
        (["hi", "--input", "x"], "NAME=VALUE"),
        (["hi", "--system", "s", "--raw"], "--raw"),
        (["hi", "--stop-via-request-cancel"], "--stop-after-ms"),
        (["hi", "--stop-after-ms", "0"], "--stop-after-ms is 0"),
        (["hi", "-C", "brotli"], "none, deflate, gzip"),
        (["hi", "-C", "gzip", "--protocol", "http"], "--protocol grpc"),
        (["hi", "--root-certificates", "x.pem"], "add --ssl"),
        (["hi", "--ssl", "--private-key", "x.pem"], "must be given together"),
        (["hi", "--ssl", "--root-certificates", "/nowhere.pem"], "--root-certificates is /nowhere.pem"),
        (["hi", "--beam-width", "0"], "--beam-width is 0"),
        (["hi", "--output-dir", "/dev/null/x"], "/dev/null is not a folder"),
        (["hi", "--stop-words", "\udce9"], "--stop-words is not UTF-8"),
        (["hi", "--system", "\udce9"], "--system is not UTF-8"),
        (["hi", "--input", "x=\udce9"], "--input is not UTF-8"),
        (["hi", "--guide", "\udce9"], "--guide is not UTF-8"),
        (["hi", "--top-p", "nan"], "--top-p is nan"),
    ],
)
def test_usage_errors_are_reported_before_anything_is_sent(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["query", *arguments, "--url", "127.0.0.1:1"]) == 2
    assert words in capsys.readouterr().err


def test_failed_stream_ends_a_started_line(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Sink(stream=True, json=False, verbose=False)
    sink.broken()
    assert capsys.readouterr().out == ""
    assert sink.on_text is not None
    sink.on_text("Mach")
    sink.broken()
    assert capsys.readouterr().out == "Mach\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "There is no prompt."), (("--input-file", "-"), "--input-file: - holds no prompt.")],
)
def test_closed_stdin_counts_as_empty(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    prepare_streams()
    assert run(["query", *arguments]) == 2
    sys.stdin.close()
    assert message in capsys.readouterr().err


def test_worker_rank_reports_its_error_after_the_leader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"pretrained_config": {"mapping": {"world_size": 4, "tp_size": 4}}}
    engine = LocalEngine(path=Path("engine"), config=EngineConfig.of(config), tokenizer=None)
    monkeypatch.setattr("trtserve.server.local_engine.find_local_engine", lambda *_: engine)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")

    def fail(_: LocalEngine) -> None:
        raise RequestError("The engine cannot be loaded.")

    waited: list[float] = []
    monkeypatch.setattr(LocalEngine, "run_worker", fail)
    monkeypatch.setattr("trtserve.cli.query.time.sleep", waited.append)
    assert run(["query", "hi", "--local", "--engine", "x"]) == RequestError.code
    assert capsys.readouterr().err == "error: Rank 3: The engine cannot be loaded.\n"
    assert len(waited) == 1
