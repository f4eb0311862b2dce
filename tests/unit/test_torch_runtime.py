"""The torch runtime: what it plans and refuses, and its engines, which are the checkpoint's own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkpoints import convert_tiny
from tests.support.quantised_models import write_quantised_model
from tests.support.stages import build_engine
from trtserve.artifacts import Checkpoint, Engine
from trtserve.checkpoint.unified import read_config
from trtserve.errors import (
    ArtifactError,
    CorruptFileError,
    DiskSpaceError,
    MemoryLimitError,
    MissingDependencyError,
    TrtserveError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.executor.loaders import device_of, engine_files, read_engine_config
from trtserve.executor.torch import runtime as torch
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.import_spec import ImportSpec
from trtserve.pipeline.importing import plan_import
from trtserve.pipeline.inspect import describe
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

needs_torch = pytest.mark.needs("torch")

SPEC = BuildSpec(max_batch_size=4, max_seq_len=128, runtime="torch", device="cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A float32 Llama checkpoint of one rank."""
    return convert_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its engine for the CPU."""
    return build_engine(checkpoint, SPEC, out=tmp_path_factory.mktemp("built") / "engine")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Let this version of PyTorch be the installed one, or none."""

    def install(version: str | None) -> None:
        def found(name: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", found)

    install("2.13.0")
    return install


def test_missing_torch_names_the_extra_where_it_would_run(
    checkpoint: Checkpoint, installed: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(None)
    with pytest.raises(MissingDependencyError, match="needs PyTorch") as caught:
        plan_build(checkpoint, SPEC)
    assert "[cuda]" in str(caught.value.hint)
    monkeypatch.setattr(torch, "count_gpus", lambda: 0)
    with pytest.raises(MissingDependencyError, match="needs PyTorch") as caught:
        plan_build(checkpoint, replace(SPEC, device=None))
    assert caught.value.hint == "This machine has no NVIDIA GPU: use --runtime openvino."


def test_a_machine_without_gpus_needs_the_cpu(
    checkpoint: Checkpoint, installed: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "count_gpus", lambda: 0)
    with pytest.raises(UsageError, match="this machine has none") as caught:
        plan_build(checkpoint, replace(SPEC, device=None))
    assert "--device cpu" in str(caught.value.hint)
    monkeypatch.setattr(torch, "count_gpus", lambda: 1)
    plan = plan_build(checkpoint, BuildSpec(runtime="torch"))
    assert plan.engine.needs_gpu
    assert (plan.engine.limits.max_batch_size, plan.engine.limits.max_num_tokens) == (256, 8192)
    assert plan.engine.limits.max_seq_len == read_config(checkpoint.path).max_position_embeddings


def test_fp8_needs_a_gpu_that_has_it(
    checkpoint: Checkpoint, installed: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(checkpoint.path).changed(quantization={"quant_algo": "FP8"})
    monkeypatch.setattr(torch, "count_gpus", lambda: 1)
    for capability, fits in (("8.6", False), ("8.9", True), ("9.0", True)):
        gpu = SimpleNamespace(name="a GPU", capability=capability)
        monkeypatch.setattr(torch, "visible_gpu", lambda gpu=gpu: gpu)
        if fits:
            assert plan_build(checkpoint, BuildSpec(runtime="torch"), config=config).engine.weights_precision == "fp8"
            continue
        with pytest.raises(UnsupportedModelError, match=r"capability 8\.9 or later; a GPU has 8\.6"):
            plan_build(checkpoint, BuildSpec(runtime="torch"), config=config)


@pytest.mark.parametrize(
    ("changes", "spec", "kind", "words"),
    [
        ({"quantization": {"quant_algo": "W8A8_SQ"}}, SPEC, UnsupportedModelError, "quantised with W8A8_SQ"),
        ({}, replace(SPEC, kv_precision="u8"), UsageError, "--kv-precision u8"),
        ({}, replace(SPEC, runtime="openvino", device="cuda"), UsageError, "the openvino runtime takes cpu, gpu, auto"),
        ({}, replace(SPEC, runtime="tensorrt_llm"), UsageError, "the tensorrt_llm runtime takes cuda"),
        ({}, replace(SPEC, device="gpu"), UsageError, "the torch runtime takes cpu, cuda"),
        ({}, replace(SPEC, gemm_plugin="auto"), UsageError, "--gemm-plugin is for trtllm-build"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_by_name(
    checkpoint: Checkpoint,
    changes: dict[str, Any],
    spec: BuildSpec,
    kind: type[TrtserveError],
    words: str,
    installed: Callable[[str | None], None],
) -> None:
    with pytest.raises(kind, match=words):
        plan_build(checkpoint, spec, config=read_config(checkpoint.path).changed(**changes))


def test_the_fingerprint_covers_device_and_limits_but_not_the_version(
    checkpoint: Checkpoint, installed: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "count_gpus", lambda: 1)
    before = plan_build(checkpoint, SPEC).fingerprint
    assert plan_build(checkpoint, replace(SPEC, device="cuda")).fingerprint != before
    assert plan_build(checkpoint, replace(SPEC, max_seq_len=64)).fingerprint != before
    installed("2.14.0")
    assert plan_build(checkpoint, SPEC).fingerprint == before


@pytest.mark.parametrize(("line", "cuda"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", None)])
def test_the_cuda_version_is_read_without_importing(
    line: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n", encoding="utf-8")
    monkeypatch.setattr(torch, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert torch.cuda_version() == cuda
    monkeypatch.setattr(torch, "find_spec", lambda _: None)
    assert torch.cuda_version() is None


def test_advice_names_nothing_that_it_refuses(
    checkpoint: Checkpoint, installed: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 10 * 2**20)
    with pytest.raises(MemoryLimitError) as caught:
        build_engine(checkpoint, SPEC, out=tmp_path / "engine")
    assert "--quantize" not in str(caught.value.hint)


@needs_torch
def test_the_engine_is_the_checkpoints_file(engine: Engine, checkpoint: Checkpoint) -> None:
    assert (engine.path / "rank0.safetensors").samefile(checkpoint.path / "rank0.safetensors")
    assert sorted(path.name for path in engine.path.iterdir()) == ["config.json", "manifest.json", "rank0.safetensors"]
    config = read_engine_config(engine.path)
    assert config.content["pretrained_config"] == read_config(checkpoint.path).content
    own = config.content["trtserve"]
    assert {key: own[key] for key in ("runtime", "device", "compute_precision", "torch")} == {
        "runtime": "torch",
        "device": "cpu",
        "compute_precision": "f32",
        "torch": metadata.version("torch"),
    }
    assert device_of(config) == "cpu"
    assert engine.manifest is not None
    assert engine.manifest.facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


@needs_torch
def test_the_config_has_the_keys_of_other_embedded_engines(engine: Engine, checkpoint: Checkpoint) -> None:
    other = build_engine(checkpoint, replace(SPEC, runtime="openvino"), out=engine.path.parent / "openvino")
    ours, theirs = read_engine_config(engine.path), read_engine_config(other.path)
    different = {"tokens_per_block"}
    plugins = [dict(each.plugin_keys) for each in (ours, theirs)]
    assert list(ours.build_keys) == list(theirs.build_keys)
    assert {key for key in plugins[0] if plugins[0][key] != plugins[1][key]} == different
    assert "openvino" in theirs.content["trtserve"]


@needs_torch
def test_it_is_described(engine: Engine) -> None:
    (found,) = describe(str(engine.path))
    assert (found.runtime, found.missing, found.versions) == ("torch", (), {"torch": metadata.version("torch")})
    assert found.precision == "float32 weights, f32 arithmetic, f32 KV cache"
    assert found.kv_cache == {"type": "PAGED", "tokens_per_block": 16, "bytes_per_token": 2 * 2 * 2 * 16 * 4}


@needs_torch
def test_each_rank_keeps_its_file(tmp_path: Path) -> None:
    source = convert_tiny(tmp_path / "source", tp_size=2, pp_size=2)
    engine = build_engine(source, SPEC, out=tmp_path / "engine")
    config = read_engine_config(engine.path)
    names = [f"rank{rank}.safetensors" for rank in range(4)]
    assert engine_files(config, "torch") == names
    assert all((engine.path / name).samefile(source.path / name) for name in names)
    from trtserve.executor.torch.model import load_model

    with pytest.raises(ArtifactError, match="2 tensor-parallel ranks and 2 pipeline stages, but 1 and 1 were started"):
        load_model(engine.path, None)


@needs_torch
def test_a_rank_with_wrong_tensors_is_named(tmp_path: Path) -> None:
    source = convert_tiny(tmp_path / "source", tp_size=2)
    changed = tmp_path / "changed"
    shutil.copytree(source.path, changed)
    config = json.loads((changed / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] *= 2
    (changed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (changed / "manifest.json").unlink()
    with pytest.raises(CorruptFileError, match=r"rank0\.safetensors: .*mlp\.fc\.weight has shape"):
        build_engine(Checkpoint(path=changed), SPEC, out=tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_copy_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rank0.safetensors").write_bytes(b"0" * 4096)
    elsewhere = SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=-1), parent=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(DiskSpaceError, match=r"they take 4 KiB, and 100 bytes are free"):
        torch._require_room(tmp_path / "a", elsewhere, ["rank0.safetensors"])  # type: ignore[arg-type]
    torch._require_room(tmp_path / "a", tmp_path, ["rank0.safetensors"])


@pytest.mark.parametrize(
    ("form", "capability", "keep", "kept"),
    [
        ("fp8, blocks of 128", "9.0", None, True),
        ("fp8, blocks of 128", "8.6", None, None),
        ("fp8, blocks of 128", "9.0", False, False),
        ("gptq, desc_act", "9.0", None, None),
    ],
)
def test_an_import_for_a_gpu_with_fp8_keeps_the_codes(
    form: str,
    capability: str,
    keep: bool | None,
    kept: bool | None,
    installed: Callable[[str | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch, "visible_gpu", lambda: SimpleNamespace(name="a GPU", capability=capability))
    spec = ImportSpec(
        source=str(write_quantised_model(tmp_path, form).folder),
        convert=ConvertSpec(keep_fp8=keep),
        build=BuildSpec(runtime="torch"),
        repository=RepositorySpec(name="tiny"),
    )
    plan = plan_import(spec)
    assert plan.spec.convert.keep_fp8 is kept
    assert plan.build is not None
    assert plan.build.engine.weights_precision == ("fp8" if kept else "float16")
