"""What stages need is known before they begin, they refuse with numbers, and the advice that is given really fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import FAMILIES
from tests.support.large_models import LLAMA_2_7B, llama_2_7b
from tests.support.recorded_progress import Lines
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import DiskSpaceError, MemoryLimitError
from trtserve.executor.openvino.memory import engine_needs, weight_bytes
from trtserve.executor.runtimes import draft_memory, engine_needs_of
from trtserve.host.machine import AddressSpace
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.convert_own import convert_memory, plan_own_conversion
from trtserve.pipeline.memory import Deployment, MemoryNeeds, check_memory, memory_needs, require_enough_memory
from trtserve.repository.served import ServedRepository
from trtserve.server.engine_fit import fitting_tokens, require_servable, server_needs, server_processes, serving_note
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.specs.runtime import Limits

FREE = "trtserve.host.machine.free_memory"

GIB = 2**30


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers here are those of a CPU that multiplies bfloat16; one that does not holds 16-bit weights twice."""
    monkeypatch.setattr("trtserve.host.machine.has_bfloat16", lambda: True)


def _deployment(**changes: Any) -> Deployment:
    convert = ConvertSpec(dtype=changes.pop("dtype", "auto"), quantize=changes.pop("quantize", "none"))
    kv_tokens = changes.pop("kv_tokens", None)
    return Deployment(
        hf=LLAMA_2_7B, convert=convert, build=BuildSpec(runtime="openvino", **changes), kv_tokens=kv_tokens
    )


def _followed(advice: str, asked: dict[str, Any]) -> MemoryNeeds:
    """What a user needs who follows the flags in `advice`, beside what was `asked` for."""
    flags = dict(re.findall(r"--([a-z-]+) (\w+)", advice))
    kv_tokens = flags.pop("max-tokens-in-paged-kv-cache", None)
    strings = {key: flags.pop(key) for key in ("dtype", "quantize") if key in flags}
    numbers = {key.replace("-", "_"): int(value) for key, value in flags.items()}
    cache = {"kv_tokens": int(kv_tokens)} if kv_tokens else {}
    return memory_needs(_deployment(**{**asked, **strings, **numbers, **cache}))


def _require(deployment: Deployment) -> None:
    require_enough_memory(deployment, memory_needs(deployment), "llama-2-7b")


def test_seven_billion_parameters() -> None:
    need = memory_needs(_deployment())
    assert need.engine.disk_bytes == pytest.approx(2 * 6.74e9, rel=0.01)
    assert need.server.kv_tokens == 4096
    assert memory_needs(_deployment(quantize="int8")).engine.disk_bytes < 0.55 * need.engine.disk_bytes
    assert memory_needs(_deployment(dtype="float32")).engine.disk_bytes == pytest.approx(
        2 * need.engine.disk_bytes, rel=0.001
    )


def test_enough_memory_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory_needs(_deployment()).total
    monkeypatch.setattr(FREE, lambda: free)
    _require(_deployment())
    monkeypatch.setattr(FREE, lambda: free - 1)
    with pytest.raises(MemoryLimitError, match="needs"):
        _require(_deployment())


@pytest.mark.parametrize(
    ("changes", "free", "expected"),
    [
        ({}, 13.7 * GIB, "--max-seq-len"),
        ({}, 9 * GIB, "--quantize int8"),
        ({"dtype": "float32"}, 17 * GIB, "--dtype bfloat16"),
        ({"dtype": "float32"}, 8.5 * GIB, "--dtype bfloat16 --quantize int8"),
        ({}, 7.8 * GIB, "--quantize int8 --max-seq-len"),
        ({}, 6 * GIB, "--quantize int4"),
        ({"quantize": "int8"}, 6 * GIB, "--quantize int4"),
        ({"dtype": "float32"}, 6 * GIB, "--dtype bfloat16 --quantize int4"),
        ({"kv_tokens": 100_000}, 30 * GIB, "--max-tokens-in-paged-kv-cache"),
        ({"max_input_len": 4096}, 13.7 * GIB, "--max-input-len"),
        ({"max_batch_size": 10**8}, 16 * GIB, "--max-batch-size 4096 would fit"),
        ({"max_batch_size": 10**8, "max_num_tokens": 2 * 10**8}, 15.5 * GIB, "--max-num-tokens 4096 would fit"),
        ({"max_num_tokens": 10**6}, 16 * GIB, "--max-num-tokens 8192 would fit"),
        ({"max_batch_size": 10**8}, 9 * GIB, "--max-batch-size 16 --quantize int8 would fit"),
        (
            {"quantize": "int4", "max_seq_len": 128, "gather_context_logits": True},
            4.13 * GIB,
            "--max-num-tokens 256 would fit",
        ),
    ],
)
def test_advice_fits(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], free: float, expected: str) -> None:
    monkeypatch.setattr(FREE, lambda: int(free))
    with pytest.raises(MemoryLimitError, match=f"{free / GIB:.1f} GiB are free") as caught:
        _require(_deployment(**changes))
    hint = str(caught.value.hint)
    assert expected in hint
    assert _followed(hint, changes).total <= free


def test_nothing_fits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FREE, lambda: 2 * GIB)
    with pytest.raises(MemoryLimitError) as caught:
        _require(_deployment())
    assert "No setting" in str(caught.value.hint)


LIMITS = Limits(max_batch_size=4, max_input_len=100, max_seq_len=128, max_num_tokens=64)


def test_memory_by_stage() -> None:
    """A model whose tables outweigh everything: the peak is the graph with the head twice, the file has all once."""
    config = llama_2_7b(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=400_000)
    table = 400_000 * 64 * 2
    needs = engine_needs(config, LIMITS, compute="bf16", kv="u8", rows=4)
    assert weight_bytes(config) == pytest.approx(2 * table, rel=0.1)
    assert needs.build - 3 * table == pytest.approx(38 * 2**20, rel=0.1)
    assert weight_bytes(config.changed(tie_word_embeddings=True)) == pytest.approx(table, rel=0.1)
    # The embedding stays in the file, the head is packed; logits are float32.
    assert needs.serving == pytest.approx(table + 4 * 400_000 * 4 + 45 * 2**20, rel=0.05)


def test_float32_arithmetic_packs_narrow_layers_twice() -> None:
    config = llama_2_7b()
    once, twice = (engine_needs(config, LIMITS, compute=how, kv="u8", rows=4).serving for how in ("bf16", "f32"))
    layers = weight_bytes(config) - 2 * 32000 * 4096 * 2
    assert twice - once == pytest.approx(layers, rel=0.01)


def test_quantising_holds_three_copies_of_a_matrix() -> None:
    wide: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 1_000_000, "num_hidden_layers": 1}
    matrix = 64 * 1_000_000
    for quantize, packed, held in (("int8", 1.0, 2 + 1 + 1), ("int4", 0.53, 2 + 3 + 0.53)):
        algorithm = {"int8": "W8A16", "int4": "W4A16"}[quantize]
        config = llama_2_7b("float16", **wide).changed(quantization={"quant_algo": algorithm})
        needs = engine_needs(config, LIMITS, compute="bf16", kv="u8", rows=4)
        # Two of the MLP's matrices are packed when the third is read; beside them the process.
        assert needs.build - 38 * 2**20 == pytest.approx((2 * packed + held) * matrix, rel=0.05)
        assert needs.disk == pytest.approx(3 * packed * matrix, rel=0.15)


def test_small_matrices_are_quantised_in_small_pieces() -> None:
    """A head of half a million weights is rounded at once: 12 bytes for each, beside itself and its codes."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8192}
    plain, packed = (llama_2_7b("float16", quantize, **sizes) for quantize in ("none", "int8"))
    graph = [engine_needs(each, LIMITS, compute="bf16", kv="u8", rows=4).build for each in (plain, packed)]
    assert graph[1] - graph[0] < (1 + 12) * 8192 * 64


def test_expert_matrices_are_copied_side_by_side() -> None:
    """The largest of their matrices is there as it was read, side by side, and as the graph's own."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 1000, "hidden_size": 512, "num_attention_heads": 8}
    config = checkpoint_config(
        FAMILIES["mixtral"].config | sizes | {"intermediate_size": 17920}, ConvertSpec(dtype="float16")
    )
    matrix = config.moe.num_experts * 512 * 17920 * 2
    needs = engine_needs(config, LIMITS, compute="bf16", kv="u8", rows=4)
    # gate and up are one matrix of twice the size, which comes first; then the one of this size, as read and copied.
    assert needs.build - 38 * 2**20 == pytest.approx(4 * matrix, rel=0.05)


def test_context_logits_need_memory() -> None:
    few, many = (memory_needs(_deployment(gather_context_logits=flag)).server.engine for flag in (False, True))
    assert many - few == (2048 - 16) * 32000 * 4


def _engine(**build: Any) -> EngineConfig:
    limits = {"max_batch_size": 2, "max_input_len": 64, "max_seq_len": 100, "max_num_tokens": 64}
    model = llama_2_7b(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    own = {"runtime": "openvino", "compute_precision": "f32", "kv_precision": "f16"}
    return EngineConfig.of({"pretrained_config": model.content, "build_config": limits | build, "trtserve": own})


def test_check_holds_one_model_at_a_time() -> None:
    """A model whose tables outweigh everything, over two sequences; torch holds float32, OpenVINO what is stored."""
    config = llama_2_7b(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=400_000)
    table, row = 400_000 * 64, 400_000 * 4
    need = check_memory(config, [10, 30])
    assert need.original == pytest.approx(4 * 3 * table, rel=0.01)
    # The graph's two tables, the packed head, and a step of the longest sequence with its logits.
    assert need.converted == pytest.approx(2 * 3 * table + 30 * row, rel=0.2)
    assert need.logits == 3 * 40 * row + 8 * 30 * row
    assert need.total == need.processes + max(need.original, need.converted) + need.logits
    wide = check_memory(llama_2_7b("float32"), [10])
    assert wide.converted > wide.original > 4 * 6.7e9


def test_draft_model_memory_is_included(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    per_token = 2 * 2 * 4 * 16 * 2  # keys and values, layers, heads, sizes, bytes
    serving = engine_needs_of(engine).serving
    assert draft_memory(engine, None) == serving + 100 * per_token
    assert draft_memory(engine, 7) == serving + 7 * per_token
    alone = memory_needs(_deployment()).total
    monkeypatch.setattr(FREE, lambda: alone)
    with pytest.raises(MemoryLimitError, match="for the server and the draft model"):
        _require(replace(_deployment(), draft=2 * GIB))


def _served(**changes: Any) -> ServedRepository:
    served = ServedRepository(
        models=(), model="m", backends=frozenset(), streaming=True, engine=_engine(max_seq_len=4000)
    )
    return replace(served, instances={"preprocessing": 1, "postprocessing": 1, "tensorrt_llm_bls": 1}, **changes)


def test_copies_of_the_tokenizer_in_helper_processes_count() -> None:
    """Of pre- and postprocessing and of the gateway, and of the helpers of preprocessing, and the gateway's two."""
    added = server_processes(tokenizer_bytes=10_000_000) - server_processes()
    assert added == (3 * 12 + 3 * 13) * 10_000_000
    one_more = server_processes(tokenizers=4, tokenizer_bytes=10_000_000) - server_processes(tokenizers=4)
    assert one_more == (5 * 12 + 4 * 13) * 10_000_000


def test_start_refuses_engines_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = server_needs(_served().engine)
    per_token = needs.kv // needs.kv_tokens
    bare = needs.processes + needs.engine
    lines = Lines()
    for free, kv_tokens, refused, warned in (
        (needs.total, None, False, False),
        (needs.total - 1, None, False, True),
        (bare + 31 * per_token, None, True, False),
        (bare + 1024 * per_token, 1000, False, False),
        (bare + 1023 * per_token, 1000, True, False),
    ):
        monkeypatch.setattr(FREE, lambda free=free: free)
        lines.warnings.clear()
        if refused:
            with pytest.raises(MemoryLimitError, match="Serving m takes") as caught:
                require_servable(_served(kv_tokens=kv_tokens), "m", lines)
            hint = str(caught.value.hint)
            assert ("--max-tokens-in-paged-kv-cache 992 " in hint) == (kv_tokens is not None)
        else:
            require_servable(_served(kv_tokens=kv_tokens), "m", lines)
        assert bool(lines.warnings) == warned


def test_triton_address_space_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    space = AddressSpace(limit=2 * GIB, used=0)
    monkeypatch.setattr("trtserve.server.engine_fit.address_space", lambda: space)
    with pytest.raises(MemoryLimitError, match=r"allows each process 2\.0 GiB"):
        require_servable(_served(), "m")


def test_advice_names_an_oversized_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    small = server_needs(_engine(max_seq_len=4000, max_batch_size=256, max_num_tokens=2048))
    monkeypatch.setattr(FREE, lambda: small.total)
    for sizes, flags in (
        ({"max_batch_size": 10**8, "max_num_tokens": 10**8}, "--max-batch-size 256 --max-num-tokens 2048"),
        ({"max_batch_size": 16, "max_num_tokens": 10**8}, "--max-num-tokens 2048"),
    ):
        served = _served()
        with pytest.raises(MemoryLimitError) as caught:
            require_servable(replace(served, engine=served.engine.with_build(**sizes)), "m")
        assert str(caught.value.hint) == f"{flags} of `trtserve build` or `import` would fit."


def test_build_warns_when_engine_cannot_be_served(folder: Path, tmp_path: Path) -> None:
    checkpoint = convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "checkpoint")
    lines = Lines()
    for batch, warned in ((10**9, True), (16, False)):
        plan = plan_build(checkpoint, BuildSpec(runtime="openvino", max_batch_size=batch))
        assert (serving_note(plan.engine) is not None) == warned
    build_engine(checkpoint, BuildSpec(runtime="openvino", max_batch_size=10**9), out=tmp_path / "e", progress=lines)
    (line,) = lines.warnings
    found = re.search(r"--max-batch-size (\d+) --max-num-tokens (\d+) would fit", line)
    assert found
    steps = BuildSpec(runtime="openvino", max_batch_size=int(found[1]), max_num_tokens=int(found[2]))
    assert serving_note(plan_build(checkpoint, steps).engine) is None


def test_suggested_cache_size_fits() -> None:
    needs = server_needs(_engine())
    assert fitting_tokens(needs, 1000, needs.processes + needs.engine + 65_999) == 64
    assert fitting_tokens(needs, 1000, 0) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_convert_and_build_refuse_before_writing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_own_conversion(Model(path=folder), ConvertSpec())
    assert plan.memory_bytes == convert_memory(plan.moves, "float16") > 2**20
    monkeypatch.setattr(FREE, lambda: plan.memory_bytes - 1)
    with pytest.raises(MemoryLimitError, match=r"needs \d+ MiB of memory; \d+ MiB are free"):
        convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "checkpoint")
    monkeypatch.setattr(FREE, lambda: GIB)
    monkeypatch.setattr("trtserve.host.machine.free_disk", lambda _: 2**20)
    for spec, half in ((ConvertSpec(quantize="int8"), False), (ConvertSpec(dtype="float32"), True)):
        with pytest.raises(DiskSpaceError, match="The checkpoint would take") as full:
            convert_model(Model(path=folder), spec, out=tmp_path / "checkpoint")
        hint = str(full.value.hint)
        assert ("--out" in hint, "--quantize" in hint, "--dtype bfloat16" in hint) == (True, False, half)
    assert not (tmp_path / "checkpoint").exists()
    monkeypatch.undo()
    checkpoint = convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "checkpoint")
    monkeypatch.setattr(FREE, lambda: 2**20)
    with pytest.raises(MemoryLimitError, match="Building this engine needs") as caught:
        build_engine(checkpoint, BuildSpec(runtime="openvino"), out=tmp_path / "engine")
    assert "No setting" in str(caught.value.hint)


def test_build_suggests_narrower_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtserve.executor.runtimes import RUNTIMES
    from trtserve.pipeline.build import _advice

    runtime, spec = RUNTIMES["openvino"], BuildSpec()
    wide = runtime.plan(llama_2_7b("float32"), spec)
    half, packed = (runtime.plan(llama_2_7b(*how), spec) for how in (("bfloat16",), ("bfloat16", "int8")))
    assert _advice(wide, spec, runtime, half.memory_bytes).startswith("Convert with --dtype bfloat16: ")
    assert "--dtype bfloat16 --quantize int8" in _advice(wide, spec, runtime, packed.memory_bytes)
    least = runtime.plan(llama_2_7b("bfloat16", "int4"), spec)
    assert "--dtype bfloat16 --quantize int4" in _advice(wide, spec, runtime, least.memory_bytes)
    assert "--quantize int4" in _advice(packed, spec, runtime, least.memory_bytes)
    assert "No setting" in _advice(wide, spec, runtime, GIB)
    # What is quantised already cannot be quantised otherwise.
    widened = runtime.plan(llama_2_7b("bfloat16").changed(quantization={"quant_algo": "FP8"}), spec)
    assert "No setting" in _advice(widened, spec, runtime, packed.memory_bytes)
