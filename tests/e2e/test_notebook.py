"""The notebook of the examples, executed from its first cell to its last."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trtserve.server.state import list_servers
from trtserve.store import Store

pytestmark = [pytest.mark.triton, pytest.mark.needs("notebook")]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
TIMEOUT = 600
"""Seconds that one cell may take."""


def test_the_notebook_runs_and_ends_with_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    home = tmp_path / "home"
    monkeypatch.setenv("TRTSERVE_HOME", str(home))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # else its import warns
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    read: Any = nbformat.read
    notebook = read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without outputs, so that they cannot age
    NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(str(output.get("text", "")) for output in outputs)
    assert "learning" in printed
    plots = [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert len(plots) == 1
    assert "ms" in plots[0]
    assert not list_servers(Store(home))
