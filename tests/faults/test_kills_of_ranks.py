"""kill -9 of the ranks of a real engine, of a rank's Python stub and of the real mpirun."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from tests.support.stages import tiny_repository
from tests.support.supervised import Supervised, measured, seconds_until, supervised
from tests.support.waiting import wait_until
from trtserve.server.rank_processes import with_members
from trtserve.specs import BuildSpec

pytestmark = [pytest.mark.triton, pytest.mark.needs("torch")]

VICTIMS = ("rank 0", "rank 1", "stub of rank 1", "mpirun")
# A rank notices within 5 s that another one has died; the rest is time for a machine that is busy.
NOTICED = 30.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in two shards on PyTorch, whose ranks talk through gloo."""
    build = BuildSpec(runtime="torch", device="cpu", max_batch_size=8, max_seq_len=128)
    return tiny_repository(tmp_path_factory.mktemp("ranks"), build, tp_size=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def generate(one: Supervised) -> int:
    return one.post("/v2/models/tensorrt_llm_bls/generate", {"text_input": "hello", "max_tokens": 16})


def process_of(one: Supervised, victim: str) -> int:
    (instance,) = with_members(one.record()).instances
    if victim == "mpirun":
        return instance.process.pid
    if victim == "stub of rank 1":
        (stub,) = psutil.Process(instance.ranks[1].pid).children()  # the other ranks load the core model alone
        return stub.pid
    return instance.ranks[int(victim.removeprefix("rank "))].pid


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "under load"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_is_started_again_with_all_others(
    victim: str, loaded: bool, repository: Path, home: Path
) -> None:
    with supervised(repository, home, "--restart", "on-failure", "--oversubscribe") as one:
        one.ready()
        wait_until(lambda: generate(one) == 200)
        with one.load(ask=lambda: generate(one)) if loaded else nullcontext():
            os.kill(process_of(one, victim), signal.SIGKILL)
            noticed = seconds_until(lambda: one.state() != "ready", NOTICED)
        settled = seconds_until(lambda: one.state() == "ready", 120)
        one.ready()
        assert [generate(one) for _ in range(10)] == [200] * 10
    measured("kill of a rank", victim=victim, loaded=loaded, noticed_s=noticed, settled_s=settled)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_stopped_rank_is_started_again_with_all_others(victim: str, repository: Path, home: Path) -> None:
    with supervised(repository, home, "--restart", "on-failure", "--oversubscribe", gateway=True) as one:
        one.ready()
        wait_until(lambda: generate(one) == 200)
        with one.load(ask=lambda: generate(one)):
            os.kill(process_of(one, victim), signal.SIGSTOP)
            noticed = seconds_until(lambda: one.state() != "ready", NOTICED)
        settled = seconds_until(lambda: one.record().restarts == 1 and one.state() == "ready", 120)
        one.ready()
        assert [generate(one) for _ in range(10)] == [200] * 10
    measured("stop of a rank", victim=victim, noticed_s=noticed, settled_s=settled)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_ends_the_server(victim: str, repository: Path, home: Path) -> None:
    with supervised(repository, home, "--oversubscribe") as one:
        one.ready()
        os.kill(process_of(one, victim), signal.SIGKILL)
        settled = seconds_until(lambda: one.record().state == "failed", NOTICED)
        failure = one.record().failure
        assert failure is not None
        # Which processes mpirun has ended already when the supervisor looks is chance.
        expected = "mpirun was killed" if victim == "mpirun" else f"{victim.removeprefix('stub of ').capitalize()} "
        assert expected in failure.message
    measured("kill of a rank", victim=victim, policy="never", settled_s=settled)
