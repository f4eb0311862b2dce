"""Which Python doctor asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtserve.server import doctor
from trtserve.server.triton import tritonserver


def test_the_first_python3_on_path_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho \'{"version": [3, 8], "prefix": "/elsewhere", "numpy": "2.0.0"}\'\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(tritonserver, "stub_environment", lambda: environment)
    wrong = {finding.name for finding in doctor.failed(doctor.quick_checks())}
    assert wrong == {"python3", "numpy"}
