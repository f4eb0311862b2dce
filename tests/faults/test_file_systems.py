"""Full and read-only file systems, and no shared memory, each in a mount namespace of its own.

Not every machine lets its users mount.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.errors import DiskSpaceError, UsageError
from trtserve.server.doctor.stub import write_probe_repository

pytestmark = pytest.mark.triton

# Commands refuse a disk with too little space before they begin; here it is full when they have begun.
WITHOUT_CHECK = textwrap.dedent("""
    import shutil
    free = shutil.disk_usage
    shutil.disk_usage = lambda path: free(path)._replace(free=2**40)
    from trtserve.__main__ import main
    main()
""")


def mounted(script: str, tmp_path: Path, **variables: str) -> None:
    """Run a script that may mount; $HOME_OF_STORE is an empty folder, $RESULTS keeps what it writes."""
    home, results = tmp_path / "home", tmp_path / "results"
    home.mkdir()
    results.mkdir()
    functions = 'trtserve() { "$PYTHON" -m trtserve "$@"; }\n'
    given = {"TRTSERVE_HOME": str(home), "PYTHON": sys.executable, "RESULTS": str(results), **variables}
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-euc", functions + script],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def result(tmp_path: Path, name: str) -> str:
    return (tmp_path / "results" / name).read_text()


@pytest.fixture
def probe(tmp_path: Path) -> str:
    return str(write_probe_repository(tmp_path / "probe"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 16 MB, whose checkpoint and engine have 8 MB each."""
    folder = tmp_path_factory.mktemp("model")
    return str(write_tiny_model(folder, hidden_size=256, intermediate_size=1024, num_hidden_layers=4))


def test_the_disk_becomes_full_under_a_server(probe: str, tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=8m tmpfs "$TRTSERVE_HOME"
        trtserve start --model-repository "$REPOSITORY" --detach --auto-ports --raw-http --quiet
        dd if=/dev/zero of="$TRTSERVE_HOME/full" bs=64k 2> /dev/null || true
        sleep 5
        trtserve status --json > "$RESULTS/status"
        trtserve stop --quiet > "$RESULTS/stop"
    """
    mounted(script, tmp_path, REPOSITORY=probe)
    (status,) = json.loads(result(tmp_path, "status"))["result"]
    assert (status["state"], result(tmp_path, "stop")) == ("ready", "probe\n")


@pytest.mark.parametrize(
    ("free", "stage"), [(20, "models"), (3_000, "checkpoints"), (9_000, "engines"), (15_000, "engines")]
)
def test_the_disk_becomes_full_under_an_import(free: int, stage: str, model: str, tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=60m tmpfs "$TRTSERVE_HOME"
        room=$(df -k --output=avail "$TRTSERVE_HOME" | tail -1)
        dd if=/dev/zero of="$TRTSERVE_HOME/full" bs=1k count=$((room - FREE)) 2> /dev/null
        "$PYTHON" -c "$WITHOUT_CHECK" import "$MODEL" --name one 2> "$RESULTS/errors" || echo $? > "$RESULTS/code"
        find "$TRTSERVE_HOME" -mindepth 2 -maxdepth 2 ! -name '*.lock' ! -path '*/locks/*' > "$RESULTS/left"
        rm "$TRTSERVE_HOME/full"
        "$PYTHON" -c "$WITHOUT_CHECK" import "$MODEL" --name one --json > "$RESULTS/again"
    """
    mounted(script, tmp_path, MODEL=model, FREE=str(free), WITHOUT_CHECK=WITHOUT_CHECK)
    errors = result(tmp_path, "errors")
    assert result(tmp_path, "code") == "13\n", errors
    assert f"/{stage}" in errors
    assert "the disk is full" in errors
    # What was finished before is kept, and nothing half-written.
    finished = ["models", "checkpoints", "engines"]
    kept = sorted(Path(line).parent.name for line in result(tmp_path, "left").splitlines())
    assert kept == sorted(finished[: finished.index(stage)])
    assert json.loads(result(tmp_path, "again"))["result"]


def test_the_disk_is_full_before_a_start(probe: str, tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=8m tmpfs "$TRTSERVE_HOME"
        dd if=/dev/zero of="$TRTSERVE_HOME/full" bs=1k 2> /dev/null || true
        start="trtserve start --model-repository $REPOSITORY --detach --auto-ports --raw-http --quiet"
        $start 2> "$RESULTS/errors" || echo $? > "$RESULTS/code"
        find "$TRTSERVE_HOME" -name '.*' > "$RESULTS/left"
        rm "$TRTSERVE_HOME/full"
        $start
        trtserve stop --quiet
    """
    mounted(script, tmp_path, REPOSITORY=probe)
    assert result(tmp_path, "code") == "13\n"
    assert "cannot be written: the disk is full" in result(tmp_path, "errors")
    assert result(tmp_path, "left") == ""


def test_messages_that_a_full_disk_does_not_take_end_no_command(tmp_path: Path) -> None:
    """Neither its work nor its code depends on where its messages go; what it prints as data must arrive."""
    trtserve = [sys.executable, "-m", "trtserve"]
    with Path("/dev/full").open("w") as full:
        made = subprocess.run([*trtserve, "init", str(tmp_path / "a.yaml")], stderr=full, check=False)
        assert (made.returncode, (tmp_path / "a.yaml").exists()) == (0, True)
        assert subprocess.run([*trtserve, "nosuch"], stderr=full, check=False).returncode == UsageError.code
        lost = subprocess.run([*trtserve, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (lost.returncode, lost.stderr.splitlines()[0]) == (
        DiskSpaceError.code,
        "error: The output cannot be read or written: the disk is full.",
    )


def test_a_read_only_store(model: str, tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=500m tmpfs "$TRTSERVE_HOME"
        trtserve import "$MODEL" --name one --quiet
        mount -o remount,ro "$TRTSERVE_HOME"
        trtserve list --json > "$RESULTS/list"
        for command in "start one --detach --auto-ports" "import $MODEL --name two" "convert $MODEL" "remove one"; do
            trtserve $command 2>> "$RESULTS/errors" || echo $? >> "$RESULTS/codes"
        done
    """
    mounted(script, tmp_path, MODEL=model)
    assert [each["name"] for each in json.loads(result(tmp_path, "list"))["result"]] == ["one"]
    assert result(tmp_path, "codes").split() == ["23"] * 4
    assert result(tmp_path, "errors").count("Read-only file system") == 4


def test_no_shared_memory_left(model: str, tmp_path: Path) -> None:
    """Too little at the start is refused; memory that other programs take afterwards is not missed."""
    script = """
        trtserve import "$MODEL" --name one --quiet
        mount -t tmpfs -o size=20m tmpfs /dev/shm
        trtserve start one --detach --auto-ports 2> "$RESULTS/errors" || echo $? > "$RESULTS/code"
        mount -o remount,size=40m /dev/shm
        trtserve start one --detach --auto-ports --quiet
        dd if=/dev/zero of=/dev/shm/full bs=1k 2> /dev/null || true
        for text in one two three; do trtserve query "$text" --max-tokens 8 > /dev/null; done
        trtserve stop one --quiet
        rm /dev/shm/full
        ls /dev/shm > "$RESULTS/left"
    """
    mounted(script, tmp_path, MODEL=model)
    assert (result(tmp_path, "code"), result(tmp_path, "left")) == ("30\n", "")
    assert "20 MiB free in /dev/shm; 32 MiB needed" in result(tmp_path, "errors")
