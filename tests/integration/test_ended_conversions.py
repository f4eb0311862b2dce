"""Conversions that signals end: they clean up, however often the signal comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model

# Reads are slow, so that the signal comes while threads read and write.
SLOW = """
import os, sys, time
read = os.preadv
def slow(*arguments):
    time.sleep(0.05)
    return read(*arguments)
os.preadv = slow
from trtserve.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("signals", "codes"),
    [
        ([signal.SIGINT, signal.SIGINT, signal.SIGINT], {130}),
        ([signal.SIGTERM], {143}),
        ([signal.SIGHUP, signal.SIGTERM], {129, 143}),  # two that are pending have no order
    ],
)
def test_an_ended_conversion_leaves_nothing(tmp_path: Path, signals: list[signal.Signals], codes: set[int]) -> None:
    model, place = write_tiny_model(tmp_path / "model"), tmp_path / "place"
    arguments = ["convert", str(model), "--out", str(place / "made"), "--tp-size", "2", "--quiet"]
    conversion = subprocess.Popen([sys.executable, "-c", SLOW, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (place / ".made.partial" / "rank1.safetensors").exists():
            assert conversion.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for number in signals:
            conversion.send_signal(number)
        _, errors = conversion.communicate(timeout=60)
    finally:
        conversion.kill()
        conversion.wait()
    assert conversion.returncode in codes
    assert errors == ""
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_closed_stream_is_not_written_to(tmp_path: Path, stream: str) -> None:
    model, made = write_tiny_model(tmp_path / "model"), tmp_path / "made"
    command = [sys.executable, "-m", "trtserve", "convert", str(model), "--out", str(made)]
    result = subprocess.run(["sh", "-c", f'exec "$@" {stream}>&-', "sh", *command], timeout=60, check=False)
    assert result.returncode == 0
    assert (made / "manifest.json").is_file()
