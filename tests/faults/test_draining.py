"""`stop --drain`: running requests end, new ones are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.model_server import ModelServer, integers
from tests.support.release_client import NEWEST
from tests.support.stages import tiny_repository
from tests.support.supervised import supervised
from tests.support.waiting import wait_until
from trtserve.client.metrics import read_heartbeats
from trtserve.programs.shared.run_folder import DRAINING
from trtserve.server.shutdown import stop_server
from trtserve.server.state import run_folder
from trtserve.specs import BuildSpec

pytestmark = pytest.mark.triton

TOKENS = 300
# What the core model's program does besides: its steps take long as long as the file HOLD is there.
SLOW = """
import time
from pathlib import Path

from trtserve.executor.engine import step

HOLD, start = Path({hold!r}), step.Stepper.start


def held(self, plan, iteration):
    if HOLD.exists():
        time.sleep(0.2)
    return start(self, plan, iteration)


step.Stepper.start = held
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The models of a tiny engine that can be held up."""
    build = BuildSpec(max_batch_size=8, max_seq_len=TOKENS + 100, runtime="openvino")
    path = tiny_repository(tmp_path, build, ngram_max_draft_len=0)
    program = path / "tensorrt_llm" / "1" / "model.py"
    text = program.read_text() + SLOW.format(hold=str(tmp_path / "hold"))
    program.unlink()  # it may be linked from elsewhere
    program.write_text(text)
    return path


def test_running_requests_end_and_new_ones_are_refused(repository: Path, tmp_path: Path) -> None:
    with supervised(repository, tmp_path / "home", "--no-verify") as one:
        server = one.ready()
        folder = run_folder(server.name, one.store)
        body = {"text_input": "x", "max_tokens": 3}
        assert one.post("/v2/models/tiny/generate", body) == 200
        (folder / DRAINING).touch()
        assert {one.post(f"/v2/models/{model}/generate", body) for model in ("tiny", "ensemble")} <= {400, 500, 503}
        (folder / DRAINING).unlink()
        hold = tmp_path / "hold"
        hold.touch()

        def go_on() -> None:
            wait_until((folder / DRAINING).exists)
            assert one.post("/v2/models/tiny/generate", body) in (400, 500, 503)
            hold.unlink()

        with ModelServer(server.address).stream() as stream, ThreadPoolExecutor(1) as other:
            asked = {**NEWEST.text("Draining", TOKENS, streaming=False), "end_id": integers(-1)}
            stream.send("ensemble", asked, "running")
            wait_until(lambda: sum(each.open_requests for each in read_heartbeats(folder)) == 1)
            went_on = other.submit(go_on)
            stop_server(one.name, drain=600, store=one.store)
            went_on.result()
            assert stream.next()[0]["text_output"].size
        assert one.record().state == "stopped"
