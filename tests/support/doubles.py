"""The doubles of tests/doubles as executables of a folder, with their settings and the log of their calls.

doubles = Doubles(tmp_path / "doubles", gpus=2)
subprocess.run(["trtllm-build", ...], env=doubles.environment(build_fault="oom"))
doubles.calls("trtllm-build")[0].arguments
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.containers import CONTAINERS
from tests.doubles.convert_checkpoint import script_path
from tests.doubles.converter_options import FAMILIES
from tests.doubles.settings import PREFIX, Settings
from trtserve.host import gpus

ROOT = Path(__file__).parents[2]
# Executable → module and function of tests.doubles.
TOOLS = {
    "trtllm-build": ("trtllm_build", "main"),
    "nvidia-smi": ("nvidia_smi", "main"),
    "tritonserver": ("tritonserver", "main"),
    "trtllm-llmapi-launch": ("llmapi_launch", "main"),
    "docker": ("docker", "main"),
    "sbatch": ("slurm", "sbatch"),
    "srun": ("slurm", "srun"),
    "scancel": ("slurm", "scancel"),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a double."""

    tool: str
    arguments: tuple[str, ...]
    cwd: Path
    pid: int
    time: float
    environment: dict[str, str]  # the telling variables only, see tests.doubles.settings.LOGGED_VARIABLES

    @property
    def rank(self) -> int:
        """MPI or Slurm rank of the process, 0 without one."""
        for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
            if name in self.environment:
                return int(self.environment[name])
        return 0


class Doubles:
    """A folder `bin` with the doubles, to be put in front of PATH."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """Make the executables; `settings` are fields of tests.doubles.settings.Settings."""
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "scratch").mkdir()
        for backend in ("tensorrtllm", "python"):  # as beside NVIDIA's /opt/tritonserver/bin
            (folder / "backends" / backend).mkdir(parents=True)
        # No product may need NVIDIA's own: it is where executor_worker_path has to lead to on this machine.
        self.worker = folder / "backends" / "tensorrtllm" / "trtllmExecutorWorker"
        self.worker.write_bytes(b"")
        for name, (module, function) in TOOLS.items():
            self._write(self.bin / name, module, function)
        self.configure(**settings)

    def _write(self, path: Path, module: str, function: str) -> None:
        """A script without `site`: the interpreter starts in a third of the time, which four ranks at once feel."""
        packages = sysconfig.get_paths()["purelib"]
        text = (
            f"#!{sys.executable} -SE\n"
            f"import sys\nfrom pathlib import Path\nsys.path[:0] = [{str(ROOT)!r}]\nsys.path.append({packages!r})\n"
            f"from tests.doubles.{module} import {function}\n"
            f"raise SystemExit({function}(sys.argv[1:], Path({str(self.folder)!r})))\n"
        )
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def examples(self, release: str) -> Path:
        """A folder `examples` as in this release's source tree, with the converters as doubles of that release."""
        found = [row for row in CONTAINERS.values() if row.tensorrt_llm.startswith(f"{release}.")][-1]
        folder = self.folder / f"source-{release}" / "examples"
        for family in FAMILIES:
            path = folder / script_path(family, found.release)
            self._write_script(path, f"main, {{'family': {family!r}}}", found.tensorrt_llm)
        self._write_script(folder / "quantization" / "quantize.py", "quantize, {}", found.tensorrt_llm)
        return folder

    def _write_script(self, path: Path, call: str, version: str) -> None:
        """A script for any interpreter, as the real ones are called: `<python> examples/…/convert_checkpoint.py`."""
        function, _, keywords = call.partition(", ")
        text = (
            f"import os\nimport sys\nfrom pathlib import Path\n\nsys.path[:0] = [{str(ROOT)!r}]\n"
            f"os.environ[{PREFIX + 'VERSION'!r}] = {version!r}\n"
            f"from tests.doubles.convert_checkpoint import {function}\n"
            f"raise SystemExit({function}(sys.argv[1:], Path({str(self.folder)!r}), script=__file__, **{keywords}))\n"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def packages(self, version: str) -> Path:
        """A folder for sys.path with the metadata of an installed TensorRT-LLM; importing the package is recorded.

        The package cannot be used: who needs more than its version must not get it by importing gigabytes.
        """
        found = next(row for row in CONTAINERS.values() if row.tensorrt_llm == version)
        folder = self.folder / f"packages-{version}"
        for name, number in (("tensorrt_llm", version), ("tensorrt", found.tensorrt)):
            metadata = folder / f"{name}-{number}.dist-info" / "METADATA"
            metadata.parent.mkdir(parents=True)
            title = name.replace("_", "-")
            metadata.write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {number}\n", encoding="utf-8")
        (folder / "tensorrt_llm").mkdir()
        (folder / "tensorrt_llm" / "__init__.py").write_text(
            f"import sys\nfrom pathlib import Path\n\nsys.path[:0] = [{str(ROOT)!r}]\n"
            "from tests.doubles.settings import record_call\n"
            f"record_call(Path({str(self.folder)!r}), 'import tensorrt_llm', [])\n"
            "raise ImportError('libnvinfer.so.10: cannot open shared object file: No such file or directory')\n",
            encoding="utf-8",
        )
        return folder

    def configure(self, **settings: Any) -> None:
        """Set the behaviour of every later call, also of calls whose environment is not passed on."""
        known = {field.name for field in fields(Settings)}
        if unknown := settings.keys() - known:
            raise TypeError(f"no setting of the doubles: {', '.join(sorted(unknown))}")
        text = json.dumps({name: str(value) for name, value in settings.items()})
        (self.folder / "settings.json").write_text(text, encoding="utf-8")
        gpus._asked_once.cache_clear()

    def environment(self, **settings: Any) -> dict[str, str]:
        """This process's environment with the doubles in front of PATH, and settings for these calls alone."""
        known = {field.name for field in fields(Settings)}
        if unknown := settings.keys() - known:
            raise TypeError(f"no setting of the doubles: {', '.join(sorted(unknown))}")
        given = {PREFIX + name.upper(): str(value) for name, value in settings.items()}
        return {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", **given}

    def let_rank_die(self) -> None:
        """End the rank of tritonserver that was configured with die_when=asked."""
        (self.folder / "die").touch()

    def calls(self, tool: str | None = None) -> list[Call]:
        """Calls in their order, of one tool or of all."""
        log = self.folder / "calls.jsonl"
        if not log.exists():
            return []
        lines = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
        calls = [Call(**{**line, "arguments": tuple(line["arguments"]), "cwd": Path(line["cwd"])}) for line in lines]
        return [call for call in calls if tool in (None, call.tool)]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the doubles in front of this process's PATH for one test."""
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
