"""config.pbtxt: written through protobuf messages, and parsed as Triton does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from trtserve.errors import UsageError
from trtserve.nvidia.releases import RELEASES
from trtserve.programs.bls.inputs import CORE as FORWARDED
from trtserve.repository.config import ConfigOptions, config_text, parse_config
from trtserve.repository.profiles import BLS, CORE, ENSEMBLE, POSTPROCESSING, PREPROCESSING, profile
from trtserve.repository.settings import resolve_settings

OPTIONS = ConfigOptions(
    max_batch_size=16,
    decoupled=True,
    max_queue_size=7,
    parameters={CORE: {"max_beam_width": "4", "executor": "openvino"}},
    instance_counts={BLS: 3},
)


def config(model: str, release: str | None = None, options: ConfigOptions = OPTIONS, name: str | None = None) -> Any:
    return parse_config(config_text(profile(release), model, options, name=name))


@pytest.mark.parametrize("release", [*RELEASES, None])
def test_every_model_reads_back(release: str | None) -> None:
    for model, table in profile(release).models.items():
        read = config(model, release)
        assert (read.name, read.max_batch_size) == (model, 16)
        assert [tensor.name for tensor in read.input] == [tensor.name for tensor in table.inputs]
        assert [tensor.name for tensor in read.output] == [tensor.name for tensor in table.outputs]
        assert {parameter.name for parameter in table.parameters} <= set(read.parameters)


def test_core_tensors() -> None:
    inputs = {tensor.name: tensor for tensor in config(CORE).input}
    ids, length, words = inputs["input_ids"], inputs["input_lengths"], inputs["stop_words_list"]
    assert (ids.allow_ragged_batch, ids.optional, ids.HasField("reshape")) == (True, True, False)
    assert (length.optional, length.HasField("reshape"), list(length.reshape.shape)) == (False, True, [])
    assert list(words.dims) == [2, -1]


def test_core_model() -> None:
    read = config(CORE)
    assert read.backend == "python"
    assert read.model_transaction_policy.decoupled
    assert list(read.dynamic_batching.preferred_batch_size) == [16]
    assert read.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert read.parameters["max_beam_width"].string_value == "4"
    assert read.parameters["executor"].string_value == "openvino"
    assert read.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"
    assert read.parameters["sink_token_length"].string_value == ""


def test_ensemble() -> None:
    read = config(ENSEMBLE)
    assert read.platform == "ensemble"
    assert not read.backend
    assert not read.HasField("model_transaction_policy")
    steps = read.ensemble_scheduling.step
    assert [step.model_name for step in steps] == [PREPROCESSING, CORE, POSTPROCESSING]
    assert {step.model_version for step in steps} == {-1}
    assert steps[1].input_map["runtime_top_k"] == "top_k"
    assert steps[2].output_map["OUTPUT"] == "text_output"


def test_alias_is_a_renamed_bls_model() -> None:
    read = config(BLS, name="llama-2-7b")
    assert read.name == "llama-2-7b"
    assert read.instance_group[0].count == 3
    assert not read.HasField("dynamic_batching")


def test_chosen_types() -> None:
    options = ConfigOptions(max_batch_size=1, decoupled=False, logits_datatype="FP16")
    types = {tensor.name: tensor.data_type for tensor in config(CORE, "0.17", options).output}
    older = {tensor.name: tensor.data_type for tensor in config(CORE, "0.16", options).output}
    from tritonclient.grpc.model_config_pb2 import DataType

    assert types["context_logits"] == DataType.Value("TYPE_FP16")
    assert older["context_logits"] == DataType.Value("TYPE_FP32")


def test_batching_by_release() -> None:
    assert not config(PREPROCESSING, "0.18").HasField("dynamic_batching")
    assert config(PREPROCESSING, "0.19").HasField("dynamic_batching")
    assert not config(POSTPROCESSING, "0.12").HasField("dynamic_batching")
    assert config(POSTPROCESSING, "0.13").HasField("dynamic_batching")


DATA_TYPES = [
    ("logits_datatype", "FP32"),
    ("logits_datatype", "FP16"),
    *(("encoder_input_features_data_type", value) for value in ("FP16", "BF16", "FP32")),
    *(("prompt_embedding_table_data_type", value) for value in ("FP16", "BF16", "FP32")),
]


@pytest.mark.parametrize("setting", sorted({name for name, _ in DATA_TYPES}))
def test_data_types_match_those_of_set(setting: str) -> None:
    listed = {f"TYPE_{value}" for name, value in DATA_TYPES if name == setting}
    with pytest.raises(UsageError) as refused:
        resolve_settings({setting: "TYPE_INT8"}, profile())
    assert set(re.findall(r"TYPE_\w+", str(refused.value))) - {"TYPE_INT8"} == listed


@pytest.mark.parametrize("setting", DATA_TYPES, ids=" ".join)
def test_types_agree_between_the_models_of_each_release(setting: tuple[str, str]) -> None:
    change: dict[str, Any] = dict([setting])
    options = replace(OPTIONS, **change)
    for release in (*RELEASES, None):
        assert {name: found for name, found in _ensemble_types(release, options).items() if len(found) > 1} == {}
        core = {tensor.name: tensor.data_type for tensor in config(CORE, release, options).input}
        for tensor in config(BLS, release, options).input:
            if (inner := FORWARDED.get(tensor.name)) in core and tensor.name != "max_tokens":
                assert tensor.data_type == core[inner], (release, tensor.name)


def _ensemble_types(release: str | None, options: ConfigOptions) -> dict[str, set[int]]:
    """Types of each tensor in all models: Triton loads no ensemble in which one has two."""
    ensemble = config(ENSEMBLE, release, options)
    types: dict[str, set[int]] = {}
    for tensor in (*ensemble.input, *ensemble.output):
        types.setdefault(tensor.name, set()).add(tensor.data_type)
    for step in ensemble.ensemble_scheduling.step:
        model = config(step.model_name, release, options)
        for tensors, links in ((model.input, step.input_map), (model.output, step.output_map)):
            declared = {tensor.name: tensor.data_type for tensor in tensors}
            for name, ensemble_tensor in links.items():
                types.setdefault(ensemble_tensor, set()).add(declared[name])
    return types
