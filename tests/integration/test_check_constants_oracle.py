"""Constants that prompts are too short for, against transformers: each fault is found by the value alone, no logits.

Windows, original positions and tables are of the size of real models, which the built-in prompts never reach.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversion_faults import config_faults, faults_of
from tests.support.families import FAMILIES
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import family
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.parity import constants, original
from trtserve.pipeline.parity.comparison import Judgement
from trtserve.specs import ConvertSpec

pytestmark = pytest.mark.needs("torch")

LONGEST = 32768
# Every sequence shows these, so that logits judge them.
SEEN = {"wrong scale of scores", "probabilities of experts"}


@pytest.fixture(scope="module", autouse=True)
def transformers_is_there() -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module("transformers.modeling_utils")


def write_real(folder: Path, name: str) -> Path:
    defaults, changed = FAMILIES[name].config, dict(FAMILIES[name].real)
    if "rope_scaling" in changed:
        changed["rope_scaling"] = defaults["rope_scaling"] | changed["rope_scaling"]
    if "max_position_embeddings" in defaults and name != "opt":
        changed = {"max_position_embeddings": LONGEST} | changed
    return write_tiny_model(folder, name, **changed)


def judged(config: CheckpointConfig, of: constants.Constants) -> list[Judgement]:
    return constants.judged_constants(config, family(config.architecture).decoder(config), of)


def failed(verdicts: list[Judgement]) -> list[str]:
    return [verdict.name for verdict in verdicts if not verdict.passed]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_constant_is_compared_by_value(name: str, tmp_path: Path) -> None:
    folder = write_real(tmp_path, name)
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec())
    of = constants.constants_of(original._load(folder))
    assert failed(judged(config, of)) == []
    faults = config_faults(config)
    assert faults.keys() == FAMILIES[name].constants
    changed = {fault: config.changed(**{key: change(config.content[key])}) for fault, (key, change) in faults.items()}
    found = {fault: failed(judged(each, of)) for fault, each in changed.items()}
    assert {fault for fault, names in found.items() if not names} == SEEN & faults.keys()


@pytest.mark.parametrize(
    ("name", "changed"),
    [("llama", {}), ("qwen3_moe", {}), ("gpt2", {}), ("opt", {}), ("opt", {"word_embed_proj_dim": 32}), ("phi", {})],
)
def test_a_wrong_row_outside_of_the_prompts_is_found(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", name, vocab_size=1000, **changed)
    made = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=tmp_path / "made").path
    products = constants.products_of(original._load(model))

    def beyond() -> list[str]:
        return failed(list(constants.judged_rows(CheckpointReader(made), products, "float32")))

    assert beyond() == []
    tensors = read_safetensors(made / "rank0.safetensors")
    tables = {"transformer.vocab_embedding.weight": "rows of the embedding", "lm_head.weight": "rows of the head"}
    tables["transformer.position_embedding.weight"] = "rows of the positions"
    for table in tables.keys() & tensors.keys():
        wrong = tensors[table].copy()
        wrong[[411, 412]] = wrong[[412, 411]]
        write_safetensors(made / "rank0.safetensors", {**tensors, table: wrong})
        assert tables[table] in beyond()


def test_a_table_of_another_length_fails(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "gpt2")
    made = convert_model(Model(path=model), ConvertSpec(), out=tmp_path / "made").path
    products = constants.products_of(original._load(model))
    products["transformer.position_embedding.weight"] = products["transformer.position_embedding.weight"][:100]
    assert failed(list(constants.judged_rows(CheckpointReader(made), products, "float32"))) == ["rows of the positions"]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "starcoder2"])
def test_faults_of_constants_are_faults_of_whole_checkpoints_too(name: str, tmp_path: Path) -> None:
    model = write_real(tmp_path / "model", name)
    made = convert_model(Model(path=model), ConvertSpec(), out=tmp_path / "made").path
    faults_of(made)["windows dropped"](made)
    config = CheckpointConfig.of(json.loads((made / "config.json").read_text()))
    of, decoder = constants.constants_of(original._load(model)), family(config.architecture).decoder(config)
    assert failed(judged(config, of)) == ["layers with another window"]
    # NVIDIA's converters leave windows to the start of the server; other windows than the model's are wrong there too.
    assert failed(constants.judged_constants(config, decoder, of, windows=False)) == []
    other = replace(decoder, windows=(77,))
    assert failed(constants.judged_constants(config, other, of, windows=False)) == ["layers with another window"]
