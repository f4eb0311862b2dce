"""Guides of an unknown client: one that takes too much is refused by name, and nobody else waits for it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

import trtserve
from tests.support.sampling_requests import VOCAB, build_tiny_engine
from trtserve.executor import api
from trtserve.executor.engine import guide_trial
from trtserve.executor.engine.guided import LONGEST_QUEUE
from trtserve.executor.engine.limits import GuideTokenizer
from trtserve.executor.engine.requests import GuideType

END = 2
ANSWERED = 60.0
ORDINARY = json.dumps(
    {
        "type": "object",
        "properties": {f"field{number}": {"type": "string", "maxLength": 5} for number in range(20)},
        "required": ["field0"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and its engine."""
    folder = tmp_path_factory.mktemp("guides")
    build_tiny_engine(folder)
    return folder


@pytest.fixture
def executor(folder: Path) -> Iterator[api.Executor]:
    with executor_of(folder) as running:
        yield running


@pytest.fixture(scope="module")
def shared_executor(folder: Path) -> Iterator[api.Executor]:
    """Of tests whose guides do not depend on what was asked before."""
    with executor_of(folder) as running:
        yield running


def executor_of(folder: Path, tokenizer: Path | None = None) -> api.Executor:
    guided = api.GuidedDecodingConfig(
        api.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE,
        tokenizer_str=(tokenizer or folder / "model" / "tokenizer.json").read_text(encoding="utf-8"),
    )
    config = api.ExecutorConfig(guided_decoding_config=guided)
    return api.Executor(folder / "engine", api.ModelType.DECODER_ONLY, config)


def request(kind: GuideType | None = None, guide: str = "", *, count: int = 8, **more: Any) -> api.Request:
    params = None if kind is None else api.GuidedDecodingParams(kind, guide)
    output = api.OutputConfig(exclude_input_from_output=True)
    return api.Request([5, 6], count, guided_decoding_params=params, end_id=END, output_config=output, **more)


def multiple_of(number: int) -> api.Request:
    return request(GuideType.JSON_SCHEMA, f'{{"type": "integer", "multipleOf": {number}}}')


def answer(executor: api.Executor, number: int, seconds: float = ANSWERED) -> api.Response:
    """The last response of a request."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for response in executor.await_responses(number, 0.2):
            assert isinstance(response, api.Response)
            if response.has_error() or response.result.is_final:
                return response
    raise AssertionError(f"no answer within {seconds} s")


def error_of(executor: api.Executor, number: int) -> str:
    response = answer(executor, number)
    assert response.has_error()
    return str(response.error_msg)


@pytest.fixture
def less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse guides sooner; a request of another client takes some hundredths of a second."""
    monkeypatch.setattr("trtserve.executor.engine.guided.GUIDE_SECONDS", 0.8)


def other_is_answered(executor: api.Executor, *, guided: bool = False) -> None:
    """Ask for another client."""
    number = executor.enqueue_request(request(GuideType.REGEX, "[a-z]{3}") if guided else request())
    assert not answer(executor, number).has_error()


def are_open(executor: api.Executor, numbers: Sequence[int]) -> bool:
    """Return whether none of the requests has been answered."""
    return not any(executor.await_responses(number, 0) for number in numbers)


BRACKETS = "of type EBNF_GRAMMAR is invalid"
HOSTILE = {
    "10,000 brackets": (GuideType.EBNF_GRAMMAR, "[" * 10_000 + "::=", BRACKETS),
    "50,000 brackets": (GuideType.EBNF_GRAMMAR, "[" * 50_000 + "::=", BRACKETS),
    "50,000 quotes": (GuideType.EBNF_GRAMMAR, 'root ::= "' + "\\" * 50_001 + '["' * 20_000, BRACKETS),
    "many rules": (GuideType.EBNF_GRAMMAR, "root ::= " + "a\n" * 60_000, "of type EBNF_GRAMMAR"),
    "expression": (GuideType.REGEX, ".*" * 5000 + "a", "REGEX takes too much: it needs more than"),
    "multipleOf": (
        GuideType.JSON_SCHEMA,
        '{"type": "integer", "multipleOf": 999983}',
        "takes too much: it needs more than",
    ),
    "a larger one": (
        GuideType.JSON_SCHEMA,
        '{"type": "integer", "multipleOf": 10000019}',
        "takes too much: it needs more",
    ),
    "8 MiB": (GuideType.JSON_SCHEMA, " " * (8 << 20), "has 8388608 bytes; expected 131072 at most"),
    "half a character": (GuideType.REGEX, "\ud800", "REGEX is invalid"),
}


def spent_by_children() -> float:
    """Return the CPU seconds of the processes that try guides, ended ones too; a busy machine does not change them."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    ended = psutil.Process().cpu_times()
    running = sum(each.user + each.system + each.children_user + each.children_system for each in times)
    return running + ended.children_user + ended.children_system


@pytest.mark.usefixtures("less_time")
@pytest.mark.parametrize(("kind", "guide", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_nobody_waits_for_a_guide_that_takes_too_much(
    shared_executor: api.Executor, kind: GuideType, guide: str, words: str
) -> None:
    executor = shared_executor
    hostile = executor.enqueue_request(request(kind, guide))
    other_is_answered(executor)
    assert "it needs more" not in words or are_open(executor, [hostile])
    assert re.search(words, error_of(executor, hostile))
    before = spent_by_children()
    assert re.search(words, error_of(executor, executor.enqueue_request(request(kind, guide))))
    assert spent_by_children() - before < 1  # what was refused once costs nothing
    assert not answer(executor, executor.enqueue_request(request(GuideType.JSON_SCHEMA, ORDINARY))).has_error()


def test_a_new_guide_waits_for_others_a_moment_each(executor: api.Executor) -> None:
    other_is_answered(executor, guided=True)  # the process has started
    ids = executor.enqueue_requests([multiple_of(10000019 * at) for at in range(1, 7)])
    new = executor.enqueue_request(request(GuideType.REGEX, "[b-y]{3}"))
    assert not answer(executor, new).has_error()
    # Each of those takes ten times as long until it is refused.
    finished = [number for number in ids if executor.await_responses(number, 0)]
    assert len(finished) <= 3
    for number in ids:
        executor.cancel_request(number)


def test_a_guide_is_tried_again_when_its_process_was_stopped_and_killed(executor: api.Executor) -> None:
    other_is_answered(executor, guided=True)  # the process has started
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.suspend()
    number = executor.enqueue_request(request(GuideType.REGEX, "[0-9]{3}"))
    with pytest.raises(AssertionError, match="no answer"):
        answer(executor, number, seconds=0.5)
    for child in children:
        child.kill()  # as the supervisor does
    assert not answer(executor, number).has_error()


def test_slow_guides_do_not_fill_the_queue_of_others(executor: api.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.executor.engine.guided._MOST_LATE", 1)  # ten first looks fit into its time
    other_is_answered(executor, guided=True)
    ids = executor.enqueue_requests([multiple_of(10000019 * at) for at in range(1, 6)])
    assert "queue of guides that take more than 0.2 s to compile is full: 1 are in it" in error_of(executor, ids[1])
    new = executor.enqueue_request(request(GuideType.REGEX, "[c-x]{3}"))
    assert not answer(executor, new).has_error()
    for number in ids:
        executor.cancel_request(number)


@pytest.mark.usefixtures("less_time")
def test_nobody_waits_for_many_guides_that_take_too_much(executor: api.Executor) -> None:
    other_is_answered(executor, guided=True)  # this guide is known from now on
    hostile = [
        request(GuideType.JSON_SCHEMA, f'{{"type": "integer", "multipleOf": {10000019 * at}}}') for at in range(1, 7)
    ]
    ids = executor.enqueue_requests(hostile)
    other_is_answered(executor)
    other_is_answered(executor, guided=True)
    assert are_open(executor, ids)
    for number in ids[2:]:  # those that wait for their turn
        executor.cancel_request(number)
    for number in ids[2:]:
        response = answer(executor, number)
        assert response.result.finish_reasons == [api.FinishReason.CANCELLED]
    for number in ids[:2]:
        assert "takes too much" in error_of(executor, number)


def test_only_so_many_guides_wait(executor: api.Executor) -> None:
    hostile = [multiple_of(10000019 * at) for at in range(1, LONGEST_QUEUE + 2)]
    *ids, last = executor.enqueue_requests(hostile)
    assert f"The queue of guides to compile is full: {LONGEST_QUEUE} are in it" in error_of(executor, last)
    same = executor.enqueue_request(hostile[0])  # waits with the first
    for number in [*ids, same]:
        executor.cancel_request(number)
    for number in [*ids, same]:
        answer(executor, number)
    other_is_answered(executor)


ALTERNATIVES = "root ::= " + " | ".join(f'[a-z]* "x{number}" [0-9]*' for number in range(1500))
# Compiled at once, but has ever more ways to read the text so far.
AMBIGUOUS = 'root ::= s\ns ::= s s s s s s s s | [a-z] | [a-z ] | ""'


@pytest.mark.parametrize("guide", [ALTERNATIVES, AMBIGUOUS], ids=["first token", "later token"])
def test_a_token_that_takes_too_much_fails_its_request_alone(folder: Path, guide: str) -> None:
    tokenizer = Path(trtserve.__file__).parent / "demo" / "tokenizer.json"
    bias = np.zeros(VOCAB, dtype=np.float32)
    bias[Tokenizer.from_file(str(tokenizer)).token_to_id("a")] = 100
    with executor_of(folder, tokenizer) as executor:
        number = executor.enqueue_request(request(GuideType.EBNF_GRAMMAR, guide, count=90, embedding_bias=bias))
        other_is_answered(executor)
        error = error_of(executor, number)
        assert re.search("than the limit (max_items_in_row|step_max_items) of|takes too long: more than 0.02 s", error)
        other_is_answered(executor)


def test_requests_that_wait_for_their_guides_are_answered_before_the_end(folder: Path) -> None:
    executor = executor_of(folder)
    number = executor.enqueue_request(request(GuideType.REGEX, "[a-z]{4}"))
    responses: list[Any] = []
    reader = threading.Thread(target=lambda: responses.extend(executor.await_responses(number, ANSWERED)))
    reader.start()
    time.sleep(0.05)
    executor.shutdown()
    reader.join(ANSWERED)
    assert responses
    assert not responses[0].has_error()


def test_an_attempt_without_a_processor_is_not_called_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (folder / "model" / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = guide_trial.read_tokenizer(GuideTokenizer(text=text))
    monkeypatch.setattr(guide_trial, "WAITED", 1e-4)
    assert guide_trial._try_in_fork(tokenizer, GuideType.REGEX, "a+", 1.0) == {"starved": True}
