"""The environment in which programs find TensorRT-LLM's Python names on the embedded executor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.errors import RepositoryError, UsageError
from trtserve.executor.interface.bindings import (
    bindings_environment,
    imports_bindings,
    logger,
    tokenizer_info,
)
from trtserve.server.plan import plan_server
from trtserve.specs import ServerSpec
from trtserve.store import Store

CONFIG = 'name: "own" backend: "python" max_batch_size: 1 input { name: "X" data_type: TYPE_INT32 dims: 1 } '


def repository(folder: Path, program: str) -> ModelRepository:
    (folder / "own" / "1").mkdir(parents=True)
    (folder / "own" / "config.pbtxt").write_text(CONFIG)
    (folder / "own" / "1" / "model.py").write_text(program)
    return ModelRepository(path=folder)


def test_the_environment_is_made_once(tmp_path: Path) -> None:
    environment = bindings_environment("0.16.0", Store(tmp_path))
    assert not tmp_path.joinpath("bindings").exists()
    environment.prepare()
    module = environment.packages / "tensorrt_llm" / "bindings" / "executor.py"
    names: dict[str, object] = {}
    exec(module.read_text(), names)
    assert {"Executor", "ExecutorConfig", "Request", "SamplingConfig"} <= names.keys()
    assert names["__version__"] == "0.16.0"
    assert (environment.programs / "python3").resolve().is_file()
    written = module.stat().st_mtime_ns
    bindings_environment("0.16", Store(tmp_path)).prepare()
    assert module.stat().st_mtime_ns == written
    assert bindings_environment("0.17", Store(tmp_path)).folder != environment.folder


def test_an_environment_that_was_not_finished_is_made_again(tmp_path: Path) -> None:
    environment = bindings_environment("0.16", Store(tmp_path))
    environment.prepare()
    (environment.folder / "pyvenv.cfg").unlink()
    (environment.packages / "tensorrt_llm" / "__init__.py").write_text("")
    environment.prepare()
    assert "__version__" in (environment.packages / "tensorrt_llm" / "__init__.py").read_text()


def test_unknown_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"--bindings is '0\.11'"):
        bindings_environment("0.11", Store(tmp_path), option="--bindings")
    assert run(["bindings", "--release", "0.11"]) == 2
    assert "--release is '0.11'" in capsys.readouterr().err


def test_the_command_prints_the_folder_for_pythonpath(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bindings", "--release", "0.19"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder / "tensorrt_llm" / "llmapi" / "tokenizer.py").is_file()


@pytest.mark.parametrize(
    ("program", "imports"),
    [
        ("import tensorrt_llm.bindings.executor as trtllm\n", True),
        ("def later():\n    from tensorrt_llm import logger\n", True),
        ("import tensorrt_llm_bls\nfrom .tensorrt_llm import x\n", False),
        ("import (", False),
    ],
)
def test_programs_that_need_the_bindings(tmp_path: Path, program: str, imports: bool) -> None:
    (tmp_path / "model.py").write_text(program)
    assert imports_bindings(tmp_path / "model.py") is imports


def test_start_says_which_flag_a_model_needs(tmp_path: Path) -> None:
    made = repository(tmp_path / "models", "import tensorrt_llm.bindings.executor\n")
    with pytest.raises(RepositoryError, match="imports tensorrt_llm") as caught:
        plan_server(made, ServerSpec(), store=Store(tmp_path))
    assert "--bindings RELEASE" in str(caught.value.hint)
    plan = plan_server(made, ServerSpec(bindings="0.16"), store=Store(tmp_path))
    assert plan.bindings is not None
    path = plan.instances[0].launch.command.env["PATH"]
    assert path.startswith(f"{plan.bindings.programs}:")


def test_ranks_of_the_torch_runtime_find_the_names_too(tmp_path: Path) -> None:
    made = repository(tmp_path / "models", "import tensorrt_llm.bindings.executor\n")
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "rank0.safetensors").touch()
    built = {
        "trtserve": {"runtime": "torch", "device": "cpu"},
        "build_config": {},
        "pretrained_config": {"mapping": {}},
    }
    (engine / "config.json").write_text(json.dumps(built))
    values = {"gpt_model_type": "inflight_batching", "gpt_model_path": str(engine)}
    parameters = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }} ' for k, v in values.items())
    (made.path / "own" / "config.pbtxt").write_text(CONFIG + parameters)
    plan = plan_server(made, ServerSpec(bindings="0.16"), store=Store(tmp_path))
    assert plan.served.embedded
    assert not plan.served.merges_ranks
    assert plan.bindings is not None
    assert plan.instances[0].launch.command.env["PATH"].startswith(f"{plan.bindings.programs}:")


def test_tokenizer_for_guided_decoding() -> None:
    class Backend:
        def to_str(self) -> str:
            return "{}"

    class Tokenizer:
        eos_token_id = 2
        backend_tokenizer = Backend()

        def get_vocab(self) -> dict[str, int]:
            return {"b": 1, "a": 0, "</s>": 2}

    assert tokenizer_info(Tokenizer()) == {
        "encoded_vocab": ["a", "b", "</s>"],
        "tokenizer_str": "{}",
        "stop_token_ids": [2],
    }


def test_logger_takes_levels_by_name() -> None:
    before = logger.level
    logger.set_level("error")
    assert logger.getEffectiveLevel() == 40
    logger.setLevel(before)
