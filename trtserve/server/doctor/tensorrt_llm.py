"""The installed TensorRT-LLM: its version, its programs, and Triton's backend for it."""

from __future__ import annotations

from collections.abc import Iterator

from trtserve import process
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.containers import (
    Container,
    all_containers,
    container,
    containers_of,
    latest_container,
)
from trtserve.nvidia.releases.installed import (
    BUILDER,
    Installed,
    has_engine_path,
    interpreter,
    require_engine_path,
)
from trtserve.nvidia.releases.launcher import LLMAPI_LAUNCH, launcher_facts
from trtserve.repository.profiles import llmapi_model
from trtserve.server.doctor.findings import (
    ENGINES,
    LLMAPI,
    TENSORRT_LLM,
    Finding,
    State,
)
from trtserve.server.triton.installation import find_triton


def check_installed(here: Installed | None, asked: Installed | None, *, suited: str = "") -> Finding:
    """Check which version is installed; `asked` is the value of --trtllm-version, or None.

    `suited` is the tag of the container that suits the driver best.
    """
    if here is None:
        newer = asked is not None and not has_engine_path(asked.release)
        best = container(suited) if suited and not asked else _container(asked.release if asked else NEWEST)
        return Finding(
            group="tensorrt_llm",
            name="TensorRT-LLM",
            state="failed",
            evidence="not installed, neither next to trtllm-build on PATH nor in this Python",
            fix="Install the wheel of that release, or use its container: `--container IMAGE`. "
            f"The newest known container, {best.tag}, has {best.tensorrt_llm}."
            if newer
            else f"Use NVIDIA's container: add `--container {best.tag}` to the commands, or run "
            f"docker run --gpus all -it {best.image}",
            needed_by=TENSORRT_LLM,
        )
    tensorrt = f", TensorRT {here.tensorrt}" if here.tensorrt else ""
    differs = asked is not None and asked.version != here.version
    return Finding(
        group="tensorrt_llm",
        name="TensorRT-LLM",
        state="warning" if differs else "ok",
        evidence=f"{here.version}{tensorrt} ({here.source})",
        fix=f"--trtllm-version is {asked.version}: engines of one version do not run on the other."
        if differs and asked
        else "",
        needed_by=TENSORRT_LLM,
    )


def check_engine_path(found: Installed) -> Finding:
    """Check whether this release builds and runs engines."""
    try:
        require_engine_path(found.version)
    except UsageError as error:
        return Finding(
            group="tensorrt_llm",
            name="engines",
            state="failed",
            evidence=error.message.rstrip("."),
            fix=str(error.hint),
            needed_by=ENGINES,
        )
    return Finding(
        group="tensorrt_llm", name="engines", state="ok", evidence=f"release {found.release} builds and runs them"
    )


def check_builder(found: Installed) -> Finding:
    """Find `trtllm-build`; if the script is not on PATH, its module does the same."""
    place = process.program(BUILDER)
    if place is not None:
        return Finding(group="tensorrt_llm", name=BUILDER, state="ok", evidence=str(place))
    if found.environment is not None:
        evidence = f"not on PATH; {interpreter(found)} -m tensorrt_llm.commands.build does the same"
        return Finding(group="tensorrt_llm", name=BUILDER, state="ok", evidence=evidence)
    return Finding(
        group="tensorrt_llm",
        name=BUILDER,
        state="failed",
        evidence="not on PATH",
        fix=f"Run in NVIDIA's container {_container(found.release).image}.",
        needed_by=ENGINES,
    )


def check_backend() -> Finding:
    """Find a tritonserver that can load engines."""
    try:
        triton = find_triton(frozenset({"tensorrtllm"}), system_first=True)
    except MissingDependencyError as error:
        return Finding(
            group="tensorrt_llm",
            name="tensorrtllm backend",
            state="failed",
            evidence=error.message.rstrip("."),
            fix=f"Serve in NVIDIA's container {_container(NEWEST).image}.",
            needed_by=ENGINES,
        )
    place = str(triton.backends / "tensorrtllm")
    return Finding(group="tensorrt_llm", name="tensorrtllm backend", state="ok", evidence=place)


def check_llmapi(found: Installed, gpus: int) -> Iterator[Finding]:
    """Check whether this release has a Triton model for the LLM API, and the launcher that several GPUs need."""
    try:
        llmapi_model(found.release)
    except UsageError as error:
        yield _llmapi(
            "LLM API",
            "failed",
            error.message.rstrip("."),
            f"Use a newer container, such as {latest_container().tag}.",
        )
        return
    yield _llmapi("LLM API", "ok", f"release {found.release} has a Triton model for it")
    release = found.release if found.release in RELEASES else NEWEST
    if not launcher_facts(release).llmapi_launch:
        return
    place = process.program(LLMAPI_LAUNCH)
    if place is not None:
        yield _llmapi(LLMAPI_LAUNCH, "ok", str(place))
    elif gpus > 1:
        yield _llmapi(
            LLMAPI_LAUNCH,
            "warning",
            "not on PATH; models on several GPUs need it",
            "Install the wheel of TensorRT-LLM.",
        )


def _llmapi(name: str, state: State, evidence: str, fix: str = "") -> Finding:
    return Finding(group="tensorrt_llm", name=name, state=state, evidence=evidence, fix=fix, needed_by=LLMAPI)


def _container(release: str) -> Container:
    """Return the newest container of a release; for an unknown release the newest of all."""
    return (containers_of(release) if release in RELEASES else all_containers())[-1]
