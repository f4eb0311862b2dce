"""kill -9 of the Python stub of each model of a language model, with an engine of the runtime for CPUs."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.stages import tiny_repository
from tests.support.supervised import measured, seconds_until, supervised
from tests.support.waiting import wait_until
from trtserve.specs import BuildSpec

pytestmark = pytest.mark.triton

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = BuildSpec(runtime="openvino", max_batch_size=8)
    return tiny_repository(tmp_path_factory.mktemp("engine"), build, ngram_max_draft_len=0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("moment", ["start", "idle", "load"])
@pytest.mark.parametrize("model", MODELS)
def test_a_killed_stub_is_started_again(model: str, moment: str, repository: Path, home: Path) -> None:
    with supervised(repository, home, "--restart", "on-failure") as one:

        def generate(name: str = "tensorrt_llm_bls") -> int:
            return one.post(f"/v2/models/{name}/generate", {"text_input": "hello", "max_tokens": 16})

        if moment != "start":
            one.ready()
        with one.load(ask=generate) if moment == "load" else nullcontext():
            if moment == "load":
                wait_until(lambda: generate() == 200)
            os.kill(one.victim(model), signal.SIGKILL)
            seconds_until(lambda: one.state() != "ready" or one.record().restarts)
        settled = seconds_until(lambda: one.state() == "ready", 120)
        one.ready()
        assert [generate(name) for name in ("ensemble", "tensorrt_llm_bls") * 5] == [200] * 10
    measured("kill of a stub", model=model, moment=moment, settled_s=settled)


@pytest.mark.parametrize("model", MODELS)
def test_a_killed_stub_ends_the_server(model: str, repository: Path, home: Path) -> None:
    with supervised(repository, home) as one:
        one.ready()
        os.kill(one.victim(model), signal.SIGKILL)
        settled = seconds_until(lambda: one.record().state == "failed")
        failure = one.record().failure
        assert failure is not None
        assert model in failure.message
    measured("kill of a stub", model=model, moment="idle", policy="never", settled_s=settled)
