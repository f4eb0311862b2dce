"""The installed TensorRT-LLM: its version, its programs, and Triton's backend for it."""

from __future__ import annotations

from collections.abc import Iterator

from trtserve import process
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.containers import Container, all_containers, container, containers_of, latest_container
from trtserve.nvidia.releases.installed import BUILDER, Installed, has_engine_path, interpreter, require_engine_path
from trtserve.nvidia.releases.triton import LLMAPI_LAUNCH, launcher_facts
from trtserve.repository.profiles import llmapi_model
from trtserve.server.doctor.findings import ENGINES, LLMAPI, TENSORRT_LLM, CheckResult, report_for
from trtserve.server.triton.installation import find_triton

_ANY = report_for("tensorrt_llm", TENSORRT_LLM)
_ENGINES = report_for("tensorrt_llm", ENGINES)
_LLMAPI = report_for("tensorrt_llm", LLMAPI)


def check_installed(here: Installed | None, asked: Installed | None, *, suited: str = "") -> CheckResult:
    """Check which version is installed; `asked` is the value of --trtllm-version, or None.

    `suited` is the tag of the container that suits the driver best.
    """
    if here is None:
        newer = asked is not None and not has_engine_path(asked.release)
        best = container(suited) if suited and not asked else _container(asked.release if asked else NEWEST)
        return _ANY(
            "TensorRT-LLM",
            "failed",
            "not installed, neither next to trtllm-build on PATH nor in this Python",
            "Install the wheel of that release, or use its container: `--container IMAGE`. "
            f"The newest known container, {best.tag}, has {best.tensorrt_llm}."
            if newer
            else f"Use NVIDIA's container: add `--container {best.tag}` to the commands, or run "
            f"docker run --gpus all -it {best.image}",
        )
    evidence = f"{here.version}{f', TensorRT {here.tensorrt}' if here.tensorrt else ''} ({here.source})"
    if asked is None or asked.version == here.version:
        return _ANY("TensorRT-LLM", "ok", evidence)
    fix = f"--trtllm-version is {asked.version}: engines of one version do not run on the other."
    return _ANY("TensorRT-LLM", "warning", evidence, fix)


def check_engine_path(found: Installed) -> CheckResult:
    """Check whether this release builds and runs engines."""
    try:
        require_engine_path(found.version)
    except UsageError as error:
        return _ENGINES("engines", "failed", error.message.rstrip("."), str(error.hint))
    return _ENGINES("engines", "ok", f"release {found.release} builds and runs them")


def check_builder(found: Installed) -> CheckResult:
    """Find `trtllm-build`; if the script is not on PATH, its module does the same."""
    place = process.program(BUILDER)
    if place is not None:
        return _ENGINES(BUILDER, "ok", str(place))
    if found.environment is not None:
        evidence = f"not on PATH; {interpreter(found)} -m tensorrt_llm.commands.build does the same"
        return _ENGINES(BUILDER, "ok", evidence)
    return _ENGINES(BUILDER, "failed", "not on PATH", f"Run in NVIDIA's container {_container(found.release).image}.")


def check_backend() -> CheckResult:
    """Find a tritonserver that can load engines."""
    name = "tensorrtllm backend"
    try:
        triton = find_triton(frozenset({"tensorrtllm"}), system_first=True)
    except MissingDependencyError as error:
        fix = f"Serve in NVIDIA's container {_container(NEWEST).image}."
        return _ENGINES(name, "failed", error.message.rstrip("."), fix)
    return _ENGINES(name, "ok", str(triton.backends / "tensorrtllm"))


def check_llmapi(found: Installed, gpus: int) -> Iterator[CheckResult]:
    """Check whether this release has a Triton model for the LLM API, and the launcher that several GPUs need."""
    try:
        llmapi_model(found.release)
    except UsageError as error:
        fix = f"Use a newer container, such as {latest_container().tag}."
        yield _LLMAPI("LLM API", "failed", error.message.rstrip("."), fix)
        return
    yield _LLMAPI("LLM API", "ok", f"release {found.release} has a Triton model for it")
    release = found.release if found.release in RELEASES else NEWEST
    if not launcher_facts(release).llmapi_launch:
        return
    place = process.program(LLMAPI_LAUNCH)
    if place is not None:
        yield _LLMAPI(LLMAPI_LAUNCH, "ok", str(place))
    elif gpus > 1:
        evidence = "not on PATH; models on several GPUs need it"
        yield _LLMAPI(LLMAPI_LAUNCH, "warning", evidence, "Install the wheel of TensorRT-LLM.")


def _container(release: str) -> Container:
    """Return the newest container of a release; for an unknown release the newest of all."""
    return (containers_of(release) if release in RELEASES else all_containers())[-1]
