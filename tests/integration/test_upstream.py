"""NVIDIA's converters and ModelOpt (strict doubles): commands per family and release, their result, their failures."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from tests.support.doubles import Doubles
from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.cli.app import run
from trtserve.errors import (
    CheckError,
    ConversionError,
    MemoryLimitError,
    MissingDependencyError,
    ModelOptMissingError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.nvidia.converters import Toolkit, tool_command
from trtserve.nvidia.releases.containers import latest_container
from trtserve.pipeline.convert import plan_conversion
from trtserve.specs import ConvertSpec

VERSIONS = {"0.12": "0.12.0", "0.16": "0.16.0", "0.18": "0.18.2", "0.20": "0.20.0", "1.0": "1.0.0", "1.2": "1.2.1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ("llama", "qwen2", "qwen3_moe", "gemma", "gpt2", "falcon", "phi3")
    return {name: write_tiny_model(folder / name, name, dtype="bfloat16") for name in names}


def install(doubles: Doubles, monkeypatch: pytest.MonkeyPatch, release: str, *, modelopt: bool = True) -> Path:
    """Install TensorRT-LLM of a release in this Python and its examples in a folder, which is returned."""
    packages = doubles.packages(VERSIONS[release])
    if modelopt:
        metadata = packages / "nvidia_modelopt-0.27.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: nvidia-modelopt\nVersion: 0.27.0\n")
    monkeypatch.syspath_prepend(packages)
    examples = doubles.examples(release)
    monkeypatch.setenv("TRTSERVE_TRTLLM_EXAMPLES", str(examples))
    return examples


def flags(arguments: tuple[str, ...]) -> dict[str, str]:
    """Return flag → value of the command line after its script; "" for a switch."""
    pairs = zip(arguments[1:], [*arguments[2:], "--"], strict=True)
    return {flag: "" if value.startswith("-") else value for flag, value in pairs if flag.startswith("-")}


@pytest.mark.parametrize(
    ("name", "release", "spec", "script", "expected"),
    [
        ("llama", "0.12", {"tp_size": 2}, "llama", {"--tp_size": "2", "--pp_size": "1", "--dtype": "bfloat16"}),
        ("llama", "1.2", {"pp_size": 2, "workers": 2}, "models/core/llama", {"--pp_size": "2", "--workers": "2"}),
        (
            "qwen2",
            "0.18",
            {"quantize": "int8", "dtype": "float16"},
            "qwen",
            {"--use_weight_only": "", "--weight_only_precision": "int8", "--dtype": "float16"},
        ),
        ("qwen3_moe", "1.2", {"tp_size": 2, "moe_ep_size": 2}, "models/core/qwen", {"--moe_ep_size": "2"}),
        (
            "gemma",
            "0.20",
            {"tp_size": 2, "quantize": "int8"},
            "models/core/gemma",
            {"--world-size": "2", "--ckpt-type": "hf", "--use-weight-only-with-precision": "int8"},
        ),
        ("gpt2", "0.16", {"tp_size": 2, "dtype": "float32"}, "gpt", {"--tp_size": "2", "--dtype": "float32"}),
        ("falcon", "0.20", {}, "models/contrib/falcon", {"--tp_size": "1"}),
        (
            "falcon",
            "0.18",
            {"use_parallel_embedding": True, "embedding_sharding_dim": 1},
            "falcon",
            {"--use_parallel_embedding": "", "--embedding_sharding_dim": "1"},
        ),
        ("phi3", "0.18", {"tp_size": 2}, "phi", {"--tp_size": "2"}),
    ],
)
def test_a_converter_of_each_family(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    release: str,
    spec: dict[str, Any],
    script: str,
    expected: dict[str, str],
) -> None:
    examples = install(doubles, monkeypatch, release)
    wanted = ConvertSpec(converter="upstream", **spec)
    made = convert_model(Model(path=models[name]), wanted, out=tmp_path / "made")
    (call,) = doubles.calls("convert_checkpoint.py")
    assert call.arguments[0] == str(examples / script / "convert_checkpoint.py")
    given = flags(call.arguments)
    assert expected.items() <= given.items()
    assert given.get("--model_dir", given.get("--model-dir")) == str(models[name])
    config = json.loads((made.path / "config.json").read_text())
    assert config["mapping"]["world_size"] == wanted.tp_size * wanted.pp_size
    assert made.manifest is not None
    assert made.manifest.tools == {"tensorrt_llm": VERSIONS[release]}
    assert "Total time of converting" in Path(made.manifest.facts["log"]).read_text()
    again = convert_model(Model(path=models[name]), wanted, out=tmp_path / "made")
    assert again.manifest == made.manifest
    assert len(doubles.calls("convert_checkpoint.py")) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", r"ended with code 1(?s:.*)CUDA out of memory"),
        ("missing_rank", r"rank1\.safetensors is missing"),
        ("cut_rank", "is damaged"),
        ("no_config", "has no config.json"),
    ],
)
def test_an_incomplete_checkpoint_is_not_published(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: str,
    message: str,
) -> None:
    install(doubles, monkeypatch, "0.18")
    doubles.configure(convert_fault=fault)
    out = tmp_path / "out" / "made"
    with pytest.raises(ConversionError, match=message) as caught:
        convert_model(Model(path=models["llama"]), ConvertSpec(converter="upstream", tp_size=2), out=out)
    assert caught.value.log is not None
    assert "TensorRT-LLM version: 0.18.2" in caught.value.log.read_text()
    assert [path.name for path in out.parent.iterdir() if path.suffix != ".lock"] == []


@dataclass(frozen=True)
class Comparison:
    """A planned check."""

    windows: bool = True


def failing(*_: object, **__: object) -> NoReturn:
    """Compare a checkpoint that does not hold the model's numbers."""
    raise CheckError("The checkpoint is not the model.")


def test_a_reused_checkpoint_is_verified_too(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(doubles, monkeypatch, "1.0")
    # The real comparison needs PyTorch; this one finds that the double did not write the model's numbers.
    monkeypatch.setattr("trtserve.pipeline.parity.plan_check", lambda *_, **__: Comparison())
    monkeypatch.setattr("trtserve.pipeline.parity.run_check", failing)
    words = ["convert", str(models["llama"]), "--converter", "upstream"]
    assert run(words) == 0
    made = Path(capsys.readouterr().out.strip())
    assert run([*words, "--verify"]) == CheckError.code
    assert run([*words, "--verify", "--name", "twin"]) == CheckError.code
    assert [path.parent for path in made.parent.glob("*/manifest.json")] == [made]
    assert len(doubles.calls("convert_checkpoint.py")) == 1


@pytest.mark.parametrize("spec", [{"converter": "upstream", "tp_size": 2, "workers": 2}, {"quantize": "fp8"}])
def test_a_tool_that_is_killed_ran_out_of_memory(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    spec: dict[str, Any],
) -> None:
    install(doubles, monkeypatch, "0.18")
    doubles.configure(convert_fault="oom")
    with pytest.raises(
        MemoryLimitError, match=r"signal 9: it ran out of memory(?s:.*)KiB each(?s:.*)were free"
    ) as caught:
        convert_model(Model(path=models["llama"]), ConvertSpec(**spec), out=tmp_path / "made")
    hint = str(caught.value.hint)
    assert ("--workers 1" in hint, "--converter own" in hint) == (2 * ("converter" in spec,))
    assert caught.value.log is not None
    assert not (tmp_path / "made").exists()


def test_memory_is_guarded_before_the_tool_starts(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVIDIA's converter needs the model and the ranks under way; the advice fits, and so does what loads less."""
    install(doubles, monkeypatch, "0.18")
    model, out = Model(path=models["llama"]), tmp_path / "made"
    spec = ConvertSpec(converter="upstream", tp_size=4, workers=4)
    plan = plan_conversion(model, spec)
    total, rank = plan.total_bytes, plan.work.sizes[0]
    assert total == 4 * rank > 0
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: total + 3 * rank)
    with pytest.raises(MemoryLimitError, match=r"the whole model, .* and 4 of the ranks") as caught:
        convert_model(model, spec, out=out)
    assert "--workers 3 fits" in str(caught.value.hint)
    assert doubles.calls() == []
    assert convert_model(model, replace(spec, workers=3), out=out).path.is_dir()
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: total)
    with pytest.raises(MemoryLimitError) as caught:
        convert_model(model, replace(spec, workers=1), out=tmp_path / "other")
    assert "--workers" not in str(caught.value.hint)
    assert "--converter own" in str(caught.value.hint)
    less = replace(spec, workers=1, converter_flags=("--load_by_shard",))
    assert convert_model(model, less, out=tmp_path / "other").path.is_dir()


def _described(model: Path, folder: Path, quantization: dict[str, Any]) -> Path:
    """Return a copy of a model with a config of a quantised model."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"quantize": "int4", "converter": "upstream"}])
def test_nothing_is_quantised_twice(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    install(doubles, monkeypatch, "0.20")
    model = _described(models["llama"], tmp_path / "model", {"quant_method": "awq", "bits": 4})
    with pytest.raises(UsageError, match=r"already quantised \(awq\)"):
        plan_conversion(Model(path=model), ConvertSpec(**options))


def test_unsupported_sources_are_converted_by_nvidias_tool(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Our own converter's hint for such a model is this one."""
    install(doubles, monkeypatch, "0.20")
    model = _described(models["llama"], tmp_path / "model", {"quant_method": "gptq", "bits": 4, "desc_act": True})
    spec = ConvertSpec(converter="upstream", tp_size=2)
    made = convert_model(Model(path=model), spec, out=tmp_path / "made")
    assert (made.path / "rank1.safetensors").is_file()
    assert plan_conversion(Model(path=model), spec).total_bytes > 0


def test_flags_behind_the_dashes_are_passed_on(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Words after -- reach the tool, which reports unknown ones itself, with the log."""
    install(doubles, monkeypatch, "1.0")
    line = ["convert", str(models["llama"]), "--converter", "upstream", "--out", str(tmp_path / "made"), "--quiet"]
    assert run([*line, "--converter-flag=--load_by_shard", "--", "--use_parallel_embedding"]) == 0
    (call,) = doubles.calls("convert_checkpoint.py")
    assert call.arguments[-2:] == ("--load_by_shard", "--use_parallel_embedding")
    with pytest.raises(ConversionError, match="unrecognized arguments: --no-such-flag"):
        convert_model(
            Model(path=models["llama"]),
            ConvertSpec(converter="upstream", converter_flags=("--no-such-flag",)),
            out=tmp_path / "other",
        )


@pytest.mark.parametrize("script", ["llama", "core/llama", "models/core/llama/convert_checkpoint.py"])
def test_a_converter_script_can_be_named(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    """For an architecture in no table, for example a derivative with another name."""
    examples = install(doubles, monkeypatch, "1.2")
    config = json.loads((models["llama"] / "config.json").read_text()) | {"architectures": ["NewForCausalLM"]}
    shutil.copytree(models["llama"], model := tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    spec = ConvertSpec(converter="upstream", trtllm_script=script, tp_size=2)
    plan = plan_conversion(Model(path=model), spec)
    line = str(plan.work.command(tmp_path / "made"))
    assert f"{examples}/models/core/llama/convert_checkpoint.py --model_dir {model}" in line
    with pytest.raises(UnsupportedModelError, match="NewForCausalLM") as caught:
        plan_conversion(Model(path=model), ConvertSpec(converter="upstream"))
    assert "--trtllm-script llama" in str(caught.value.hint)
    with pytest.raises(MissingDependencyError, match=r"nothing/convert_checkpoint\.py does not exist"):
        plan_conversion(Model(path=model), ConvertSpec(converter="upstream", trtllm_script="nothing"))


def test_the_converter_of_recurrentgemma_gets_its_own_flags(tmp_path: Path) -> None:
    script = tmp_path / "recurrentgemma" / "convert_checkpoint.py"
    script.parent.mkdir()
    script.touch()
    kit = Toolkit(version="0.18.2", release="0.18", python=Path("python3"), examples=tmp_path, environment=None)

    def command(**options: Any) -> str:
        spec = ConvertSpec(converter="upstream", dtype="float16", **options)
        return str(tool_command(kit, spec, "RecurrentGemmaForCausalLM", Path("model"), Path("made")))

    line = command(tp_size=2)
    assert line.endswith("--ckpt_type hf --model_dir model --output_dir made --dtype float16 --world_size 2")
    for options, flag in (({"pp_size": 2}, "--pp-size"), ({"quantize": "int8"}, "--quantize")):
        with pytest.raises(UsageError, match=f"no option for {flag}"):
            command(**options)


def test_dry_run_shows_the_command(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    examples = install(doubles, monkeypatch, "0.18")
    out = tmp_path / "made"
    assert run(["convert", str(models["llama"]), "--converter", "upstream", "--out", str(out), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"{examples}/llama/convert_checkpoint.py --model_dir {models['llama']} --output_dir {out}" in shown
    assert doubles.calls() == []


@pytest.mark.parametrize(("quantize", "algorithm"), [("int4_awq", "W4A16_AWQ"), ("fp8", "FP8")])
@pytest.mark.parametrize("release", ["0.12", "1.0"])
def test_calibrated_quantisation(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    quantize: Any,
    algorithm: str,
    release: str,
) -> None:
    examples = install(doubles, monkeypatch, release)
    spec = ConvertSpec(quantize=quantize, tp_size=2, calib_dataset="pileval", calib_size=64)
    made = convert_model(Model(path=models["llama"]), spec, out=tmp_path / "made")
    (call,) = doubles.calls("quantize.py")
    assert call.arguments[0] == str(examples / "quantization" / "quantize.py")
    expected = {"--qformat": quantize, "--tp_size": "2", "--calib_dataset": "pileval", "--calib_size": "64"}
    assert expected.items() <= flags(call.arguments).items()
    config = json.loads((made.path / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == algorithm


def test_int8_sq_runs_quantize_py(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(doubles, monkeypatch, "0.18")
    made = convert_model(Model(path=models["qwen2"]), ConvertSpec(quantize="int8_sq"), out=tmp_path / "made")
    assert json.loads((made.path / "config.json").read_text())["quantization"]["quant_algo"].startswith("W8A8_SQ")


def test_missing_modelopt_is_an_error(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has its own exit code, and the hint says how to install it."""
    install(doubles, monkeypatch, "0.18", modelopt=False)
    assert run(["convert", str(models["llama"]), "--quantize", "int4_awq"]) == ModelOptMissingError.code == 4
    assert "pip install nvidia-modelopt" in capsys.readouterr().err


def test_missing_tensorrt_llm_is_an_error(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(MissingDependencyError, match="TensorRT-LLM is not installed") as caught:
        plan_conversion(Model(path=models["llama"]), ConvertSpec(converter="upstream"))
    assert "--converter own" in str(caught.value.hint)
    newest = f"--container {latest_container().tag},"
    assert newest in str(caught.value.hint)
    with pytest.raises(ModelOptMissingError, match="NVIDIA ModelOpt") as calibrated:
        plan_conversion(Model(path=models["llama"]), ConvertSpec(quantize="fp8"))
    assert newest in str(calibrated.value.hint)


def test_missing_examples_are_an_error(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(doubles, monkeypatch, "0.18")
    for variable in (str(tmp_path / "nowhere"), str(tmp_path)):
        monkeypatch.setenv("TRTSERVE_TRTLLM_EXAMPLES", variable)
        with pytest.raises(MissingDependencyError) as caught:
            plan_conversion(Model(path=models["llama"]), ConvertSpec(converter="upstream"))
        assert "--branch v0.18.2" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("gemma", {"pp_size": 2}, "no option for --pp-size"),
        ("gemma", {"workers": 2}, "no option for --workers"),
        ("falcon", {"moe_tp_size": 1}, "no --moe_tp_size"),
        ("phi3", {"use_parallel_embedding": True}, "no --use_parallel_embedding"),
        ("llama", {"quantize": "fp8", "use_parallel_embedding": True}, "no option for --use-parallel-embedding"),
        ("llama", {"calib_size": 8}, "for calibrated quantisation only"),
        ("llama", {"quantize": "fp8", "workers": 2}, "no option for --workers"),
        ("qwen3_moe", {"quantize": "fp8", "moe_ep_size": 1}, "no option for --moe-ep-size"),
    ],
)
def test_options_a_tool_lacks_are_refused(
    models: dict[str, Path],
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    spec: dict[str, Any],
    message: str,
) -> None:
    install(doubles, monkeypatch, "0.18")
    with pytest.raises(UsageError, match=message):
        plan_conversion(Model(path=models[name]), ConvertSpec(converter="upstream", **spec))


@pytest.mark.parametrize(
    "spec", [{"workers": 2}, {"calib_size": 8}, {"converter_flags": ("--x",)}, {"trtllm_script": "llama"}]
)
def test_options_of_another_tool_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is for NVIDIA's tools"):
        ConvertSpec(**spec)


def test_an_interrupt_ends_the_tool(
    models: dict[str, Path], doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(doubles, monkeypatch, "0.18")
    doubles.configure(convert_seconds=600)

    class Interrupted:
        def step(self, text: str) -> None:
            """Nothing is told."""

        warn = step

        def task(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_model(
            Model(path=models["llama"]),
            ConvertSpec(converter="upstream"),
            out=tmp_path / "made",
            progress=Interrupted(),
        )
    left = [
        child for child in psutil.Process(os.getpid()).children(recursive=True) if "convert_checkpoint" in name(child)
    ]
    assert left == []
    assert not (tmp_path / "made").exists()


def name(child: psutil.Process) -> str:
    """The command line of a process; "" when it has ended."""
    try:
        return " ".join(child.cmdline())
    except psutil.Error:
        return ""


def test_the_interpreter_is_that_of_tensorrt_llm(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtserve.nvidia.converters import find_toolkit

    install(doubles, monkeypatch, "0.18")
    assert find_toolkit().python == Path(sys.executable)
