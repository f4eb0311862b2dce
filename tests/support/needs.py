"""What a test needs beyond Python and the packages of `make test`, declared with `@pytest.mark.needs("torch")`.

Tests whose needs this machine lacks are left out as a group. CI runs everything: `.ci/run` sets TRTSERVE_TESTS_BARE=1
for a first run without the group, then installs the rest and runs the group alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trtserve.process import program


@dataclass(frozen=True)
class Need:
    """Something that `make test` does not install."""

    name: str
    present: Callable[[], bool]
    package: str | None  # of Debian; None for what `make test-oracle` installs


def _modules(*names: str) -> Callable[[], bool]:
    return lambda: all(find_spec(name) is not None for name in names)


def find_program(name: str) -> Path | None:
    """Return the path of a program on PATH, or in the folders that Debian puts only on root's PATH."""
    return program(name, os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin")))


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(find_program(name) is not None for name in names)


NEEDS = {
    "torch": Need("PyTorch", _modules("torch", "peft", "triton"), None),
    "vl_convert": Need("vl-convert", _modules("vl_convert"), None),
    "notebook": Need("nbclient and vl-convert", _modules("nbclient", "ipykernel", "vl_convert"), None),
    "clients": Need("LangChain and litellm", _modules("langchain_openai", "litellm"), None),
    "anthropic": Need("Anthropic's client", _modules("anthropic"), None),
    "chromium": Need("Chromium", lambda: _modules("playwright")() and _programs("chromium")(), "chromium"),
    "promtool": Need("promtool", _programs("promtool"), "prometheus"),
    "registry": Need("an OCI registry", _programs("docker-registry"), "docker-registry"),
    "s3": Need("moto and s3fs", _modules("moto", "s3fs", "flask"), None),
    "helm": Need("Helm", _modules("helm_python"), None),
    "sshd": Need("sshd", _programs("sshd", "ssh", "ssh-keygen"), "openssh-server"),
}
BARE = os.environ.get("TRTSERVE_TESTS_BARE") == "1"
IN_CI = os.environ.get("CI") == "true"


def missing_needs() -> list[str]:
    """Return the keys of NEEDS that this machine lacks, or all of them in a bare run."""
    return [key for key, need in NEEDS.items() if BARE or not need.present()]


def left_out_line(count: int, missing: Iterable[str]) -> str:
    """Return the closing line about `count` tests that were left out, with the commands that run them."""
    needs = [NEEDS[key] for key in missing]
    *first, last = [need.name for need in needs]
    names = f"{', '.join(first)} or {last}" if first else last
    packages = " ".join(need.package for need in needs if need.package)
    before = f"`apt-get install {packages}`, then " if packages else ""
    return f"{count} tests were left out because they need {names}. To run them: {before}`make test-oracle`."
