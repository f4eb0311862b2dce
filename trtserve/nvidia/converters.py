"""Checkpoints that NVIDIA's own tools make: convert_checkpoint.py of TensorRT-LLM, and ModelOpt through quantize.py.

Find the Python that has TensorRT-LLM and the scripts of its release, write their command lines, run them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.checkpoint.unified import read_config
from trtserve.errors import ConversionError, MissingDependencyError, ModelOptMissingError, TrtserveError, UsageError
from trtserve.nvidia.containers import (
    ContainerRun,
    ToolMemory,
    announce,
    known_container,
    last_lines,
    require_installed_in,
    run_tool,
)
from trtserve.nvidia.releases import release_of
from trtserve.nvidia.releases.containers import latest_container
from trtserve.nvidia.releases.converters import QUANTIZE_SCRIPT, converter_script, launcher_facts, named_script
from trtserve.nvidia.releases.installed import Installed, installed, interpreter, require_engine_path
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import CALIBRATED

if TYPE_CHECKING:
    from trtserve.specs import ConvertSpec

EXAMPLES_VARIABLE = "TRTSERVE_TRTLLM_EXAMPLES"
VERSION_VARIABLE = "TRTSERVE_TRTLLM_VERSION"
_APP = "/app"  # where NVIDIA's containers have their scripts and examples
_MODELOPT = "nvidia-modelopt"
_EXAMPLES = "examples"  # `pip install tensorrt_llm` has no examples; NVIDIA's containers do
# Folders of the converters whose models have experts.
_WITH_EXPERTS = ("llama", "qwen", "phi", "deepseek_v1", "deepseek_v2", "dbrx", "grok")
_LAYOUT = ("moe_tp_size", "moe_ep_size", "use_parallel_embedding")


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
    *, calibrated: bool = False, examples: Path | None = None, container: str | None = None, version: str | None = None
) -> Toolkit:
    """Find the installed TensorRT-LLM and its examples.

    The examples are in `examples`, else in $TRTSERVE_TRTLLM_EXAMPLES, else where NVIDIA's containers have them. With
    `container` (a tag or an image), both are inside it. `version` overrides the version that is found.

    Raises MissingDependencyError when either is missing (ModelOptMissingError for a `calibrated` quantisation) and
    UsageError for a version without converters.
    """
    if examples is None and (folder := os.environ.get(EXAMPLES_VARIABLE)):
        examples = Path(folder)
    if container is not None:
        return _in_container(container, examples, version or os.environ.get(VERSION_VARIABLE))
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
        examples=_examples(found, release, examples),
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


def needs_calibration(spec: ConvertSpec) -> bool:
    """Return whether the quantisation needs activations of sample texts."""
    return spec.quantize in CALIBRATED


def tool_command(toolkit: Toolkit, spec: ConvertSpec, architecture: str, model: Path, out: Path) -> Command:
    """Return the command that writes the checkpoint of `model` to `out`; the dtype of `spec` must be resolved.

    Raises UsageError when the tool has no option for something in `spec`.
    """
    if needs_calibration(spec):
        script, flags = toolkit.quantizer(), _quantize_flags(spec, model, out)
    else:
        script = toolkit.converter(architecture, spec.trtllm_script)
        for flag, value in (("--calib-dataset", spec.calib_dataset), ("--calib-size", spec.calib_size)):
            if value is not None:
                raise UsageError(f"{flag} is for calibrated quantisation only: --quantize {', '.join(CALIBRATED)}.")
        family = script.parent.name
        if family == "gemma":
            flags = list(_gemma_flags(spec, model, out))
        elif family == "recurrentgemma":
            flags = list(_recurrentgemma_flags(spec, model, out))
        else:
            flags = list(_flags(family, spec, model, out))
    return Command(argv=(str(toolkit.python), str(script), *flags, *spec.converter_flags))


def _refuse_given(tool: str, spec: ConvertSpec, *options: str) -> None:
    """Raise UsageError for options that the tool does not have; one worker is what it has anyway."""
    default = type(spec)(workers=spec.workers if spec.workers == 1 else None)
    given = [name for name in options if getattr(spec, name) != getattr(default, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{tool} has no option for {names}.", hint="Leave it out, or use --converter own.")


def _quantize_flags(spec: ConvertSpec, model: Path, out: Path) -> list[str]:
    _refuse_given(f"--quantize {spec.quantize} runs quantize.py, which", spec, "workers", *_LAYOUT)
    flags = {
        "--model_dir": model,
        "--output_dir": out,
        "--dtype": spec.dtype,
        "--qformat": spec.quantize,
        "--tp_size": spec.tp_size,
        "--pp_size": spec.pp_size,
        "--calib_dataset": spec.calib_dataset,
        "--calib_size": spec.calib_size,
    }
    return [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]


def _flags(family: str, spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """The flags of most converters."""
    yield from ("--model_dir", str(model), "--output_dir", str(out), "--dtype", spec.dtype)
    yield from ("--tp_size", str(spec.tp_size), "--pp_size", str(spec.pp_size))
    for flag, value in (("--moe_tp_size", spec.moe_tp_size), ("--moe_ep_size", spec.moe_ep_size)):
        if value is None:
            continue
        if family not in _WITH_EXPERTS:
            raise UsageError(f"{family}/convert_checkpoint.py has no {flag}: its models have no experts.")
        yield from (flag, str(value))
    if spec.use_parallel_embedding:
        if family == "phi":
            raise UsageError("phi/convert_checkpoint.py has no --use_parallel_embedding.")
        yield from ("--use_parallel_embedding", "--embedding_sharding_dim", str(spec.embedding_sharding_dim))
    if spec.quantize != "none":
        yield from ("--use_weight_only", "--weight_only_precision", spec.quantize)
    if spec.workers is not None:
        yield from ("--workers", str(spec.workers))


def _recurrentgemma_flags(spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """RecurrentGemma's converter supports tensor parallelism and little else."""
    _refuse_given("recurrentgemma/convert_checkpoint.py", spec, "pp_size", "quantize", "workers", *_LAYOUT)
    yield from ("--ckpt_type", "hf", "--model_dir", str(model), "--output_dir", str(out))
    yield from ("--dtype", spec.dtype, "--world_size", str(spec.tp_size))


def _gemma_flags(spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """Gemma's converter has its own flags, only tensor parallelism, and no workers."""
    _refuse_given("gemma/convert_checkpoint.py", spec, "pp_size", "workers")
    yield from ("--ckpt-type", "hf", "--model-dir", str(model), "--output-model-dir", str(out))
    yield from ("--dtype", spec.dtype, "--world-size", str(spec.tp_size))
    if spec.quantize != "none":
        yield from ("--use-weight-only-with-precision", spec.quantize)


def run_converter(
    command: Command,
    folder: Path,
    *,
    world_size: int,
    memory: ToolMemory,
    log: Path,
    progress: Progress,
    box: ContainerRun | None = None,
) -> CheckpointConfig:
    """Run `command`, which fills `folder`, in the container `box` or here, and return the checkpoint's config.

    Raises ConversionError, with the last lines of the log, when it fails or does not write a checkpoint of `world_size`
    ranks, and MemoryLimitError or DiskSpaceError when memory or disk ran out.
    """
    name, done = Path(command.argv[1]).name, 0
    command = announce(command, box, progress)
    with progress.task(f"Running {name} (log: {log})", total=world_size, unit="items") as task:

        def follow() -> None:
            nonlocal done
            written = min(len(list(folder.glob("rank*.safetensors"))), world_size)
            task.advance(written - done)
            done = written

        run_tool(name, command, follow=follow, memory=memory, log=log, failure=ConversionError, box=box)
        task.advance(world_size - done)
    try:
        config = read_config(folder)
        found = config.mapping.ranks
        if found != world_size:
            raise ConversionError(f"config.json is for {found} ranks; expected {world_size}.")
        for rank in range(world_size):
            path = folder / f"rank{rank}.safetensors"
            if not path.is_file():
                raise ConversionError(f"rank{rank}.safetensors is missing.")
            if not TensorFile(path).entries:
                raise ConversionError(f"rank{rank}.safetensors holds no tensors.")
    except TrtserveError as error:
        raise ConversionError(
            f"{name} ended without an error, but its checkpoint is incomplete: {error.message} Its last lines:\n"
            f"{last_lines(log)}",
            hint="Read the log; free disk and memory are the usual reasons.",
            log=log,
        ) from error
    return config
