"""Clients that people use, unchanged and in an environment of their own, against the demo model on a real Triton.

`make clients` runs this file; `make test` does not collect it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import trtserve
from tests.support.servers import running_server
from trtserve.server.repositories import find_repository
from trtserve.server.state import Server
from trtserve.store import Store

pytestmark = pytest.mark.triton

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".cache" / "clients" / "bin" / "python"
PROGRAMS = (
    "openai_chat",
    "openai_responses",
    "anthropic",
    "langchain",
    "llama_index",
    "pydantic_ai",
    "instructor",
    "litellm",
    "ollama",
    "guidellm",
    "lm_eval",
    "mini_swe_agent",
)
TIMEOUT = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all; lm-eval needs logits."""
    home = tmp_path_factory.mktemp("clients")
    trtserve("import", "demo", "--gather-all-token-logits", home=home)
    repository = find_repository(store=Store(home))
    with running_server(repository.path, home=home, name="demo", gateway=True) as server:
        yield server


def run(command: list[str], folder: Path, **variables: str) -> None:
    """Run a program to its end. It must not find the user's settings or the internet."""
    offline = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "MSWEA_SILENT_STARTUP": "1",
    }
    environment = {**os.environ, "HOME": str(folder), **offline, **variables}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_client(server: Server, tmp_path: Path, name: str) -> None:
    url = f"http://{server.address.host}:{server.address.http_port}"
    tokenizer = Path(server.repository) / "preprocessing" / "1" / "tokenizer"
    run([str(PYTHON), str(HERE / "programs.py"), name, url, str(tokenizer)], tmp_path)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_ai_sdk(server: Server, tmp_path: Path) -> None:
    """The package of JavaScript is installed as its lock file says."""
    for name in ("package.json", "package-lock.json", "ai_sdk.mjs"):
        shutil.copy(HERE / name, tmp_path)
    run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], tmp_path)
    run(["node", "ai_sdk.mjs", f"http://{server.address.host}:{server.address.http_port}/v1"], tmp_path)
