"""Which executor requests a stop request reaches."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.model_modules import load

UUID4 = "9721033f-05a8-4b00-ab0a-7ebae767f854"
UUID1 = "f8d0d170-e4e9-11f1-9525-02fc00000001"


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(
        sys.modules, "triton_python_backend_utils", SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)
    )
    return load(monkeypatch, "tensorrt_llm", "core_pending")


def table(pending: Any, *request_ids: str) -> Any:
    """Requests with the executor ids 0, 1, 2 …"""
    found = pending.PendingTable()
    for number, request_id in enumerate(request_ids):
        found.add(pending.Pending(request_id, sender=None, open_rows={number: None}))
    return found


def test_a_stop_reaches_its_id_and_what_the_bls_model_made_of_it(pending: Any) -> None:
    ids = table(pending, "mine", f"mine/bls-{UUID4}", "other", "mine")
    assert ids.executor_ids("mine") == [0, 1, 3]


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
def test_a_stop_leaves_the_ids_of_others_alone(pending: Any, other: str) -> None:
    assert table(pending, other).executor_ids("mine") == []


def test_an_id_is_no_pattern(pending: Any) -> None:
    assert table(pending, f"mine/bls-{UUID4}").executor_ids("m.ne") == []
