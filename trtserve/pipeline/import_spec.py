"""The options of an import: from what a user gives, which names models and engines, to a spec of folders."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

from trtserve.artifacts import Engine, Model
from trtserve.errors import UsageError
from trtserve.executor.runtimes import choose_runtime
from trtserve.nvidia.releases.installed import installed
from trtserve.progress import SILENT, Progress
from trtserve.repository.adapters import find_adapters
from trtserve.repository.draft import find_draft
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store
from trtserve.store.sources import parse_source

ENGINE_DEST_PATH = "ENGINE_DEST_PATH"
# Limits of a build that the LLM has keywords for, under the same names.
_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_PARALLEL = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size")
# These may come from the machine's environment, for the sake of other converters.
_IGNORED = ("gpu_sm", "trtllm_examples", "trtllm_version")


@dataclass(frozen=True, kw_only=True)
class ImportSpec:
    """The options of all stages of an import."""

    source: str
    convert: ConvertSpec
    build: BuildSpec
    repository: RepositorySpec  # its name is used for all artefacts
    tokenizer: Path | None = None  # a Hugging Face folder; None: the model's own
    draft: Engine | None = None  # engine of a draft model
    draft_tokenizer: Path | None = None  # folder of the draft model's tokenizer, if known
    engine_out: Path | None = None  # folder of the engine; None: in the store
    out: Path | None = None  # folder of the repository; None: in the store
    into: Path | None = None  # a repository to add the models to
    discard_intermediate: bool = False  # remove the checkpoint when the repository is complete
    verify: CheckSpec | None = None  # compare the checkpoint with the model before the build, even a reused one

    @property
    def name(self) -> str:
        """Name of all artefacts, and of the served model."""
        return self.repository.name

    def tokenizer_of(self, model: Model) -> Path:
        """Return the folder of the tokenizer that is served with `model`."""
        return self.tokenizer or model.path

    @property
    def any_architecture(self) -> bool:
        """Whether NVIDIA's tools convert or load the model, so that our converter need not know it."""
        runtime = choose_runtime(self.build.runtime, container=self.build.container)
        return self.convert.converter == "upstream" or bool(runtime.folder_loader)


def resolve_import(
    source: str,
    *,
    name: str | None = None,
    convert: ConvertSpec,
    build: BuildSpec,
    repository: RepositorySpec,
    tokenizer: str | None = None,
    draft: str | None = None,
    out: Path | None = None,
    into: Path | None = None,
    discard_intermediate: bool = False,
    verify: bool = False,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ImportSpec:
    """Return the import of `source`, with the folders that its names stand for.

    `tokenizer` is a folder or the name of an imported model, `draft` a folder or the name of an engine. The embedded
    runtimes use no version of TensorRT-LLM, so theirs is removed. Raises ModelNotFoundError for an unknown name.
    """
    store = store or Store()
    name = parse_source(source, name=name).name
    engine, draft_tokenizer = find_draft(draft, store, progress)
    runtime = choose_runtime(build.runtime, container=build.container)
    return ImportSpec(
        source=source,
        convert=runtime.without_unused(convert),
        build=build,
        repository=replace(repository, name=name, lora=find_adapters(repository, store)),
        tokenizer=store.find(Model, tokenizer, progress=progress).path if tokenizer else None,
        draft=engine,
        draft_tokenizer=draft_tokenizer,
        engine_out=engine_destination(name),
        out=out,
        into=into,
        discard_intermediate=discard_intermediate,
        verify=CheckSpec() if verify else None,
    )


def engine_destination(name: str) -> Path | None:
    """Return `$ENGINE_DEST_PATH/<name>`, where engines outlive the store, or None when the variable is not set."""
    folder = os.environ.get(ENGINE_DEST_PATH)
    return (Path(folder).expanduser() / name).absolute() if folder else None


def llmapi_repository_spec(spec: ImportSpec) -> RepositorySpec:
    """Return the repository's spec: limits and expert parallelism become keywords of the LLM.

    Raises UsageError for options that only engines, conversions and repositories of engines have.
    """
    _require_defaults(spec.convert, (*_PARALLEL, *_IGNORED))
    _require_defaults(spec.build, (*_LIMITS, "runtime", "trtllm_version"))
    for name, flag in (("tokenizer", "--tokenizer"), ("draft", "--draft-engine"), ("verify", "--verify")):
        if getattr(spec, name) is not None:
            raise _meaningless(flag)
    keywords = {name: getattr(spec.build, name) for name in _LIMITS}
    keywords["moe_expert_parallel_size"] = spec.convert.moe_ep_size
    keywords["moe_tensor_parallel_size"] = spec.convert.moe_tp_size
    found = installed()
    return replace(
        spec.repository,
        settings={
            **{name: str(value) for name, value in keywords.items() if value is not None},
            **spec.repository.settings,
        },
        trtllm_version=spec.repository.trtllm_version or (None if found is None else found.version),
    )


def _require_defaults(spec: BuildSpec | ConvertSpec, taken: tuple[str, ...]) -> None:
    default = type(spec)()
    for field in fields(spec):
        if field.name not in taken and getattr(spec, field.name) != getattr(default, field.name):
            raise _meaningless(f"--{field.name.replace('_', '-')}")


def _meaningless(flag: str) -> UsageError:
    return UsageError(
        f"{flag} has no meaning with --runtime llmapi: nothing is converted or built.",
        hint="Keywords of the LLM are given with --set, such as --set max_seq_len=4096.",
    )
