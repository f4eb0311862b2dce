"""The command lines of NVIDIA's converters and of quantize.py (convert-and-build, section 1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.errors import UsageError
from trtserve.process import Command
from trtserve.specs import CALIBRATED

if TYPE_CHECKING:
    from trtserve.specs import ConvertSpec
    from trtserve.upstream.toolkit import Toolkit

_WITH_EXPERTS = ("llama", "qwen", "phi")


def needs_calibration(spec: ConvertSpec) -> bool:
    """True when the weights cannot be quantised without looking at activations."""
    return spec.quantize in CALIBRATED


def tool_command(toolkit: Toolkit, spec: ConvertSpec, architecture: str, model: Path, out: Path) -> Command:
    """What makes the checkpoint of `model` in `out`; the dtype of `spec` must be resolved.

    UsageError when the tool has no option for a wish.
    """
    if needs_calibration(spec):
        script, flags = toolkit.quantizer(), _quantize_flags(spec, model, out)
    else:
        script = toolkit.converter(architecture)
        _require_no_calibration(spec)
        flags = list(
            _gemma_flags(spec, model, out) if script.parent.name == "gemma" else _flags(script, spec, model, out)
        )
    return Command(argv=(str(toolkit.python), str(script), *flags, *spec.converter_flags))


def _quantize_flags(spec: ConvertSpec, model: Path, out: Path) -> list[str]:
    if spec.use_parallel_embedding:
        raise UsageError("quantize.py lays the embedding out by itself: --use-parallel-embedding has no place in it.")
    if spec.moe_tp_size is not None or spec.moe_ep_size is not None:
        raise UsageError(f"quantize.py, which does --quantize {spec.quantize}, cannot split experts.")
    if spec.workers is not None:
        raise UsageError("--workers belongs to convert_checkpoint.py; quantize.py has no such flag.")
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


def _require_no_calibration(spec: ConvertSpec) -> None:
    for flag, value in (("--calib-dataset", spec.calib_dataset), ("--calib-size", spec.calib_size)):
        if value is not None:
            raise UsageError(f"{flag} belongs to calibrated quantisation: --quantize {', '.join(CALIBRATED)}.")


def _flags(script: Path, spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """Flags that the converters of all families but Gemma share."""
    yield from ("--model_dir", str(model), "--output_dir", str(out), "--dtype", spec.dtype)
    yield from ("--tp_size", str(spec.tp_size), "--pp_size", str(spec.pp_size))
    for flag, value in (("--moe_tp_size", spec.moe_tp_size), ("--moe_ep_size", spec.moe_ep_size)):
        if value is None:
            continue
        if script.parent.name not in _WITH_EXPERTS:
            raise UsageError(f"{script.parent.name}/convert_checkpoint.py has no {flag}: its models have no experts.")
        yield from (flag, str(value))
    if spec.use_parallel_embedding:
        if script.parent.name == "phi":
            raise UsageError("phi/convert_checkpoint.py has no --use_parallel_embedding.")
        yield from ("--use_parallel_embedding", "--embedding_sharding_dim", str(spec.embedding_sharding_dim))
    if spec.quantize != "none":
        yield from ("--use_weight_only", "--weight_only_precision", spec.quantize)
    if spec.workers is not None:
        yield from ("--workers", str(spec.workers))


def _gemma_flags(spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """Gemma's converter has flags of its own, splits tensors only, and has no workers."""
    for flag, value in (("--pp-size", spec.pp_size), ("--workers", spec.workers)):
        if value not in (None, 1):
            raise UsageError(
                f"NVIDIA's converter of Gemma has nothing like {flag}.", hint="Leave it out, or use --converter own."
            )
    yield from ("--ckpt-type", "hf", "--model-dir", str(model), "--output-model-dir", str(out))
    yield from ("--dtype", spec.dtype, "--world-size", str(spec.tp_size))
    if spec.quantize != "none":
        yield from ("--use-weight-only-with-precision", spec.quantize)
