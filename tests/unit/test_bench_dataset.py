"""Prompts from a dataset file: which entries are used, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_models import write_byte_tokenizer
from trtserve.bench.records import Traffic, TrafficLimits
from trtserve.bench.traffic import dataset_traffic, read_dataset
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import UsageError
from trtserve.specs import BenchSpec

ENTRY = {"input": "ab", "instruction": "cd", "output": "one two  three"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return TokenizerFiles(folder)


def write(folder: Path, content: object) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(content))
    return path


def traffic(path: Path, files: TokenizerFiles, limits: TrafficLimits | None = None, **spec: object) -> Traffic:
    settings = BenchSpec(dataset=path, **spec)  # type: ignore[arg-type]
    return dataset_traffic(settings, limits or TrafficLimits(), files, text=False, special=True, end_id=2)


def test_prompts_and_lengths_match_upstream(tmp_path: Path, files: TokenizerFiles) -> None:
    """Input, a space, instruction; output words split at single spaces (four here) times 1.3, cut."""
    path = write(tmp_path, [ENTRY, {**ENTRY, "output": ""}])
    assert [each.prompt for each in read_dataset(path)] == ["ab cd", "ab cd"]
    first, second = traffic(path, files).requests
    assert first.token_ids.tolist() == files.encode("ab cd", special=True)
    assert (first.output_len, second.output_len) == (5, 1)
    assert (first.text, first.end_id) == (None, 2)
    assert [each.output_len for each in traffic(path, files, op_tokens_per_word=2.0).requests] == [8, 2]


def test_prompts_above_the_limit_are_skipped(tmp_path: Path, files: TokenizerFiles) -> None:
    path = write(tmp_path, [ENTRY, {**ENTRY, "input": "x" * 50}, ENTRY, ENTRY])
    found = traffic(path, files, TrafficLimits(max_input_len=10), num_requests=2)
    assert len(found.requests) == 2
    assert found.notes[0] == "Tokenizer: tokens per word = 3.000."
    assert found.notes[1].startswith("1 prompts were skipped")


def test_answers_are_shortened_to_the_engine_limit(tmp_path: Path, files: TokenizerFiles) -> None:
    found = traffic(write(tmp_path, [ENTRY]), files, TrafficLimits(max_seq_len=8))
    assert (found.requests[0].output_len, found.clipped_outputs) == (2, 1)


def test_num_requests_limits_the_dataset(tmp_path: Path, files: TokenizerFiles) -> None:
    assert len(traffic(write(tmp_path, [ENTRY] * 5), files, num_requests=3).requests) == 3
    assert len(traffic(write(tmp_path, [ENTRY] * 5), files, num_requests=30000).requests) == 5


def test_dataset_without_a_usable_prompt_is_refused(tmp_path: Path, files: TokenizerFiles) -> None:
    with pytest.raises(UsageError, match=r"None of the 2 prompts.*max_input_len 3"):
        traffic(write(tmp_path, [ENTRY, ENTRY]), files, TrafficLimits(max_input_len=3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "empty list"),
        ({"data": [ENTRY]}, "not a JSON list"),
        ("text", "not a JSON list"),
        ([ENTRY, "text"], "Entry 1 .* no text for 'input'"),
        ([ENTRY, {"input": "a", "instruction": "b"}], "Entry 1 .* no text for 'output'"),
        ([{**ENTRY, "instruction": 3}], "Entry 0 .* no text for 'instruction'"),
    ],
)
def test_invalid_dataset_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_dataset(write(tmp_path, content))


def test_unreadable_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_dataset(tmp_path / "nowhere.json")
    with pytest.raises(UsageError, match="directory"):
        read_dataset(tmp_path)
    (tmp_path / "data.json").write_bytes(b"\xff[")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_dataset(tmp_path / "data.json")


def test_sharegpt_and_json_lines_are_read(tmp_path: Path) -> None:
    talk = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a b c"}]}
    (tmp_path / "share.json").write_text(json.dumps([talk, {"conversations": []}]))
    example, empty = read_dataset(tmp_path / "share.json")
    assert empty.prompt == ""  # and skipped
    assert (example.prompt, example.output_len(2.0, 9)) == ("hi", 6)
    lines = [{"prompt": "x", "output_len": 4}, {"text": "y", "completion": "a b"}, {"prompt": "z"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = read_dataset(tmp_path / "some.jsonl")
    assert [(each.prompt, each.output_len(1.0, 9)) for each in found] == [("x", 4), ("y", 2), ("z", 9)]
