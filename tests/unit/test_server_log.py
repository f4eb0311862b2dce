"""Reading Triton's log: why models did not load, its last lines, lines of several ranks, and whom mpirun names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtserve.process import ProcessId
from trtserve.server import rank_processes as ranks
from trtserve.server.rank_processes import sweep_session
from trtserve.server.triton import server_log
from trtserve.server.triton.tritonserver import start_error

LOG = r"""
W1120 12:14:51.292258 7022 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory pool will not be available: CUDA driver version is insufficient for CUDA runtime version"
E1120 12:14:51.292462 7022 server.cc:241] "CudaDriverHelper has not been initialized."
I1120 12:14:51.293426 7022 model_lifecycle.cc:472] "loading: bad:1"
I1120 12:14:51.293460 7022 model_lifecycle.cc:472] "loading: ident:1"
I1120 12:14:51.368941 7022 model_lifecycle.cc:839] "successfully loaded 'ident'"
E1120 12:14:51.634461 7022 model_lifecycle.cc:642] "failed to load 'bad' version 1: Internal: ValueError: \"x\" is odd\n\nAt:\n  /r/bad/1/model.py(3): initialize\n"
E1120 12:14:51.699583 7022 ensemble_scheduler.cc:1468] "unable to create stream for ensemble: CUDA driver version is insufficient for CUDA runtime version"
+-------+---------+
| Model | Version |
+-------+---------+
Error: Failed to initialize NVML
error: creating server: Internal - failed to load all models
"""  # noqa: E501 - as Triton writes it
POLL = """
[libprotobuf ERROR /x/text_format.cc:337] Error parsing text-format inference.ModelConfig: 6:27: Expected integer, got: $
E1120 12:14:55.994432 7101 model_repository_manager.cc:1460] "Poll failed for model directory 'ident': failed to read text proto from /r/ident/config.pbtxt"
"""  # noqa: E501 - as Triton writes it
SOCKET = """
E1120 12:17:16.145471 9428 main.cc:245] "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use "
"""  # noqa: E501 - as Triton writes it
# As vLLM 0.32 and Triton write them; the worker knows the cause.
VLLM = """
(Worker pid=12) ERROR 11-30 10:19:35 [multiproc_executor.py:873] WorkerProc failed to start.
(Worker pid=12) ERROR 11-30 10:19:35 [multiproc_executor.py:873]     raise OutOfMemoryError(
(Worker pid=12) ERROR 11-30 10:19:35 [multiproc_executor.py:873] torch.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=11) ERROR 11-30 10:19:35 [core.py:1510] Exception: WorkerProc initialization failed.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
E1130 10:19:46.337897 164 model_lifecycle.cc:642] "failed to load 'tensorrt_llm' version 1: Internal: TritonModelException: vLLM does not start: RuntimeError: Engine core initialization failed"
"""  # noqa: E501 - as Triton writes it
# As mpirun of Open MPI 5.0 prints them; 4.1 has no blank after the tag.
RANKS = """\
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


def test_failed_model_with_its_lines() -> None:
    (failure,) = server_log.failures(LOG)
    assert failure.model == "bad"
    assert failure.message == 'ValueError: "x" is odd'


def test_broken_configuration_carries_the_parser_message() -> None:
    (failure,) = server_log.failures(POLL)
    assert failure.model == "ident"
    assert "6:27: Expected integer, got: $" in failure.message


def test_a_vllm_that_does_not_start_carries_the_first_error_of_its_processes() -> None:
    (failure,) = server_log.failures(VLLM)
    assert failure.message.endswith("Engine core initialization failed (torch.OutOfMemoryError: CUDA out of memory.)")


def test_port_in_use() -> None:
    assert "127.0.0.1:18101' already in use" in str(server_log.failures(SOCKET)[0])


def test_refused_flag_is_found_before_the_usage_text() -> None:
    text = "/opt/bin/tritonserver: unrecognized option '--nope=1'\nUsage: tritonserver [options]\n  --help\n"
    assert [str(failure) for failure in server_log.failures(text)] == ["unrecognized option '--nope=1'"]


def test_other_error_lines_without_noise() -> None:
    text = LOG.replace("failed to load '", "something else '")
    assert [failure.message.split(":")[0] for failure in server_log.failures(text)] == [
        "something else 'bad' version 1",
        "error",
    ]


def test_noise_and_tables_are_not_reasons() -> None:
    lines = server_log.significant(LOG)
    assert not any("CUDA" in line or "NVML" in line or line.startswith(("+", "|")) for line in lines)


def test_a_crash_in_native_code_is_named_without_the_stacks_of_all_threads() -> None:
    text = """
Fatal Python error: Segmentation fault

Thread 0x00007fe9e8fff000 (most recent call first):
  File "/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007fea36d3b000 (most recent call first):
  <no Python frame>

Extension modules: numpy.core._multiarray_umath, psutil._psutil_linux (total: 2)
"""
    assert server_log.significant(text) == ["Fatal Python error: Segmentation fault"]


def test_models_that_are_still_loading() -> None:
    assert server_log.still_loading(LOG) == ["bad"]


def test_stub_without_program_is_fatal() -> None:
    line = "I1120 12:17:17.1 95 pb_stub.cc:1]  Failed to preinitialize Python stub: Python model file not found in 'x'"
    assert str(server_log.fatal(line)) == "Python model file not found in 'x'"
    assert server_log.fatal(LOG) is None


def test_follow_reads_additions_and_starts_over_with_a_new_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    contents = ["one\ntwo\n", "new\n"]

    def pause() -> None:
        log.write_text(contents.pop(0))

    assert list(server_log.follow(log, position=4, ended=lambda: not contents, pause=pause)) == ["two\n", "new\n"]


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert server_log.tail(log, 3) == []
    log.write_text("a\nb\nc\n")
    assert server_log.tail(log, 2) == ["b", "c"]
    assert server_log.tail(log, 0) == []


def test_captured_decode_steps() -> None:
    lines = ("[1,1]<stderr>: Captured the decode step of 8 rows, 1 of 3", "Captured the decode step of 4 rows, 2 of 3")
    assert server_log.captured("\n".join(lines)) == "2 of 3"
    assert server_log.captured(LOG) == ""


def test_lines_belong_to_their_rank() -> None:
    assert server_log.lines_of(RANKS, 1) == ["terminate called after throwing an instance of 'std::bad_alloc'"]
    assert server_log.lines_of(RANKS, 0)[1] == "waiting"
    assert server_log.rank_of("no tag") is None
    assert server_log.untagged("no tag") == "no tag"
    assert server_log.significant(RANKS)[1].startswith("terminate")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (RANKS, "Rank 1 was killed (signal 9, by the kernel for want of memory or by someone)"),
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
    assert not server_log.lacks_slots(RANKS)


def test_the_rank_that_was_silent_the_longest() -> None:
    assert server_log.silent_longest(RANKS, 3) == 1
    assert server_log.silent_longest(RANKS, 4) == 3


def test_a_rank_without_process_is_the_missing_one() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    all_there = {0: me, 1: me, 2: me}
    assert ranks.kept_waiting({0: me, 2: me}, 3, RANKS) == "Rank 1 keeps the others waiting:"
    assert ranks.kept_waiting(all_there, 3, RANKS).startswith(
        "Rank 1 has been silent for the longest time and probably"
    )
    # The same last line of all ranks tells nothing.
    same = "".join(f'[1,{rank}]<stderr>:I1120 12:00:0{rank}.1 {rank} a.cc:1] "loaded"\n' for rank in (1, 0, 2))
    assert "the log does not show which" in ranks.kept_waiting(all_there, 3, same)
    lines = ranks.describe_ranks({0: me}, 2, RANKS).splitlines()
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


def test_a_summary_has_what_a_person_reads() -> None:
    assert [server_log.summary(line) for line in server_log.significant(LOG)[:3]] == [
        "12:14:51  loading: bad:1",
        "12:14:51  loading: ident:1",
        "12:14:51  successfully loaded 'ident'",
    ]
    error = 'E1120 12:14:51.292462 7022 server.cc:241] "It is \\"odd\\"."'
    assert server_log.summary(f"[1,3]<stderr>: {error}") == '12:14:51  rank 3: error: It is "odd".'
    assert server_log.significant("I1120 12:14:51.292462 7022 server.cc:604] \n+---+\n| a |") == []
