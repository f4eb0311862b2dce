"""Which executor requests a stop request reaches, and how responses end."""

from __future__ import annotations

from typing import Any

import pytest

from trtserve.programs.core import pending as _pending

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
