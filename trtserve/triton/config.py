"""How a model's `config.pbtxt` is written: through Triton's own protobuf, never by filling text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.triton.profiles import BLS, CORE, ENSEMBLE, POSTPROCESSING, PREPROCESSING, ModelProfile, Profile, Tensor


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """What the configs of one repository have in common, beside the profile.

    `parameters` maps model → parameter → text; `instance_counts` maps model → number of instances. The four
    data types are Triton names without the TYPE_ prefix. `model_names` renames models of the profile; without
    `keep_unset` only parameters with a value are written, and those whose key must exist.
    """

    max_batch_size: int
    decoupled: bool
    backend: str = "python"
    max_queue_size: int = 0
    max_queue_delay_microseconds: int = 0
    logits_datatype: str = "FP32"
    encoder_input_features_data_type: str = "FP16"
    prompt_embedding_table_data_type: str = "FP16"
    lora_weights_data_type: str = "FP16"
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    instance_counts: Mapping[str, int] = field(default_factory=dict)
    model_names: Mapping[str, str] = field(default_factory=dict)
    keep_unset: bool = True


def config_text(profile: Profile, model: str, options: ConfigOptions, *, name: str | None = None) -> str:
    """`config.pbtxt` of `model` as the profile has it; `name` renames it (the alias is a renamed BLS model)."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(build_config(profile, model, options, name=name)))


def build_config(profile: Profile, model: str, options: ConfigOptions, *, name: str | None = None) -> Any:
    """The `ModelConfig` message of `model`; see `config_text`."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    description = profile.models[model]
    config = ModelConfig(name=name or options.model_names.get(model, model), max_batch_size=options.max_batch_size)
    for tensor in description.inputs:
        _add_input(config, tensor, options)
    for tensor in description.outputs:
        config.output.add(name=tensor.name, data_type=_data_type(tensor, options), dims=tensor.dims)
    if model == ENSEMBLE:
        config.platform = "ensemble"
        _add_steps(config, description, options)
    else:
        _add_python_parts(config, profile, description, options)
    return config


def llmapi_config_text(description: ModelProfile, *, name: str, decoupled: bool, gpu_device_ids: str) -> str:
    """`config.pbtxt` of a model of the LLM API, which has no batch axis; one instance for each group of GPUs.

    Batches and streaming are told here and not in model.yaml alone: servers are started without auto-completion.
    """
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

    options = ConfigOptions(max_batch_size=0, decoupled=decoupled)
    config = ModelConfig(name=name, backend="python")
    for tensor in description.inputs:
        _add_input(config, tensor, options)
    for tensor in description.outputs:
        config.output.add(name=tensor.name, data_type=_data_type(tensor, options), dims=tensor.dims)
    config.model_transaction_policy.decoupled = decoupled
    if gpu_device_ids:
        config.parameters["gpu_device_ids"].string_value = gpu_device_ids
    count = max(1, len(gpu_device_ids.split(";")))
    config.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)
    return str(text_format.MessageToString(config))


def parse_config(text: str, name: object = "The text") -> Any:
    """The `ModelConfig` message that `text` says; RepositoryError, which calls it `name`, when it says none."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return text_format.Parse(text, ModelConfig())
    except (text_format.ParseError, ValueError) as error:
        raise RepositoryError(f"{name} is not a Triton model configuration: {str(error).rstrip('.')}.") from error


def type_name(tensor: Any) -> str:
    """The type of an input or output of a ModelConfig message, without TYPE_."""
    from tritonclient.grpc.model_config_pb2 import DataType

    return str(DataType.Name(tensor.data_type)).removeprefix("TYPE_")


def _data_type(tensor: Tensor, options: ConfigOptions) -> Any:
    from tritonclient.grpc.model_config_pb2 import DataType

    chosen = {
        "$logits": options.logits_datatype,
        "$encoder": options.encoder_input_features_data_type,
        "$prompt": options.prompt_embedding_table_data_type,
        "$lora": options.lora_weights_data_type,
    }
    return DataType.Value(f"TYPE_{chosen.get(tensor.type, tensor.type)}")


def _add_input(config: Any, tensor: Tensor, options: ConfigOptions) -> None:
    added = config.input.add(
        name=tensor.name,
        data_type=_data_type(tensor, options),
        dims=tensor.dims,
        optional=tensor.optional,
        allow_ragged_batch=tensor.ragged,
    )
    if tensor.scalar:
        added.reshape.SetInParent()


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
    _add_batching(config, profile, name, options)
    given = options.parameters.get(name, {})
    for parameter in description.parameters:
        text = given.get(parameter.name, parameter.text)
        # NVIDIA's C++ backend takes some empty values for values, such as a list of no GPUs.
        if text or options.keep_unset or name != CORE or parameter.needs_key:
            config.parameters[parameter.name].string_value = text
    for key in given.keys() - {parameter.name for parameter in description.parameters}:
        config.parameters[key].string_value = given[key]
    config.instance_group.add(count=options.instance_counts.get(name, 1), kind=ModelInstanceGroup.KIND_CPU)


def _add_batching(config: Any, profile: Profile, name: str, options: ConfigOptions) -> None:
    newer = profile.release not in ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18")
    if name == POSTPROCESSING and profile.release != "0.12":
        config.dynamic_batching.SetInParent()
    if name == CORE or (name == PREPROCESSING and newer):
        batching = config.dynamic_batching
        batching.preferred_batch_size.append(options.max_batch_size)
        batching.max_queue_delay_microseconds = options.max_queue_delay_microseconds
        batching.default_queue_policy.max_queue_size = options.max_queue_size
