"""Import for the LLM API: the model is pulled and put into a repository; nothing is converted or built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Model, ModelRepository
from trtserve.errors import UsageError
from trtserve.import_ import ModelPlan, missing_bytes, model_destination, plan_model, pull_model
from trtserve.pipeline.recorded import record_of, take_name
from trtserve.pipeline.spec import ImportSpec
from trtserve.pipeline.stages import Stage, planned_stage
from trtserve.progress import SILENT, Progress
from trtserve.releases.installed import installed
from trtserve.repo.group import require_room
from trtserve.repo.llmapi import LlmapiPlan, assemble_llmapi, llmapi_models, plan_llmapi
from trtserve.runtimes import choose_runtime, llmapi
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store, reusable

# Limits of a build that the LLM has keywords for, under the same names.
_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_TAKEN = (*_LIMITS, "runtime", "trtllm_version")
_PARALLEL = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size")
# For other converters' sakes it may come from the environment of a machine.
_WITHOUT_MEANING = ("gpu_sm", "trtllm_examples")


@dataclass(frozen=True, kw_only=True)
class LlmapiImportPlan:
    """An import before its first byte; `missing` counts bytes to pull, `repository` is known when they are here."""

    model: ModelPlan
    model_path: Path
    model_reused: bool
    missing: int
    repository: LlmapiPlan | None = None

    def stages(self) -> list[Stage]:
        """Both stages; the path of the repository follows from the model's files."""
        repository = self.repository
        return [
            planned_stage("model", self.model_path, self.missing, done=self.model_reused),
            planned_stage(
                "repo", repository.path if repository else None, 0, done=bool(repository and repository.reused)
            ),
        ]


def for_llmapi(spec: ImportSpec, progress: Progress = SILENT) -> bool:
    """Whether the runtime that `spec` means has no engines."""
    return choose_runtime(spec.build.runtime, progress, container=spec.build.container).NAME == llmapi.NAME


def plan_llmapi_import(
    spec: ImportSpec, *, store: Store | None = None, token: str | None = None, progress: Progress = SILENT
) -> LlmapiImportPlan:
    """Everything that can be known before the pull; UsageError for options of engines and conversions."""
    store = store or Store()
    asked = repository_spec(spec)
    if spec.into is not None:
        require_room(spec.into, asked, llmapi_models(asked), runtime=llmapi.NAME)
    model = plan_model(spec.source, name=spec.name, store=store, token=token, any_architecture=True, progress=progress)
    path = model_destination(model, None, store)
    published = reusable(Model, path, model.fingerprint)
    plan = LlmapiImportPlan(
        model=model,
        model_path=path,
        model_reused=published is not None,
        missing=missing_bytes(model, store=store),
    )
    return plan if published is None else replace(plan, repository=_plan_repository(spec, published, store))


def import_for_llmapi(
    spec: ImportSpec,
    *,
    store: Store | None = None,
    token: str | None = None,
    record: bool = True,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Pull the model, make its repository, and remember it under its name if `record`."""
    store = store or Store()
    plan = plan_llmapi_import(spec, store=store, token=token, progress=progress)
    progress.step("Nothing is converted or built: TensorRT-LLM's PyTorch backend loads the Hugging Face folder")
    model = pull_model(plan.model, store=store, token=token, progress=progress)
    made = _plan_repository(spec, model, store, progress)
    if made.reused:
        progress.step(f"Model repository {made.path} is reused")
    repository = assemble_llmapi(made, progress=progress)
    if record:
        take_name(record_of(spec, plan.model, model, repository), store, progress)
    return repository


def _plan_repository(spec: ImportSpec, model: Model, store: Store, progress: Progress = SILENT) -> LlmapiPlan:
    convert = spec.convert
    return plan_llmapi(
        model,
        repository_spec(spec),
        tp_size=convert.tp_size,
        pp_size=convert.pp_size,
        out=spec.out,
        into=spec.into,
        store=store,
        progress=progress,
    )


def repository_spec(spec: ImportSpec) -> RepositorySpec:
    """What the repository is asked for: limits and expert parallelism become keywords of the LLM.

    UsageError for what only engines, conversions and repositories of engines have.
    """
    _require_defaults(spec.convert, (*_PARALLEL, *_WITHOUT_MEANING, "trtllm_version"))
    _require_defaults(spec.build, _TAKEN)
    for name, flag in (("tokenizer", "--tokenizer"), ("draft", "--draft-engine"), ("verify", "--verify")):
        if getattr(spec, name) is not None:
            raise _meaningless(flag)
    keywords = {name: getattr(spec.build, name) for name in _LIMITS}
    keywords["moe_expert_parallel_size"] = spec.convert.moe_ep_size
    keywords["moe_tensor_parallel_size"] = spec.convert.moe_tp_size
    return replace(
        spec.repository,
        settings={**_given(keywords), **spec.repository.settings},
        trtllm_version=spec.repository.trtllm_version or _installed(),
    )


def _given(keywords: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in keywords.items() if value is not None}


def _installed() -> str | None:
    found = installed()
    return None if found is None else found.version


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
