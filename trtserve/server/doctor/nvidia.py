"""What NVIDIA's software needs: driver, GPUs and peer access; TensorRT-LLM, PyTorch and NCCL on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from trtserve import process
from trtserve.errors import MachineError, MissingDependencyError, UsageError, counted
from trtserve.executor.vllm.installation import require_installation
from trtserve.host.gpus import NVIDIA_SMI, VISIBLE_DEVICES, Device, Gpus, on_the_bus, shown_devices
from trtserve.host.machine import format_bytes, install_command
from trtserve.nvidia.gpu_findings import architecture_words, kernels_fix
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.containers import (
    Container,
    all_containers,
    container,
    containers_of,
    cuda_of,
    driver_of,
    driver_support,
    latest_container,
    newest_container,
    newest_cuda,
    runs_on,
)
from trtserve.nvidia.releases.converters import LLMAPI_LAUNCH, launcher_facts
from trtserve.nvidia.releases.installed import BUILDER, Installed, has_engine_path, interpreter, require_engine_path
from trtserve.process import Command, run
from trtserve.repository.profiles import llmapi_model
from trtserve.server.doctor import ENGINES, GPU, LLMAPI, PYTORCH, TENSORRT_LLM, VLLM, CheckResult, State, report_for
from trtserve.server.doctor.system import MARK, found, run_two_ranks
from trtserve.server.triton.installation import find_triton

# More memory than the driver and a display use.
_OWN_USE = 2**30
_TIMEOUT = 60.0
# A process of its own: PyTorch takes seconds to load, and a broken driver may end it.
_LOOK = f"""\
import json, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    import torch
    count = torch.cuda.device_count() if torch.version.cuda else 0
    problem = ''
    try:
        for number in range(count):
            torch.ones(1, device=f'cuda:{{number}}').add_(1).item()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
nccl = '.'.join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
problem = problem or ('' if count else ' '.join(str(each.message) for each in told).strip())
print({MARK!r} + json.dumps(dict(torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl, gpus=count,
    problem=problem)))
"""
_HELLO = f"""\
import json, torch
from trtserve.executor.torch.ranks import join
ranks = join(2, 1, 'cuda', None)
total = ranks.all_reduce(torch.full((4,), ranks.rank + 1.0, device=ranks.device))
print({MARK!r} + json.dumps(dict(rank=ranks.rank, device=str(ranks.device), sum=float(total.sum()))), flush=True)
"""
_SUM = 4 * (1.0 + 2.0)

_GPU = report_for("gpu", GPU)
_TENSORRT_LLM = report_for("gpu", TENSORRT_LLM)
_PYTORCH = report_for("gpu", PYTORCH)
_VLLM = report_for("tools", VLLM)
_NCCL = report_for("mpi", PYTORCH)
_ANY = report_for("tensorrt_llm", TENSORRT_LLM)
_ENGINES = report_for("tensorrt_llm", ENGINES)
_LLMAPI = report_for("tensorrt_llm", LLMAPI)


def check_no_driver(error: MachineError) -> CheckResult:
    found = on_the_bus()
    bus = f"; {counted(found, 'NVIDIA GPU') if found else 'no NVIDIA GPU'} on the PCI bus"
    return _GPU("driver", "failed", f"none ({error.message}){bus}", error.hint or "")


def check_driver(gpus: Gpus) -> CheckResult:
    if not gpus.devices:
        return _GPU(
            "driver",
            "failed",
            f"{gpus.driver.version or NVIDIA_SMI} shows no GPU",
            "In a container, start it with --gpus all; otherwise see what `nvidia-smi` reports.",
        )
    derived = "" if gpus.driver.cuda else " (derived from its version)"
    return _GPU("driver", "ok", f"{gpus.driver.version}, supports CUDA {_dotted(newest_cuda(gpus.driver))}{derived}")


def check_visible(gpus: Gpus) -> Iterator[CheckResult]:
    """Check CUDA_VISIBLE_DEVICES, if it is set: CUDA programs see only the GPUs that it lists."""
    text = os.environ.get(VISIBLE_DEVICES)
    if text is None:
        return
    shown = shown_devices(text, [device.uuid for device in gpus.devices])
    if shown is None:
        yield _GPU(VISIBLE_DEVICES, "ok", f"{text}: partitions, not checked")
        return
    count = f"{len(shown.devices)} of {counted(len(gpus.devices), 'GPU')}"
    fix = f"Unset {VISIBLE_DEVICES}, or correct it."
    if not shown.devices:
        why = f"{shown.stopped}, so no GPU is left" if shown.stopped else "no GPU is left"
        yield _GPU(VISIBLE_DEVICES, "failed", f"{text!r}: {why}", fix)
    elif shown.stopped:
        yield _GPU(VISIBLE_DEVICES, "warning", f"{text!r}: {count}, because {shown.stopped}", fix)
    else:
        yield _GPU(VISIBLE_DEVICES, "ok", f"{text}: {count}")


def check_device(device: Device) -> CheckResult:
    """Describe one GPU, and warn about conditions that would slow down or break a server."""
    facts = [f"{device.name}, compute capability {device.capability}"]
    facts.append(f"{format_bytes(device.free)} free of {format_bytes(device.memory)}")
    modes = (("MIG", device.mig), ("persistence mode", device.persistence))
    facts += [f"{name} {'on' if value else 'off'}" for name, value in modes if value is not None]
    facts += [counted(device.errors, "uncorrected memory error")] if device.errors is not None else []
    problems = list(_problems(device))
    state: State = "warning" if problems else "ok"
    return _GPU(f"GPU {device.index}", state, ", ".join(facts), " ".join(problems))


def _problems(device: Device) -> Iterator[str]:
    if device.used > max(_OWN_USE, device.memory // 20):
        yield f"Other programs hold {format_bytes(device.used)}: end them (`nvidia-smi` lists them)."
    if device.mig:
        yield "MIG splits it: a rank gets one partition, and ranks cannot exchange tensors between partitions."
    if device.errors:
        yield "Its memory has errors: reset the GPU, and replace it if they come back."


def check_peers(gpus: Gpus) -> Iterator[CheckResult]:
    """Check whether GPUs can read each other's memory; without that, tensor parallelism goes through the host."""
    count = len(gpus.devices)
    if count < 2 or gpus.apart is None:
        return
    if gpus.apart:
        pairs = ", ".join(f"{one}–{other}" for one, other in gpus.apart)
        yield _GPU(
            "peer access",
            "warning",
            f"none between GPUs {pairs}",
            "Tensor parallelism between them is slow: choose others with --gpus; in a VM, check IOMMU and ACS.",
        )
    else:
        yield _GPU("peer access", "ok", "between both GPUs" if count == 2 else f"between all {count} GPUs")


def check_cuda(gpus: Gpus, found: Installed | None) -> CheckResult:
    """Compare the driver with the CUDA of the TensorRT-LLM that should run here."""
    if found is None:
        return _TENSORRT_LLM("CUDA", "ok", f"this driver runs {_runs(gpus)}")
    exact = [each for each in all_containers() if each.tensorrt_llm == found.version]
    same = [each for each in all_containers() if each.release == found.release]
    made_in = next(reversed(exact or same), None)
    if made_in is None:
        return _TENSORRT_LLM(
            "CUDA",
            "warning",
            f"unknown for TensorRT-LLM {found.version}, which is not in any known container",
            "See its release notes.",
        )
    support = driver_support(gpus.driver, made_in)
    needs = f"TensorRT-LLM {found.version} is built with CUDA {_dotted(cuda_of(made_in))}"
    speaks = f"driver {gpus.driver.version} supports CUDA {_dotted(newest_cuda(gpus.driver))}"
    if support == "full":
        return _TENSORRT_LLM("CUDA", "ok", f"{speaks}; {needs}")
    if support == "minor":
        return _TENSORRT_LLM("CUDA", "ok", f"{speaks}; {needs}, which runs thanks to minor version compatibility")
    return _TENSORRT_LLM(
        "CUDA",
        "failed",
        f"{speaks}; {needs}",
        f"Install driver {driver_of(made_in)} or newer, or use an older container: this driver runs {_runs(gpus)}.",
    )


def check_kernels(gpus: Gpus, found: Installed | None) -> CheckResult:
    """Check whether the TensorRT-LLM that should run here, else the newest one, has kernels for these GPUs."""
    capabilities = sorted({device.capability for device in gpus.devices})
    release = found.release if found else latest_container().release
    known = {capability: runs_on(release, capability) for capability in capabilities}
    named = ", ".join(architecture_words(capability) for capability in capabilities)
    subject = f"TensorRT-LLM {found.version if found else release}"
    lacking = [capability for capability, runs in known.items() if runs is False]
    if lacking:
        return _TENSORRT_LLM(
            "kernels",
            "failed",
            f"{subject} has no kernels for {architecture_words(lacking[0])}",
            kernels_fix(lacking[0]),
        )
    if None in known.values():
        return _TENSORRT_LLM(
            "kernels", "warning", f"unknown whether {subject} has kernels for {named}", "See its release notes."
        )
    mixed = len({device.name for device in gpus.devices}) > 1
    return _TENSORRT_LLM(
        "kernels",
        "warning" if mixed else "ok",
        f"{subject} has kernels for {named}",
        "The GPUs differ, and an engine runs only on the kind that it was built on: choose with --gpus."
        if mixed
        else "",
    )


def suited_container(gpus: Gpus) -> str:
    """Return the tag of the newest container that runs here, preferably with full driver support, or ""."""
    full, minor = _newest(gpus)
    return full or minor


def _newest(gpus: Gpus) -> tuple[str, str]:
    """Return the newest containers for the first GPU, fully supported by the driver and by minor compatibility."""

    def fits(release: str) -> bool:
        return runs_on(release, gpus.devices[0].capability) is not False

    return newest_container(gpus.driver, "full", fits=fits), newest_container(gpus.driver, "minor", fits=fits)


def _runs(gpus: Gpus) -> str:
    """Describe the newest containers that the driver runs."""
    full, minor = _newest(gpus)
    words = [f"container {full} (TensorRT-LLM {container(full).tensorrt_llm})"] if full else []
    if minor > full:
        words.append(f"{minor} ({container(minor).tensorrt_llm}) by minor version compatibility")
    return ", ".join(words) or f"none of the containers {all_containers()[0].tag} … {latest_container().tag}"


def _dotted(cuda: tuple[int, int]) -> str:
    return f"{cuda[0]}.{cuda[1]}"


def check_pytorch() -> CheckResult:
    """Load PyTorch in another process, and calculate on every GPU that it sees."""
    if find_spec("torch") is None:
        return _PYTORCH("PyTorch", "failed", "not installed", install_command("cuda"))
    output = run(Command(argv=(sys.executable, "-c", _LOOK)), timeout=_TIMEOUT).stdout
    (seen,) = found(output)
    if seen["cuda"] is None:
        fix = "Install a build of PyTorch for CUDA: https://pytorch.org/get-started/locally"
        return _PYTORCH("PyTorch", "failed", f"{seen['torch']} is built without CUDA", fix)
    what = f"{seen['torch']}, CUDA {seen['cuda']}, NCCL {seen['nccl']}"
    if not seen["gpus"] or seen["problem"]:
        reason = seen["problem"] or "the driver shows none"
        fix = "Install a driver for that CUDA, or a PyTorch for the CUDA of this driver."
        return _PYTORCH("PyTorch", "failed", f"{what}: no usable GPU: {reason}", fix)
    return _PYTORCH("PyTorch", "ok", f"{what}, calculates on {counted(seen['gpus'], 'GPU')}")


def check_vllm() -> CheckResult:
    """Look at the vLLM that `start` would use, and calculate with its PyTorch on every GPU; vLLM is not loaded."""
    try:
        found_here = require_installation()
    except MissingDependencyError as error:
        return _VLLM("vLLM", "failed", error.message.rstrip("."), error.hint or "")
    ended = run(Command(argv=(str(found_here.python), "-c", _LOOK), cwd=Path("/")), timeout=_TIMEOUT)
    what = f"{found_here.version} of {found_here.python}"
    if (seen := next(iter(found(ended.stdout)), None)) is None:
        reason = (ended.stderr.strip().splitlines() or ["no answer"])[-1]
        return _VLLM("vLLM", "failed", f"{what}: its PyTorch does not load: {reason}", "Install vLLM again.")
    if found_here.on_cpu:
        return _VLLM("vLLM", "ok", f"{what}, for CPUs, PyTorch {seen['torch']}")
    what = f"{what}, PyTorch {seen['torch']}, CUDA {seen['cuda']}"
    if not seen["gpus"] or seen["problem"]:
        fix = "Install a driver for that CUDA, or a vLLM for the CUDA of this driver."
        return _VLLM("vLLM", "failed", f"{what}: no usable GPU: {seen['problem'] or 'the driver shows none'}", fix)
    return _VLLM("vLLM", "ok", f"{what}, calculates on {counted(seen['gpus'], 'GPU')}")


def check_ranks() -> CheckResult:
    """Start two ranks as `start` does; each takes a GPU, and NCCL adds a tensor of both."""
    if find_spec("torch") is None:
        return _NCCL("NCCL", "failed", "PyTorch is not installed", install_command("cuda"))
    ended = run_two_ranks(_HELLO, bound=False)
    ranks = {each["rank"]: each for each in found(ended.output) if each["sum"] == _SUM}
    if len(ranks) == 2:
        devices = " and ".join(ranks[rank]["device"] for rank in sorted(ranks))
        return _NCCL("NCCL", "ok", f"two ranks added a tensor on {devices}")
    fix = "Start it with NCCL_DEBUG=INFO to see why: NCCL_DEBUG=INFO trtserve doctor"
    return _NCCL("NCCL", "failed", f"two ranks: {ended.problem}", fix)


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
