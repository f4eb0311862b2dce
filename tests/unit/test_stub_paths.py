"""Folders from which Triton's Python backend starts no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.doctor.stub import check_store
from trtserve.errors import RepositoryError
from trtserve.store import Store
from trtserve.triton.stub_paths import is_fit, require_stub_path


@pytest.mark.parametrize("name", ["a b", "hö", "it's", "$HOME", "a;b", "(1)", "a&b", "a*"])
def test_what_bash_or_the_stub_does_not_take_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "repository"
    with pytest.raises(RepositoryError, match="starts no model from") as caught:
        require_stub_path(folder)
    assert "TRTSERVE_HOME" in str(caught.value.hint)
    finding = check_store(Store(tmp_path / name))
    assert finding.state == "failed"
    assert "TRTSERVE_HOME" in finding.fix


@pytest.mark.parametrize(
    "path", ["/home/me/.cache/trtserve/repositories/demo-58052adeecad", "/a+b/c,d/e:f@g=h%i_j-k.l"]
)
def test_usual_paths_are_fit(path: str) -> None:
    assert is_fit(Path(path))
    require_stub_path(Path(path))
