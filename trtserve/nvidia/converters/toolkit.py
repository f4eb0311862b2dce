"""Find NVIDIA's tools: the Python that has TensorRT-LLM, and the scripts of its release."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from trtserve.errors import MissingDependencyError, ModelOptMissingError
from trtserve.nvidia.containers import known_container, require_installed_in
from trtserve.nvidia.releases import release_of
from trtserve.nvidia.releases.containers import latest_container
from trtserve.nvidia.releases.converters import QUANTIZE_SCRIPT, converter_script, named_script
from trtserve.nvidia.releases.installed import (
    Installed,
    installed,
    interpreter,
    require_engine_path,
)
from trtserve.nvidia.releases.launcher import launcher_facts

EXAMPLES_VARIABLE = "TRTSERVE_TRTLLM_EXAMPLES"
VERSION_VARIABLE = "TRTSERVE_TRTLLM_VERSION"
_APP = "/app"  # where NVIDIA's containers have their scripts and examples
_MODELOPT = "nvidia-modelopt"
# `pip install tensorrt_llm` has no examples; NVIDIA's containers do.
_EXAMPLES = "examples"


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """A TensorRT-LLM with its tools, on this machine or in a container."""

    version: str  # of TensorRT-LLM
    release: str
    python: Path  # the interpreter that imports it
    examples: Path  # folder of its examples; in a container, it cannot be inspected before the container runs
    environment: Path | None  # folder of its packages
    container: str | None = None  # a tag or an image
    mounted: Path | None = None  # examples of this machine that the container uses instead of its own

    def converter(self, architecture: str, script: str | None = None) -> Path:
        """Return the convert_checkpoint.py of an architecture. Raises MissingDependencyError when the examples lack it.

        `script` names it instead: its folder in the examples, or its path there.
        """
        if script is None:
            return self._script(converter_script(architecture, self.release))
        if script.endswith(".py"):
            return self._script(str(Path(_EXAMPLES) / script))
        return self._script(named_script(script, self.release))

    def quantizer(self) -> Path:
        """Return quantize.py. Raises ModelOptMissingError when ModelOpt, which it needs, is not installed."""
        folders = sys.path if self.environment is None else [str(self.environment)]
        if self.container is None and not any(metadata.distributions(name=_MODELOPT, path=folders)):
            raise ModelOptMissingError(
                f"Calibrated quantisation needs NVIDIA ModelOpt, which {self.python} does not have.",
                hint=f"{self.python} -m pip install nvidia-modelopt, or quantise with --quantize int8 or none.",
            )
        return self._script(QUANTIZE_SCRIPT)

    def _script(self, relative: str) -> Path:
        script = self.examples / Path(relative).relative_to(_EXAMPLES)
        inside = self.container is not None and self.mounted is None
        if not inside and not script.is_file():
            raise MissingDependencyError(
                f"{script} does not exist: the examples are not those of TensorRT-LLM {self.version}.",
                hint=_clone(self.version),
            )
        return script


def find_toolkit(
    *,
    calibrated: bool = False,
    examples: Path | None = None,
    container: str | None = None,
    version: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Toolkit:
    """Find the installed TensorRT-LLM and its examples.

    The examples are in `examples`, else in $TRTSERVE_TRTLLM_EXAMPLES, else where NVIDIA's containers have them. With
    `container` (a tag or an image), both are inside it. `version` overrides the version that is found.

    Raises MissingDependencyError when either is missing (ModelOptMissingError for a `calibrated` quantisation) and
    UsageError for a version without converters.
    """
    if container is not None:
        return _in_container(container, examples or _folder(environ), version or environ.get(VERSION_VARIABLE))
    found = installed()
    if found is None:
        raise _not_installed(calibrated=calibrated)
    if version is not None:
        found = replace(found, version=version, release=release_of(version))
    release = require_engine_path(found.version)
    return Toolkit(
        version=found.version,
        release=release,
        python=interpreter(found),
        examples=_examples(found, release, examples or _folder(environ)),
        environment=found.environment,
    )


def _in_container(container: str, examples: Path | None, version: str | None) -> Toolkit:
    """The toolkit of an image; images before 0.17 have no examples, so a checkout is mounted."""
    found = require_installed_in(container, version if known_container(container) is None else None)
    release = require_engine_path(found.version)
    inside = Path(launcher_facts(release).examples)
    if examples is None and not inside.is_relative_to(_APP):
        raise MissingDependencyError(
            f"Containers with TensorRT-LLM {found.version} lack the examples, which hold the converters.",
            hint=_clone(found.version),
        )
    return Toolkit(
        version=found.version,
        release=release,
        python=Path("python3"),
        examples=inside if examples is None else _examples(found, release, examples.absolute()),
        environment=None,
        container=container,
        mounted=None if examples is None else examples.absolute(),
    )


def _folder(environ: Mapping[str, str]) -> Path | None:
    text = environ.get(EXAMPLES_VARIABLE)
    return Path(text) if text else None


def _examples(found: Installed, release: str, wanted: Path | None) -> Path:
    """Return the folder `examples`; a checkout of TensorRT-LLM is accepted too."""
    folder = wanted or Path(launcher_facts(release).examples)
    if (folder / _EXAMPLES).is_dir():
        folder /= _EXAMPLES
    if not folder.is_dir():
        raise MissingDependencyError(
            f"TensorRT-LLM {found.version} is installed without its examples, which hold the converters: {folder} does "
            "not exist.",
            hint=_clone(found.version),
        )
    return folder


def _clone(version: str) -> str:
    return (
        f"git clone --depth 1 --branch v{version} https://github.com/NVIDIA/TensorRT-LLM, and name its folder with "
        f"--trtllm-examples or {EXAMPLES_VARIABLE}."
    )


def _not_installed(*, calibrated: bool) -> MissingDependencyError:
    if calibrated:
        return ModelOptMissingError(
            "Calibrated quantisation runs NVIDIA ModelOpt with TensorRT-LLM, and neither is installed here.",
            hint=f"Add --container {latest_container().tag}, which runs them in NVIDIA's container on a GPU, or choose "
            "--quantize int8, which needs neither.",
        )
    return MissingDependencyError(
        "--converter upstream runs NVIDIA's converter, and TensorRT-LLM is not installed here.",
        hint=f"Add --container {latest_container().tag}, which runs it in NVIDIA's container, pip install "
        "tensorrt_llm, or use --converter own.",
    )
