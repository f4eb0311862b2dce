"""TensorRT-LLM as it is installed: its version, the programs that come with it, the backend of Triton."""

from __future__ import annotations

from collections.abc import Iterator

from trtserve import process
from trtserve.doctor.findings import GPU, Finding, State
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.releases import NEWEST, RELEASES
from trtserve.releases.containers import CONTAINERS, Container, container, containers_of
from trtserve.releases.installed import BUILDER, ENGINE_REMOVED, Installed, has_engine_path, interpreter
from trtserve.releases.launcher import LLMAPI_LAUNCH, launcher_facts
from trtserve.triton.profiles import llmapi_model
from trtserve.triton.server import find_triton

_ENGINES = frozenset({"tensorrt_llm"})
_LLMAPI = frozenset({"llmapi"})


def check_installed(here: Installed | None, asked: Installed | None, *, suited: str = "") -> Finding:
    """Which version is installed; `asked` is the one of --trtllm-version, None without that option.

    `suited` is the tag of the container that the driver runs best.
    """
    if here is None:
        newer = asked is not None and not has_engine_path(asked.release)
        best = container(suited) if suited and not asked else _container(asked.release if asked else NEWEST)
        return Finding(
            group="tensorrt_llm",
            name="TensorRT-LLM",
            state="failed",
            evidence="not installed, neither beside trtllm-build on PATH nor in this Python",
            fix="Install the wheel of that release, or use its container: `--container IMAGE`. "
            f"The newest in the table, {best.tag}, has {best.tensorrt_llm}."
            if newer
            else f"Use NVIDIA's container: `--container {best.tag}` of the stages, or "
            f"docker run --gpus all -it {best.image}",
            needed_by=GPU,
        )
    tensorrt = f", TensorRT {here.tensorrt}" if here.tensorrt else ""
    differs = asked is not None and asked.version != here.version
    return Finding(
        group="tensorrt_llm",
        name="TensorRT-LLM",
        state="warning" if differs else "ok",
        evidence=f"{here.version}{tensorrt} ({here.source})",
        fix=f"--trtllm-version says {asked.version}: engines of one do not run on the other."
        if differs and asked
        else "",
        needed_by=GPU,
    )


def check_engine_path(found: Installed) -> Finding:
    """Whether this release builds and runs engines."""
    removed, older = not has_engine_path(found.release), found.release not in RELEASES
    if removed or older:
        return Finding(
            group="tensorrt_llm",
            name="engines",
            state="failed",
            evidence=ENGINE_REMOVED.format(version=found.version).rstrip(".")
            if removed
            else f"{found.version} is older than {RELEASES[0]}, the first release that trtserve knows",
            fix=f"Use --runtime llmapi, or TensorRT-LLM {NEWEST} (container {CONTAINERS[-1].tag})."
            if removed
            else f"Use a container from {CONTAINERS[0].tag} on.",
            needed_by=_ENGINES,
        )
    return Finding(
        group="tensorrt_llm", name="engines", state="ok", evidence=f"release {found.release} builds and runs them"
    )


def check_builder(found: Installed) -> Finding:
    """`trtllm-build`; the module behind it does the same where the script is not on PATH."""
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
        needed_by=_ENGINES,
    )


def check_backend() -> Finding:
    """A tritonserver that loads engines."""
    try:
        triton = find_triton(frozenset({"tensorrtllm"}), system_first=True)
    except MissingDependencyError as error:
        return Finding(
            group="tensorrt_llm",
            name="tensorrtllm backend",
            state="failed",
            evidence=error.message.rstrip("."),
            fix=f"Serve in NVIDIA's container {_container(NEWEST).image}.",
            needed_by=_ENGINES,
        )
    place = str(triton.backends / "tensorrtllm")
    return Finding(group="tensorrt_llm", name="tensorrtllm backend", state="ok", evidence=place)


def check_llmapi(found: Installed, gpus: int) -> Iterator[Finding]:
    """Whether this release has a Triton model for the LLM API, and the launcher that several GPUs take."""
    try:
        llmapi_model(found.release)
    except UsageError as error:
        yield _llmapi(
            "LLM API", "failed", error.message.rstrip("."), f"Use a newer container, such as {CONTAINERS[-1].tag}."
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
    return Finding(group="tensorrt_llm", name=name, state=state, evidence=evidence, fix=fix, needed_by=_LLMAPI)


def _container(release: str) -> Container:
    """The newest one with a release, or with the newest that there is."""
    return (containers_of(release) if release in RELEASES else CONTAINERS)[-1]
