"""The command lines of NVIDIA's converters and of quantize.py (convert-and-build, section 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.errors import UsageError
from trtserve.process import Command
from trtserve.specs import CALIBRATED

if TYPE_CHECKING:
    from trtserve.specs import ConvertSpec
    from trtserve.upstream.toolkit import Toolkit

_WITH_EXPERTS = ("llama", "qwen", "phi", "deepseek_v1", "deepseek_v2", "dbrx", "grok")


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
        script = toolkit.converter(architecture, spec.trtllm_script)
        _require_no_calibration(spec)
        flags = list(_flags_of(script.parent.name)(spec, model, out))
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


def _flags_of(family: str) -> Callable[[ConvertSpec, Path, Path], Iterator[str]]:
    """The flags of the convert_checkpoint.py in the folder `family`."""
    own = {"gemma": _gemma_flags, "recurrentgemma": _recurrentgemma_flags}
    return own.get(family, partial(_flags, family))


def _flags(family: str, spec: ConvertSpec, model: Path, out: Path) -> Iterator[str]:
    """Flags that most converters share."""
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
    """It splits tensors only, and knows little else."""
    given = {
        "--pp-size": spec.pp_size != 1,
        "--moe-tp-size": spec.moe_tp_size is not None,
        "--moe-ep-size": spec.moe_ep_size is not None,
        "--use-parallel-embedding": spec.use_parallel_embedding,
        "--quantize": spec.quantize != "none",
        "--workers": spec.workers not in (None, 1),
    }
    for flag in (flag for flag, wished in given.items() if wished):
        raise UsageError(f"recurrentgemma/convert_checkpoint.py has nothing like {flag}.", hint="Leave it out.")
    yield from ("--ckpt_type", "hf", "--model_dir", str(model), "--output_dir", str(out))
    yield from ("--dtype", spec.dtype, "--world_size", str(spec.tp_size))


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
