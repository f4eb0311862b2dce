"""Whether an engine that is to be built here will fit this machine's GPUs, before anything is converted or built."""

from __future__ import annotations

from trtserve.architectures.checkpoint import with_defaults
from trtserve.architectures.quantized import quant_algo
from trtserve.capacity.fitting import fit_gpu, fitting_step, smallest_fit
from trtserve.capacity.gpus import Gpu
from trtserve.errors import MemoryLimitError, UnsupportedModelError
from trtserve.launch.gpus import gpu_memory
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.runtimes import EnginePlan, tensorrt_llm
from trtserve.runtimes.base import CheckpointConfig
from trtserve.specs import BuildSpec


def require_gpu_room(engine: EnginePlan, spec: BuildSpec, progress: Progress = SILENT) -> None:
    """MemoryLimitError when the weights of one rank are larger than the largest GPU here.

    That is certain; what comes on top of the weights is an estimate, so that a cache without room for one sequence is
    only said. Engines that stream their weights from the host, and families that are not known here, are not judged.
    """
    if engine.runtime != tensorrt_llm.NAME or "--weight_streaming" in spec.builder_flags:
        return
    memory = max((gpu.total for gpu in gpu_memory()), default=0)
    if not memory:
        return
    gpu = Gpu(name="this machine's GPU", memory=memory)
    try:
        # A checkpoint of NVIDIA's converter leaves out what follows from other sizes.
        config = with_defaults(dict(engine.config))
        fit = fit_gpu(config, spec, gpu)
    except UnsupportedModelError:
        return
    if fit.weights > memory:
        ranks = fit.tp_size * fit.pp_size
        raise MemoryLimitError(
            f"{'The engine' if ranks == 1 else f'Each of {ranks} ranks'} has {gibibytes(fit.weights)} of weights, "
            f"and the largest GPU of this machine {gibibytes(memory)} of memory.",
            hint=f"{_narrower(config, spec, gpu)} `trtserve plan` has the whole need.",
        )
    if not fit.fits:
        step = fitting_step(config, spec, gpu)
        progress.step(
            f"By estimate no sequence of {fit.limits.max_seq_len} tokens fits this machine's GPU beside "
            f"{gibibytes(fit.weights)} of weights and {gibibytes(fit.activations)} of activations. "
            + (f"{step} would fit." if step else _narrower(config, spec, gpu))
        )


def _narrower(config: CheckpointConfig, spec: BuildSpec, gpu: Gpu) -> str:
    """Options of a conversion whose ranks are small enough."""
    smallest = smallest_fit(config, spec, gpu)
    ways = [f"--tp-size {smallest.tp_size} --pp-size {smallest.pp_size} would fit by estimate"] if smallest else []
    if quant_algo(config) is None:
        ways.append("--quantize int8 or int4 makes the weights smaller")
    return f"Convert otherwise: {', '.join(ways)}." if ways else "Take a GPU with more memory, or a smaller model."
