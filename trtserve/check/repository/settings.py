"""Rules about parameters, streaming, batches, instances and queues."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import partial

from trtserve.check.repository.findings import Fault
from trtserve.check.repository.subject import LLMAPI, ModelFolder, Subject
from trtserve.releases import RELEASES
from trtserve.releases.retired import TEMPLATE_TOOL, retired
from trtserve.triton.embedded import startup_refusal
from trtserve.triton.parameters import PARAMETERS
from trtserve.triton.preflight import refusal
from trtserve.triton.profiles import BLS, CORE, POSTPROCESSING, PREPROCESSING
from trtserve.triton.tables.rows import Parameter

# Keys of trtserve's own programs, and those that Triton or the C++ backend read beside the templates'.
_FURTHER = {
    PREPROCESSING: {"lora_table"},
    CORE: {"executor", "executor_release", "recv_poll_period_ms"},
    BLS: {
        "core_answers",
        "preprocessing_model_name",
        "postprocessing_model_name",
        "lora_table",
        "exclude_input_in_output",
        "tensorrt_llm_model_name",
    },
}
_TRITONS = {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}
# The C++ backend takes an empty text for a value of these.
_NEVER_EMPTY = ("gpu_device_ids", "participant_ids", "medusa_choices", "eagle_choices")
_LONG_DELAY = 1_000_000
_CORE_KEY, _DRAFT_KEY = "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name"
# What the models are that a BLS model asks; models of another kind do not take its tensors.
_ROLES = {
    _CORE_KEY: (CORE, LLMAPI),
    _DRAFT_KEY: (CORE,),
    "preprocessing_model_name": (PREPROCESSING,),
    "postprocessing_model_name": (POSTPROCESSING,),
}


def _rows(subject: Subject, model: ModelFolder) -> Iterator[Parameter]:
    release = subject.parameter_release(model)
    if release in RELEASES:
        yield from (row for row in PARAMETERS.get(model.role, ()) if row.within(str(release)))


def other_releases(subject: Subject) -> Iterator[Fault]:
    """No parameter is one that another release has, or had."""
    for model in subject.models.values():
        release = subject.parameter_release(model)
        for key in _unknown(subject, model):
            having = [row for row in PARAMETERS[model.role] if row.name == key]
            old = retired(TEMPLATE_TOOL, key)
            if having or old:
                when = ", ".join(f"{row.since} … {row.until or ''}".rstrip(" …") for row in having)
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The parameter {key} is not read by release {release}"
                    + (f"; it belongs to {when}." if when else "."),
                    fix=old.answer if old else "Leave it out, or serve the repository with that release.",
                )


def unknown_keys(subject: Subject) -> Iterator[Fault]:
    """No parameter is one that nothing reads."""
    for model in subject.models.values():
        for key in _unknown(subject, model):
            if any(row.name == key for row in PARAMETERS[model.role]) or retired(TEMPLATE_TOOL, key):
                continue
            names = [row.name for row in _rows(subject, model)]
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"Nothing reads the parameter {key}.",
                fix=f"Did you mean {close[0]}?" if close else "Leave it out.",
            )


def _unknown(subject: Subject, model: ModelFolder) -> list[str]:
    if model.role not in PARAMETERS or subject.parameter_release(model) is None:
        return []
    names = {row.name for row in _rows(subject, model)} | _FURTHER.get(model.role, set()) | _TRITONS
    return sorted(set(model.parameters) - names)


def wrong_values(subject: Subject) -> Iterator[Fault]:
    """Every value is one that its parameter takes."""
    for model in subject.models.values():
        for row in _rows(subject, model):
            text = model.parameters.get(row.name, "")
            if model.embedded and row.name == "guided_decoding_backend":
                continue  # the embedded executor has one of its own
            if text and not row.values.accepts(text):
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The parameter {row.name} is {text!r}; expected {row.values.expected}.",
                    fix="Another text counts as unset, or is refused when the model is loaded.",
                )


def lacking_parameters(subject: Subject) -> Iterator[Fault]:
    """What a model does not load without is there."""
    for model in subject.models.values():
        for row in _rows(subject, model):
            absent = row.name not in model.parameters
            needs_key = row.needs_key and absent and model.config.backend == "tensorrtllm"
            if (row.required and not model.parameters.get(row.name)) or needs_key:
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The parameter {row.name} is {'missing' if absent else 'empty'}; the model does not load "
                    "without it.",
                    fix=f"Set it: {row.meaning}." if row.required else "Add the key; its value may be empty.",
                )


def empty_lists(subject: Subject) -> Iterator[Fault]:
    """The C++ backend takes an empty list for no GPU, and not for all."""
    for model in subject.of(CORE):
        for key in _NEVER_EMPTY:
            if model.config.backend == "tensorrtllm" and model.parameters.get(key) == "":
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The parameter {key} is empty, which the C++ backend takes for an empty list.",
                    fix="Leave the whole entry out: unset means all.",
                )


def refused(subject: Subject) -> Iterator[Fault]:
    """The openvino runtime can carry out what is set."""
    for model in subject.models.values():
        if subject.member(model.name).get("runtime") != "openvino":
            continue
        reason = refusal(model.file)
        if reason is None and model.role == CORE and model.build and model.pretrained.get("vocab_size"):
            reason = _executor_refusal(subject, model)
        if reason is not None:
            yield Fault(
                model=model.name, file=model.file, what=reason, fix="Remove the parameter, or leave its value empty."
            )


def _executor_refusal(subject: Subject, model: ModelFolder) -> str | None:
    queue = model.config.dynamic_batching.default_queue_policy.max_queue_size
    return startup_refusal(
        model.parameters,
        model.engine,
        release=str(subject.parameter_release(model)),
        max_queue_size=queue,
    )


def mixed_policies(subject: Subject) -> Iterator[Fault]:
    """The core models and the BLS models stream, or none does."""
    for model in subject.of(BLS):
        core = subject.models.get(subject.inner(model, "tensorrt_llm_model_name", CORE))
        if core is None or core.role not in (CORE, LLMAPI) or core.decoupled == model.decoupled:
            continue
        said = f"{model.name} says decoupled: {_word(model)}, its core model {core.name} {_word(core)}"
        yield Fault(
            model=model.name,
            file=model.file,
            what=f"{said}: streaming needs it in both.",
            fix="Make the repository again with --streaming or --no-streaming, which sets both.",
        )


def _word(model: ModelFolder) -> str:
    return "true" if model.decoupled else "false"


def streaming_tokenizers(subject: Subject) -> Iterator[Fault]:
    """Models that answer once are not decoupled."""
    for model in subject.of(PREPROCESSING, POSTPROCESSING):
        if model.decoupled:
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"{model.name} says decoupled: true, and answers each request once.",
                fix="Leave model_transaction_policy out of it.",
            )


def large_batches(subject: Subject) -> Iterator[Fault]:
    """Batches fit the engine."""
    for model in subject.engines:
        built, said = model.limit("max_batch_size"), model.config.max_batch_size
        if built is not None and said > built:
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"It takes batches of {said}; the engine runs {built} requests at a time.",
                fix=f"Set max_batch_size to {built} in all models, or build with --max-batch-size {said}.",
            )


def inner_batches(subject: Subject) -> Iterator[Fault]:
    """What a BLS model takes, the models behind it take too."""
    for model in subject.of(BLS):
        for key, default in (("tensorrt_llm_model_name", CORE), ("preprocessing_model_name", PREPROCESSING)):
            inner = subject.models.get(subject.inner(model, key, default))
            taken = 1 if inner is not None and inner.role == LLMAPI else inner.config.max_batch_size if inner else None
            if inner is None or taken is None or taken >= model.config.max_batch_size:
                continue
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"It takes batches of {model.config.max_batch_size}; {inner.name} behind it takes {taken}.",
                fix="Set max_batch_size to the same number in all models.",
            )


def preferred_batches(subject: Subject) -> Iterator[Fault]:
    """Triton refuses a preferred batch above the largest one."""
    for model in subject.models.values():
        largest = model.config.max_batch_size
        for size in model.config.dynamic_batching.preferred_batch_size:
            if size > largest or size < 1:
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"preferred_batch_size is {size}, and max_batch_size {largest}.",
                    fix=f"Set preferred_batch_size to {largest}.",
                )


def long_delays(subject: Subject) -> Iterator[Fault]:
    """Queues hold no request back for long."""
    for model in subject.models.values():
        delay = model.config.dynamic_batching.max_queue_delay_microseconds
        if delay >= _LONG_DELAY:
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"max_queue_delay_microseconds is {delay}: a request waits {delay / 1e6:g} s for others.",
                fix="Set it to 0; the core model batches by itself.",
            )


def no_instances(subject: Subject) -> Iterator[Fault]:
    """The number of instances is given."""
    for model in subject.models.values():
        if any(group.count < 1 for group in model.config.instance_group):
            yield Fault(
                model=model.name,
                file=model.file,
                what="An instance_group has no count above 0, and Triton then chooses one itself.",
                fix="Write count: 1, or as many as are wanted.",
            )


def one_at_a_time(subject: Subject) -> Iterator[Fault]:
    """The processes of a BLS model can fill the engine's batch."""
    for model in subject.of(BLS):
        core = subject.models.get(subject.inner(model, "tensorrt_llm_model_name", CORE))
        if core is None or core.role != CORE or (core.limit("max_batch_size") or 1) < 2 or model.instances > 1:
            continue
        if not model.own or (model.decoupled and model.parameters.get("core_answers") == "pushed"):
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"One instance of {model.name} serves one {'stream' if model.own else 'request'} at a time; the "
                f"engine runs {core.limit('max_batch_size')}.",
                fix="Raise the count of its instance_group: trtserve repo --bls-instance-count N",
            )


def absent_models(subject: Subject) -> Iterator[Fault]:
    """The models that a BLS model asks are there."""
    for model in subject.of(BLS):
        core = subject.inner(model, "tensorrt_llm_model_name", CORE)
        asked = {_CORE_KEY: core, _DRAFT_KEY: model.parameters.get(_DRAFT_KEY, "")}
        asked["multimodal_encoders_name"] = model.parameters.get("multimodal_encoders_name", "")
        if core not in subject.models or subject.models[core].role != LLMAPI:
            for name in (PREPROCESSING, POSTPROCESSING):
                asked[f"{name}_model_name"] = subject.inner(model, f"{name}_model_name", name)
        for key, name in asked.items():
            yield from _asked(subject, model, key, name)


def _asked(subject: Subject, model: ModelFolder, key: str, name: str) -> Iterator[Fault]:
    """What is wrong with the model that `model` asks by its parameter `key`."""
    fault = partial(Fault, model=model.name, file=model.file)
    found = subject.models.get(name)
    if name and found is None and name not in subject.unread:
        close = difflib.get_close_matches(name, subject.models, n=1)
        yield fault(
            what=f"{key} is {name!r}, which is not in the repository.",
            fix=f"Did you mean {close[0]}?" if close else "Add that model, or leave the parameter out.",
        )
    elif found is not None and found.role not in _ROLES.get(key, (found.role,)):
        yield fault(
            what=f"{key} is {name!r}, which is {_told(found, model)}.",
            fix="Name the model of that kind, or leave the parameter out.",
        )
    elif key == _DRAFT_KEY and name and name == subject.inner(model, _CORE_KEY, CORE):
        yield fault(
            what=f"The draft model is the target {name} itself, so that nothing is gained.",
            fix="Name a smaller model, or leave the parameter out.",
        )


def _told(found: ModelFolder, asking: ModelFolder) -> str:
    return "itself" if found.name == asking.name else f"a model of the kind {found.role or 'unknown'}"
