"""kill -9 of the Python stub of each model of a language model, with an engine of the runtime for CPUs."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.stages import build_engine, convert_model
from tests.support.supervised import measured, seconds_until, supervised
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.artifacts import Model
from trtserve.repository.assembling import plan_repository
from trtserve.repository.publishing import assemble_repository
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

pytestmark = pytest.mark.triton

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    model = write_tiny_model(root / "model")
    checkpoint = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=root / "checkpoint")
    engine = build_engine(checkpoint, BuildSpec(runtime="openvino", max_batch_size=8), out=root / "engine")
    spec = RepositorySpec(name="tiny", ngram_max_draft_len=0)
    return assemble_repository(plan_repository(engine, model, spec, out=root / "repository")).path


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
