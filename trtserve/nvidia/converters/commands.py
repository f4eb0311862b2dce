"""The command lines of NVIDIA's converters and of quantize.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.errors import UsageError
from trtserve.process import Command
from trtserve.specs import CALIBRATED

if TYPE_CHECKING:
    from trtserve.nvidia.converters.toolkit import Toolkit
    from trtserve.specs import ConvertSpec

# Folders of the converters whose models have experts.
_WITH_EXPERTS = ("llama", "qwen", "phi", "deepseek_v1", "deepseek_v2", "dbrx", "grok")


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


def _quantize_flags(spec: ConvertSpec, model: Path, out: Path) -> list[str]:
    if spec.use_parallel_embedding:
        raise UsageError(
            "quantize.py chooses the layout of the embedding; it has no option for --use-parallel-embedding.",
            hint="Leave it out.",
        )
    if spec.moe_tp_size is not None or spec.moe_ep_size is not None:
        raise UsageError(
            f"--quantize {spec.quantize} runs quantize.py, which cannot split experts.",
            hint="Leave --moe-tp-size and --moe-ep-size out.",
        )
    if spec.workers is not None:
        raise UsageError(
            f"--quantize {spec.quantize} runs quantize.py, which has no option for --workers.", hint="Leave it out."
        )
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
    given = {
        "--pp-size": spec.pp_size != 1,
        "--moe-tp-size": spec.moe_tp_size is not None,
        "--moe-ep-size": spec.moe_ep_size is not None,
        "--use-parallel-embedding": spec.use_parallel_embedding,
        "--quantize": spec.quantize != "none",
        "--workers": spec.workers not in (None, 1),
    }
    unsupported = [flag for flag, is_given in given.items() if is_given]
    if unsupported:
        raise UsageError(
            f"recurrentgemma/convert_checkpoint.py has no option for {', '.join(unsupported)}.", hint="Leave it out."
        )
    yield from ("--ckpt_type", "hf", "--model_dir", str(model), "--output_dir", str(out))
    yield from ("--dtype", spec.dtype, "--world_size", str(spec.tp_size))


def _gemma_flags(spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """Gemma's converter has its own flags, only tensor parallelism, and no workers."""
    for flag, value in (("--pp-size", spec.pp_size), ("--workers", spec.workers)):
        if value not in (None, 1):
            raise UsageError(
                f"NVIDIA's converter of Gemma has no option for {flag}.", hint="Leave it out, or use --converter own."
            )
    yield from ("--ckpt-type", "hf", "--model-dir", str(model), "--output-model-dir", str(out))
    yield from ("--dtype", spec.dtype, "--world-size", str(spec.tp_size))
    if spec.quantize != "none":
        yield from ("--use-weight-only-with-precision", spec.quantize)
