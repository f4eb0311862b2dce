"""Repositories for TensorRT-LLM's LLM API: no engine, a Hugging Face model and the `model.yaml` that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.architectures.source import weight_map
from trtserve.artifacts import Manifest, Model, ModelRepository, fingerprint
from trtserve.errors import CorruptFileError, RepositoryError, UsageError
from trtserve.files import read_json_object
from trtserve.import_.plan import INDEX, require_whole
from trtserve.import_.sources import served_name
from trtserve.progress import SILENT, Progress
from trtserve.releases import NEWEST, normalize_release, order, release_of
from trtserve.releases.llm_arguments import dropped_argument, unknown_argument
from trtserve.repo.group import is_there, publish_models
from trtserve.repo.models import LLMAPI, LLMAPI_BLS, write_program
from trtserve.repo.options import require_one_gpu_each
from trtserve.repo.placement import VERSION, model_names, root_of
from trtserve.repo.tokenizer import check_tokenizer, tokenizer_files
from trtserve.specs import RepositorySpec
from trtserve.store import Store, link_or_copy
from trtserve.triton.config import ConfigOptions, config_text, llmapi_config_text
from trtserve.triton.core_models import LLMAPI_FILE, device_groups
from trtserve.triton.profiles import BLS, CORE, llmapi_model, profile

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
    "batching_strategy",
    "batch_scheduler_policy",
    "max_attention_window_size",
    "exclude_input_in_output",
    "max_queue_size",
    "triton_backend",
    "lora",
)
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
"""Keywords of the LLM (dotted where they are nested) whose kinds are known; it takes many more."""

OWN_KEYS = frozenset({"triton_config", "logits_post_processors"})
"""Keys of model.yaml that Triton's model reads, and does not give to the LLM."""

_OWN = ("model", "triton_config.decoupled", "triton_config.max_batch_size")


@dataclass(frozen=True, kw_only=True)
class LlmapiPlan:
    """What a repository of the LLM API will hold; `model` is a folder, or a name of the hub.

    `added`: its models become part of the repository at `path`.
    """

    spec: RepositorySpec
    model: Path | str
    release: str
    settings: Mapping[str, Any]
    gpu_device_ids: str
    manifest: Manifest
    path: Path
    reused: bool
    added: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all its models, the alias last."""
        return llmapi_models(self.spec)


def llmapi_models(spec: RepositorySpec) -> tuple[str, ...]:
    """Names of the models of a repository of the LLM API, the alias last."""
    return (model_names(spec.suffix)[CORE], spec.name)


def plan_llmapi(
    model: Model | str,
    spec: RepositorySpec,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> LlmapiPlan:
    """Everything that can be known before a file is written.

    `model` is a Hugging Face folder, whose files are linked into the repository, or a name of the hub, which the server
    loads by itself. `spec.settings` are keywords of the LLM, dotted where they are nested; `into` is a repository to
    which the models are added. UsageError for a name, release or setting that cannot work, RepositoryError for a folder
    without weights and for names that are taken.
    """
    served_name(spec.name)
    release = _release(spec)
    llmapi_model(release)
    if isinstance(model, Model):
        require_weights(model.path)
    given = _given(spec)
    groups = str(given.pop("gpu_device_ids", ""))
    settings = _settings(spec, given, tp_size=tp_size, pp_size=pp_size)
    _tell_unknown(given, release, progress)
    _require_gpus(groups, settings)
    place = (out or into or (store or Store()).root) if spec.absolute_paths else None
    manifest = _manifest(spec, model, release, settings, groups, place)
    found = (store or Store()).destination(ModelRepository, spec.name, manifest.fingerprint)
    plan = LlmapiPlan(
        spec=spec,
        model=model.path if isinstance(model, Model) else model,
        release=release,
        settings=settings,
        gpu_device_ids=groups,
        manifest=manifest,
        path=(into or out or found).absolute(),
        reused=False,
        added=into is not None,
    )
    return replace(plan, reused=is_there(plan.path, plan.models, manifest, into=plan.added))


def _manifest(
    spec: RepositorySpec,
    model: Model | str,
    release: str,
    settings: Mapping[str, Any],
    groups: str,
    place: Path | None,
) -> Manifest:
    source = model.fingerprint if isinstance(model, Model) else model
    digest = fingerprint(
        stage="llmapi",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False)),
        place=str(place),
        model=source,
        settings=settings,
        gpus=groups,
        release=release,
    )
    facts = _facts(spec, release, settings, groups, str(model.path if isinstance(model, Model) else model))
    inputs = {"model": source}
    return Manifest(
        kind="repository", name=spec.name, fingerprint=digest, inputs=inputs, spec=asdict(spec), facts=facts
    )


def assemble_llmapi(plan: LlmapiPlan, *, progress: Progress = SILENT) -> ModelRepository:
    """Make the repository: the model of the LLM API, and the alias, which has the tensors of the BLS model."""

    def produce(folder: Path) -> None:
        progress.step(f"Assemble model repository {plan.spec.name} for the LLM API")
        if isinstance(plan.model, Path):
            _require_tokenizer(plan.model, plan.settings, progress)
        core = model_names(plan.spec.suffix)[CORE]
        _write_core(folder / core, plan)
        _write_alias(folder / plan.spec.name, core, plan)
        if isinstance(plan.model, Path):
            _link_model(plan.model, folder / core / VERSION / "model", copy=plan.spec.copy)

    return publish_models(plan.path, plan.models, plan.manifest, produce, into=plan.added)


def _require_tokenizer(model: Path, settings: Mapping[str, Any], progress: Progress) -> None:
    """RepositoryError when the model's tokenizer cannot be loaded; code of its own is the server's to run."""
    if any(settings.get(key) for key in ("tokenizer", "skip_tokenizer_init", "trust_remote_code")):
        return
    try:
        tokenizer_files(model)
        size = read_json_object(model / "config.json", CorruptFileError).get("vocab_size")
        check_tokenizer(model, size if isinstance(size, int) else None, progress)
    except RepositoryError as error:
        hint = "Mend the files of the tokenizer, or name another folder: --set tokenizer=FOLDER"
        raise RepositoryError(error.message, hint=hint) from error


def _write_core(folder: Path, plan: LlmapiPlan) -> None:
    import yaml

    write_program(folder / VERSION, LLMAPI)
    text = llmapi_config_text(
        llmapi_model(plan.release),
        name=folder.name,
        decoupled=plan.spec.streaming,
        gpu_device_ids=plan.gpu_device_ids,
    )
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    model = plan.model
    if isinstance(model, Path):
        model = f"{root_of(plan.spec, plan.path)}{folder.name}/{VERSION}/model"
    content = yaml.safe_dump({"model": model, **plan.settings}, sort_keys=False)
    (folder / VERSION / LLMAPI_FILE).write_text(content, encoding="utf-8")


def _write_alias(folder: Path, core: str, plan: LlmapiPlan) -> None:
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


def _link_model(source: Path, target: Path, *, copy: bool) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "manifest.json":
            link_or_copy(file.resolve(), target / file.name, copy=copy)


def require_weights(folder: Path) -> None:
    """RepositoryError for a folder that is no Hugging Face model with all of its weights; CorruptFileError when one of
    its files is cut off.
    """
    if not (folder / "config.json").is_file() or not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise RepositoryError(
            f"{folder} is no Hugging Face model: it needs a config.json and weights.",
            hint="Import one with `trtserve import NAME --download-only`, or give a name of the hub.",
        )
    for path in sorted(folder.glob("*.safetensors")):
        require_whole(path)
    if (index := folder / INDEX).is_file():
        lacking = sorted(name for name in set(weight_map(index).values()) if not (folder / name).is_file())
        if lacking:
            raise RepositoryError(
                f"{index} names files of weights that are not there: {', '.join(lacking)}.",
                hint="Pull the model again, or copy the missing files.",
            )


def _release(spec: RepositorySpec) -> str:
    """`--release`, else the release of `--trtllm-version`, which may be newer than every table, else the newest."""
    if spec.release is not None:
        return normalize_release(spec.release)
    if spec.trtllm_version is None:
        return NEWEST
    installed = release_of(spec.trtllm_version)
    return NEWEST if order(installed) > order(NEWEST) else normalize_release(installed, option="--trtllm-version")


def _yaml(key: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        raise UsageError(
            f"--set {key}={text}: the value is not YAML: {reason}.", hint=f"""A text in quotes: --set '{key}="…"'"""
        ) from None


def _given(spec: RepositorySpec) -> dict[str, Any]:
    """Dotted keyword → value, from `--set` and from the flags that the LLM knows too."""
    if set_flags := [name for name in _ENGINE_ONLY if getattr(spec, name)]:
        raise UsageError(
            f"--{set_flags[0].replace('_', '-')} has no meaning on the llmapi runtime.",
            hint="Keywords of the LLM are given with --set, such as --set max_seq_len=4096.",
        )
    values: dict[str, Any] = {}
    for key, text in spec.settings.items():
        values[key] = text if key == "gpu_device_ids" else _yaml(key, text)
    for field, key in _NAMED.items():
        value = getattr(spec, field)
        if value is not None and key in values:
            raise UsageError(f"--set {key} and --{field.replace('_', '-')} were both given; leave one of them out.")
        if value is not None:
            values[key] = value
    return values


def _settings(spec: RepositorySpec, given: Mapping[str, Any], *, tp_size: int, pp_size: int) -> dict[str, Any]:
    """The content of model.yaml without `model`."""
    result: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": pp_size,
        "triton_config": {"max_batch_size": 0, "decoupled": spec.streaming},
    }
    for key, value in given.items():
        require_setting(key, value)
        place = result
        *parents, name = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {key}: {parent} is set to {place!r} and has no parts.")
        place[name] = value
    return result


def _tell_unknown(given: Mapping[str, Any], release: str, progress: Progress) -> None:
    """Warn of keywords that the LLM refuses when the server starts; the tables may lack a new one."""
    for key in given:
        name = key.partition(".")[0]
        gone, advice = dropped_argument(name, release), unknown_argument(name, besides=OWN_KEYS)
        if gone is not None:
            progress.warn(f"--set {key}: the LLM has no keyword {name} after release {gone[0]}: {gone[1]}.")
        elif advice is not None:
            progress.warn(f"--set {key}: the LLM has no keyword {name}, and refuses those it does not have. {advice}")


def require_setting(key: str, value: object) -> None:
    """UsageError for a keyword that other flags decide, and for a value that is not of its kind."""
    if key in _OWN:
        raise UsageError(f"--set {key} is decided by other flags.", hint="--streaming, and the MODEL that is given.")
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
