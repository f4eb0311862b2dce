"""Repositories for TensorRT-LLM's LLM API: a Hugging Face model and the `model.yaml` that names it, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Manifest, Model, ModelRepository, fingerprint
from trtserve.checkpoint.architectures import architecture_of
from trtserve.checkpoint.source import INDEX, weight_map
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.errors import CorruptFileError, RepositoryError, UnsupportedModelError, UsageError
from trtserve.files import read_json_object
from trtserve.nvidia.releases import NEWEST, normalize_release, order, release_of
from trtserve.nvidia.releases.options import backend_of, dropped_argument, unknown_argument
from trtserve.progress import SILENT, Progress
from trtserve.repository.config import ConfigOptions, config_text, llmapi_config_text
from trtserve.repository.engines import own_files
from trtserve.repository.options import require_one_gpu_each
from trtserve.repository.profiles import BLS, CORE, llmapi_model, profile
from trtserve.repository.programs import (
    LLMAPI,
    LLMAPI_BLS,
    VERSION,
    model_names,
    program_digest,
    root_of,
    write_program,
)
from trtserve.repository.publishing import RepositoryPlan, exists
from trtserve.repository.served import LLMAPI_FILE, device_groups
from trtserve.repository.tokenizer import check_tokenizer, tokenizer_files
from trtserve.specs import RepositorySpec
from trtserve.specs.options import put_setting, setting_value
from trtserve.store import Store, link_or_copy
from trtserve.store.sources import served_name

SCHEMA = 1
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
# Fields of RepositorySpec that the LLM has under another name.
_NAMED = {
    "max_tokens_in_paged_kv_cache": "kv_cache_config.max_tokens",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "enable_kv_cache_reuse": "kv_cache_config.enable_block_reuse",
    "enable_chunked_context": "enable_chunked_prefill",
}
_ENGINE_ONLY = (
    "batching_strategy", "batch_scheduler_policy", "max_attention_window_size", "exclude_input_in_output",
    "max_queue_size", "ngram_max_draft_len", "triton_backend", "lora",
)  # fmt: skip
KEYWORDS: dict[str, tuple[type, ...]] = {
    "tensor_parallel_size": (int,),
    "pipeline_parallel_size": (int,),
    "moe_expert_parallel_size": (int,),
    "moe_tensor_parallel_size": (int,),
    "max_batch_size": (int,),
    "max_seq_len": (int,),
    "max_num_tokens": (int,),
    "enable_chunked_prefill": (bool,),
    "kv_cache_config.free_gpu_memory_fraction": (float, int),
    "kv_cache_config.max_tokens": (int,),
    "kv_cache_config.enable_block_reuse": (bool,),
    "triton_config.cancellation_check_period_ms": (int,),
    "backend": (str,),
}
"""Keywords of the LLM (dotted where they are nested) whose types are checked; it takes many more."""

OWN_KEYS = frozenset({"triton_config", "logits_post_processors"})
"""Keys of model.yaml that Triton's model reads and does not pass to the LLM."""

_OWN = ("model", "triton_config.decoupled", "triton_config.max_batch_size")


@dataclass(frozen=True, kw_only=True)
class LlmapiRepositoryPlan(RepositoryPlan):
    """A repository of the LLM API: its model, and the alias, which has the tensors of the BLS model."""

    model: Path | str  # a folder, or a hub id that the server loads when it starts
    release: str
    settings: Mapping[str, Any]  # content of model.yaml without `model`
    gpu_device_ids: str

    @property
    def models(self) -> tuple[str, ...]:
        return llmapi_models(self.spec)

    def write(self, folder: Path, progress: Progress) -> None:
        progress.step(f"Assembling model repository {self.spec.name} for the LLM API")
        if isinstance(self.model, Path):
            _require_tokenizer(self.model, self.settings, progress)
        core = model_names(self.spec.suffix)[CORE]
        _write_core(folder / core, self)
        _write_alias(folder / self.spec.name, core, self)
        if isinstance(self.model, Path):
            for file in own_files(self.model):
                place = folder / core / VERSION / "model" / file.relative_to(self.model)
                link_or_copy(file, place, copy=self.spec.copy)


def llmapi_models(spec: RepositorySpec) -> tuple[str, ...]:
    """Return the names of the models of a repository of the LLM API, the alias last."""
    return (model_names(spec.suffix)[CORE], spec.name)


def plan_llmapi_repository(
    model: Model | str,
    spec: RepositorySpec,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> LlmapiRepositoryPlan:
    """Plan the repository of a model for the LLM API.

    `model` is a Hugging Face folder, whose files are linked into the repository, or a hub id, which the server loads
    when it starts. `spec.settings` are keywords of the LLM, dotted where they are nested; `into` is a repository to add
    the models to. Raises UsageError for a name, release or setting that cannot work and RepositoryError for a folder
    without weights and for names that are taken.
    """
    served_name(spec.name)
    release = _release(spec)
    llmapi_model(release)
    if isinstance(model, Model):
        require_weights(model.path)
        own_files(model.path)
        require_architecture(read_json_object(model.path / "config.json", CorruptFileError), spec)
    given = _given(spec)
    groups = str(given.pop("gpu_device_ids", ""))
    settings = _settings(spec, given, tp_size=tp_size, pp_size=pp_size)
    for key in given:
        name = key.partition(".")[0]
        gone, advice = dropped_argument(name, release), unknown_argument(name, others=OWN_KEYS)
        if gone is not None:
            progress.warn(f"--set {key}: the LLM has no keyword {name} after release {gone[0]}: {gone[1]}.")
        elif advice is not None:
            progress.warn(f"--set {key}: the LLM has no keyword {name} and will refuse to start with it. {advice}")
    _require_gpus(groups, settings)
    source, place = (model.fingerprint, model.path) if isinstance(model, Model) else (model, model)
    root = (out or into or (store or Store()).root) if spec.absolute_paths else None
    digest = fingerprint(
        stage="llmapi",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False)),
        place=str(root),
        model=source,
        programs=program_digest((LLMAPI, LLMAPI_BLS)),
        settings=settings,
        gpus=groups,
        release=release,
    )
    manifest = Manifest(
        kind="repository",
        name=spec.name,
        fingerprint=digest,
        inputs={"model": source},
        spec=asdict(spec),
        facts=_facts(spec, release, settings, groups, str(place)),
    )
    path = (into or out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    return LlmapiRepositoryPlan(
        spec=spec,
        manifest=manifest,
        path=path,
        reused=exists(path, llmapi_models(spec), manifest, added=into is not None),
        added=into is not None,
        model=place,
        release=release,
        settings=settings,
        gpu_device_ids=groups,
    )


def _require_tokenizer(model: Path, settings: Mapping[str, Any], progress: Progress) -> None:
    """Raise RepositoryError when the model's tokenizer cannot be loaded; one that runs its own code is not checked."""
    if any(settings.get(key) for key in ("tokenizer", "skip_tokenizer_init", "trust_remote_code")):
        return
    try:
        tokenizer_files(model)
        size = read_json_object(model / "config.json", CorruptFileError).get("vocab_size")
        check_tokenizer(model, size if isinstance(size, int) else None, progress)
    except RepositoryError as error:
        raise RepositoryError(
            error.message,
            hint="Correct the files of the tokenizer, or name another folder: --set tokenizer=FOLDER. If it needs the "
            "model's own code, read that first; --set trust_remote_code=true runs it.",
        ) from error


def _write_core(folder: Path, plan: LlmapiRepositoryPlan) -> None:
    import yaml

    write_program(folder / VERSION, LLMAPI)
    text = llmapi_config_text(
        llmapi_model(plan.release), name=folder.name, decoupled=plan.spec.streaming, gpu_device_ids=plan.gpu_device_ids
    )
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    model = plan.model
    if isinstance(model, Path):
        model = f"{root_of(plan.spec, plan.path)}{folder.name}/{VERSION}/model"
    content = yaml.safe_dump({"model": model, **plan.settings}, sort_keys=False)
    (folder / VERSION / LLMAPI_FILE).write_text(content, encoding="utf-8")


def _write_alias(folder: Path, core: str, plan: LlmapiRepositoryPlan) -> None:
    write_program(folder / VERSION, LLMAPI_BLS)
    own = {"tensorrt_llm_model_name": core}
    if plan.spec.accumulate_tokens is not None:
        own["accumulate_tokens"] = str(plan.spec.accumulate_tokens).lower()
    options = ConfigOptions(
        max_batch_size=1,
        decoupled=plan.spec.streaming,
        parameters={BLS: own},
        instance_counts={BLS: plan.spec.bls_instance_count or 1},
    )
    table = profile(None if plan.spec.release is None else plan.release)
    (folder / "config.pbtxt").write_text(config_text(table, BLS, options, name=folder.name), encoding="utf-8")


def require_architecture(config: Mapping[str, Any], spec: RepositorySpec) -> None:
    """Raise UnsupportedModelError for a config.json whose architecture the LLM API cannot load, as far as is known.

    Another backend, and the model's own code, are for the user to judge.
    """
    given, name = _given(spec), architecture_of(config)
    if given.get("trust_remote_code") or given.get("backend", "pytorch") != "pytorch":
        return
    backend = backend_of(name)
    if backend is None:
        raise UnsupportedModelError(
            f"No release of TensorRT-LLM up to {NEWEST} loads {name} with --runtime llmapi.",
            hint="Use another runtime (`trtserve plan MODEL` says which one takes it), or choose what loads it: "
            "--set backend=tensorrt, --set backend=_autodeploy, or the model's own code with --set "
            "trust_remote_code=true.",
        )
    if backend != "pytorch":
        raise UnsupportedModelError(
            f"TensorRT-LLM loads {name} with its backend {backend}, not with pytorch.",
            hint=f"Add --set backend={backend}.",
        )


def require_weights(folder: Path) -> None:
    """Raise RepositoryError for a folder without a complete Hugging Face model, CorruptFileError for a file cut off."""
    if not (folder / "config.json").is_file() or not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise RepositoryError(
            f"{folder} is not a Hugging Face model: it needs a config.json and weights.",
            hint="Import one with `trtserve import NAME --download-only`, or give a hub id.",
        )
    for path in sorted(folder.glob("*.safetensors")):
        TensorFile(path)
    if (index := folder / INDEX).is_file():
        lacking = sorted(name for name in set(weight_map(index).values()) if not (folder / name).is_file())
        if lacking:
            raise RepositoryError(
                f"{index} names missing files: {', '.join(lacking)}.",
                hint="Pull the model again, or copy the missing files.",
            )


def _release(spec: RepositorySpec) -> str:
    """Return `--release`, else that of `--trtllm-version`, which may be newer than all tables, else the newest."""
    if spec.release is not None:
        return normalize_release(spec.release)
    if spec.trtllm_version is None:
        return NEWEST
    installed = release_of(spec.trtllm_version)
    return NEWEST if order(installed) > order(NEWEST) else normalize_release(installed, option="--trtllm-version")


def _given(spec: RepositorySpec) -> dict[str, Any]:
    """Return dotted keyword → value, from `--set` and from the flags that have an LLM keyword."""
    if set_flags := [name for name in _ENGINE_ONLY if getattr(spec, name)]:
        raise UsageError(
            f"--{set_flags[0].replace('_', '-')} has no meaning with --runtime llmapi.",
            hint="Keywords of the LLM are given with --set, such as --set max_seq_len=4096.",
        )
    values: dict[str, Any] = {}
    for key, text in spec.settings.items():
        values[key] = text if key == "gpu_device_ids" else setting_value(key, text)
    for field, key in _NAMED.items():
        value = getattr(spec, field)
        if value is not None and key in values:
            raise UsageError(f"--set {key} and --{field.replace('_', '-')} were both given; leave one of them out.")
        if value is not None:
            values[key] = value
    return values


def _settings(spec: RepositorySpec, given: Mapping[str, Any], *, tp_size: int, pp_size: int) -> dict[str, Any]:
    """Return the content of model.yaml without `model`."""
    result: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": pp_size,
        "triton_config": {"max_batch_size": 0, "decoupled": spec.streaming},
    }
    for key, value in given.items():
        require_setting(key, value)
        put_setting(result, key, value)
    return result


def require_setting(key: str, value: object) -> None:
    """Raise UsageError for a keyword that other flags set, and for a value of the wrong type."""
    if key in _OWN:
        raise UsageError(f"--set {key} is set by other flags.", hint="Use --streaming, and the MODEL argument.")
    kinds = KEYWORDS.get(key)
    if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        raise UsageError(f"--set {key}={value}: expected {' or '.join(kind.__name__ for kind in kinds)}.")
    if kinds == (int,) and isinstance(value, int) and value < 1:
        raise UsageError(f"--set {key}={value}: expected a whole number of 1 or more.")


def _require_gpus(groups: str, settings: Mapping[str, Any]) -> None:
    if not groups:
        return
    try:
        found = device_groups(groups)
    except ValueError:
        raise UsageError(
            f"--set gpu_device_ids={groups}: expected numbers such as 0,1, or 0,1;2,3 for two instances."
        ) from None
    ranks = settings["tensor_parallel_size"] * settings["pipeline_parallel_size"]
    require_one_gpu_each(groups, found, ranks)


def _facts(spec: RepositorySpec, release: str, settings: Mapping[str, Any], groups: str, model: str) -> dict[str, Any]:
    tp_size, pp_size = settings["tensor_parallel_size"], settings["pipeline_parallel_size"]
    core = model_names(spec.suffix)[CORE]
    return {
        "alias": spec.name,
        "suffix": spec.suffix,
        "streaming": spec.streaming,
        "release": release,
        "all_releases": spec.release is None,
        "runtime": "llmapi",
        "triton_backend": "llmapi",
        "model": model,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "world_size": tp_size * pp_size,
        "container_paths": spec.container_paths,
        "core_models": {
            core: {"engine": None, "world_size": tp_size * pp_size, "gpu_device_ids": groups, "origin": {}}
        },
        "model_yaml": dict(settings),
    }
