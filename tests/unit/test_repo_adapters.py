"""Adapters by name in a repository: what is written, which id they get, and what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.peft_adapters import write_adapter as write_peft
from tests.support.stages import convert_adapter, make_repository
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Adapter, Engine, Manifest
from trtserve.cli.app import run
from trtserve.errors import CorruptFileError, RepositoryError, UnsupportedModelError, UsageError
from trtserve.executor.loaders import read_engine_config
from trtserve.programs.shared.lora_names import LoraNames
from trtserve.repository.adapters import add_adapter, find_adapters, remove_adapter, resolve_adapters
from trtserve.repository.assembling import plan_repository
from trtserve.specs import RepositorySpec
from trtserve.specs.options import options_of
from trtserve.store import Store

SPEC = RepositorySpec(name="tiny")
Q, V = 1, 3


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return write_engine(tmp_path / "engine", lora_plugin="float32")


def write_engine(folder: Path, **plugins: Any) -> Engine:
    folder.mkdir()
    model = {"vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    limits = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 64, "max_beam_width": 1}
    lora = {"lora_target_modules": ["attn_q", "attn_v"], "max_lora_rank": 4}
    config = {
        "pretrained_config": {**model, "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"},
        "build_config": {**limits, "lora_config": lora, "plugin_config": plugins},
        "trtserve": {"runtime": "openvino"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("rank0.xml", "rank0.bin"):
        (folder / file).write_bytes(b"weights")
    return Engine(path=folder)


def write_adapter(folder: Path, rows: Any = ((Q, 0, 2), (V, 1, 2)), *, width: int = 256, value: float = 1) -> Path:
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_weights.npy", np.full((1, len(rows), width), value, dtype=np.float32))
    np.save(folder / "model.lora_config.npy", np.array([rows], dtype=np.int32))
    return folder


def test_repository(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    folders = {"poet": write_adapter(tmp_path / "poet"), "clerk": write_adapter(tmp_path / "clerk", value=2)}
    made = make_repository(engine, tokenizer, replace(SPEC, lora=folders)).path.rename(tmp_path / "moved")
    names = LoraNames(made)
    assert names.names == ("clerk", "poet")
    assert len({names.task_id(name) for name in names.names}) == 2
    weights, config = names.tensors("clerk")
    assert weights.dtype == np.float16
    assert (weights.max(), config.tolist()) == (2, [[[Q, 0, 2], [V, 1, 2]]])
    # Triton takes every folder beside the models for a model.
    assert all((folder / "config.pbtxt").exists() for folder in made.iterdir() if folder.is_dir())


def test_the_content_decides_id_and_fingerprint(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    one, same = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "same")
    other = write_adapter(tmp_path / "other", value=3)
    plans = [plan_repository(engine, tokenizer, replace(SPEC, lora={"x": folder})) for folder in (one, same, other)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
    assert plans[0].facts["adapters"] == plans[1].facts["adapters"] != plans[2].facts["adapters"]
    assert 0 < plans[0].facts["adapters"]["x"] < 2**63


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(5, 0, 2)], "it changes mlp_h_to_4h; the engine was built for attn_q, attn_v"),
        ([(13, 0, 2)], "it changes module 13"),
        ([(Q, 2, 2)], "it changes layer 2; the engine has 2 layers"),
        ([(Q, 0, 8)], "its rank is 8; the engine was built for ranks up to 4"),
        ([(Q, -1, 2)], "it changes layer -1; the engine has 2 layers"),
        ([(Q, 0, -5)], "its rank is -5; expected 1 or more"),
        ([(Q, 0, 4)], "attn_q has 512 weights at rank 4, a row holds 256"),
    ],
)
def test_adapters_that_do_not_fit_the_engine_are_refused(
    engine: Engine, tokenizer: Path, tmp_path: Path, rows: Any, message: str
) -> None:
    spec = replace(SPEC, lora={"x": write_adapter(tmp_path / "x", rows)})
    with pytest.raises(RepositoryError, match=f"adapter x does not fit the engine: {message}"):
        plan_repository(engine, tokenizer, spec)


def test_engines_without_adapters_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    plain = write_engine(tmp_path / "plain", lora_plugin=None)
    with pytest.raises(RepositoryError, match="built without adapters") as caught:
        plan_repository(plain, tokenizer, replace(SPEC, lora={"x": write_adapter(tmp_path / "x")}))
    assert "--lora-plugin" in str(caught.value.hint)


def test_folders_without_an_adapter_are_refused(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(RepositoryError) as caught:
            plan_repository(engine, tokenizer, replace(SPEC, lora={"x": folder}))
        return f"{caught.value} {caught.value.hint}"

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no model.lora_weights.npy and no model.lora_config.npy" in refusal(empty)
    (empty / "adapter_config.json").write_text("{}")
    assert f"trtserve lora {empty}" in refusal(empty)
    wide = write_adapter(tmp_path / "wide", value=1e6)
    assert "beyond float16" in refusal(wide)
    np.save(wide / "model.lora_config.npy", np.zeros((1, 5, 3), dtype=np.int32))
    assert "expected [1, rows, width] and [1, rows, 3]" in refusal(wide)
    (wide / "model.lora_config.npy").write_bytes(b"no array")
    assert "cannot be read" in refusal(wide)


def test_adapter_names_are_checked(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'a/b' cannot be a name"):
        plan_repository(engine, tokenizer, replace(SPEC, lora={"a/b": write_adapter(tmp_path / "x")}))


def test_command_takes_adapters(
    engine: Engine, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["repo", str(engine.path), "--tokenizer", str(tokenizer), "--name", "tiny"]
    given = f"--lora=poet={write_adapter(tmp_path / 'poet')}"
    assert run([*arguments, given, "--dry-run"]) == 0
    assert "adapters  poet" in capsys.readouterr().out
    assert run([*arguments, given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert list(result["adapters"]) == ["poet"]
    assert (Path(result["path"]) / "lora.json").exists()
    assert run([*arguments, "--lora", "poet"]) == UsageError.code
    assert "expected NAME=FOLDER" in capsys.readouterr().err
    assert run([*arguments, given, given]) == UsageError.code
    assert "gives poet twice" in capsys.readouterr().err


def test_a_converted_adapter_wins_over_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poet").mkdir()
    (tmp_path / "poet" / "adapter_config.json").write_text("{}")
    store = Store(tmp_path / "home")

    def found(text: str) -> dict[str, Path]:
        lora = options_of(RepositorySpec)["lora"].value_of([f"x={text}"])
        return find_adapters(RepositorySpec(lora=lora), store)

    assert found("poet") == {"x": tmp_path / "poet"}
    converted = write_adapter(store.folder(Adapter) / "poet-1")
    Manifest(kind="adapter", name="poet", fingerprint="1" * 64).write(converted)
    assert found("poet") == {"x": converted}
    assert found("./poet") == {"x": tmp_path / "poet"}


def test_a_peft_folder_is_converted(engine: Engine, tokenizer: Path, tmp_path: Path) -> None:
    modules = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32)}
    peft = write_peft(tmp_path / "peft", modules=modules, alpha_pattern={"v_proj": 1})
    made = make_repository(engine, tokenizer, replace(SPEC, lora={"poet": peft})).path
    expected = convert_adapter(peft, out=tmp_path / "converted").path
    weights, config = LoraNames(made).tensors("poet")
    np.testing.assert_array_equal(weights, np.load(expected / "model.lora_weights.npy"))
    np.testing.assert_array_equal(config, np.load(expected / "model.lora_config.npy"))
    with pytest.raises(UnsupportedModelError, match=r"--lora x=.*: The adapter has DoRA"):
        plan_repository(
            engine,
            tokenizer,
            replace(SPEC, lora={"x": write_peft(tmp_path / "dora", modules=modules, use_dora=True)}),
        )
    (peft / "adapter_model.safetensors").unlink()
    with pytest.raises(RepositoryError, match=r"the folder has no adapter_model\.safetensors"):
        plan_repository(engine, tokenizer, replace(SPEC, lora={"poet": peft}))


def test_adapters_are_added_and_removed_while_a_repository_is_served(
    engine: Engine, tokenizer: Path, tmp_path: Path
) -> None:
    made = make_repository(engine, tokenizer, SPEC).path.rename(tmp_path / "served")
    names = LoraNames(made)

    def known() -> list[str]:
        return list(names.names)

    assert known() == []
    poet = write_adapter(tmp_path / "poet")
    add_adapter(made, "tensorrt_llm", "lora.json", "poet", poet)
    assert known() == ["poet"]
    first = names.task_id("poet")
    assert names.tensors("poet")[0].shape == (1, 2, 256)
    assert LoraNames(made).task_id("poet") == first  # after a restart
    for name, folder, error in (
        ("poet", poet, "is there already"),
        ("../x", poet, "cannot be a name"),
        ("bad", write_adapter(tmp_path / "bad", rows=((Q, 7, 2),)), "the engine has 2 layers"),
        ("none", tmp_path / "nowhere", "has no model.lora_weights.npy"),
    ):
        with pytest.raises((UsageError, RepositoryError), match=error):
            add_adapter(made, "tensorrt_llm", "lora.json", name, folder)
    with pytest.raises(RepositoryError, match=r"has no model\.lora_weights\.npy"):
        add_adapter(made, "tensorrt_llm", "lora.json", "poet", tmp_path / "mistyped", replacing=True)
    assert (known(), names.task_id("poet")) == (["poet"], first)
    assert names.tensors("poet")[0][0, 0, 0] == 1
    newer = write_adapter(tmp_path / "newer", value=2)
    add_adapter(made, "tensorrt_llm", "lora.json", "poet", newer, replacing=True)
    assert (known(), names.task_id("poet") == first) == (["poet"], False)
    assert names.tensors("poet")[0][0, 0, 0] == 2
    assert len(list(made.rglob("model.lora_weights.npy"))) == 1
    remove_adapter(made, "tensorrt_llm", "lora.json", "poet")
    assert known() == []
    assert not list(made.rglob("model.lora_weights.npy"))
    with pytest.raises(UsageError, match="There is no adapter poet; there are: none"):
        remove_adapter(made, "tensorrt_llm", "lora.json", "poet")
    add_adapter(made, "tensorrt_llm", "lora.json", "poet", write_adapter(tmp_path / "other", value=3))
    assert names.task_id("poet") != first
    assert names.tensors("poet")[0][0, 0, 0] == 3
    (made / "lora.json").write_text("[]")
    assert known() == ["poet"]  # a broken table changes nothing


@pytest.mark.parametrize("wrong", [{"r": 0}, {"r": 2.5}, {"lora_alpha": "1"}, {"target_modules": [5]}])
def test_an_adapter_that_vllm_would_load_has_a_sound_config(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object]
) -> None:
    monkeypatch.setattr("trtserve.repository.adapters.takes_peft", lambda _: True)
    content = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 5}, **wrong}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CorruptFileError, match=rf"--lora x=.* adapter_config\.json has .*{next(iter(wrong))}"):
        resolve_adapters({"x": tmp_path}, read_engine_config(engine.path))


def test_adapters_of_vllm_stay_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_engine(tmp_path / "tensorrt_llm")
    (tmp_path / "tensorrt_llm").rename(tmp_path / "1")
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "1").rename(tmp_path / "tensorrt_llm" / "1")
    monkeypatch.setattr("trtserve.repository.adapters.takes_peft", lambda _: True)
    folder = write_adapter(tmp_path / "tensorrt_llm" / "1" / "lora" / "poet")
    entry = {"task_id": 7, "folder": "tensorrt_llm/1/lora/poet"}
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": {"poet": entry}}))
    with pytest.raises(RepositoryError, match="vLLM gets its adapters when it starts: poet cannot"):
        add_adapter(tmp_path, "tensorrt_llm", "lora.json", "poet", tmp_path, replacing=True)
    with pytest.raises(RepositoryError, match="vLLM gets its adapters when it starts: poet cannot"):
        remove_adapter(tmp_path, "tensorrt_llm", "lora.json", "poet")
    assert len(list(folder.iterdir())) == 2
    assert json.loads((tmp_path / "lora.json").read_text()) == {"adapters": {"poet": entry}}
