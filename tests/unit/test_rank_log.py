"""Lines of several ranks in one log, and the rank that mpirun names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtserve.process import ProcessId
from trtserve.server import rank_processes as ranks
from trtserve.server.rank_processes import sweep_session
from trtserve.server.triton import server_log
from trtserve.server.triton.tritonserver import start_error

# As mpirun of Open MPI 5.0 prints them; 4.1 has no blank after the tag.
LOG = """\
[1,0]<stderr>: I1120 12:00:00.000001 10 server.cc:1] "loading"
[1,1]<stderr>:terminate called after throwing an instance of 'std::bad_alloc'
[1,0]<stdout>: waiting
[1,2]<stderr>:
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 11 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
CODE_5 = "  Process name: [prterun-vm-4321@1,3]\n  Exit code:    7\n"
CODE_4 = "  Process name: [[40661,1],3]\n  Exit code:    7\n"
SIGNAL_4 = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 6 (Aborted).\n"


def test_lines_belong_to_their_rank() -> None:
    assert server_log.lines_of(LOG, 1) == ["terminate called after throwing an instance of 'std::bad_alloc'"]
    assert server_log.lines_of(LOG, 0)[1] == "waiting"
    assert server_log.rank_of("no tag") is None
    assert server_log.untagged("no tag") == "no tag"
    assert server_log.significant(LOG)[1].startswith("terminate")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LOG, "Rank 1 was killed (signal 9, which the kernel sends when memory runs out)"),
        (SIGNAL_4, "Rank 2 was ended by signal 6"),
        (CODE_5, "Rank 3 ended with code 7"),
        (CODE_4, "Rank 3 ended with code 7"),
    ],
)
def test_the_first_rank_to_end(text: str, sentence: str) -> None:
    ended = server_log.first_end(text)
    assert ended is not None
    assert ended.sentence == sentence


def test_a_log_without_a_reason_has_none() -> None:
    assert server_log.first_end("[1,0]<stdout>: all is well") is None
    assert not server_log.lacks_slots(LOG)


def test_the_rank_that_was_silent_the_longest() -> None:
    assert server_log.silent_longest(LOG, 3) == 1
    assert server_log.silent_longest(LOG, 4) == 3


def test_a_rank_without_process_is_the_missing_one() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    all_there = {0: me, 1: me, 2: me}
    assert ranks.kept_waiting({0: me, 2: me}, 3, LOG) == "Rank 1 keeps the others waiting:"
    assert ranks.kept_waiting(all_there, 3, LOG).startswith("Rank 1 has been silent for the longest time and probably")
    # The same last line of all ranks tells nothing.
    same = "".join(f'[1,{rank}]<stderr>:I1120 12:00:0{rank}.1 {rank} a.cc:1] "loaded"\n' for rank in (1, 0, 2))
    assert "the log does not show which" in ranks.kept_waiting(all_there, 3, same)
    lines = ranks.describe_ranks({0: me}, 2, LOG).splitlines()
    assert lines[0].endswith("last line: waiting")
    assert "% CPU" in lines[0]
    assert lines[1].startswith("  rank 1: no process; last line: terminate called")


def test_a_refusal_of_mpirun_has_its_hint(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("All nodes which are allocated for this job are already filled.\n")
    gone = ProcessId(pid=2**22 + 1, started=0.0)
    error = start_error(gone, log)
    assert "already filled" in error.message
    assert "--oversubscribe" in str(error.hint)


def test_only_the_folder_of_that_mpirun_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for name in ("ompi.77", "ompi.777", f"ompi.vm.{os.getuid()}/pid.77", f"ompi.vm.{os.getuid()}/pid.78"):
        (tmp_path / name).mkdir(parents=True)
    sweep_session(ProcessId(pid=77, started=0.0))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["ompi.777", f"ompi.vm.{os.getuid()}", f"ompi.vm.{os.getuid()}/pid.78"]
