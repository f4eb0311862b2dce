"""TensorRT-LLM's Python bindings on the embedded executor, for programs that import `tensorrt_llm.bindings.executor`.

The programs run in a virtual environment that has the packages of this one and, before them, a package `tensorrt_llm`,
whose files import what they hold from here. Triton's Python stub ignores PYTHONPATH; it uses the environment of the
first `python3` on PATH.
"""

from __future__ import annotations

import ast
import logging
import site
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts import fingerprint
from trtserve.files import locked, writing
from trtserve.nvidia.releases import normalize_release
from trtserve.store import Store

PACKAGE = "tensorrt_llm"
_MODULES = {
    "__init__.py": "from .logger import logger as logger\n\n__version__ = {release!r} + '.0'\n",
    "logger.py": "from trtserve.executor.interface.bindings import logger as logger\n",
    "bindings/__init__.py": "",
    "bindings/executor.py": "from trtserve.executor.api import *\n\n__version__ = {release!r} + '.0'\n",
    "llmapi/__init__.py": "",
    "llmapi/tokenizer.py": "from trtserve.executor.interface.bindings import tokenizer_info\n\n"
    "_xgrammar_tokenizer_info = tokenizer_info\n",
}
_COMPLETE = "pyvenv.cfg"  # written last; Python takes the folder for an environment only if it is there


@dataclass(frozen=True, kw_only=True)
class BindingsEnvironment:
    """The virtual environment of one release, which `prepare` makes."""

    folder: Path
    release: str

    @property
    def programs(self) -> Path:
        """Folder of its `python3`, to put first on PATH."""
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        """Folder of the package `tensorrt_llm`, for PYTHONPATH."""
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def prepare(self) -> None:
        """Write the environment unless it exists."""
        with writing(self.folder), locked(self.folder.with_suffix(".lock")):
            if (self.folder / _COMPLETE).exists():
                return
            for name, text in _MODULES.items():
                module = self.packages / PACKAGE / name
                module.parent.mkdir(parents=True, exist_ok=True)
                module.write_text(text.format(release=self.release), encoding="utf-8")
            # Lines that begin with `import` are run; these read the .pth files of the other folders too.
            lines = [f"import site; site.addsitedir({path!r})\n" for path in _package_folders()]
            (self.packages / "trtserve.pth").write_text("".join(lines), encoding="utf-8")
            self.programs.mkdir(exist_ok=True)
            for name in ("python", "python3"):
                (self.programs / name).unlink(missing_ok=True)
                (self.programs / name).symlink_to(_interpreter())
            version = ".".join(map(str, sys.version_info[:3]))
            (self.folder / _COMPLETE).write_text(
                f"home = {_interpreter().parent}\nversion = {version}\n", encoding="utf-8"
            )


def bindings_environment(release: str, store: Store, *, option: str = "--release") -> BindingsEnvironment:
    """Return the environment for a release; nothing is written. UsageError names `option` for an unknown one."""
    known = normalize_release(release, option=option)
    key = fingerprint(modules=_MODULES, packages=_package_folders(), python=str(_interpreter()), version=sys.version)
    return BindingsEnvironment(folder=store.root / "bindings" / f"{known}-{key[:12]}", release=known)


def imports_bindings(program: Path) -> bool:
    """Return whether a Python file imports the package `tensorrt_llm`; False for one that cannot be parsed."""
    try:
        tree = ast.parse(program.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        if any(name.partition(".")[0] == PACKAGE for name in names):
            return True
    return False


def _package_folders() -> list[str]:
    return [path for path in site.getsitepackages() if Path(path).is_dir()]


def _interpreter() -> Path:
    """Return the interpreter that this environment was made from."""
    return Path(sys.executable).resolve()


class _Logger(logging.Logger):
    def set_level(self, level: str) -> None:
        """Set the level by its name, as TensorRT-LLM's logger does."""
        self.setLevel(level.upper())


logger = _Logger("tensorrt_llm", logging.WARNING)
logger.addHandler(logging.StreamHandler())


def tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """Return the keywords of GuidedDecodingConfig that describe a tokenizer of transformers."""
    ids = tokenizer.get_vocab()
    ends = tokenizer.eos_token_id
    return {
        "encoded_vocab": sorted(ids, key=lambda token: ids[token]),
        "tokenizer_str": tokenizer.backend_tokenizer.to_str(),
        "stop_token_ids": [ends] if isinstance(ends, int) else list(ends or ()),
    }
