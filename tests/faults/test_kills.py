"""kill -9 of each process of a server: the state is right, nothing is left, and where it may it serves again."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from tests.support.commands import trtserve
from tests.support.supervised import ALL, Supervised, measured, seconds_until, slow_model, supervised
from tests.support.waiting import wait_until
from trtserve.server.doctor.stub import write_probe_repository

pytestmark = pytest.mark.triton

PROCESSES = ("tritonserver", "probe", "gateway", "supervisor")
MOMENTS = ("start", "idle", "load")
POLICIES = ("never", "on-failure")
CASES = [(process, moment, policy) for process in PROCESSES for moment in MOMENTS for policy in POLICIES]
SELECTED = [
    ("probe", "idle", "never"),
    ("supervisor", "load", "never"),
    ("gateway", "idle", "on-failure"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all servers, because the first start in a store tests Triton."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_probe_repository(tmp_path / "probe")


@pytest.mark.parametrize(("process", "moment", "policy"), CASES if ALL else SELECTED)
def test_a_killed_process(process: str, moment: str, policy: str, repository: Path, home: Path) -> None:
    if moment == "start":
        slow_model(repository, 3.0)
    with supervised(repository, home, "--restart", policy, gateway=ALL or process == "gateway") as one:
        if moment != "start":
            one.ready()
        with one.load() if moment == "load" else nullcontext():
            if moment == "load":
                wait_until(lambda: one.ask() == 200)
            os.kill(one.victim(process), signal.SIGKILL)
            noticed = seconds_until(lambda: one.state() != "ready" or one.record().restarts)
        if process == "supervisor" or policy == "never":
            settled = seconds_until(lambda: process == "supervisor" or one.record().state == "failed")
            expect_an_explanation(one, process)
        else:
            settled = seconds_until(lambda: one.record().restarts and one.state() == "ready", 120)
            one.ready()
            assert [one.ask() for _ in range(20)] == [200] * 20
            failure = one.record().failure
            assert moment == "start" or failure is not None
    measured("kill", process=process, moment=moment, policy=policy, noticed_s=noticed, settled_s=settled)


def expect_an_explanation(one: Supervised, process: str) -> None:
    """The state file has the exit code, what ended, and the last lines, or Triton's words if it noticed first."""
    if process == "supervisor":
        wait_until(lambda: not one.record().instances[0].process.alive())
        return
    server = one.record()
    assert server.failure is not None
    if process == "tritonserver":
        assert server.failure.exit_code == -signal.SIGKILL
    assert any(words in server.failure.message for words in ("Last lines:", "'probe_0_0' is not healthy."))
    assert {"tritonserver": "signal 9", "probe": "probe", "gateway": "gateway"}[process] in server.failure.message
    if process == "probe" and one.seen:  # as the kernel ends it when memory runs out
        told = trtserve("status", one.name, home=one.store.root, check=False).stderr
        assert "1 of 1 Python stubs have ended (probe)" in told
        assert "by the kernel for want of memory (`dmesg`), or by someone" in told


def test_a_killed_launcher_does_not_stop_the_server(repository: Path, home: Path) -> None:
    slow_model(repository, 1.0)
    with supervised(repository, home) as one:
        one.victim("probe")
        one.launcher.kill()
        one.launcher.wait()
        wait_until(lambda: one.state() == "ready")
        one.seen.append(one.record())
        assert one.ask() == 200


def test_restarts_end_at_their_limit(repository: Path, home: Path) -> None:
    """The first kill is during the start, where Triton's processes may be half there."""
    slow_model(repository, 3.0)
    with supervised(repository, home, "--restart", "on-failure", "--restart-limit", "1") as one:
        for count in (1, 2):
            os.kill(one.victim("tritonserver"), signal.SIGKILL)
            if count == 1:
                wait_until(lambda: one.record().restarts == 1 and one.state() == "ready")
                one.ready()
                assert [one.ask() for _ in range(20)] == [200] * 20
        wait_until(lambda: one.state() == "failed")
        assert one.record().restarts == 1


def test_a_random_kill_or_stop_leaves_nothing(repository: Path, home: Path) -> None:
    """One cycle; `make cycles` has hundreds."""
    generator = random.Random(int(os.environ.get("TRTSERVE_SEED", "0")))
    slow_model(repository, 0.5)
    process = generator.choice((*PROCESSES, "launcher", "slow"))
    policy = generator.choice(POLICIES)
    number = generator.choice((signal.SIGKILL, signal.SIGSTOP))
    with supervised(repository, home, "--restart", policy, gateway=ALL or process == "gateway") as one:
        one.record()  # a launcher that is killed earlier has started nothing
        victim = one.victim(process)
        time.sleep(generator.uniform(0, 3))
        with suppress(ProcessLookupError):
            os.kill(victim, number)
        time.sleep(generator.uniform(0, 5 if number == signal.SIGSTOP else 1))
        if process in ("launcher", "supervisor"):  # the others are ended by those that watch them
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
