"""Imports for the LLM API: only the repository is made; nothing is converted or built."""

from __future__ import annotations

from dataclasses import fields, replace

from trtserve.errors import UsageError
from trtserve.executor.runtimes import choose_runtime
from trtserve.nvidia.releases.installed import installed
from trtserve.pipeline.import_spec import ImportSpec
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

# Limits of a build that the LLM has keywords for, under the same names.
_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_PARALLEL = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size")
# These may come from the machine's environment, for the sake of other converters.
_IGNORED = ("gpu_sm", "trtllm_examples", "trtllm_version")


def uses_llmapi(spec: ImportSpec) -> bool:
    """Return whether the runtime that `spec` requests works without engines."""
    return bool(choose_runtime(spec.build.runtime, container=spec.build.container).folder_loader)


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
