"""Check that an engine to be built here fits this machine's GPUs, before anything is converted or built."""

from __future__ import annotations

from trtserve.errors import MemoryLimitError, UnsupportedModelError
from trtserve.executor.runtimes import RUNTIMES, EnginePlan
from trtserve.host.gpus import list_gpus
from trtserve.host.machine import format_bytes
from trtserve.pipeline.planner.gpu_fit import fit_gpu, fitting_step, smallest_fit
from trtserve.pipeline.planner.gpus import Gpu
from trtserve.progress import SILENT, Progress
from trtserve.specs import BuildSpec


def require_gpu_memory(engine: EnginePlan, spec: BuildSpec, progress: Progress = SILENT) -> None:
    """Raise MemoryLimitError when the weights of one rank exceed the largest GPU here.

    That much is certain. Everything beyond the weights is an estimate, so a cache too small for one sequence is only
    reported. Engines that stream weights from the host and unknown families are not checked.
    """
    if not engine.needs_gpu or "--weight_streaming" in spec.builder_flags:
        return
    memory = max((gpu.memory for gpu in list_gpus()), default=0)
    if not memory:
        return
    gpu = Gpu(name="this machine's GPU", memory=memory)
    try:
        fit = fit_gpu(engine.config, spec, gpu)
    except UnsupportedModelError:
        return
    if fit.weights > memory:
        ranks = fit.tp_size * fit.pp_size
        raise MemoryLimitError(
            f"{'The engine' if ranks == 1 else f'Each of {ranks} ranks'} has {format_bytes(fit.weights)} of weights; "
            f"the largest GPU of this machine has {format_bytes(memory)} of memory.",
            hint=f"{_narrower(engine, spec, gpu)} `trtserve plan` shows the details.",
        )
    if not fit.fits:
        step = fitting_step(engine.config, spec, gpu)
        progress.step(
            f"An estimate: no sequence of {fit.limits.max_seq_len} tokens fits this machine's GPU next to "
            f"{format_bytes(fit.weights)} of weights and {format_bytes(fit.activations)} of activations. "
            + (f"{step} would fit." if step else _narrower(engine, spec, gpu))
        )


def _narrower(engine: EnginePlan, spec: BuildSpec, gpu: Gpu) -> str:
    """Name conversion options whose ranks are small enough."""
    smallest = smallest_fit(engine.config, spec, gpu)
    ways = [f"--tp-size {smallest.tp_size} --pp-size {smallest.pp_size} would fit by estimate"] if smallest else []
    if engine.config.quantization.algorithm is None and (narrower := RUNTIMES[engine.runtime].narrower):
        ways.append(f"{narrower} makes the weights smaller")
    return f"Convert with one of: {', '.join(ways)}." if ways else "Use a GPU with more memory, or a smaller model."
