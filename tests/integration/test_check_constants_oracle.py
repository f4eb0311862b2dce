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
from tests.support.tiny_models import FAMILIES, read_safetensors, write_safetensors, write_tiny_model
from trtserve.architectures import family
from trtserve.architectures.checkpoint import CheckpointReader
from trtserve.artifacts import Model
from trtserve.check import constants, original, rows
from trtserve.check.comparison import Verdict
from trtserve.convert import checkpoint_config, convert_model
from trtserve.specs import ConvertSpec

pytestmark = pytest.mark.oracle

# As published: Mistral 7B v0.1, Gemma 2 and 3, Phi-3-mini-4k and -128k, StarCoder2, Qwen2 with windows, Llama 3.1.
REAL: dict[str, dict[str, Any]] = {
    "llama3": {"max_position_embeddings": 131072, "rope_scaling": {"original_max_position_embeddings": 8192}},
    "mistral": {"sliding_window": 4096, "max_position_embeddings": 32768},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    "gemma2": {"sliding_window": 4096},
    "gemma3": {"sliding_window": 512},
    "phi3": {"sliding_window": 2047, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "phi3_long": {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
    "starcoder2": {"sliding_window": 4096},
}
LONGEST = 32768
BASE = {"wrong rope base", "rope base by a hundredth"}
SIZE, SCORES = {"wrong rope size"}, {"wrong scale of scores"}
SCALING = {"rope scaling dropped", "wrong rope factor"}
WINDOW = {"windows dropped", "windows by one"}
LAYERS = {"windows in other layers"}
ATTENTION_CAP = {"attention soft-cap dropped", "wrong attention soft-cap"}
LONG = {"wrong short factors", "wrong long factors", "wrong original positions"}
EXPERTS = {"probabilities of experts"}
EXPECTED: dict[str, set[str]] = {
    "llama": BASE,
    "llama3": BASE | SCALING,
    "llama_linear": BASE | SCALING,
    "llama_dynamic": BASE,
    "mistral": BASE | WINDOW,
    "qwen2": BASE | WINDOW | LAYERS,
    "qwen3": BASE,
    "mixtral": BASE | EXPERTS,
    "qwen2_moe": BASE | EXPERTS,
    "qwen3_moe": BASE | EXPERTS,
    "gemma": BASE,
    "gemma2": BASE | WINDOW | LAYERS | ATTENTION_CAP | SCORES | {"logits soft-cap dropped"},
    "gemma3": BASE | LAYERS | SCORES | {"windows by one", "rope scaling dropped", "wrong local rope base"},
    "gpt2": SCORES,
    "gptj": SIZE,
    "gpt_neox": {"wrong rope base"} | SIZE,
    "opt": set(),
    "phi": BASE | SIZE,
    "phi3": BASE | SIZE | WINDOW,
    "phi3_long": BASE | LONG,
    "starcoder2": BASE | WINDOW | SCORES,
    "bloom": set(),
    "falcon": BASE,
    "falcon_new": BASE,
    "falcon_rw": set(),
}
# Every sequence shows these, so that logits judge them.
SEEN = {"wrong scale of scores", "probabilities of experts"}


@pytest.fixture(scope="module", autouse=True)
def transformers_is_there() -> None:
    pytest.importorskip("torch").set_num_threads(1)
    importlib.import_module("transformers.modeling_utils")


def write_real(folder: Path, name: str) -> Path:
    defaults, changed = FAMILIES[name][0], dict(REAL.get(name, {}))
    if "rope_scaling" in changed:
        changed["rope_scaling"] = defaults["rope_scaling"] | changed["rope_scaling"]
    if "max_position_embeddings" in defaults and name != "opt":
        changed = {"max_position_embeddings": LONGEST} | changed
    return write_tiny_model(folder, name, **changed)


def judged(config: dict[str, Any], of: constants.Constants) -> list[Verdict]:
    return constants.judged(config, family(config["architecture"]).decoder(config), of)


def failed(verdicts: list[Verdict]) -> list[str]:
    return [verdict.name for verdict in verdicts if not verdict.passed]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_constant_is_compared_by_value(name: str, tmp_path: Path) -> None:
    folder = write_real(tmp_path, name)
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec())
    of = constants.constants_of(original._load(folder))
    assert failed(judged(config, of)) == []
    faults = config_faults(config)
    assert faults.keys() == EXPECTED[name]
    found = {fault: failed(judged(config | {key: change(config[key])}, of)) for fault, (key, change) in faults.items()}
    assert {fault for fault, names in found.items() if not names} == SEEN & faults.keys()


@pytest.mark.parametrize(
    ("name", "changed"),
    [("llama", {}), ("qwen3_moe", {}), ("gpt2", {}), ("opt", {}), ("opt", {"word_embed_proj_dim": 32}), ("phi", {})],
)
def test_one_wrong_row_that_no_prompt_asks_for_is_found(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", name, vocab_size=1000, **changed)
    made = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=tmp_path / "made").path
    products = rows.products_of(original._load(model))

    def beyond() -> list[str]:
        return failed(list(rows.judged(CheckpointReader(made), products, "float32")))

    assert beyond() == []
    tensors = read_safetensors(made / "rank0.safetensors")
    tables = {"transformer.vocab_embedding.weight": "rows of the embedding", "lm_head.weight": "rows of the head"}
    tables["transformer.position_embedding.weight"] = "rows of the positions"
    for table in tables.keys() & tensors.keys():
        wrong = tensors[table].copy()
        wrong[[411, 412]] = wrong[[412, 411]]
        write_safetensors(made / "rank0.safetensors", {**tensors, table: wrong})
        assert tables[table] in beyond()


def test_a_table_of_another_length_is_no_table_of_the_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "gpt2")
    made = convert_model(Model(path=model), ConvertSpec(), out=tmp_path / "made").path
    products = rows.products_of(original._load(model))
    products["transformer.position_embedding.weight"] = products["transformer.position_embedding.weight"][:100]
    assert failed(list(rows.judged(CheckpointReader(made), products, "float32"))) == ["rows of the positions"]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "starcoder2"])
def test_faults_of_constants_are_faults_of_whole_checkpoints_too(name: str, tmp_path: Path) -> None:
    model = write_real(tmp_path / "model", name)
    made = convert_model(Model(path=model), ConvertSpec(), out=tmp_path / "made").path
    faults_of(made)["windows dropped"](made)
    config = json.loads((made / "config.json").read_text())
    of, decoder = constants.constants_of(original._load(model)), family(config["architecture"]).decoder(config)
    assert failed(judged(config, of)) == ["layers with another window"]
    # NVIDIA's converters leave windows to the start of the server; other windows than the model's are wrong there too.
    assert failed(constants.judged(config, decoder, of, windows=False)) == []
    other = replace(decoder, windows=(77,))
    assert failed(constants.judged(config, other, of, windows=False)) == ["layers with another window"]
