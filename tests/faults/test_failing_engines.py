"""An engine that turns bad while it serves, as one does whose GPU has failed: nobody is told that it was the client."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.servers import HOST
from tests.support.stages import tiny_repository
from tests.support.supervised import ALL, Supervised, alive, measured, seconds_until, supervised
from tests.support.waiting import wait_until
from trtserve.specs import BuildSpec

pytestmark = pytest.mark.triton

# What the core model's program does besides: once the file ORDER is there, steps fail as it says, until a new start.
# The first one takes a second, so that other requests wait for it.
FAULTS = """
import time
from pathlib import Path

from trtserve.executor.engine import step
from trtserve.executor.engine.model import FatalModelError

ORDER = Path({order!r})
start, faults = step.Stepper.start, []
step._LONGEST_WAIT = 1.0


def failing(self, plan, iteration):
    if ORDER.exists():
        faults.append(ORDER.read_text())
        ORDER.unlink()
        time.sleep(1.0)
    if faults == ["lost"]:
        raise FatalModelError("AcceleratorError: CUDA error: an illegal memory access was encountered")
    if faults == ["errors"]:
        raise RuntimeError("CUDA error: something that nobody knows")
    if faults == ["hangs"]:
        self._awaited_since = time.monotonic()
        time.sleep(10_000)
    if faults == ["waits"]:  # for something that is not the GPU
        time.sleep(10_000)
    return start(self, plan, iteration)


step.Stepper.start = failing
"""
# The state file and the health page tell within 5 s; the rest is time for a machine that is busy.
NOTICED = 30.0
PROMPT = {"prompt": "hello", "max_tokens": 16, "temperature": 0}
GENERATED = {"text_input": "hello", "max_tokens": 16}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("order") / "fault"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, order: Path) -> Path:
    build = BuildSpec(runtime="openvino", max_batch_size=8)
    path = tiny_repository(tmp_path_factory.mktemp("engine"), build, ngram_max_draft_len=0)
    program = path / "tensorrt_llm" / "1" / "model.py"
    text = program.read_text() + FAULTS.format(order=str(order))
    program.unlink()  # it may be linked from elsewhere
    program.write_text(text)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="function" if ALL else "module")
def one(repository: Path, home: Path) -> Iterator[Supervised]:
    """A server that is started again; `make faults` measures each fault on one of its own."""
    with supervised(repository, home, "--restart", "on-failure", "--no-verify", gateway=True) as one:
        one.ready()
        yield one


def answer(one: Supervised, path: str, body: object = None, seconds: float = 30) -> tuple[int, str]:
    """Ask the gateway and return the status and the body of its answer; 0 without an answer."""
    connection = http.client.HTTPConnection(HOST, one.record().endpoint.http_port, timeout=seconds)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def completion(one: Supervised) -> tuple[int, str]:
    """Return the status and the text, or the error, of OpenAI's API."""
    status, body = answer(one, "/v1/completions", {"model": "tiny", **PROMPT})
    return status, json.loads(body)["choices"][0]["text"] if status == 200 else body


def healthy(one: Supervised, seconds: float = 30) -> bool:
    return answer(one, "/health", seconds=seconds)[0] == 200


@pytest.mark.parametrize("fault", ["lost", "errors", "hangs", "waits"] if ALL else ["lost"])
def test_a_server_whose_engine_fails_is_started_again(fault: str, order: Path, one: Supervised) -> None:
    before = one.record()
    status, text = completion(one)
    assert (status, healthy(one)) == (200, True), text
    order.write_text(fault)
    asked: list[Callable[[], tuple[int, str]]] = [
        partial(completion, one),
        partial(answer, one, "/v2/models/ensemble/generate", GENERATED),
        partial(answer, one, "/v2/models/tensorrt_llm_bls/generate", GENERATED),
    ]
    if fault == "errors":
        # Nobody knows yet that it is no single step that fails; not even then is it the client's fault.
        assert [completion(one)[0] for _ in range(2)] == [500, 500]
        asked = asked[:1]
    with ThreadPoolExecutor(len(asked)) as threads:
        calls = [threads.submit(each) for each in asked]
        unhealthy = seconds_until(lambda: not healthy(one), NOTICED)
        answers = [call.result() for call in calls]
    assert [status for status, _ in answers] == [503] * len(asked), answers
    told = "no step" if fault == "waits" else "stopped working"
    assert all(told in body for _, body in answers), answers
    settled = seconds_until(lambda: one.record().restarts == before.restarts + 1 and one.state() == "ready", 120)
    one.ready()
    wait_until(lambda: healthy(one))
    assert completion(one) == (200, text)
    measured("failing engine", how=fault, unhealthy_s=unhealthy, settled_s=settled)


STOPPED = ("gateway", "preprocessing", "tensorrt_llm", "tritonserver", "postprocessing", "tensorrt_llm_bls")


@pytest.mark.parametrize("process", STOPPED if ALL else STOPPED[:2])
def test_a_stopped_process_is_ended_and_the_server_started_again(process: str, one: Supervised) -> None:
    before = one.record()
    text = completion(one)
    assert text[0] == 200
    os.kill(one.victim(process), signal.SIGSTOP)
    unhealthy = seconds_until(lambda: not healthy(one, 2), NOTICED)
    if process in ("preprocessing", "tensorrt_llm"):
        status, body = answer(one, "/v2/models/ensemble/generate", GENERATED)
        assert status in (0, 503), body
    settled = seconds_until(lambda: one.record().restarts == before.restarts + 1 and one.state() == "ready", 120)
    one.ready()
    wait_until(lambda: healthy(one))
    assert completion(one) == text
    failure = one.record().failure
    assert failure is not None
    assert failure != before.failure
    assert "stopped by a signal" in failure.message or "is not healthy" in failure.message
    measured("stopped process", process=process, unhealthy_s=unhealthy, settled_s=settled)


if ALL:  # make faults

    @pytest.mark.parametrize("parent", [False, True], ids=["who encodes", "who starts it"])
    def test_a_stopped_helper_is_replaced(parent: bool, repository: Path, home: Path) -> None:
        """What the gateway has started to encode texts: it is killed, and the next text starts another."""
        with supervised(repository, home, "--restart", "on-failure", "--no-verify", gateway=True) as one:
            one.ready()
            text = completion(one)
            assert text[0] == 200
            helpers = psutil.Process(one.victim("gateway")).children(recursive=True)
            encoders = [each for each in helpers if any("encoding" in word for word in each.cmdline())]
            starters = [each for each in encoders if each.children()]
            stopped = starters if parent else [each for each in encoders if not each.children()]
            assert stopped
            for each in stopped:
                each.suspend()
            gone = seconds_until(lambda: not any(alive(each.pid) for each in stopped), NOTICED)
            assert healthy(one)
            wait_until(lambda: completion(one) == text)
            assert one.record().restarts == 0
        measured("stopped helper", starts=parent, gone_s=gone)

    def test_a_server_whose_engine_fails_ends(order: Path, repository: Path, home: Path) -> None:
        with supervised(repository, home, "--no-verify", gateway=True) as one:
            one.ready()
            order.write_text("lost")
            assert completion(one)[0] == 503
            settled = seconds_until(lambda: one.record().state == "failed", NOTICED)
            failure = one.record().failure
            assert failure is not None
            assert "stopped working: AcceleratorError: CUDA error: an illegal memory access" in failure.message
        measured("failing engine", how="lost", policy="never", settled_s=settled)
