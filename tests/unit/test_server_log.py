"""Reading Triton's log: why models did not load, and its last lines."""

from __future__ import annotations

from pathlib import Path

from trtserve.server.triton import server_log

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


def test_failed_model_with_its_lines() -> None:
    (failure,) = server_log.failures(LOG)
    assert failure.model == "bad"
    assert failure.message == 'ValueError: "x" is odd'


def test_broken_configuration_carries_the_parser_message() -> None:
    (failure,) = server_log.failures(POLL)
    assert failure.model == "ident"
    assert "6:27: Expected integer, got: $" in failure.message


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
