"""What `doctor` says of PyTorch and NCCL, from what the processes that it starts print."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from trtserve.server.doctor import pytorch

SEEN: dict[str, Any] = {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "gpus": 2, "problem": ""}
HELLO = [{"rank": rank, "device": f"cuda:{rank}", "sum": 12.0} for rank in (0, 1)]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "find_spec", lambda _name: object())


@pytest.mark.parametrize(
    ("seen", "state", "evidence"),
    [
        ({}, "ok", "2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, calculates on 2 GPUs"),
        ({"cuda": None, "nccl": None, "gpus": 0}, "failed", "2.11.0+cu130 is built without CUDA"),
        ({"gpus": 0, "problem": "The driver is too old"}, "failed", "no usable GPU: The driver is too old"),
        ({"problem": "no kernel image is available"}, "failed", "no usable GPU: no kernel image is available"),
        ({"gpus": 0}, "failed", "no usable GPU: the driver shows none"),
    ],
)
def test_pytorch(monkeypatch: pytest.MonkeyPatch, seen: dict[str, Any], state: str, evidence: str) -> None:
    printed = f"a warning\nfound {json.dumps(SEEN | seen)}\n"
    monkeypatch.setattr(pytorch, "run", lambda *_arguments, **_options: SimpleNamespace(stdout=printed))
    found = pytorch.check_pytorch()
    assert (found.state, bool(found.fix)) == (state, state == "failed")
    assert evidence in found.evidence
    assert found.needed_by == {"torch"}


@pytest.mark.parametrize(
    ("code", "said", "state", "evidence"),
    [
        (0, HELLO, "ok", "two ranks added a tensor on cuda:0 and cuda:1"),
        (0, [HELLO[0], {**HELLO[1], "sum": 4.0}], "failed", "two ranks: exit code 0"),
        (1, [], "failed", "two ranks: exit code 1: it printed nothing"),
        (None, HELLO[:1], "failed", "two ranks: did not end in time"),
    ],
)
def test_two_ranks(
    monkeypatch: pytest.MonkeyPatch, code: int | None, said: list[dict[str, Any]], state: str, evidence: str
) -> None:
    output = "".join(f"[1,{each['rank']}]<stdout>: found {json.dumps(each)}\n" for each in said)
    monkeypatch.setattr(pytorch, "run_two_ranks", lambda _program, *, bound: (code, output))
    found = pytorch.check_ranks()
    assert (found.state, found.group) == (state, "mpi")
    assert found.evidence.startswith(evidence)


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "find_spec", lambda _name: None)
    for found in (pytorch.check_pytorch(), pytorch.check_ranks()):
        assert (found.state, found.judged("openvino").state, found.judged("torch").state) == (
            "failed",
            "unneeded",
            "failed",
        )
        assert "[cuda]" in found.fix
