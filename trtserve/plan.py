"""What a model takes, before anything starts: bytes, memory, disk and time of every stage, and what fits where.

Config and headers of the safetensors files are all that is read; those of the hub come by range request.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trtserve.architectures.source import read_hf_config
from trtserve.artifacts import Manifest, Model, looks_like
from trtserve.capacity.fitting import (
    FIRST_BFLOAT16,
    FIRST_FP8,
    GpuFit,
    fit_gpu,
    fitting_step,
    shorter_fit,
    smallest_fit,
    unable,
)
from trtserve.capacity.gpu_notes import gpu_notes, release_note
from trtserve.capacity.gpus import Gpu
from trtserve.capacity.needs import build_addresses, import_memory
from trtserve.capacity.own_gpus import own_gpu
from trtserve.capacity.rates import Runs, expected_seconds, read_rates
from trtserve.capacity.room import memory_room
from trtserve.capacity.serving import fitting_tokens
from trtserve.capacity.wishes import Need, Wish, advice, need_of
from trtserve.convert import Plan as Conversion
from trtserve.convert import checkpoint_config, plan_conversion
from trtserve.errors import MemoryLimitError, TrtserveError, UnsupportedModelError, UsageError
from trtserve.import_ import ModelPlan, missing_bytes, plan_model
from trtserve.import_.headers import outline_model
from trtserve.import_.plan import is_weights
from trtserve.machine import free_disk
from trtserve.progress import SILENT, Progress
from trtserve.runtimes import automatic_runtime
from trtserve.runtimes.rank_weights import rank_weights
from trtserve.specs import CALIBRATED, BuildSpec, ConvertSpec
from trtserve.store import Store

StageName = Literal["import", "convert", "build", "repo", "start"]

_MANIFESTS = 64 * 2**10
_REPOSITORY = 2**20


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """Bytes of disk that a stage adds and of memory at its peak; None where this machine does not carry it out.

    `seconds` follow from runs measured here; None before the first.
    """

    stage: StageName
    disk: int | None
    memory: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class MachineFit:
    """This machine: free bytes, and the tokens of KV cache that they hold beside engine and server.

    `sequences` are those of `max_seq_len` tokens; `hint` says what would fit when nothing does.
    """

    free_memory: int
    free_disk: int
    max_seq_len: int
    tokens: int
    fits: bool
    hint: str | None

    @property
    def sequences(self) -> int:
        """Longest sequences that the cache holds at once."""
        return self.tokens // self.max_seq_len


@dataclass(frozen=True, kw_only=True)
class GpuAnswer:
    """The GPUs that were asked for, the smallest tp × pp that fits them, and the longest sequence that would.

    `steps` are options of a smaller batch or fewer tokens at a time with which they would do.

    `problem` is why GPUs of this kind cannot run the model, whatever fits, and nothing smaller is looked for then;
    `note` what a conversion for them needs, and which releases have kernels for them.
    """

    asked: GpuFit
    smallest: GpuFit | None
    longest: int | None
    steps: str | None = None
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    """Everything that is known of a model beforehand; sizes are bytes.

    `source_bytes` are those of its tensors, `pull_bytes` those that are not on this machine yet. `engine_bytes` and
    `kv_bytes_per_token` are of the whole engine on this machine, None where the plan is for GPUs, `machine` likewise;
    `problem` is why this machine cannot build it, `converter` what makes the checkpoint where we do not.
    """

    name: str
    source: str
    architecture: str
    parameters: int
    source_bytes: int
    pull_bytes: int
    dtype: str
    quantization: str | None
    precision: str | None
    engine_bytes: int | None
    kv_bytes_per_token: int | None
    stages: tuple[StageNeed, ...]
    machine: MachineFit | None
    gpu: GpuAnswer | None
    problem: str | None = None
    converter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: the options of the stages, an explicit size of the KV cache in tokens, and a GPU, if any."""

    convert: ConvertSpec
    build: BuildSpec
    kv_tokens: int | None = None
    gpu: Gpu | None = None


def plan_needs(
    source: str,
    question: Question,
    *,
    store: Store | None = None,
    token: str | None = None,
    progress: Progress = SILENT,
) -> ModelNeed:
    """Plan a model: a folder, the name of an import, an alias, or a hub id; no weights are read or pulled.

    Raises what planning an import and a conversion raise, for models that cannot be converted, and UsageError for
    settings that the model does not allow.
    """
    if question.kv_tokens is not None and question.kv_tokens < 1:
        raise UsageError(f"--max-tokens-in-paged-kv-cache is {question.kv_tokens}; it must be at least 1.")
    store, question = store or Store(), _with_runtime(question)
    location, name = _location(source, store, progress)
    model = plan_model(location, name=name, store=store, token=token, own_tokenizer=False, progress=progress)
    with tempfile.TemporaryDirectory(prefix="trtserve-plan-") as folder:
        readable = _readable(model, Path(folder), token, progress)
        conversion = _conversion(readable, question.convert, headers_only=model.folder is None)
    missing = missing_bytes(model, store=store)
    need, problem = _engine_need(model, question)
    runs = read_rates(store)
    serving = question.gpu is None and need is not None
    return ModelNeed(
        name=model.name,
        source=model.source.location,
        architecture=model.architecture,
        parameters=conversion.parameters,
        source_bytes=conversion.source_bytes,
        pull_bytes=missing,
        dtype=conversion.spec.dtype,
        quantization=conversion.config["quantization"]["quant_algo"],
        precision=need.engine.precision if serving and need else None,
        engine_bytes=need.engine.disk_bytes if serving and need else None,
        kv_bytes_per_token=need.engine.kv_bytes_per_token if serving and need else None,
        stages=_stages(model, question, conversion, missing, need if serving else None, runs),
        machine=_machine(model, question, need, store) if serving and need else None,
        gpu=_gpu_answer(conversion, question),
        problem=problem if question.gpu is None else None,
        converter=_converter(question.convert),
    )


def _converter(spec: ConvertSpec) -> str | None:
    if spec.quantize in CALIBRATED:
        return "NVIDIA ModelOpt, on a machine with an NVIDIA GPU"
    return "NVIDIA's convert_checkpoint.py, which TensorRT-LLM brings" if spec.upstream else None


def require_fit(need: ModelNeed) -> None:
    """UnsupportedModelError when what was planned for cannot run the model, MemoryLimitError when it does not fit."""
    machine, gpu = need.machine, need.gpu
    problem = need.problem if gpu is None else gpu.problem
    if problem:
        where = "this machine's runtime" if gpu is None else gpu.asked.gpu.name
        raise UnsupportedModelError(f"{where} cannot run {need.name}: {problem}", hint=_other_precision(need))
    if machine is not None and not machine.fits:
        raise MemoryLimitError(f"{need.name} does not fit the free memory of this machine.", hint=machine.hint)
    if gpu is not None and not gpu.asked.fits:
        asked = gpu.asked
        raise MemoryLimitError(
            f"{need.name} does not fit {asked.gpu.name} with tp {asked.tp_size} × pp {asked.pp_size} and sequences of "
            f"{asked.limits.max_seq_len} tokens.",
            hint=_gpu_advice(gpu),
        )


def _other_precision(need: ModelNeed) -> str | None:
    """The options of a precision that the GPU has; None where precision is not what it lacks."""
    sm = need.gpu.asked.gpu.sm if need.gpu else None
    if sm is None:
        return None
    options = ["--dtype float16"] if need.dtype == "bfloat16" and sm < FIRST_BFLOAT16 else []
    if (need.quantization or "").startswith("FP8") and sm < FIRST_FP8:
        options.append("--quantize int8")
    return f"Plan with {' '.join(options)}." if options else None


def _gpu_advice(answer: GpuAnswer) -> str:
    smaller = [answer.steps] if answer.steps else []
    smaller += [f"--max-seq-len {answer.longest}"] if answer.longest else []
    if answer.smallest is not None:
        smaller.append(f"--tp-size {answer.smallest.tp_size} --pp-size {answer.smallest.pp_size}")
    return f"{' or '.join(smaller)} would fit." if smaller else "Take a larger GPU, a smaller model, or --quantize."


def _with_runtime(question: Question) -> Question:
    """The runtime and the GPU of a plan: without the name of one, what this machine has; UsageError for a wish of both.

    What is only for CPUs decides for them.
    """
    if question.gpu is not None:
        if question.build.runtime == "openvino" or question.build.kv_precision != "auto":
            wish = "--runtime openvino" if question.build.runtime == "openvino" else "--kv-precision"
            raise UsageError(
                f"{wish} is for this machine's CPU, and a GPU is named.", hint=f"Leave out {wish} or --gpu."
            )
        return question
    runtime: str = question.build.runtime
    if runtime == "auto":
        runtime = "openvino" if question.build.kv_precision != "auto" else automatic_runtime()[0]
    if runtime == "openvino":
        return replace(question, build=replace(question.build, runtime="openvino"))
    gpu = own_gpu(question.convert.tp_size * question.convert.pp_size)
    if gpu is None:
        raise UsageError(
            f"The runtime {runtime} runs on NVIDIA GPUs; no GPU is named, and nvidia-smi finds none here.",
            hint="Say for which one to plan: --gpu h100-80gb, or --gpu-memory 80GB; --runtime openvino is for CPUs.",
        )
    return replace(question, gpu=gpu)


def _location(source: str, store: Store, progress: Progress) -> tuple[str, str | None]:
    """Folder and name of a model that was imported under this name; anything else as it was given, without a name.

    A folder of a model comes before a name of the same spelling, as for the other commands.
    """
    for record in store.recorded():
        if record.name == source and not looks_like(Model, Path(source)):
            return record.model, record.name
        if record.name == source:
            progress.warn(
                f"The folder {Path(source).absolute()} is used for {source}; {record.model} has that name too."
            )
            break
    return source, None


def _readable(model: ModelPlan, folder: Path, token: str | None, progress: Progress) -> Model:
    """A folder with the model's config and headers: its own where it is on this machine."""
    manifest: Manifest = model.manifest()
    if model.folder is not None:
        return Model(path=model.folder, manifest=manifest)
    outline_model(model, folder, token=token, progress=progress)
    return Model(path=folder, manifest=manifest)


def _conversion(model: Model, spec: ConvertSpec, *, headers_only: bool) -> Conversion:
    """What our own converter reads; of one that NVIDIA's tools carry out, the sizes that its checkpoint will have."""
    if not spec.upstream:
        return plan_conversion(model, spec, headers_only=headers_only)
    config = checkpoint_config(read_hf_config(model.path), spec)
    plain = plan_conversion(model, replace(spec, quantize="none"), headers_only=headers_only)
    ranks = spec.tp_size * spec.pp_size
    return replace(plain, config=config, sizes=[rank_weights(config).loaded] * ranks)


def _wish(model: ModelPlan, question: Question) -> Wish:
    tokenizer = next((file.size for file in model.files if file.name == "tokenizer.json"), 0)
    return Wish(
        hf=model.config,
        convert=question.convert,
        build=question.build,
        kv_tokens=question.kv_tokens,
        tokenizer_bytes=tokenizer,
    )


def _engine_need(model: ModelPlan, question: Question) -> tuple[Need | None, str | None]:
    """None with the reason when this machine's runtime cannot build the model; a plan for GPUs does not ask it."""
    if question.gpu is not None:
        return None, None
    try:
        return need_of(_wish(model, question)), None
    except TrtserveError as error:
        if isinstance(error, UsageError):
            raise
        return None, error.message


def _stages(
    model: ModelPlan, question: Question, conversion: Conversion, missing: int, need: Need | None, runs: Runs
) -> tuple[StageNeed, ...]:
    ours = not question.convert.upstream
    convert = StageNeed(
        stage="convert",
        disk=conversion.total_bytes + _MANIFESTS,
        memory=conversion.memory_bytes if ours else None,
        seconds=expected_seconds(runs, "convert", conversion.source_bytes) if ours else None,
    )
    pull = StageNeed(
        stage="import",
        disk=missing + _MANIFESTS,
        memory=import_memory(need.engine) if need else None,
        seconds=expected_seconds(runs, "pull", missing),
    )
    if need is None:
        return pull, convert
    small = sum(file.size for file in model.files if not is_weights(file.name))
    engine = need.engine
    return (
        pull,
        convert,
        StageNeed(
            stage="build",
            disk=engine.disk_bytes + _MANIFESTS,
            memory=engine.memory_bytes,
            seconds=expected_seconds(runs, "build", engine.disk_bytes),
        ),
        # Engine files are hard links; both processing models have the tokenizer.
        StageNeed(stage="repo", disk=_REPOSITORY + 2 * small, memory=None, seconds=None),
        StageNeed(
            stage="start",
            disk=0,
            memory=need.server.total,
            seconds=expected_seconds(runs, "start", engine.disk_bytes),
        ),
    )


def _machine(model: ModelPlan, question: Question, need: Need, store: Store) -> MachineFit:
    room = memory_room(build_addresses(need.engine, tokenizer=True))
    free = room.free
    tokens = fitting_tokens(need.server, need.engine.kv_bytes_per_token, free)
    fits = need.total <= free
    return MachineFit(
        free_memory=free,
        free_disk=free_disk(store.root),
        max_seq_len=need.engine.limits.max_seq_len,
        tokens=min(tokens, question.kv_tokens or tokens),
        fits=fits,
        hint=None if fits else f"{room.advice}{advice(_wish(model, question), free)}",
    )


def _gpu_answer(conversion: Conversion, question: Question) -> GpuAnswer | None:
    gpu = question.gpu
    if gpu is None:
        return None
    asked = fit_gpu(conversion.config, question.build, gpu)
    if problem := unable(conversion.config, gpu):
        return GpuAnswer(asked=asked, smallest=None, longest=None, problem=problem, note=release_note(gpu))
    smallest = asked if asked.fits and asked.tp_size * asked.pp_size == 1 else None
    return GpuAnswer(
        asked=asked,
        smallest=smallest or smallest_fit(conversion.config, question.build, gpu),
        longest=None if asked.fits else shorter_fit(conversion.config, question.build, gpu),
        steps=None if asked.fits else fitting_step(conversion.config, question.build, gpu),
        note="; ".join(gpu_notes(conversion.config, asked, gpu)) or None,
    )
