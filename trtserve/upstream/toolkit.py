"""Where NVIDIA's tools are on this machine: the Python that has TensorRT-LLM, and the scripts of its release."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from trtserve.errors import MissingDependencyError, ModelOptMissingError
from trtserve.launch.container import known_container, require_installed_in
from trtserve.releases import release_of
from trtserve.releases.containers import CONTAINERS
from trtserve.releases.converters import QUANTIZE_SCRIPT, converter_script, named_script
from trtserve.releases.installed import Installed, installed, interpreter, require_engine_path
from trtserve.releases.launcher import launcher_facts

EXAMPLES_VARIABLE = "TRTSERVE_TRTLLM_EXAMPLES"
VERSION_VARIABLE = "TRTSERVE_TRTLLM_VERSION"
_APP = "/app"  # where NVIDIA's containers have their scripts and examples
_MODELOPT = "nvidia-modelopt"
# `pip install tensorrt_llm` has no examples; NVIDIA's containers do.
_EXAMPLES = "examples"


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """TensorRT-LLM `version` (of `release`), the interpreter that imports it, and the folder of its examples.

    Of a `container` (a tag or an image) they are what is inside, where nothing can be looked up before it runs;
    `mounted` are examples of this machine that it uses instead of its own.
    """

    version: str
    release: str
    python: Path
    examples: Path
    environment: Path | None
    container: str | None = None
    mounted: Path | None = None

    def converter(self, architecture: str, script: str | None = None) -> Path:
        """convert_checkpoint.py of a family; MissingDependencyError when the examples lack it.

        `script` names it instead: its folder below the examples, or its own path.
        """
        if script is None:
            return self._script(converter_script(architecture, self.release))
        if script.endswith(".py"):
            return self._script(str(Path(_EXAMPLES) / script))
        return self._script(named_script(script, self.release))

    def quantizer(self) -> Path:
        """quantize.py, which works through ModelOpt; ModelOptMissingError when that is not installed."""
        if self.container is None and self._modelopt() is None:
            raise ModelOptMissingError(
                f"Calibrated quantisation needs NVIDIA ModelOpt, which {self.python} does not have.",
                hint=f"{self.python} -m pip install nvidia-modelopt, or quantise with --quantize int8 or none.",
            )
        return self._script(QUANTIZE_SCRIPT)

    def _modelopt(self) -> str | None:
        folders = None if self.environment is None else [str(self.environment)]
        found = metadata.distributions(name=_MODELOPT) if folders is None else _distributions(folders)
        return next((each.version for each in found), None)

    def _script(self, relative: str) -> Path:
        script = self.examples / Path(relative).relative_to(_EXAMPLES)
        inside = self.container is not None and self.mounted is None
        if not inside and not script.is_file():
            raise MissingDependencyError(
                f"{script} is not there: the examples are not those of TensorRT-LLM {self.version}.",
                hint=_clone(self.version),
            )
        return script


def _distributions(folders: list[str]) -> list[metadata.Distribution]:
    return list(metadata.distributions(name=_MODELOPT, path=folders))


def find_toolkit(
    *,
    calibrated: bool = False,
    examples: Path | None = None,
    container: str | None = None,
    version: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Toolkit:
    """The installed TensorRT-LLM and its examples: in `examples`, $TRTSERVE_TRTLLM_EXAMPLES, or a container's folder.

    With `container` (a tag or an image) those inside it, which are not looked up. `version` replaces what is found.

    MissingDependencyError when either is absent (ModelOptMissingError when the wish is `calibrated`), UsageError for a
    version that has no converters any more.
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
    """The Python and the examples of an image; before 0.17 it has none, and a checkout is mounted."""
    found = require_installed_in(container, version if known_container(container) is None else None)
    release = require_engine_path(found.version)
    inside = Path(launcher_facts(release).examples)
    if examples is None and not inside.is_relative_to(_APP):
        raise MissingDependencyError(
            f"Containers with TensorRT-LLM {found.version} have no examples, where the converters are.",
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
    """The folder `examples`; a checkout of TensorRT-LLM may be named as well."""
    folder = wanted or Path(launcher_facts(release).examples)
    if (folder / _EXAMPLES).is_dir():
        folder /= _EXAMPLES
    if not folder.is_dir():
        raise MissingDependencyError(
            f"TensorRT-LLM {found.version} is installed, but not its examples, where the converters are: {folder} is "
            "not there.",
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
            hint=f"Add --container {CONTAINERS[-1].tag}, which runs them in NVIDIA's container on a GPU, or choose "
            "--quantize int8, which needs neither.",
        )
    return MissingDependencyError(
        "--converter upstream runs NVIDIA's converter, and TensorRT-LLM is not installed here.",
        hint=f"Add --container {CONTAINERS[-1].tag}, which runs it in NVIDIA's container, pip install tensorrt_llm, or "
        "take --converter own.",
    )
