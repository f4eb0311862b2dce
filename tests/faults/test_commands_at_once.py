"""Commands that work on one store at once: one does the work, the others wait, reuse it, or say what is gone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.supervised import measured
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import KINDS, Checksums, damages, load_artifact
from trtserve.errors import LockedError, ModelNotFoundError
from trtserve.store import Store

ROUNDS = int(os.environ.get("TRTSERVE_ROUNDS", "1"))
NAME = "tiny"
# What `remove` has taken away cannot be found; nothing else may go wrong.
ALLOWED = {0, ModelNotFoundError.code, LockedError.code}


def commands(model: Path) -> list[list[str]]:
    """Every command that changes a store, for one name."""
    import_ = ["import", f"local:{model}", "--name", NAME, "--runtime", "openvino", "--max-batch-size", "2", "--quiet"]
    return [
        import_,
        ["convert", str(model), "--name", NAME, "--quiet"],
        ["build", NAME, "--runtime", "openvino", "--max-batch-size", "2", "--quiet"],
        ["repo", NAME, "--tokenizer", str(model), "--quiet"],
        ["remove", NAME],
    ]


def run_at_once(lines: Sequence[Sequence[str]], home: Path) -> list[tuple[Sequence[str], int, str]]:
    """Run commands at the same time; return each with its exit code and what it wrote to stderr."""
    environment = {**os.environ, "TRTSERVE_HOME": str(home)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "trtserve", *line],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in lines
    ]
    errors = [each.communicate(timeout=300)[1] for each in running]
    return [(line, each.returncode, text) for line, each, text in zip(lines, running, errors, strict=True)]


def require_sound(store: Store) -> int:
    """Every artefact is complete and undamaged, and nothing half-made is left; return how many there are."""
    count = 0
    for kind in KINDS:
        folder = store.folder(kind)
        for path in folder.iterdir() if folder.exists() else ():
            assert not path.name.startswith("."), f"{path} was left behind"
            assert not damages(load_artifact(kind, path), Checksums())
            count += 1
    for record in store.recorded():
        for place in (record.checkpoint, record.engine, record.repository):
            assert Path(place).is_dir(), f"the record of {record.name} names {place}, which is gone"
    return count


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_commands_on_one_store(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One round: two imports and three more commands, on what earlier rounds have left."""
    root = tmp_path_factory.getbasetemp() / "at-once"
    home, model = root / "home", root / "model"
    if not model.exists():
        write_tiny_model(model)
    choice, begin = random.Random(seed), time.monotonic()
    made = commands(model)
    lines = [made[0], made[0], *choice.choices(made, k=3)]
    choice.shuffle(lines)
    done = run_at_once(lines, home)
    for line, code, text in done:
        assert code in ALLOWED, (line, code, text)
        assert "Traceback" not in text, (line, text)
    found = require_sound(Store(home))
    codes = Counter(f"{line[0]} {code}" for line, code, _ in done)
    measured("commands at once", seed=seed, seconds=time.monotonic() - begin, artefacts=found, codes=codes)
