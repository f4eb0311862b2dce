"""The numerical check against transformers: no fault of a converter passes, no good conversion is refused.

Faults are put into checkpoints of two tensor-parallel ranks in bfloat16, of every family; the original is run once.
"""

from __future__ import annotations

import gc
import importlib
import json
import shutil
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.conversion_faults import config_faults, copied, faults_of, faulty_copies
from tests.support.families import EVERY, FAMILIES
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.unified import read_config
from trtserve.cli import run
from trtserve.errors import CheckError, CorruptFileError
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.parity import CheckPlan, check_checkpoint, compare_checkpoint, plan_check, require_passed
from trtserve.pipeline.parity.original import Original, run_original
from trtserve.specs import CheckSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

# Settings that differ from a family's defaults; an odd vocabulary shows the padding.
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "vocab_size": 323},
    "gpt2": {"vocab_size": 323},
}
# The others of Llama's family differ from it in numbers alone.
# Norms after the experts scale what these add up to.
UNSEEN = {"flex_olmo": {"probabilities of experts"}}
FAULTY = [name for name in FAMILIES if name not in ("llama_dynamic", "mistral")]
GOOD: list[dict[str, Any]] = [
    {"dtype": "float32", "tp_size": 4},
    {"dtype": "float16", "pp_size": 2},
    {"dtype": "bfloat16", "tp_size": 2, "pp_size": 2},
    {"dtype": "float16", "quantize": "int8"},
    {"dtype": "bfloat16", "quantize": "int4"},
]
GAIN = 1.0
SQUARED = ("nemotron", "arcee", "jais2")
# Families that are given all faults; test_check_constants_oracle has the wrong constants of every family by value.
WHOLE = ("llama", "gemma3", "gpt2", "gpt_neox")
# These have no value of their own to compare: logits must show them.
ALWAYS_SEEN = {"wrong scale of scores", "probabilities of experts"}
# What every family has, and what each has besides; tests of constants name those of config.json.
COMMON = {
    *("q and k swapped", "layers swapped", "norm epsilon × 0.1", "ranks swapped"),
    *("shards swapped, attention.qkv.weight", "shards swapped, mlp.proj.weight", "shards swapped, lm_head.weight"),
    *("transposed, attention.dense.weight", "transposed, attention.qkv.weight"),
    *("transposed, mlp.fc.weight", "transposed, mlp.proj.weight"),
}
# What shows in every precision.
GROSS = COMMON - {"q and k swapped", "norm epsilon × 0.1", "transposed, attention.dense.weight"}


@dataclass(frozen=True)
class Case:
    """A good checkpoint, its prompts, and the original's output."""

    folder: Path
    checkpoint: Path
    plan: CheckPlan
    said: Original


@pytest.fixture(scope="module", autouse=True)
def quick() -> None:
    """The models are too small to gain from a second thread; and a check collects garbage, which took two thirds of
    the time as long as it went through all of PyTorch and transformers.
    """
    import torch

    torch.set_num_threads(1)
    importlib.import_module("transformers.modeling_utils")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> CheckSpec:
    random = np.random.default_rng(5)
    lines = [[int(token) for token in random.integers(3, 259, length)] for length in (16, 70)]
    file = tmp_path_factory.mktemp("prompts") / "prompts"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return CheckSpec(max_tokens=5, prompts=file)


def make_case(name: str, prompts: CheckSpec, folder: Path, **spec: Any) -> Case:
    model = write_tiny_model(folder / "model", name, gain=GAIN, **OVERRIDES.get(name, {}))
    checkpoint = convert_model(Model(path=model), ConvertSpec(**spec), out=folder / "checkpoint").path
    plan = plan_check(read_config(checkpoint), model, prompts)
    said = run_original(model, plan.prompts, max_tokens=plan.max_tokens, rounding=plan.changes.rounding)
    return Case(model, checkpoint, plan, said)


def beyond(case: Case, checkpoint: Path) -> list[str]:
    """Return the figures beyond their bounds; a file that contradicts its config counts as one."""
    try:
        stages = compare_checkpoint(case.plan, case.said, checkpoint)
    except CorruptFileError as error:
        return [error.message]
    return [verdict.name for stage in stages for verdict in stage.verdicts if not verdict.passed]


def _constants(case: Case) -> Set[str]:
    return config_faults(read_config(case.checkpoint)).keys()


def faults_found(case: Case, folder: Path, *, but: Set[str] = frozenset()) -> dict[str, list[str]]:
    """The figures that each fault moves beyond their bounds, when none of the good checkpoint is; all must be found."""
    assert beyond(case, case.checkpoint) == []
    found = {fault: beyond(case, copy) for fault, copy in faulty_copies(case.checkpoint, folder, but=but)}
    assert [fault for fault, names in found.items() if not names] == []
    # All but the epsilon show in the logits, and not just by a hair; those of constants may show in their value alone.
    shown = {"difference", "median token", "far tokens"}
    unseen = {fault for fault, names in found.items() if not shown & set(names)}
    assert unseen <= {"norm epsilon × 0.1", *config_faults(read_config(case.checkpoint))} - ALWAYS_SEEN
    return found


@pytest.mark.parametrize("name", FAULTY)
def test_every_fault_is_caught(name: str, prompts: CheckSpec, tmp_path: Path) -> None:
    """An eighth of the faults for each family except those of WHOLE, in turn; TRTSERVE_ALL=1 tests all."""
    parallel = {"moe_ep_size": 2} if FAMILIES[name].experts else {}
    case = make_case(name, prompts, tmp_path, dtype="bfloat16", tp_size=2, **parallel)
    faults = faults_of(case.checkpoint).keys()
    latent = {fault.replace("qkv", "kv_b") for fault in COMMON} - {"q and k swapped"}
    assert faults >= (COMMON if "q and k swapped" in faults else latent) | _constants(case)
    source, hf = (
        read_safetensors(case.folder / "model.safetensors"),
        json.loads((case.folder / "config.json").read_text()),
    )
    (expected,) = FAMILIES[name].ranks(source, hf, 1)
    gated = any(
        part in tensor
        for part in ("gate_proj", "gate_up_proj", ".input_linear.", ".w1.", ".c_fc_0.")
        for tensor in source
    )
    final = expected["transformer.ln_f.weight"]
    shifted = not any(np.array_equal(final, values) for values in source.values())
    assert ("gate and up swapped" in faults) == gated
    assert ("experts in another order" in faults) == FAMILIES[name].experts
    assert ("dropped bias, mlp.fc.bias" in faults) == ("transformer.layers.0.mlp.fc.bias" in expected)
    assert ("missing norm + 1, ln_f.weight" in faults) == shifted
    assert ("vocabulary padded in front" in faults) == ("vocab_size" in OVERRIDES.get(name, {}))
    turn = FAULTY.index(name) % 8
    later = {fault for number, fault in enumerate(sorted(faults - _constants(case))) if number % 8 != turn}
    but = set() if EVERY or name in WHOLE else later | _constants(case) - ALWAYS_SEEN
    but |= UNSEEN.get(name, set())
    assert faults_found(case, tmp_path / "faulty", but=but).keys() == faults - but


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("gemma", {"dtype": "float16", "quantize": "int8"}),
        ("gpt2", {"dtype": "float32", "tp_size": 2}),
        ("qwen2", {"dtype": "float16", "tp_size": 2}),
        ("mixtral", {"dtype": "float16", "quantize": "int4"}),
    ],
)
def test_no_precision_hides_a_fault(name: str, spec: dict[str, Any], prompts: CheckSpec, tmp_path: Path) -> None:
    """Norms that count from one, transposed Conv1D, biases and experts, each in another precision."""
    case = make_case(name, prompts, tmp_path, **spec)
    assert len(faults_found(case, tmp_path / "faulty", but=_constants(case) - ALWAYS_SEEN | GROSS)) >= 5


def test_exchanged_pipeline_stages_are_caught(prompts: CheckSpec, tmp_path: Path) -> None:
    case = make_case("llama", prompts, tmp_path, dtype="float16", pp_size=2)
    but = faults_of(case.checkpoint).keys() - {"stages swapped"}
    assert "stages swapped" in faults_found(case, tmp_path / "faulty", but=but)


@pytest.mark.parametrize("name", FAMILIES)
def test_good_conversions_pass(name: str, prompts: CheckSpec, tmp_path: Path) -> None:
    """A fifth of the conversions for each family, in turn: TRTSERVE_ALL=1 makes all of them."""
    # Squared ReLUs double the error of int4 weights: too much for what random layers of full strength answer.
    model = write_tiny_model(tmp_path / "model", name, gain=0.5 if name in SQUARED else GAIN)
    specs = [spec for spec in GOOD if FAMILIES[name].stages or "pp_size" not in spec]
    turn = list(FAMILIES).index(name) % len(specs)
    for number, spec in enumerate(specs):
        if number != turn and not EVERY:
            continue
        checkpoint = convert_model(Model(path=model), ConvertSpec(**spec), out=tmp_path / str(number)).path
        report = check_checkpoint(checkpoint, model, prompts)
        assert report.passed, report.described()
        assert report.stages[0].differences.relative < 1e-5
        assert [stage.name for stage in report.stages] == ["conversion", "precision"][: 1 if number == 0 else 2]


def test_a_model_that_int8_cannot_hold_fails_for_its_precision_alone(prompts: CheckSpec, tmp_path: Path) -> None:
    """One input of every matrix is 1000 times as large, and its norm that much smaller: int8 drops all the others."""
    model = write_tiny_model(tmp_path / "model", gain=GAIN)
    tensors = {name: values.copy() for name, values in read_safetensors(model / "model.safetensors").items()}
    for name, values in tensors.items():
        if "layernorm" in name:
            values[0] /= 1000
        elif "q_proj" in name or "k_proj" in name or "v_proj" in name or "gate" in name or "up_proj" in name:
            values[:, 0] *= 1000
    write_safetensors(model / "model.safetensors", tensors)
    spec = ConvertSpec(dtype="float32", quantize="int8")
    report = check_checkpoint(convert_model(Model(path=model), spec, out=tmp_path / "made").path, model, prompts)
    conversion, precision = report.stages
    assert all(verdict.passed for verdict in conversion.verdicts)
    assert not all(verdict.passed for verdict in precision.verdicts)
    with pytest.raises(CheckError) as caught:
        require_passed(report)
    assert "without --quantize" in str(caught.value.hint)


def test_another_vocabulary_size_is_reported(prompts: CheckSpec, tmp_path: Path) -> None:
    case = make_case("llama", prompts, tmp_path, dtype="float32")
    other = write_tiny_model(tmp_path / "other", vocab_size=400)
    made = convert_model(Model(path=other), ConvertSpec(), out=tmp_path / "second")
    with pytest.raises(CheckError, match=r"vocabulary of 400 tokens.*323"):
        compare_checkpoint(case.plan, case.said, made.path)


def test_the_command_prints_figures_and_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    made = convert_model(Model(path=model), ConvertSpec(dtype="float16", tp_size=2), out=tmp_path / "made").path
    assert run(["check", str(made), "--quiet", "--max-tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("\t")[:2] == ["conversion", "difference"]
    assert sum(line.endswith("\tpassed") for line in lines) == 15
    faulty = copied(made, tmp_path / "faulty")
    faults_of(faulty)["q and k swapped"](faulty)
    arguments = ["check", str(faulty), "--against", str(model), "--json", "--quiet", "--max-tokens", "3"]
    assert run(arguments) == 25
    captured = capsys.readouterr()
    result = json.loads(captured.out)["result"]
    assert (result["passed"], result["precision"], result["prompts"]) == (False, "float16", 9)
    assert {"maximum", "mean", "divergence", "top1", "greedy", "verdicts"} <= result["stages"][0].keys()
    assert "does not match the model in" in captured.err


@pytest.fixture
def faulty_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that writes ten times the rope base."""
    right = checkpoint_config

    def wrong(*arguments: Any) -> CheckpointConfig:
        return (config := right(*arguments)).changed(rotary_base=config.rotary_base * 10)

    monkeypatch.setattr("trtserve.pipeline.convert_own.checkpoint_config", wrong)


def test_convert_verifies_before_it_publishes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    model, store = write_tiny_model(tmp_path / "model"), tmp_path / "store"
    arguments = ["convert", str(model), "--tp-size", "2", "--verify", "--json", "--out"]
    assert run([*arguments, str(store / "good")]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["verified"] is True
    facts = json.loads((store / "good" / "manifest.json").read_text())["facts"]
    assert facts["check"]["passed"] is True
    shutil.rmtree(store)
    request.getfixturevalue("faulty_converter")
    assert run([*arguments, str(store / "bad")]) == 25
    assert str(store / "bad") in capsys.readouterr().err
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_conversions_are_verified_as_the_engine_will_hold_them(
    quantize: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="float16", gain=GAIN)
    arguments = ["convert", str(model), "--quantize", quantize, "--verify", "--json", "--quiet", "--out"]
    assert run([*arguments, str(tmp_path / "good")]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["verified"] is True
    check = json.loads((tmp_path / "good" / "manifest.json").read_text())["facts"]["check"]
    stages = [stage["stage"] for stage in check["stages"]]
    assert (check["passed"], check["precision"], stages) == (True, quantize, ["conversion", "precision"])
    request.getfixturevalue("faulty_converter")
    assert run([*arguments, str(tmp_path / "bad")]) == 25
    assert not (tmp_path / "bad").exists()


@pytest.mark.usefixtures("faulty_converter")
def test_a_reused_conversion_is_verified_too(tmp_path: Path) -> None:
    model = Model(path=write_tiny_model(tmp_path / "model"))
    made = convert_model(model, ConvertSpec(), name="first")
    with pytest.raises(CheckError):
        convert_model(model, ConvertSpec(), name="first", verify=CheckSpec(max_tokens=2))
    with pytest.raises(CheckError):
        convert_model(model, ConvertSpec(), name="second", verify=CheckSpec(max_tokens=2))
    assert [path.name for path in made.path.parent.iterdir()] == [made.path.name]
