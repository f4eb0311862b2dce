"""How a Triton model repository is assembled from an engine and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import MANIFEST, Artifact, Engine, Manifest, ModelRepository, fingerprint
from trtserve.errors import RepositoryError
from trtserve.import_.sources import parse_source, served_name
from trtserve.progress import SILENT, Progress
from trtserve.specs import RepositorySpec
from trtserve.store import Store, link_or_copy, publish, reusable
from trtserve.triton.config import ConfigOptions, config_text
from trtserve.triton.embedded import require_carried_out, require_startable
from trtserve.triton.parameters import CLASSES_FILE, classes_json, set_without_meaning
from trtserve.triton.profiles import BLS, CORE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING, Profile, profile
from trtserve.triton.settings import Settings, resolve_settings

SCHEMA = 1
VERSION = "1"
TOKENIZER = f"{PREPROCESSING}/{VERSION}/tokenizer"

_SOURCES = Path(__file__).parent / "triton" / "models"
_TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "config.json",
    "generation_config.json",
)
_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
_SHARED = {
    PREPROCESSING: ("hf_tokenizer", "model_parameters", "parameter_classes"),
    POSTPROCESSING: ("hf_tokenizer", "model_parameters"),
    CORE: ("guarded_sender", "model_parameters", "parameter_classes"),
    BLS: ("guarded_sender", "model_parameters", "parameter_classes"),
    ENSEMBLE: (),
}
_PROBE = "What is machine learning?"


@dataclass(frozen=True, kw_only=True)
class RepositoryPlan:
    """What a repository will hold and where it goes; `facts` end in its manifest."""

    spec: RepositorySpec
    profile: Profile
    options: ConfigOptions
    facts: dict[str, Any]
    fingerprint: str
    path: Path
    reused: bool


def default_name(engine: Artifact) -> str:
    """The alias when none is given: the engine's name, else that of its folder."""
    if engine.manifest is not None:
        return served_name(engine.manifest.name)
    return parse_source(f"local:{engine.path}").name


def plan_repository(
    engine: Engine, tokenizer: Path, spec: RepositorySpec, *, out: Path | None = None, store: Store | None = None
) -> RepositoryPlan:
    """Everything that can be known before a file is written.

    UsageError for a name, release or setting that cannot work; RepositoryError for an engine or tokenizer folder
    that is none.
    """
    served_name(spec.name)
    config = _engine_config(engine.path)
    files = tokenizer_files(tokenizer)
    _require_engine_files(engine.path, config, embedded=_is_embedded(config))
    table, options = resolve_options(spec, config)
    built = engine.manifest.facts if engine.manifest is not None else {}
    facts = {**_facts(spec, table, options, config), "machine": built.get("machine", {})}
    digest = fingerprint(
        stage="repo",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False)),
        engine=engine.fingerprint,
        tokenizer=_digest(files),
        models=_digest(_model_sources()),
        classes=[classes_json(model, table.release) for model in MODELS],
    )
    path = (out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    reused = reusable(ModelRepository, path, digest) is not None
    return RepositoryPlan(
        spec=spec, profile=table, options=options, facts=facts, fingerprint=digest, path=path, reused=reused
    )


def resolve_options(spec: RepositorySpec, config: Mapping[str, Any]) -> tuple[Profile, ConfigOptions]:
    """What the models of a repository will say, for an engine whose `config.json` is `config`.

    UsageError for a release or setting that cannot work; the engine need not exist yet.
    """
    embedded = _is_embedded(config)
    table = profile(spec.release if embedded or spec.release else "1.2")
    settings = resolve_settings(spec.settings, table)
    options = _options(spec, table, settings, _limits(config), embedded=embedded)
    if embedded:
        require_carried_out({**settings.parameters, CORE: {}}, table.release)
        require_startable(
            options.parameters[CORE],
            config,
            release=table.release,
            settings=settings.parameters.get(CORE, {}),
            max_queue_size=options.max_queue_size,
        )
    return table, options


def _is_embedded(config: Mapping[str, Any]) -> bool:
    return bool(config.get("trtserve", {}).get("runtime") == "openvino")


def _limits(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config.get("build_config", {}).get(name) for name in _LIMITS}


def assemble_repository(
    engine: Engine,
    tokenizer: Path,
    spec: RepositorySpec,
    *,
    out: Path | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Make the repository of `engine`: the five models and the alias, relocatable as a whole.

    `tokenizer` is a Hugging Face folder. Engine files are hard links unless `spec.copy`. Raises what
    `plan_repository` raises, and RepositoryError for a tokenizer that does not work.
    """
    plan = plan_repository(engine, tokenizer, spec, out=out, store=store)
    manifest = Manifest(
        kind="repository",
        name=spec.name,
        fingerprint=plan.fingerprint,
        inputs={"engine": engine.fingerprint},
        spec=asdict(spec),
        facts=plan.facts,
    )

    def produce(folder: Path) -> None:
        progress.step(f"Assemble model repository {spec.name}")
        if ignored := plan.facts["without_meaning"]:
            progress.step(f"Without meaning on the {plan.facts['runtime']} runtime: {', '.join(ignored)}")
        _write_models(folder, plan)
        _link_engine(engine.path, folder / CORE / VERSION, copy=spec.copy)
        for file in tokenizer_files(tokenizer):
            link_or_copy(file, folder / TOKENIZER / file.name, copy=True)
        check_tokenizer(folder / TOKENIZER, plan.facts["vocab_size"], progress)

    return publish(ModelRepository, plan.path, manifest, produce)


def tree(path: Path) -> str:
    """The folder as a tree of text lines, directories first."""
    return "\n".join([f"{path.name}/", *_branches(path, "")])


def _branches(folder: Path, indent: str) -> list[str]:
    entries = sorted(
        (entry for entry in folder.iterdir() if not entry.name.startswith(".")),
        key=lambda entry: (not entry.is_dir(), entry.name),
    )
    lines = []
    for number, entry in enumerate(entries, start=1):
        last = number == len(entries)
        lines.append(f"{indent}{'└── ' if last else '├── '}{entry.name}{'/' if entry.is_dir() else ''}")
        if entry.is_dir():
            lines += _branches(entry, indent + ("    " if last else "│   "))
    return lines


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that its tokenizer needs; RepositoryError when there are none."""
    found = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    if not any(path.name not in ("config.json", "generation_config.json") for path in found):
        raise RepositoryError(
            f"{folder} holds no tokenizer files.",
            hint="Give the folder of the Hugging Face model (or of its tokenizer) with --tokenizer.",
        )
    return sorted(found)


def _engine_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RepositoryError(
            f"{folder} is no engine: it has no config.json.", hint="Give the folder that `trtserve build` printed."
        ) from None
    except json.JSONDecodeError as error:
        raise RepositoryError(f"{path} is not valid JSON: {error}.", hint="Build the engine again.") from error
    if not isinstance(content, dict) or not isinstance(content.get("build_config"), dict):
        raise RepositoryError(
            f"{path} has no build_config: this is a checkpoint or a model, not an engine.",
            hint="Run `trtserve build` on the checkpoint first.",
        )
    return content


def _require_engine_files(folder: Path, config: dict[str, Any], *, embedded: bool) -> None:
    """RepositoryError when a file of a rank is missing or empty: the server would tell it minutes later."""
    ranks = int(config.get("pretrained_config", {}).get("mapping", {}).get("world_size", 1))
    names = ["rank0.xml", "rank0.bin"] if embedded else [f"rank{rank}.engine" for rank in range(ranks)]
    lacking = [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size == 0]
    if lacking:
        raise RepositoryError(
            f"{folder} is not a complete engine: {', '.join(lacking)} missing or empty.",
            hint="Remove the folder and build the engine again: trtserve build CHECKPOINT",
        )


def _options(
    spec: RepositorySpec, table: Profile, settings: Settings, limits: dict[str, Any], *, embedded: bool
) -> ConfigOptions:
    defaults = {
        CORE: _core_parameters(spec, table, limits, embedded=embedded),
        PREPROCESSING: {"tokenizer_dir": TOKENIZER},
        POSTPROCESSING: {"tokenizer_dir": TOKENIZER},
    }
    parameters = {model: {**defaults.get(model, {}), **settings.parameters.get(model, {})} for model in MODELS}
    return ConfigOptions(
        max_batch_size=spec.triton_max_batch_size or limits["max_batch_size"] or 1,
        decoupled=spec.streaming,
        backend="python" if embedded else "tensorrtllm",
        parameters=parameters,
        instance_counts={
            PREPROCESSING: spec.preprocessing_instance_count,
            POSTPROCESSING: spec.postprocessing_instance_count,
            BLS: spec.bls_instance_count,
        },
        **settings.variables,
    )


def _core_parameters(spec: RepositorySpec, table: Profile, limits: dict[str, Any], *, embedded: bool) -> dict[str, str]:
    values: dict[str, Any] = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": f"{CORE}/{VERSION}",
        "max_beam_width": limits["max_beam_width"] or 1,
        "max_tokens_in_paged_kv_cache": spec.max_tokens_in_paged_kv_cache,
        "kv_cache_free_gpu_mem_fraction": spec.kv_cache_free_gpu_mem_fraction,
    }
    if any(parameter.name == "tokenizer_dir" for parameter in table.models[CORE].parameters):
        values["tokenizer_dir"] = TOKENIZER
    if embedded:
        values |= {
            "executor": "openvino",
            "executor_release": table.release,
            # Long prompts are cut into pieces between the steps of running requests; nothing has to be built for it.
            "enable_chunked_context": "true",
            # A client that went away is noticed within this time; a check costs about 0.1 ms per running request.
            "cancellation_check_period_ms": 50,
        }
    return {key: str(value) for key, value in values.items() if value is not None}


def _facts(spec: RepositorySpec, table: Profile, options: ConfigOptions, config: Mapping[str, Any]) -> dict[str, Any]:
    own = config.get("trtserve", {})
    model = config.get("pretrained_config", {})
    return {
        "alias": spec.name,
        "streaming": spec.streaming,
        "release": table.release,
        "all_releases": table.union,
        "without_meaning": _without_meaning(table, options) if _is_embedded(config) else [],
        "runtime": own.get("runtime", "tensorrt_llm"),
        "triton_max_batch_size": options.max_batch_size,
        "limits": _limits(config),
        "dtype": model.get("dtype"),
        "compute_precision": own.get("compute_precision", model.get("dtype")),
        "kv_precision": own.get("kv_precision"),
        "max_tokens_in_paged_kv_cache": options.parameters[CORE].get("max_tokens_in_paged_kv_cache"),
        "kv_cache_free_gpu_mem_fraction": options.parameters[CORE].get("kv_cache_free_gpu_mem_fraction"),
        "vocab_size": model.get("vocab_size"),
        "mapping": model.get("mapping", {}),
    }


def _without_meaning(table: Profile, options: ConfigOptions) -> list[str]:
    """Parameters that are set and that the embedded executor ignores, those of the core model by their bare names."""
    found = {model: set_without_meaning(model, given, table.release) for model, given in options.parameters.items()}
    return [name if model == CORE else f"{model}.{name}" for model, names in found.items() for name in names]


def _write_models(folder: Path, plan: RepositoryPlan) -> None:
    for model in (*MODELS, plan.spec.name):
        template = BLS if model == plan.spec.name else model
        version = folder / model / VERSION
        version.mkdir(parents=True)
        text = config_text(plan.profile, template, plan.options, name=model)
        (folder / model / "config.pbtxt").write_text(text, encoding="utf-8")
        if template == ENSEMBLE:
            # Tools that drop empty folders would make Triton refuse the model.
            (version / ".tmp").touch()
        for source in _python_files(template):
            shutil.copyfile(source, version / source.name)
        if plan.facts["runtime"] == "openvino" and (classes := classes_json(template, plan.profile.release)):
            (version / CLASSES_FILE).write_text(classes, encoding="utf-8")


def _python_files(model: str) -> list[Path]:
    """The model's own files and those that it shares with other models; each model imports only its own folder."""
    shared = [_SOURCES / "shared" / f"{name}.py" for name in _SHARED[model]]
    return sorted((_SOURCES / model / VERSION).glob("*.py")) + shared


def _model_sources() -> list[Path]:
    return [path for model in MODELS for path in _python_files(model)]


def _link_engine(engine: Path, target: Path, *, copy: bool) -> None:
    for source in sorted(engine.iterdir()):
        if source.is_file() and source.name != MANIFEST:
            link_or_copy(source, target / source.name, copy=copy)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.parent.parent.name}/{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def check_tokenizer(folder: Path, vocab_size: int | None, progress: Progress = SILENT) -> None:
    """Load a tokenizer as the models will, and take one text there and back; RepositoryError when that fails."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), legacy=False, local_files_only=True)
        ids = tokenizer.encode(_PROBE)
        text = tokenizer.decode(ids, skip_special_tokens=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RepositoryError(
            f"The tokenizer cannot be loaded: {first}",
            hint="Check the tokenizer files of the model; --tokenizer takes another folder.",
        ) from error
    if not ids or not re.sub(r"\W", "", text):
        raise RepositoryError(f"The tokenizer turns {_PROBE!r} into {text!r}; it does not fit this model.")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise RepositoryError(
            f"The tokenizer makes token {max(ids)}, but the engine's vocabulary has {vocab_size} tokens.",
            hint="Give the tokenizer of the model that the engine was built from.",
        )
    if text.strip() != _PROBE:
        progress.warn(f"The tokenizer does not give back the text it was given: {_PROBE!r} became {text.strip()!r}.")
