"""How a load ends: by itself, by the user, by its time limit; each window for itself."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from trtserve.bench import load
from trtserve.bench.traffic import TrafficRequest
from trtserve.triton.client import Endpoint, ModelDescription

MODEL = ModelDescription(name="m", decoupled=False, max_batch_size=1, inputs={}, outputs={})


def test_an_interrupt_after_a_warm_up_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    stop = asyncio.Event()

    async def answer(sender: object, record: load.Record, message: Any) -> None:
        sent.append(record.index)
        if len(sent) == 1:
            return  # one answer of the warm-up; the next one never comes
        if len(sent) == 3:  # the window
            asyncio.get_running_loop().call_later(0.05, stop.set)
        await asyncio.sleep(60)

    monkeypatch.setattr(load, "request_message", lambda *_, **__: None)
    monkeypatch.setattr(load._Sender, "_unary", answer)
    requests = [TrafficRequest(token_ids=np.arange(3, dtype=np.int32), output_len=1)] * 2
    wanted = load.Load(
        endpoint=Endpoint(),
        model=MODEL,
        requests=requests,
        warmup=requests,
        concurrency=1,
        timeout=0.5,
        may_be_empty=True,
    )
    outcome = asyncio.run(load._Sender(wanted, lambda: None)._run_windows(stop))
    assert (outcome.interrupted, outcome.timed_out) == (True, False)
    assert (outcome.records[0].status, outcome.records[0].error) == ("cancelled", "interrupted")
