"""Clients that people use, unchanged and in an environment of their own, against the demo model on a real Triton.

`make clients` and `.ci/run` run this file; `make test` does not collect it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
    "ai_sdk",
)
AT_ONCE = 2
TIMEOUT = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all; lm-eval needs logits."""
    home = tmp_path_factory.mktemp("clients")
    trtserve("import", "demo", "--gather-all-token-logits", home=home)
    repository = find_repository(store=Store(home))
    with running_server(repository.path, home=home, name="demo", gateway=True) as server:
        yield server


@pytest.fixture(scope="module")
def ends(
    server: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[None]]]:
    """The chosen programs; most of their time is one core's for their imports, so two run at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        chosen = [name for name in PROGRAMS if any(f"[{name}]" in item.name for item in request.session.items)]
        yield {name: pool.submit(run_client, name, server, tmp_path_factory.mktemp(name)) for name in chosen}


def run_client(name: str, server: Server, folder: Path) -> None:
    """Run a program to its end in an empty folder. The AI SDK is installed there, as its lock file says."""
    url = f"http://{server.address.host}:{server.address.http_port}"
    if name == "ai_sdk":
        for file in ("package.json", "package-lock.json", "ai_sdk.mjs"):
            shutil.copy(HERE / file, folder)
        run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder)
        run(["node", "ai_sdk.mjs", f"{url}/v1"], folder)
    else:
        tokenizer = Path(server.repository) / "preprocessing" / "1" / "tokenizer"
        run([str(PYTHON), str(HERE / "programs.py"), name, url, str(tokenizer)], folder)


def run(command: list[str], folder: Path) -> None:
    """Run a command that must not find the user's settings or the internet, but for npm's packages."""
    offline = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "MSWEA_SILENT_STARTUP": "1",
    }
    environment = {**os.environ, "HOME": str(folder), **offline}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_client(ends: Mapping[str, Future[None]], name: str) -> None:
    if name == "ai_sdk" and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    ends[name].result()
