"""Tokens that wait for Triton leave in one response, in their order, and nothing else is joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils

from trtserve.executor.interface.results import Response, Result
from trtserve.programs.core import pending as joining
from trtserve.programs.core.pending import joined, joined_responses, response
from trtserve.programs.core.response import Wanted, output_arrays
from trtserve.programs.shared.senders import error_response


@pytest.fixture(autouse=True)
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two answers show that Triton is behind."""
    monkeypatch.setattr(joining, "MOST_WAITING", 1)


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
    monkeypatch.setattr(joining, "MOST_WAITING", 2)
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
