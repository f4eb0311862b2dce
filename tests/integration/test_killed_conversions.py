"""A conversion that is killed at any moment and run again ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_models import write_tiny_model

KILLS = int(os.environ.get("TRTSERVE_KILLS", "4"))


def test_a_killed_conversion_can_be_repeated_and_leaves_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "hf", dtype="float16", vocab_size=2000)
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_conversion", str(model), str(tmp_path / "work"), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=120 + 10 * KILLS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    fresh, replacing = json.loads(result.stdout)
    assert replacing["renamed"] > fresh["renamed"]  # what lay there has to be moved aside
    for outcome in (fresh, replacing):
        assert outcome["killed"] >= KILLS
        assert outcome["writing"] >= 1  # how many depends on how processes take turns
