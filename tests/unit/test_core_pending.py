"""Which executor requests a stop reaches, how responses end, and which waiting tokens leave in one response."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils

from trtserve.executor.interface.results import Response, Result
from trtserve.programs.core import pending as _pending
from trtserve.programs.core.pending import joined, joined_responses, response
from trtserve.programs.core.response import Wanted, output_arrays
from trtserve.programs.shared.senders import error_response

pending: Any = _pending

UUID4 = "9721033f-05a8-4b00-ab0a-7ebae767f854"
UUID1 = "f8d0d170-e4e9-11f1-9525-02fc00000001"


def table(*request_ids: str) -> Any:
    """Requests with the executor ids 0, 1, 2 …"""
    found = pending.PendingTable()
    for number, request_id in enumerate(request_ids):
        found.add(pending.Pending(request_id, sender=None, open_rows={number: None}))
    return found


def test_a_stop_reaches_its_id_and_the_inner_requests_of_the_bls_model() -> None:
    ids = table("mine", f"mine/bls-{UUID4}", "other", "mine")
    assert ids.stop("mine") == [0, 1, 3]


@pytest.mark.parametrize(
    "other",
    [
        "mine/two",
        f"mine/{UUID4}",
        f"mine/x/bls-{UUID4}",
        f"mine/bls-{UUID4}/x",
        f"mine/bls-{UUID1}",
        f"nine/bls-{UUID4}",
        "min",
        "mine2",
    ],
)
def test_a_stop_does_not_reach_other_ids(other: str) -> None:
    assert table(other).stop("mine") == []


def test_messages_show_the_id_that_the_client_gave() -> None:
    assert pending.client_id(f"mine/bls-{UUID4}") == "mine"
    assert pending.client_id(f"/bls-{UUID4}") == ""
    assert pending.client_id("mine/two") == "mine/two"


def test_an_id_is_not_a_pattern() -> None:
    assert table(f"mine/bls-{UUID4}").stop("m.ne") == []


def ended(request_id: str) -> Any:
    """A table in which a request with this id came and ended."""
    found = table(request_id)
    found.close(0)
    return found


def test_a_stop_between_two_rounds_reaches_the_next_one() -> None:
    inner = f"mine/bls-{UUID4}"
    found = ended(inner)
    assert found.stop("mine") == []
    assert found.add(pending.Pending(inner, sender=None, open_rows={1: None}))
    found.close(1)
    assert found.add(pending.Pending(inner, sender=None, open_rows={2: None}))


def test_ids_of_stops_take_no_memory_afterwards() -> None:
    found = table(f"mine/bls-{UUID4}")
    tracemalloc.start()
    try:
        for number in range(4):
            found.stop(f"{number}" * 2**18)
        assert tracemalloc.get_traced_memory()[0] < 2**18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stopped", ["other", ""])
def test_rounds_go_on_without_a_stop(stopped: str) -> None:
    inner = f"mine/bls-{UUID4}"
    found = ended(inner)
    found.stop(stopped)
    assert not found.add(pending.Pending(inner, sender=None, open_rows={1: None}))


def test_ids_of_clients_are_not_remembered() -> None:
    found = ended("mine")
    found.stop("mine")
    assert not found.add(pending.Pending("mine", sender=None, open_rows={1: None}))


def test_the_memory_of_ended_requests_is_limited() -> None:
    found = pending.PendingTable()
    for number in range(3000):
        found.add(pending.Pending(f"{number}/bls-{UUID4}", sender=None, open_rows={number: None}))
        found.close(number)
    assert len(found._ended) == 1024


class Recorder:
    """What was sent, as (outputs or error, final)."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []

    def send(self, response: Any = None, *, final: bool) -> None:
        self.sent.append((response, final))


def answered(
    monkeypatch: pytest.MonkeyPatch, *, decoupled: bool, rows: int = 1, request_id: str = ""
) -> list[tuple[Any, bool]]:
    """What a request with `rows` rows sends when each of them has one response."""
    monkeypatch.setattr(pending, "response", lambda tensors, parameters: f"data {parameters}")
    recorder = Recorder()
    found = pending.PendingTable()
    request = pending.Pending(request_id, recorder, decoupled, dict.fromkeys(range(rows)))
    found.add(request)
    for number in range(rows):
        found.close(number)
        request.send({}, parameters={"row": number})
    return recorder.sent


def test_a_decoupled_model_ends_with_an_empty_response(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, decoupled=True) == [("data {'row': 0}", False), (None, True)]
    sent = answered(monkeypatch, decoupled=True, rows=2)
    assert sent == [("data {'row': 0}", False), ("data {'row': 1}", False), (None, True)]


@pytest.mark.parametrize("client", ["", "mine"])
def test_the_bls_model_gets_the_final_flag_with_the_data(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    sent = answered(monkeypatch, decoupled=True, rows=2, request_id=f"{client}/bls-{UUID4}")
    assert sent == [("data {'row': 0}", False), ("data {'row': 1}", True)]


def test_a_model_that_is_not_decoupled_sends_one_response(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, decoupled=False) == [("data {'row': 0}", True)]


def test_tokens_are_counted_per_sequence() -> None:
    request = pending.Pending("", None)
    assert [request.count(5, 0, tokens, repeated=False) for tokens in (1, 2)] == [1, 2]
    assert request.count(5, 1, 4, repeated=False) == 4
    assert [request.count(6, 0, tokens, repeated=True) for tokens in (1, 2, 0)] == [1, 1, 0]
    assert request.total(5) == 7
    assert request.total(6) == 2


@pytest.fixture(autouse=True)
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two answers show that Triton is behind."""
    monkeypatch.setattr(pending, "MOST_WAITING", 1)


def tokens(number: int, *ids: int, **options: Any) -> Response:
    return Response(number, Result(output_token_ids=[list(ids)], **options))


def sent(answers: list[Response]) -> list[tuple[int, list[int]]]:
    """(Request, tokens) of each response that leaves."""
    return [(answer.request_id, [*earlier, *answer.result.output_token_ids[0]]) for answer, earlier in joined(answers)]


def test_tokens_of_a_stream_are_joined_in_their_order() -> None:
    answers = [tokens(1, 10), tokens(2, 20), tokens(1, 11), tokens(2, 21, 22), tokens(1, 12, is_final=True)]
    assert sent(answers) == [(2, [20, 21, 22]), (1, [10, 11, 12])]
    assert [answer.result.is_final for answer, _ in joined(answers)] == [False, True]


def test_few_answers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MOST_WAITING", 2)
    assert sent([tokens(1, 10), tokens(1, 11)]) == [(1, [10]), (1, [11])]


def test_sequences_of_one_request_stay_apart() -> None:
    answers = [tokens(1, 10), tokens(1, 20, sequence_index=1), tokens(1, 21, sequence_index=1), tokens(1, 11)]
    assert sent(answers) == [(1, [10]), (1, [20, 21]), (1, [11])]


@pytest.mark.parametrize("more", [{"log_probs": [[-1.0]]}, {"cum_log_probs": [-1.0]}, {"generation_logits": [0.0]}])
def test_answers_with_more_than_tokens_are_not_joined(more: dict[str, Any]) -> None:
    assert sent([tokens(1, 10), tokens(1, 11, **more), tokens(1, 12)]) == [(1, [10]), (1, [11]), (1, [12])]


def test_an_error_comes_after_the_tokens() -> None:
    *before, (failure, earlier) = joined([tokens(1, 10), tokens(1, 11), Response(1, "failed")])
    assert [(answer.result.output_token_ids, first) for answer, first in before] == [([[11]], [10])]
    assert (failure.error_msg, earlier) == ("failed", [])


def test_counts_include_the_tokens_that_came_before() -> None:
    wanted = Wanted(prompt_length=4, count_output=True)
    found = output_arrays(Any, Result(output_token_ids=[[12]]), wanted, [10, 11])  # type: ignore[arg-type]
    assert found["output_ids"].tolist() == [[[10, 11, 12]]]
    assert found["sequence_length"].tolist() == found["num_output_tokens"].tolist() == [[3]]


def of_tokens(*ids: int, **others: Any) -> Any:
    """A response with tokens of one sequence."""
    arrays = {"output_ids": np.array([[ids]], np.int32), "sequence_length": np.array([[len(ids)]], np.int32), **others}
    return response([pb_utils.Tensor(name, value) for name, value in arrays.items()])


def arrays_of(answer: Any) -> dict[str, Any]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in answer.output_tensors()}


def test_responses_that_wait_to_be_fetched_are_joined() -> None:
    row = {"batch_index": np.array([[1]], np.int32)}
    both = joined_responses(of_tokens(5, 6, **row), of_tokens(7, **row))
    assert arrays_of(both) == {"output_ids": [[[5, 6, 7]]], "sequence_length": [[3]], "batch_index": [[1]]}
    assert arrays_of(joined_responses(of_tokens(5), of_tokens())) == {"output_ids": [[[5]]], "sequence_length": [[1]]}


@pytest.mark.parametrize(
    "others",
    [{"batch_index": np.array([[1]], np.int32)}, {"output_log_probs": np.zeros((1, 1, 1), np.float32)}],
    ids=["row", "log-probs"],
)
def test_responses_with_more_than_tokens_of_the_sequence_stay_apart(others: dict[str, Any]) -> None:
    assert joined_responses(of_tokens(5), of_tokens(6, **others)) is None
    assert joined_responses(of_tokens(5, **others), of_tokens(6)) is None


def test_errors_and_the_end_stay_apart() -> None:
    assert joined_responses(of_tokens(5), None) is None
    assert joined_responses(of_tokens(5), error_response("failed")) is None
