"""Write and parse `config.pbtxt`, through Triton's own protobuf messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.files import read_text
from trtserve.repository.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    ModelProfile,
    Profile,
    TensorSpec,
    parameters_of,
)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Settings shared by all configs of one repository, in addition to the profile."""

    max_batch_size: int
    decoupled: bool
    backend: str = "python"  # backend of the core model
    max_queue_size: int = 0
    max_queue_delay_microseconds: int = 0
    # Triton data types without the TYPE_ prefix.
    logits_datatype: str = "FP32"
    encoder_input_features_data_type: str = "FP16"
    prompt_embedding_table_data_type: str = "FP16"
    lora_weights_data_type: str = "FP16"
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # model → parameter → text
    instance_counts: Mapping[str, int] = field(default_factory=dict)  # model → number of instances
    model_names: Mapping[str, str] = field(default_factory=dict)
    """Model of the profile → its name in the repository, where that differs."""
    keep_unset: bool = True
    """Whether to write parameters of the core model without a value; keys that the backend needs are always written."""


def config_text(profile: Profile, model: str, options: ConfigOptions, *, name: str | None = None) -> str:
    """Return the text of `config.pbtxt` for `model`; `name` renames it (the alias is a renamed BLS model)."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(build_config(profile, model, options, name=name)))


def build_config(profile: Profile, model: str, options: ConfigOptions, *, name: str | None = None) -> Any:
    """Return the `ModelConfig` message of `model`; see `config_text`."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    description = profile.models[model]
    config = ModelConfig(name=name or options.model_names.get(model, model), max_batch_size=options.max_batch_size)
    _add_tensors(config, description, options)
    if model == ENSEMBLE:
        config.platform = "ensemble"
        _add_steps(config, description, options)
    else:
        _add_python_parts(config, profile, description, options)
    return config


def llmapi_config_text(description: ModelProfile, *, name: str, decoupled: bool, gpu_device_ids: str) -> str:
    """Return the text of `config.pbtxt` for a model of the LLM API: no batch axis, one instance per group of GPUs.

    Batch size and streaming stand here as well as in model.yaml, because servers start without auto-completion.
    """
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

    options = ConfigOptions(max_batch_size=0, decoupled=decoupled)
    config = ModelConfig(name=name, backend="python")
    _add_tensors(config, description, options)
    config.model_transaction_policy.decoupled = decoupled
    if gpu_device_ids:
        config.parameters["gpu_device_ids"].string_value = gpu_device_ids
    count = max(1, len(gpu_device_ids.split(";")))
    config.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)
    return str(text_format.MessageToString(config))


def tensors_config(description: ModelProfile, options: ConfigOptions) -> Any:
    """Return a `ModelConfig` message that only declares the inputs and outputs of a model."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig()
    _add_tensors(config, description, options)
    return config


def _add_tensors(config: Any, description: ModelProfile, options: ConfigOptions) -> None:
    for tensor in description.inputs:
        added = config.input.add(
            name=tensor.name,
            data_type=_data_type(tensor, options),
            dims=tensor.dims,
            optional=tensor.optional,
            allow_ragged_batch=tensor.ragged,
        )
        if tensor.scalar:
            added.reshape.SetInParent()
    for tensor in description.outputs:
        config.output.add(name=tensor.name, data_type=_data_type(tensor, options), dims=tensor.dims)


def parse_config(text: str, name: object = "The text") -> Any:
    """Return the `ModelConfig` message of a config.pbtxt; RepositoryError, which calls it `name`, if it is not one."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return ModelConfig.FromString(_serialized(text))
    except (text_format.ParseError, ValueError) as error:
        raise RepositoryError(f"{name} is not a Triton model configuration: {str(error).rstrip('.'):.300}.") from error


def read_config(path: Path) -> Any:
    """Parse a config.pbtxt. Raises RepositoryError with file and line when it is not valid."""
    text = read_text(path, RepositoryError)
    for number, left in wrong_placeholders(text):
        raise RepositoryError(
            f"{path}, line {number}: the placeholder {left} was never filled in.",
            hint="Give the parameter its value, or remove it; `trtserve repo` writes complete files.",
        )
    return parse_config(text, path)


@lru_cache(maxsize=64)
def _serialized(text: str) -> bytes:
    """Cache parsed texts: parsing takes milliseconds, and the start of a server reads each file several times."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    return bytes(text_format.Parse(text, ModelConfig()).SerializeToString())


def type_name(tensor: Any) -> str:
    """Return the type of an input or output of a ModelConfig message, without TYPE_."""
    from tritonclient.grpc.model_config_pb2 import DataType

    return str(DataType.Name(tensor.data_type)).removeprefix("TYPE_")


def _data_type(tensor: TensorSpec, options: ConfigOptions) -> Any:
    from tritonclient.grpc.model_config_pb2 import DataType

    chosen = {
        "$logits": options.logits_datatype,
        "$encoder": options.encoder_input_features_data_type,
        "$prompt": options.prompt_embedding_table_data_type,
        "$lora": options.lora_weights_data_type,
    }
    return DataType.Value(f"TYPE_{chosen.get(tensor.type, tensor.type)}")


def _add_steps(config: Any, description: ModelProfile, options: ConfigOptions) -> None:
    for step in description.steps:
        name = options.model_names.get(step.model, step.model)
        added = config.ensemble_scheduling.step.add(model_name=name, model_version=-1)
        for link in step.inputs:
            added.input_map[link.name] = link.ensemble_tensor
        for link in step.outputs:
            added.output_map[link.name] = link.ensemble_tensor


def _add_python_parts(config: Any, profile: Profile, description: ModelProfile, options: ConfigOptions) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    name = description.name
    config.backend = options.backend if name == CORE else "python"
    if name in (CORE, BLS):
        config.model_transaction_policy.decoupled = options.decoupled
    newer = profile.release not in ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18")
    if name == POSTPROCESSING and profile.release != "0.12":
        config.dynamic_batching.SetInParent()
    if name == CORE or (name == PREPROCESSING and newer):
        batching = config.dynamic_batching
        batching.preferred_batch_size.append(options.max_batch_size)
        batching.max_queue_delay_microseconds = options.max_queue_delay_microseconds
        batching.default_queue_policy.max_queue_size = options.max_queue_size
    given = options.parameters.get(name, {})
    for parameter in description.parameters:
        text = given.get(parameter.name, parameter.unset)
        # NVIDIA's C++ backend logs a warning for each empty text; it reads it as unset.
        if text or options.keep_unset or name != CORE or parameter.needs_key:
            config.parameters[parameter.name].string_value = text
    for key in given.keys() - {parameter.name for parameter in description.parameters}:
        config.parameters[key].string_value = given[key]
    config.instance_group.add(count=options.instance_counts.get(name, 1), kind=ModelInstanceGroup.KIND_CPU)


_PLACEHOLDER = re.compile(r"\$\{[^}]*\}?")
_PARAMETER = re.compile(
    r'key\s*:\s*"(?P<key>[^"]*)"\s*[,;]?\s*value\s*:?\s*\{\s*string_value\s*:\s*"(?P<text>\$\{[^}"]*\})"'
)
# A text that only the config.pbtxt of one model has.
_SIGNS = {CORE: '"gpt_model_type"', PREPROCESSING: '"QUERY"', POSTPROCESSING: '"TOKENS_BATCH"'}


def wrong_placeholders(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every placeholder that keeps a model from loading; those in comments do not."""
    code = "\n".join(line.split("#", 1)[0] for line in text.splitlines())
    model = next((model for model, sign in _SIGNS.items() if sign in code), CORE)
    needed = {row.name for row in parameters_of(model) if row.required}
    optional = {found.start("text") for found in _PARAMETER.finditer(code) if found["key"] not in needed}
    for found in _PLACEHOLDER.finditer(code):
        if found.start() not in optional:
            yield code.count("\n", 0, found.start()) + 1, found[0]


def parameter_texts(config: Any) -> dict[str, str]:
    """Return parameter → text of a ModelConfig message; empty where the placeholder is left."""
    texts = {key: str(value.string_value).strip() for key, value in config.parameters.items()}
    return {key: "" if _PLACEHOLDER.fullmatch(text) else text for key, text in texts.items()}


def unfilled_parameters(config: Any) -> list[str]:
    """Return the parameters of a ModelConfig message whose placeholder is left."""
    values = config.parameters.items()
    return sorted(key for key, value in values if _PLACEHOLDER.fullmatch(value.string_value.strip()))
