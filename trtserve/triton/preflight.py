"""What a model repository will serve, and what is wrong with it, as far as its files tell before Triton reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.errors import RepositoryError
from trtserve.files import read_json_object, read_text
from trtserve.triton.config import parse_config
from trtserve.triton.core_models import Backend, CoreModel, core_models, world_size
from trtserve.triton.embedded import refused_parameter
from trtserve.triton.parameters import CLASSES_FILE
from trtserve.triton.profiles import BLS, CORE, DRAFT, ENSEMBLE

_KV_TOKENS = "max_tokens_in_paged_kv_cache"
_PLACEHOLDER = re.compile(r"\$\{[^}]*\}?")


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the files of a repository say.

    `model` is the text model that is asked by default, `backends` what Triton must have, `streaming` whether that model
    is decoupled, `engine` the content of the engine's config.json (empty when there is none), `engine_bytes` the size
    of its weights and the draft model's, `facts` the manifest's,
    `kv_tokens` the cache's size where a parameter sets it, `draft` the config.json of a draft model's engine,
    `instances` the processes of each model, `tokenizer_bytes` the size of tokenizer.json,
    `core_models` those that run an engine or an LLM, the one of `engine` first,
    `without_meaning` the parameters that are set and that the runtime ignores (the core model's by their bare names).
    """

    models: tuple[str, ...]
    model: str
    backends: frozenset[str]
    streaming: bool
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_bytes: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    without_meaning: tuple[str, ...] = ()
    kv_tokens: int | None = None
    draft: Mapping[str, Any] = field(default_factory=dict)
    instances: Mapping[str, int] = field(default_factory=dict)
    tokenizer_bytes: int = 0
    core_models: tuple[CoreModel, ...] = ()

    @property
    def runtime(self) -> str | None:
        """Runtime of the first core model: `openvino`, `tensorrt_llm` or `llmapi`; None when there is no core model."""
        if (own := self._own("runtime")) is not None or not self.core_models:
            return own
        return "llmapi" if self.core_models[0].backend == "llmapi" else "tensorrt_llm"

    @property
    def backend(self) -> Backend | None:
        """How the first core model runs: `tensorrtllm` (C++), `python` or `llmapi`; None when there is none."""
        return self.core_models[0].backend if self.core_models else None

    @property
    def release(self) -> str | None:
        """The TensorRT-LLM release (`0.18`) whose tensors the models have, where a manifest tells it."""
        found = self.facts.get("release")
        return None if found is None else str(found)

    @property
    def precision(self) -> dict[str, str]:
        """Precision of the engine's weights, arithmetic and KV cache, where it says them."""
        found = {"weights_precision": self._weights_precision()}
        found |= {key: self._own(key) for key in ("compute_precision", "kv_precision")}
        return {key: value for key, value in found.items() if value}

    @property
    def world_size(self) -> int:
        """Number of ranks of one instance of the first core model: tensor × pipeline parallel."""
        return self.core_models[0].world_size if self.core_models else world_size(self.engine)

    @property
    def machine(self) -> Mapping[str, Any]:
        """The machine that the engine was built on, where a manifest describes it."""
        found = self.facts.get("machine")
        return found if isinstance(found, Mapping) else {}

    def cache_warnings(self, kv_blocks: Mapping[str, int]) -> list[str]:
        """What to say of a KV cache whose gauges are `kv_blocks` and that cannot hold one sequence of the engine."""
        tokens = kv_blocks.get("max", 0) * kv_blocks.get("tokens_per", 0)
        longest = int(self.engine.get("build_config", {}).get("max_seq_len", 0))
        if not 0 < tokens < longest:
            return []
        text = (
            f"The KV cache holds {tokens} tokens, so prompt and answer together end there (max_seq_len {tokens} "
            f"instead of the engine's {longest}). Raise max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction."
        )
        return [text]

    def _weights_precision(self) -> str | None:
        """int8 for TensorRT-LLM's W8A16, int4 for W4A16, another algorithm by its name, the dtype without one."""
        pretrained = self.engine.get("pretrained_config", {})
        algorithm = (pretrained.get("quantization") or {}).get("quant_algo")
        if algorithm in (None, "NO_QUANT"):
            algorithm = pretrained.get("dtype")
        found = {"W8A16": "int8", "W4A16": "int4"}.get(algorithm, algorithm)
        return None if found is None else str(found)

    def _own(self, key: str) -> str | None:
        value = self.engine.get("trtserve", {}).get(key)
        return None if value is None else str(value)


def inspect_repository(repository: ModelRepository) -> Served:
    """Read every model's config; RepositoryError names the file (and line) that Triton would stumble over."""
    configs = {path.parent.name: read_config(path) for path in sorted(repository.path.glob("*/config.pbtxt"))}
    if not configs:
        raise RepositoryError(
            f"{repository.path} holds no model: no <model>/config.pbtxt was found.",
            hint="Give the folder that holds the models' folders, or make one with `trtserve import`.",
        )
    for name, config in configs.items():
        require_program(repository.path / name, config)
    facts = repository.manifest.facts if repository.manifest is not None else {}
    model = _default_model(configs, facts, repository.name)
    cores = core_models(repository.path, configs, facts)
    engines = [repository.path / model / "1" for model in (CORE, DRAFT)]
    folders = {engine.resolve() for engine in (*engines, *(core.engine for core in cores if core.engine is not None))}
    return Served(
        models=tuple(configs),
        model=model,
        backends=frozenset(config.backend for config in configs.values() if config.backend),
        streaming=bool(configs[model].model_transaction_policy.decoupled or _core_streams(configs)),
        engine=_json(engines[0] / "config.json") or (cores[0].config if cores else {}),
        engine_bytes=sum(path.stat().st_size for folder in folders for path in _weights(folder)),
        facts=facts,
        without_meaning=tuple(_without_meaning(repository.path, configs)),
        kv_tokens=_kv_tokens(configs),
        core_models=cores,
        draft=_json(engines[1] / "config.json"),
        instances={
            name: sum(group.count or 1 for group in config.instance_group) or 1 for name, config in configs.items()
        },
        tokenizer_bytes=max(
            (path.stat().st_size for path in repository.path.glob("*/1/tokenizer/tokenizer.json")), default=0
        ),
    )


def _weights(engine: Path) -> Iterator[Path]:
    return (path for pattern in ("*.bin", "rank*.engine") for path in engine.glob(pattern))


def _kv_tokens(configs: Mapping[str, Any]) -> int | None:
    """The cache's size that the core model is given; None when it is empty or no number."""
    given = configs[CORE].parameters if CORE in configs else {}
    text = given[_KV_TOKENS].string_value.strip() if _KV_TOKENS in given else ""
    return int(text) if text.isdigit() else None


def _without_meaning(folder: Path, configs: Mapping[str, Any]) -> Iterator[str]:
    """The parameters that the models list when they are loaded, read from the same files."""
    for model, config in configs.items():
        classes = _json(folder / model / "1" / CLASSES_FILE).get("without_meaning", {})
        given = {name: value.string_value.strip() for name, value in config.parameters.items()}
        for name, entry in classes.items():
            if given.get(name, "") not in ("", entry["unset"]):
                yield name if model == CORE else f"{model}.{name}"


def placeholders(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every placeholder of NVIDIA's templates that nobody filled, those of comments aside."""
    for number, line in enumerate(text.splitlines(), start=1):
        yield from ((number, found[0]) for found in _PLACEHOLDER.finditer(line.split("#", 1)[0]))


def read_config(path: Path) -> Any:
    """The ModelConfig message of a config.pbtxt; RepositoryError, with file and line, when it says none."""
    text = read_text(path, RepositoryError)
    for number, left in placeholders(text):
        raise RepositoryError(
            f"{path}, line {number}: the placeholder {left} was never filled in.",
            hint="Give the parameter its value, or remove it; `trtserve repo` writes complete files.",
        )
    return parse_config(text, path)


def require_program(folder: Path, config: Any) -> None:
    """RepositoryError for a python model without its file: Triton 2.51 waits for ever for its stub."""
    if config.backend != "python":
        return
    file = config.default_model_filename or "model.py"
    versions = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()]
    lacking = next((path for path in versions if not (path / file).exists()), None)
    if lacking is not None or not versions:
        raise RepositoryError(
            f"The model {folder.name} has no {(lacking or folder / '1') / file}.",
            hint="Make the repository again, or put the file there.",
        )


def require_loadable(repository: ModelRepository) -> None:
    """RepositoryError for what Triton would find only when it loads the models.

    That is an openvino engine without its files, or a parameter that a model refuses.
    """
    _require_engines(repository)
    for path in sorted(repository.path.glob(f"*/1/{CLASSES_FILE}")):
        config = path.parents[1] / "config.pbtxt"
        if (reason := refusal(config)) is not None:
            raise RepositoryError(f"{config}: {reason}", hint="Remove the parameter, or leave its value empty.")


def refusal(config: Path) -> str | None:
    """What the model of a config.pbtxt will say at load against one of its parameters; None when it takes them all."""
    classes = _json(config.parent / "1" / CLASSES_FILE)
    given = {name: value.string_value for name, value in read_config(config).parameters.items()}
    return refused_parameter(given, classes)


def _require_engines(repository: ModelRepository) -> None:
    for model in (CORE, DRAFT):
        engine = repository.path / model / "1"
        runtime = _json(engine / "config.json").get("trtserve", {}).get("runtime")
        lacking = [name for name in ("rank0.xml", "rank0.bin") if not (engine / name).is_file()]
        if runtime == "openvino" and lacking:
            raise RepositoryError(
                f"The engine of the model {model} is incomplete: {engine} has no {' and no '.join(lacking)}.",
                hint="Make the repository again with `trtserve repo` or `trtserve import`.",
            )


def _default_model(configs: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> str:
    wanted = (facts.get("alias"), name, BLS, ENSEMBLE)
    return next((str(model) for model in wanted if model in configs), next(iter(configs)))


def _core_streams(configs: Mapping[str, Any]) -> bool:
    return CORE in configs and bool(configs[CORE].model_transaction_policy.decoupled)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(path, RepositoryError)
    except FileNotFoundError:
        return {}
