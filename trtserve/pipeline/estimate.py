"""Estimates of memory, disk and time for every stage of a model, and what fits this machine or a GPU.

Only config.json and the headers of the safetensors files are read, by range request from the hub.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from trtserve.artifacts import Model, looks_like
from trtserve.checkpoint.architectures import checkpoint_targets, described, text_model
from trtserve.checkpoint.memory import rank_weights
from trtserve.checkpoint.placement import source_shapes
from trtserve.checkpoint.source import INDEX, read_hf_config
from trtserve.checkpoint.tensor_files import CODES
from trtserve.errors import (
    CorruptFileError,
    DiskSpaceError,
    MemoryLimitError,
    ModelNotFoundError,
    TrtserveError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.executor.runtimes import CPU_RUNTIME, RUNTIMES, automatic_runtime, runs_on_cpu
from trtserve.files import LARGEST_TEXT, is_weights
from trtserve.host.machine import available_memory, format_bytes, free_disk, require_disk
from trtserve.nvidia.gpu_findings import FIRST_BFLOAT16, FIRST_FP8, capability_words, kernels_note, missing_arithmetic
from trtserve.pipeline import MANIFEST_BYTES, StageNeeds
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.convert_own import OwnConversion, plan_own_conversion
from trtserve.pipeline.gpu_fit import Gpu, GpuFit, fit_gpu, fitting_step, gpu_notes, own_gpu, shorter_fit, smallest_fit
from trtserve.pipeline.memory import Deployment, MemoryNeeds, advice, build_addresses, memory_needs
from trtserve.pipeline.model import ModelPlan, plan_model
from trtserve.pipeline.model_files import CONFIG, GGUF, SINGLE, ModelFiles, stored_files
from trtserve.progress import SILENT, Progress
from trtserve.server.engine_fit import fitting_tokens
from trtserve.specs import CALIBRATED, BuildSpec, ConvertSpec, RuntimeName
from trtserve.store import Store, expected_seconds, hub, read_rates
from trtserve.store.hub import RemoteFile
from trtserve.store.sources import ALIASES, Source, parse_source

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model whose shapes ship with trtserve."""

    alias: str
    repository: str  # hub id
    licence: str  # as the hub names it
    gated: bool  # the hub asks to accept it first
    config: Mapping[str, Any]  # the values of config.json that decide the shapes

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters; tied matrices count once."""
        return sum(map(math.prod, _shapes(self.config).values()))

    @property
    def source_bytes(self) -> int:
        """Size of the weights on the hub."""
        return self.parameters * _BYTES[self.config["torch_dtype"]]


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all models that have an alias."""
    import yaml

    text = Path(__file__).with_name("known_models.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(
        KnownModel(
            alias=alias,
            repository=repository,
            licence=table[repository]["licence"],
            gated=bool(table[repository].get("gated")),
            config=table[repository]["config"],
        )
        for alias, repository in ALIASES.items()
    )


def plan_known_model(source: Source, store: Store) -> ModelPlan | None:
    """Plan a model from its shipped shapes.

    Returns None for one without an alias, with a revision, or in the store already.
    """
    known = next((each for each in known_models() if each.repository == source.location), None)
    if source.kind != "hub" or source.revision or source.gguf or known is None:
        return None
    return None if stored_files(source, store, offline=True) is not None else _from_shapes(known, source, store)


def _from_shapes(known: KnownModel, source: Source, store: Store) -> ModelPlan:
    size = max(end for entry in tensor_table(known.config).values() for end in entry["data_offsets"])
    file = RemoteFile(name=SINGLE, size=size, digest="")
    found = ModelFiles(source=source, files=(file,), config=known.config)
    return ModelPlan(**vars(found), store=store, path=store.root, reused=False, missing_bytes=size)


def tensor_table(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the header of the one safetensors file that a model with this config.json would have."""
    dtype, end, table = config["torch_dtype"], 0, {}
    for name, shape in _shapes(config).items():
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        table[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    return table


def _shapes(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    return _shapes_of(json.dumps(dict(config), sort_keys=True))


@functools.cache
def _shapes_of(config: str) -> Mapping[str, tuple[int, ...]]:
    hf = text_model(json.loads(config))
    return source_shapes(checkpoint_targets(described(hf, checkpoint_config(hf, ConvertSpec()))))


def outline_model(plan: ModelPlan, folder: Path, progress: Progress) -> None:
    """Fill `folder` with what `plan_conversion` reads from a model that is not here: config, index, and headers.

    The weight files have their full size but are sparse, so that they use no disk.
    """
    (folder / CONFIG).write_text(json.dumps(dict(plan.config)), encoding="utf-8")
    if (revision := plan.revision) is None:
        _write_outline(folder / SINGLE, tensor_table(plan.config))
        return
    if plan.gguf is not None:
        begun = hub.cached_file(revision, plan.pulled[0]) or hub.pull_beginning(
            revision, plan.pulled[0], plan.store.download(revision.repository, revision.commit), token=plan.token
        )
        with (folder / GGUF).open("wb") as handle, begun.open("rb") as beginning:
            handle.write(beginning.read(LARGEST_TEXT))
            handle.truncate(plan.pulled[0].size)
        return
    places: dict[str, str] = {}
    weights = [file for file in plan.files if is_weights(file.name)]
    if any(file.name.endswith(".bin") for file in weights):
        raise UnsupportedModelError(
            f"The weights of {revision.repository} are .bin files; their tensors cannot be listed without a download.",
            hint="Pull the model first (import --download-only), then plan it by its name.",
        )
    with progress.task(f"Reading {len(weights)} headers of {revision.repository}", total=len(weights)) as task:
        for file in weights:
            table = hub.tensor_table(revision, file)
            places |= dict.fromkeys(table, file.name)
            _write_outline(folder / file.name, table)
            task.advance(1)
    if any(file.name == INDEX for file in plan.files):
        (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def _write_outline(path: Path, table: dict[str, dict[str, Any]]) -> None:
    text = json.dumps(table).encode()
    size = max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
    if size < 0:
        raise CorruptFileError(f"The header of {path.name} names negative offsets.")
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + size)


_REPOSITORY = 2**20


@dataclass(frozen=True, kw_only=True)
class MachineFit:
    """The answer whether a server fits this machine."""

    free_memory: int  # bytes
    free_disk: int
    max_seq_len: int
    tokens: int  # KV cache that fits next to engine and server
    start_tokens: int  # those that the memory of the stage `start` includes
    fits: bool
    hint: str | None  # what would fit, when the model does not

    @property
    def sequences(self) -> int:
        """Sequences of `max_seq_len` tokens that the cache holds at once."""
        return self.tokens // self.max_seq_len


@dataclass(frozen=True, kw_only=True)
class GpuAnswer:
    """The answer whether a server fits the requested GPUs."""

    asked: GpuFit
    smallest: GpuFit | None  # the smallest tp × pp that fits
    longest: int | None  # the longest sequence that fits, when the requested one does not
    steps: str | None = None  # options of a smaller batch or step that fits
    problem: str | None = None  # why GPUs of this kind cannot run the model, whatever its size
    note: str | None = None  # what a conversion for them needs, and which releases have kernels for them


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    """What can be determined about a model before it is imported. Sizes are in bytes."""

    name: str
    source: str
    architecture: str
    parameters: int
    source_bytes: int  # of its tensors
    pull_bytes: int  # still to be downloaded
    dtype: str
    quantization: str | None
    precision: str | None  # this and the next two: of the engine on this machine; None in a plan for GPUs
    engine_bytes: int | None
    kv_bytes_per_token: int | None
    stages: tuple[StageNeeds, ...]
    machine: MachineFit | None  # None in a plan for GPUs
    gpu: GpuAnswer | None  # None in a plan for this machine
    problem: str | None = None  # why this machine cannot build it
    converter: str | None = None  # the tool that converts, if it is not our own
    shipped_shapes: bool = False  # planned from shapes that come with trtserve, not from the model's files


@dataclass(frozen=True, kw_only=True)
class Question:
    """The input of `plan`."""

    convert: ConvertSpec
    build: BuildSpec
    kv_tokens: int | None = None  # explicit size of the KV cache
    gpu: Gpu | None = None  # None means this machine


def plan_needs(source: str, question: Question, *, progress: Progress = SILENT) -> ModelNeed:
    """Estimate what a model needs: a folder, the name of an import, an alias, or a hub id. No weights are read.

    Raises what `plan_model` and `plan_conversion` raise, and UsageError for settings that the model does not allow.
    """
    if question.kv_tokens is not None and question.kv_tokens < 1:
        raise UsageError(f"--max-tokens-in-paged-kv-cache is {question.kv_tokens}; it must be at least 1.")
    store, question = Store(), _with_runtime(question)
    location, name = _location(source, store, progress)
    known = plan_known_model(parse_source(location, name=name), store)
    model = known or plan_model(location, name=name, store=store, own_tokenizer=False, progress=progress)
    with tempfile.TemporaryDirectory(prefix="trtserve-plan-") as folder:
        files = model.folder
        if files is None:
            files = Path(folder)
            outline_model(model, files, progress)
        conversion = _conversion(model, question.convert, files)
    missing = model.missing_bytes
    need, problem = _engine_need(model, question)
    converter = "NVIDIA's convert_checkpoint.py, a part of TensorRT-LLM" if question.convert.upstream else None
    if question.convert.quantize in CALIBRATED:
        converter = "NVIDIA ModelOpt, on a machine with an NVIDIA GPU"
    serving = question.gpu is None and need is not None
    stages = _stages(model, conversion, need if serving else None, store)
    machine = _machine(model, question, need, store) if serving and need else None
    # An imported model has its files already; what does not fit into memory needs no word about disk.
    if machine is not None and machine.fits and name is None:
        try:
            disk = sum(stage.disk or 0 for stage in stages)
            require_disk(store.root, disk, f"The files of {model.name}", option="TRTSERVE_HOME")
        except DiskSpaceError as error:
            progress.warn(f"{error.message} {error.hint}")
    return ModelNeed(
        name=model.name,
        source=model.source.location,
        architecture=model.architecture,
        parameters=conversion.parameters,
        source_bytes=conversion.source_bytes,
        pull_bytes=missing,
        dtype=conversion.spec.dtype,
        quantization=conversion.config.quantization.quant_algo,
        precision=need.engine.precision if serving and need else None,
        engine_bytes=need.engine.disk_bytes if serving and need else None,
        kv_bytes_per_token=need.engine.kv_bytes_per_token if serving and need else None,
        stages=stages,
        machine=machine,
        gpu=_gpu_answer(conversion, question),
        shipped_shapes=known is not None,
        problem=problem if question.gpu is None else None,
        converter=converter,
    )


def require_fit(need: ModelNeed) -> None:
    """Raise UnsupportedModelError when machine or GPU cannot run the model, MemoryLimitError when it is too small."""
    machine, gpu = need.machine, need.gpu
    problem = need.problem if gpu is None else gpu.problem
    if problem:
        where = "this machine's runtime" if gpu is None else gpu.asked.gpu.name
        raise UnsupportedModelError(f"{where} cannot run {need.name}: {problem}", hint=_other_precision(need))
    if machine is not None and not machine.fits:
        raise MemoryLimitError(f"{need.name} does not fit the free memory of this machine.", hint=machine.hint)
    if gpu is not None and not gpu.asked.fits:
        asked = gpu.asked
        smaller = [gpu.steps] if gpu.steps else []
        smaller += [f"--max-seq-len {gpu.longest}"] if gpu.longest else []
        if gpu.smallest is not None:
            smaller.append(f"--tp-size {gpu.smallest.tp_size} --pp-size {gpu.smallest.pp_size}")
        raise MemoryLimitError(
            f"{need.name} does not fit {asked.gpu.name} with tp {asked.tp_size} × pp {asked.pp_size} and sequences of "
            f"{asked.limits.max_seq_len} tokens.",
            hint=f"{' or '.join(smaller)} would fit."
            if smaller
            else "Use a larger GPU, a smaller model, or --quantize.",
        )


def _other_precision(need: ModelNeed) -> str | None:
    """Return the options of a precision that the GPU supports, or None where precision is not the problem."""
    sm = need.gpu.asked.gpu.sm if need.gpu else None
    if sm is None:
        return None
    options = ["--dtype float16"] if need.dtype == "bfloat16" and sm < FIRST_BFLOAT16 else []
    if (need.quantization or "").startswith("FP8") and sm < FIRST_FP8:
        options.append("--quantize int8")
    return f"Plan with {' '.join(options)}." if options else None


def _with_runtime(question: Question) -> Question:
    """Fill in the runtime and GPU of this machine where none is named; options for CPUs choose the CPU.

    Raises UsageError when options for CPUs and a GPU are both given, or one that the named runtime does not have.
    """
    named = RUNTIMES.get(question.build.runtime)
    if question.build.kv_precision == "fp8" and named is not None and not named.fp8_cache:
        raise UsageError(
            f"--kv-precision fp8 is not for the {named.name} runtime.",
            hint="Leave it out, or plan for --runtime torch.",
        )
    if question.gpu is not None:
        on_cpu = runs_on_cpu(question.build.runtime, question.build.device)
        if on_cpu or question.build.kv_precision not in ("auto", "fp8"):
            option = f"--runtime {question.build.runtime}" if on_cpu else "--kv-precision"
            raise UsageError(
                f"{option} is for this machine's CPU, but a GPU is named.", hint=f"Leave out {option} or --gpu."
            )
        return question
    runtime: str = question.build.runtime
    if runtime == "auto":
        on_cpu = question.build.kv_precision not in ("auto", "fp8")
        runtime = CPU_RUNTIME if on_cpu else automatic_runtime()[0]
    if runs_on_cpu(runtime, question.build.device):
        return replace(question, build=replace(question.build, runtime=cast(RuntimeName, runtime)))
    gpu = own_gpu(question.convert.ranks)
    if gpu is None:
        raise UsageError(
            f"The {runtime} runtime needs NVIDIA GPUs; no GPU is named, and nvidia-smi finds none here.",
            hint="Name the GPU to plan for: --gpu h100-80gb, or --gpu-memory 80GB; --runtime openvino is for CPUs.",
        )
    return replace(question, gpu=gpu)


def _location(source: str, store: Store, progress: Progress) -> tuple[str, str | None]:
    """Return folder and name of a model that was imported under this name; any other source unchanged, without name.

    A folder with a model takes precedence over an import of that name, as for other commands.
    """
    for record in store.recorded():
        if record.name == source and not looks_like(Model, Path(source)):
            if not record.model:
                raise ModelNotFoundError(
                    f"{source} was pulled from {record.source}, without the model that it was made from.",
                    hint="Name that model, as `trtserve import` takes it. What was pulled is ready for `start`.",
                )
            return record.model, record.name
        if record.name == source:
            progress.warn(
                f"The folder {Path(source).absolute()} is used for {source}; {record.model} has that name too."
            )
            break
    return source, None


def _conversion(model: ModelPlan, spec: ConvertSpec, files: Path) -> OwnConversion:
    """Plan our own conversion; for one by NVIDIA's tools, replace the sizes by those its checkpoint will have."""
    plain = plan_own_conversion(
        model.artifact,
        replace(spec, quantize="none") if spec.upstream else spec,
        files=files,
        headers_only=model.folder is None,
    )
    if not spec.upstream:
        return plain
    config = checkpoint_config(read_hf_config(files), spec)
    return replace(plain, asked=spec, config=config, sizes=[rank_weights(config).loaded] * spec.ranks)


def _deployment(model: ModelPlan, question: Question) -> Deployment:
    tokenizer = next((file.size for file in model.files if file.name == "tokenizer.json"), 0)
    return Deployment(
        hf=model.config,
        convert=question.convert,
        build=question.build,
        kv_tokens=question.kv_tokens,
        tokenizer_bytes=tokenizer,
    )


def _engine_need(model: ModelPlan, question: Question) -> tuple[MemoryNeeds | None, str | None]:
    """Return the engine's need, or None and the reason why this machine's runtime cannot build the model."""
    if question.gpu is not None:
        return None, None
    try:
        return memory_needs(_deployment(model, question)), None
    except TrtserveError as error:
        if isinstance(error, UsageError):
            raise
        return None, error.message


def _stages(
    model: ModelPlan, conversion: OwnConversion, need: MemoryNeeds | None, store: Store
) -> tuple[StageNeeds, ...]:
    pull, convert = model.needs, conversion.needs(store)
    if conversion.asked.upstream:  # memory and time of NVIDIA's tools are unknown
        convert = replace(convert, memory=None, seconds=None)
    if need is None:
        return pull, convert
    runs, engine = read_rates(store), need.engine
    small = sum(file.size for file in model.files if not is_weights(file.name))
    return (
        pull,
        convert,
        StageNeeds(
            stage="build",
            disk=engine.disk_bytes + MANIFEST_BYTES,
            memory=engine.memory_bytes,
            seconds=expected_seconds(runs, "build", engine.disk_bytes),
        ),
        # Engine files are hard links; both processing models have the tokenizer.
        StageNeeds(stage="repo", disk=_REPOSITORY + 2 * small, memory=None, seconds=None),
        StageNeeds(
            stage="start", disk=0, memory=need.server.total, seconds=expected_seconds(runs, "start", engine.disk_bytes)
        ),
    )


def _machine(model: ModelPlan, question: Question, need: MemoryNeeds, store: Store) -> MachineFit:
    available = available_memory(build_addresses(need.engine, tokenizer=True))
    free = available.free
    tokens = fitting_tokens(need.server, need.engine.kv_bytes_per_token, free)
    fits = need.total <= free
    return MachineFit(
        free_memory=free,
        free_disk=free_disk(store.root),
        max_seq_len=need.engine.limits.max_seq_len,
        tokens=min(tokens, question.kv_tokens or tokens),
        start_tokens=need.server.kv_tokens,
        fits=fits,
        hint=None if fits else f"{available.advice}{advice(_deployment(model, question), free)}",
    )


def _gpu_answer(conversion: OwnConversion, question: Question) -> GpuAnswer | None:
    gpu = question.gpu
    if gpu is None:
        return None
    asked = fit_gpu(conversion.config, question.build, gpu)
    narrow = question.build.kv_precision == "fp8"
    if gpu.sm is not None and (problem := missing_arithmetic(conversion.config, gpu.name, gpu.sm, cache=narrow)):
        note = kernels_note(gpu.name, capability_words(gpu.sm))
        return GpuAnswer(asked=asked, smallest=None, longest=None, problem=problem, note=note)
    smallest = asked if asked.fits and asked.ranks == 1 else None
    return GpuAnswer(
        asked=asked,
        smallest=smallest or smallest_fit(conversion.config, question.build, gpu),
        longest=None if asked.fits else shorter_fit(conversion.config, question.build, gpu),
        steps=None if asked.fits else fitting_step(conversion.config, question.build, gpu),
        note="; ".join(gpu_notes(conversion.config, asked, gpu)) or None,
    )


Fit = Literal["yes", "int8", "int4", "no"]
# What to convert to, and its size compared with the original's.
_PRECISIONS: tuple[tuple[Literal["none", "int8", "int4"], Fit, float], ...] = (
    ("none", "yes", 1.0),
    ("int8", "int8", 0.5),
    ("int4", "int4", 0.25),
)


@dataclass(frozen=True, kw_only=True)
class KnownFit:
    """The first precision in which this machine can serve a model, and why there is none."""

    fit: Fit | None  # None: unknown
    lacks: Literal["memory", "runtime", "GPU"] | None = None  # what does not suffice, in a word
    reason: str | None = None  # the same in a sentence


def list_known(words: Sequence[str] = ()) -> Iterator[tuple[KnownModel, KnownFit]]:
    """Yield every model that has an alias with all `words`, in any case, with what this machine can serve."""
    known: dict[str, KnownFit] = {}
    for model in known_models():
        if not all(word.lower() in f"{model.alias} {model.repository}".lower() for word in words):
            continue
        shape = repr(sorted(model.config.items()))  # several models differ in their weights alone
        if shape not in known:
            known[shape] = _fit(model)
        yield model, known[shape]


def _fit(model: KnownModel) -> KnownFit:
    on_cpu = automatic_runtime()[0] == CPU_RUNTIME
    limit = available_memory().free if on_cpu else None
    for quantize, fit, size in _PRECISIONS:
        if limit is not None and model.source_bytes * size > limit:
            continue  # weights beyond the memory need no estimate
        question = Question(convert=ConvertSpec(quantize=quantize), build=BuildSpec())
        try:
            if on_cpu:
                _require_engine_fit(model, _with_runtime(question))
            else:
                require_fit(plan_needs(model.alias, question))
        except MemoryLimitError:
            continue
        except UsageError as error:  # a GPU that nothing is known about
            return KnownFit(fit=None, lacks="GPU", reason=error.message)
        except TrtserveError as error:
            return KnownFit(fit="no", lacks="runtime", reason=error.message)
        return KnownFit(fit=fit)
    precision, _, size = _PRECISIONS[-1]
    weights = format_bytes(int(model.source_bytes * size))
    return KnownFit(fit="no", lacks="memory", reason=f"{weights} of weights in {precision}")


def _require_engine_fit(model: KnownModel, question: Question) -> None:
    """Raise what `require_fit` raises: an engine follows from config.json alone, without the plan of a conversion."""
    need, problem = _engine_need(_from_shapes(model, parse_source(model.alias), Store()), question)
    if need is None:
        raise UnsupportedModelError(str(problem))
    if need.total > available_memory(build_addresses(need.engine, tokenizer=True)).free:
        raise MemoryLimitError(f"{model.alias} does not fit the free memory of this machine.")
