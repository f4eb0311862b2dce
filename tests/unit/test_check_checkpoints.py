"""`check CHECKPOINT --trtllm-version V`: whether a release loads a checkpoint, and why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import FAMILIES
from tests.support.quantised_models import write_quantised_model
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.checkpoint.unified import read_config
from trtserve.cli import run
from trtserve.errors import UnsupportedModelError
from trtserve.nvidia.releases import RELEASES, load_table, order
from trtserve.nvidia.releases.converters import converters
from trtserve.nvidia.releases.loaders import evidence, loading_releases
from trtserve.repository.check.checkpoints import LoadReport, check_loading
from trtserve.specs import ConvertSpec

RANK = "rank0.safetensors"
NORM = "transformer.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"
QKV = "transformer.layers.1.attention.qkv.weight"


def converted(folder: Path, name: str = "llama", **spec: Any) -> Path:
    model = Model(path=write_tiny_model(folder / "hf", name))
    return convert_model(model, ConvertSpec(dtype="float16", **spec), out=folder / "out").path


def config_of(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return config


def change_config(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = config_of(checkpoint)
    change(config)
    (checkpoint / "config.json").write_text(json.dumps(config))


def change_tensors(checkpoint: Path, change: Callable[[dict[str, Any]], object], rank: str = RANK) -> None:
    tensors = read_safetensors(checkpoint / rank)
    change(tensors)
    write_safetensors(checkpoint / rank, tensors)


def reasons(report: LoadReport) -> str:
    return "\n".join(problem.what for problem in report.problems)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_without_a_release_loads_where_its_config_says(tmp_path: Path, name: str) -> None:
    made = converted(tmp_path, name, tp_size=2)
    served = loading_releases(read_config(made))
    for release in RELEASES:
        report = check_loading(made, f"{release}.0")
        assert report.loads == (release in served), reasons(report)
        assert not report.loads or not report.warnings


@pytest.mark.parametrize("release", ["0.12", "0.15", "0.16", "0.19", "1.2"])
@pytest.mark.parametrize("name", ["llama", "gemma", "qwen2_moe", "phi3", "falcon_new", "opt"])
def test_checkpoint_for_a_release_loads_in_it(tmp_path: Path, name: str, release: str) -> None:
    report = check_loading(converted(tmp_path, name, tp_size=2, trtllm_version=release), release)
    assert report.loads, reasons(report)


@pytest.mark.parametrize("quantised", ["awq", "gptq", "fp8"])
def test_quantised_checkpoint_loads(tmp_path: Path, quantised: str) -> None:
    model = Model(path=write_quantised_model(tmp_path / "hf", quantised).folder)
    made = convert_model(model, ConvertSpec(tp_size=2), out=tmp_path / "out").path
    report = check_loading(made, "1.2.0")
    assert report.loads, reasons(report)
    assert not report.warnings


def test_quantised_matrix_without_its_scale_is_found(tmp_path: Path) -> None:
    model = Model(path=write_quantised_model(tmp_path / "hf", "awq").folder)
    made = convert_model(model, ConvertSpec(), out=tmp_path / "out").path
    scale = "transformer.layers.1.mlp.proj.weights_scaling_factor"
    change_tensors(made, lambda tensors: tensors.pop(scale))
    assert scale in reasons(check_loading(made, "1.2.0"))


def _truncate(folder: Path) -> None:
    data = (folder / RANK).read_bytes()
    (folder / RANK).write_bytes(data[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing rank": (lambda folder: (folder / "rank1.safetensors").unlink(), "rank1.safetensors is missing"),
    "a cut file": (_truncate, "damaged"),
    "an empty file": (lambda folder: (folder / RANK).write_bytes(b""), "damaged"),
    "a missing tensor": (lambda folder: change_tensors(folder, lambda each: each.pop(NORM)), f"lacks {NORM}"),
    "a tensor that was cut": (
        lambda folder: change_tensors(folder, lambda each: each.update({QKV: each[QKV][:-1]})),
        f"{QKV} has shape",
    ),
    "a transposed tensor": (
        lambda folder: change_tensors(folder, lambda each: each.update({HEAD: each[HEAD].T.copy()})),
        f"{HEAD} has shape",
    ),
    "a renamed tensor": (
        lambda folder: change_tensors(folder, lambda each: each.update({"qkv": each.pop(QKV)})),
        f"lacks {QKV}",
    ),
    "ranks of another size": (
        lambda folder: change_config(folder, lambda config: config["mapping"].update(tp_size=1, world_size=1)),
        "has shape",
    ),
    "a wrong world size": (
        lambda folder: change_config(folder, lambda config: config["mapping"].update(world_size=3)),
        "world_size 3",
    ),
    "more layers than there are": (
        lambda folder: change_config(folder, lambda config: config.update(num_hidden_layers=3)),
        "transformer.layers.2.",
    ),
    "another hidden size": (
        lambda folder: change_config(folder, lambda config: config.update(hidden_size=128)),
        "has shape",
    ),
    "no dtype": (lambda folder: change_config(folder, lambda config: config.pop("dtype")), "lacks dtype"),
    "no hidden size": (lambda folder: change_config(folder, lambda config: config.pop("hidden_size")), "hidden_size"),
    "a config that is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
    "a key of a later release": (
        lambda folder: change_config(folder, lambda config: config["mapping"].update(cp_config={})),
        "mapping.cp_config",
    ),
    "an unknown MoE key": (
        lambda folder: change_config(folder, lambda config: config["moe"].update(shared_expert_intermediate_size=0)),
        "moe.shared_expert_intermediate_size",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    made = converted(tmp_path, tp_size=2)
    assert check_loading(made, "0.15.0").loads
    spoil, named = DAMAGE[damage]
    spoil(made)
    report = check_loading(made, "0.15.0")
    assert not report.loads
    assert named in reasons(report)
    assert all(problem.fix for problem in report.problems)


def test_what_the_loader_only_warns_of(tmp_path: Path) -> None:
    made = converted(tmp_path)
    change_tensors(made, lambda each: each.update({"extra": each[NORM], NORM: each[NORM].astype("float32")}))
    change_tensors(made, lambda each: each.pop("lm_head.weight"))
    report = check_loading(made, "1.2")
    assert report.loads, reasons(report)
    assert [name in "\n".join(report.warnings) for name in ("extra", f"{NORM} is float32", "lm_head")] == [
        True,
        True,
        False,
    ]


def test_architecture_that_trtserve_does_not_know(tmp_path: Path) -> None:
    made = converted(tmp_path)
    change_config(made, lambda config: config.update(architecture="MambaForCausalLM"))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        check_loading(made, "1.2")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = converted(tmp_path, "qwen2_moe")
    assert run(["check", str(made), "--trtllm-version", "0.16.0"]) == 0
    said = capsys.readouterr().out
    assert "loads in TensorRT-LLM 0.16.0: yes" in said
    assert "The loader of a development snapshot of 0.16 has read checkpoints of this family." in said
    assert run(["check", str(made), "--trtllm-version", "0.15.0", "--json"]) == 25
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["loads"] is False
    assert "shared_expert" in result["because"][0]["what"]
    assert "0.15" in result["because"][0]["fix"]
    assert result["evidence"]["kind"] == "run"
    assert run(["check", str(made), "--trtllm-version", "0.15.0", "--max-tokens", "3"]) == 2


def test_every_release_of_every_family_has_evidence() -> None:
    known: dict[str, set[str]] = {"run": set(), "text": set(), "inferred": set()}
    for family in load_table("loaders")["families"].values():
        for architecture in family["architectures"]:
            since = converters()[architecture].since if architecture in converters() else RELEASES[0]
            for release in (each for each in RELEASES if order(each) >= order(since)):
                found = evidence(architecture, release)
                assert found.source
                known[found.kind].add(release)
    # No loader after 0.16 was run, so none may be said to have been.
    assert known["run"] == {"0.12", "0.13", "0.14", "0.15", "0.16"}
    assert known["text"] == {"0.17", "0.18", "0.20", "1.1", "1.2"}
    assert {"0.19", "0.21", "1.0"} <= known["inferred"]


@pytest.mark.parametrize(
    ("architecture", "release", "said"),
    [
        ("LlamaForCausalLM", "0.12", "The loader of 0.12.0 has read checkpoints of this family."),
        ("LlamaForCausalLM", "0.19", "This is inferred: known are 0.18 and 0.20, and nothing between was looked up."),
        ("Qwen3ForCausalLM", "1.0", "This is inferred: the nearest that is known is 1.1."),
        ("FalconForCausalLM", "1.2", "The model class was read: 585c7565 falcon/model.py (after 1.1.0rc6)."),
        ("OPTForCausalLM", "1.2", "This is inferred: the nearest that is known is 0.17."),
    ],
)
def test_evidence_in_words(architecture: str, release: str, said: str) -> None:
    assert str(evidence(architecture, release)) == said
