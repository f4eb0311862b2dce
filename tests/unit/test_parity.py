"""The numerical check without models: figures, bounds, prompts, memory, what is checked against what."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import write_byte_tokenizer, write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.cli import run
from trtserve.errors import (
    ArtifactError,
    CheckError,
    CorruptFileError,
    MemoryLimitError,
    MissingDependencyError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.host.machine import install_command
from trtserve.pipeline import parity
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.parity import CheckReport, Stage, converted, original
from trtserve.pipeline.parity.comparison import (
    BOUNDS,
    Differences,
    Judgement,
    Precision,
    PromptLogits,
    compare,
    verdicts,
)
from trtserve.pipeline.parity.original import TEXTS, Vocabulary, prompt_set
from trtserve.specs import CheckSpec, ConvertSpec

Logits = npt.NDArray[np.float32]


def answer(logits: npt.ArrayLike, prompt_length: int = 1) -> PromptLogits:
    rows = np.asarray(logits, dtype=np.float32)
    return PromptLogits(tokens=[0] * len(rows), prompt_length=prompt_length, logits=rows)


def random_logits(rows: int = 40, vocab: int = 50, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).standard_normal((rows, vocab), dtype=np.float32) * 3


def differences(**changes: Any) -> Differences:
    logits = random_logits()
    return replace(compare([answer(logits)], [logits], "float32"), **changes)


def test_equal_logits_have_no_difference() -> None:
    found = differences()
    assert (found.maximum, found.mean, found.relative, found.divergence) == (0, 0, 0, 0)
    assert (found.top1, found.top1_ties, found.greedy, found.greedy_ties, found.positions) == (1, 1, 1, 1, 40)
    assert found.deviation == pytest.approx(3, rel=0.05)
    assert all(verdict.passed for verdict in verdicts(found, "float32"))


def test_figures_follow_their_definitions() -> None:
    original_rows = np.array([[0.0, 1.0], [2.0, 0.0]])
    converted_rows = np.array([[0.0, 1.5], [1.0, 0.0]])
    found = compare([answer(original_rows)], [converted_rows.astype(np.float32)], "float32")
    assert found.maximum == 1
    assert found.mean == pytest.approx(1.5 / 4)
    # Rows lie ± 0.5 and ± 1 around their means.
    assert found.deviation == pytest.approx(np.sqrt((2 * 0.25 + 2 * 1) / 4))
    assert found.relative == pytest.approx(np.sqrt(1.25 / 4) / found.deviation)
    shares = [np.exp(rows) / np.exp(rows).sum(1, keepdims=True) for rows in (original_rows, converted_rows)]
    expected = (shares[0] * np.log(shares[0] / shares[1])).sum(1)
    assert found.divergence == pytest.approx(expected.mean())
    assert found.worst_divergence == pytest.approx(expected.max())
    assert (found.worst.prompt, found.worst.position, found.worst.token) == (0, 1, 0)


def test_worst_place_is_found_across_prompts() -> None:
    logits = [random_logits(seed=seed) for seed in range(3)]
    changed = [rows.copy() for rows in logits]
    changed[1][7, 13] += 5
    worst = compare([answer(rows) for rows in logits], changed, "int4").worst
    assert (worst.prompt, worst.position, worst.token) == (1, 7, 13)


def test_greedy_counts_answer_tokens_before_the_first_difference() -> None:
    logits = random_logits(rows=10)
    changed = logits.copy()
    for row in (0, 6, 7):  # row 0 is inside the prompt, the answer's rows are 3 … 9
        changed[row, logits[row].argmin()] = 100
    found = compare([answer(logits, prompt_length=4)], [changed], "float32")
    assert found.greedy == pytest.approx(3 / 7)
    assert found.top1 == pytest.approx(7 / 10)


def test_ties_count_only_when_precision_differs() -> None:
    logits = np.zeros((1, 100), dtype=np.float32)
    logits[0, 0], logits[0, 1] = 10.0, 9.9
    other = logits.copy()
    other[0, 1] = 10.05
    narrow, wide = (compare([answer(logits)], [other], precision) for precision in ("float32", "bfloat16"))
    assert (narrow.top1, narrow.top1_ties) == (0, 0)
    assert (wide.top1, wide.top1_ties) == (0, 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"relative": 0.05}, "difference"),
        ({"relative_maximum": 0.7}, "largest difference"),
        ({"divergence": 0.02}, "KL divergence"),
        ({"top1_ties": 0.9}, "top-1 agreement"),
        ({"greedy_ties": 0.5}, "greedy match"),
        ({"relative": float("nan")}, "difference"),
    ],
)
def test_every_figure_has_its_own_bound(change: dict[str, float], name: str) -> None:
    failed = [verdict.name for verdict in verdicts(differences(**change), "float16") if not verdict.passed]
    assert failed == [name]


def test_nan_logits_never_pass() -> None:
    logits = random_logits()
    broken = np.full_like(logits, np.nan)
    assert not all(verdict.passed for verdict in verdicts(compare([answer(logits)], [broken], "int4"), "int4"))


def test_constant_logits_can_be_compared() -> None:
    flat = np.zeros((2, 5), dtype=np.float32)
    assert compare([answer(flat)], [flat], "float32").relative == 0
    assert compare([answer(flat)], [flat + 1], "float32").relative == float("inf")


def test_bounds_widen_with_coarser_precisions() -> None:
    rows = [BOUNDS[precision] for precision in get_args(Precision)]
    for finer, coarser in itertools.pairwise(rows):
        assert finer.difference < coarser.difference
        assert finer.largest < coarser.largest
        assert finer.divergence < coarser.divergence
        assert finer.top1 >= coarser.top1
        assert finer.greedy >= coarser.greedy


def test_prompts_are_texts_and_random_tokens(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    prompts = prompt_set(tmp_path, Vocabulary(size=320, longest=100))
    assert len(prompts) == len(TEXTS) + 3
    assert max(map(len, prompts)) == 100
    assert max(max(prompt) for prompt in prompts) > 310
    assert prompts == prompt_set(tmp_path, Vocabulary(size=320, longest=100))


def test_without_a_tokenizer_prompts_are_random_tokens(tmp_path: Path) -> None:
    prompts = prompt_set(tmp_path, Vocabulary(size=50, longest=30))
    assert [len(prompt) for prompt in prompts] == [24, 30, 30]


def test_user_prompts_are_texts_or_token_ids(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    file = tmp_path / "prompts"
    file.write_text('plain words\n"two\\nlines"\n[5, 6, 7]\n\n', encoding="utf-8")
    words, lines, ids = prompt_set(tmp_path, Vocabulary(size=320, longest=100), file)
    assert (len(words), len(lines), ids) == (12, 10, (5, 6, 7))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("\n \n", "contains no prompts"),
        ("[1, 400]", "prompt 1 .* outside 0 … 319"),
        ("[]", "prompt 1 .* is empty"),
        (f"[1]\n{[1] * 101}", "prompt 2 .* has 101 tokens; at most 100 leave room"),
        ("words", "tokenizer of .* cannot be loaded"),
    ],
)
def test_prompts_beyond_the_limits_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        prompt_set(tmp_path, Vocabulary(size=320, longest=100), file)


@pytest.mark.parametrize(
    ("own", "spec", "precision", "rounded"),
    [
        ("float32", {"dtype": "float32"}, "float32", False),
        ("bfloat16", {"dtype": "bfloat16", "tp_size": 2}, "float32", False),
        ("bfloat16", {"dtype": "float32"}, "float32", False),
        ("float32", {"dtype": "float16"}, "float16", True),
        ("float16", {"dtype": "bfloat16"}, "bfloat16", True),
        ("float16", {"dtype": "float16", "quantize": "int8"}, "int8", False),
        ("float32", {"dtype": "bfloat16", "quantize": "int8"}, "int8", True),
    ],
)
def test_bounds_follow_the_conversion(
    tmp_path: Path, own: str, spec: dict[str, Any], precision: str, rounded: bool
) -> None:
    folder = write_tiny_model(tmp_path, dtype=own)
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec(**spec))
    changes = converted.changes_of(config, folder)
    assert (changes.precision, changes.rounding is not None) == (precision, rounded)
    assert changes.quantised == (precision == "int8")


def test_gemma_norms_are_rounded_after_adding_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gemma", dtype="bfloat16")
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec())
    rounding = converted.changes_of(config, folder).rounding
    assert rounding is not None
    assert rounding.offsets["model.norm.weight"] == 1
    assert "model.embed_tokens.weight" not in rounding.offsets


def test_float32_router_is_found_under_both_names(tmp_path: Path) -> None:
    """4 calls it as the files do, 5 renames it when it loads them."""
    folder = write_tiny_model(tmp_path, "mixtral", dtype="bfloat16")
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec(dtype="float16"))
    rounding = converted.changes_of(config, folder).rounding
    assert rounding is not None
    layers = [f"model.layers.{layer}." for layer in range(2)]
    assert rounding.kept == {f"{layer}{part}.gate.weight" for layer in layers for part in ("block_sparse_moe", "mlp")}


def test_unsupported_quantisation_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec()).changed(
        quantization={"quant_algo": "W8A8_SQ"}
    )
    with pytest.raises(UnsupportedModelError, match="quantised with W8A8_SQ"):
        converted.changes_of(config, folder)


def test_insufficient_memory_is_reported_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = checkpoint_config(json.loads((folder / "config.json").read_text()), ConvertSpec(dtype="float16"))
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 2**20)
    monkeypatch.setattr(original, "require_oracle", lambda: None)
    with pytest.raises(MemoryLimitError, match=r"The check takes .* for the original in float32.* 1 MiB are free"):
        parity.plan_check(config, folder)


def test_missing_pytorch_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(original, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError):
        original.require_oracle()
    folder = write_tiny_model(tmp_path / "model")
    assert run(["convert", str(folder), "--out", str(tmp_path / "made" / "out"), "--verify"]) == 3
    assert install_command("oracle") in capsys.readouterr().err
    assert list(tmp_path.glob("made/*")) == []


def test_original_defaults_to_the_recorded_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    made = convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "made")
    assert parity.find_artifact(str(made.path)).path == made.path
    assert parity.find_original(made, None).path == folder
    assert parity.find_original(made, str(tmp_path / "model")).path == folder
    with pytest.raises(UsageError, match="does not record its original"):
        parity.find_original(Checkpoint(path=made.path), None)
    folder.rename(tmp_path / "moved")
    with pytest.raises(ModelNotFoundError, match="no longer exists"):
        parity.find_original(made, None)


def test_files_are_checked_before_pytorch_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model")
    made = convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "made")
    monkeypatch.setattr(original, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError):
        parity.check_checkpoint(made.path, folder)
    rank = made.path / "rank0.safetensors"
    with rank.open("r+b") as file:
        file.truncate(rank.stat().st_size - 100)
    with pytest.raises(CorruptFileError, match=r"rank0\.safetensors is damaged"):
        parity.check_checkpoint(made.path, folder)
    rank.unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        parity.check_checkpoint(made.path, folder)


def test_folders_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is a model; these kinds can be checked: checkpoint"):
        parity.find_artifact(str(write_tiny_model(tmp_path)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="is not an artefact"):
        parity.find_artifact(str(tmp_path / "empty"))


def report(conversion: Differences, precision: Differences) -> CheckReport:
    stages = [
        Stage(name="conversion", bounds="float32", differences=conversion, verdicts=verdicts(conversion, "float32")),
        Stage(name="precision", bounds="int8", differences=precision, verdicts=verdicts(precision, "int8")),
    ]
    return CheckReport(
        path=Path("made"),
        against=Path("model"),
        precision="int8",
        reason="",
        prompts=1,
        stages=stages,
        seconds=1.0,
    )


def test_expert_models_are_judged_by_median_and_outliers() -> None:
    """One token of forty went to another expert: its logits are others altogether, those of the rest are rounded."""
    logits = random_logits()
    changed = logits + 0.003 * random_logits(seed=1)
    changed[7] = random_logits(seed=2)[0]
    found = compare([answer(logits)], [changed], "float16")
    assert found.far == pytest.approx(1 / 40)
    assert found.median == pytest.approx(0.003, rel=0.2)
    assert not all(verdict.passed for verdict in verdicts(found, "float16"))
    assert all(verdict.passed for verdict in verdicts(found, "float16", experts=True))
    failed = [
        [verdict.name for verdict in verdicts(each, "float16", experts=True) if not verdict.passed]
        for each in (replace(found, far=0.2), replace(found, median=0.05), replace(found, median=float("nan"), far=1.0))
    ]
    assert failed == [["far tokens"], ["median token"], ["median token", "far tokens"]]
    assert compare([answer(logits)], [np.full_like(logits, np.nan)], "int8").far == 1


def test_unrounded_experts_route_identically() -> None:
    logits = random_logits()
    changed = logits.copy()
    changed[7] = random_logits(seed=2)[0]
    found = compare([answer(logits)], [changed], "float32")
    failed = [verdict.name for verdict in verdicts(found, "float32", experts=True) if not verdict.passed]
    assert failed == ["far tokens", "top-1 agreement"]
    same = compare([answer(logits)], [logits], "float32")
    assert all(verdict.passed for verdict in verdicts(same, "float32", experts=True))


def test_error_names_figures_and_next_step() -> None:
    good = differences()
    passed = report(good, good)
    assert passed.passed
    parity.require_passed(passed)
    with pytest.raises(
        CheckError, match=r"made does not match the model in model: difference 0\.5 \(at most 0\.0005\)"
    ) as fault:
        parity.require_passed(report(replace(good, relative=0.5), good))
    assert "must not be used" in str(fault.value.hint)
    with pytest.raises(CheckError, match=r"KL divergence 2 \(at most 0\.15\)") as loss:
        parity.require_passed(report(good, replace(good, divergence=2.0)))
    assert "another --dtype" in str(loss.value.hint)
    assert loss.value.code == 25


def test_epsilon_must_be_exact() -> None:
    assert Judgement(name="norm epsilon", value=1e-5, relation="exactly", bound=1e-5).passed
    assert not Judgement(name="norm epsilon", value=1.1e-5, relation="exactly", bound=1e-5).passed


def test_zero_max_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-tokens is 0"):
        CheckSpec(max_tokens=0)
