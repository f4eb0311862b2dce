"""Weight-only quantisation is left to the loader of each release: its rule takes the weights that ours takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_models import FAMILIES
from trtserve.architectures import family
from trtserve.convert import checkpoint_config
from trtserve.errors import UsageError
from trtserve.releases import RELEASES, weight_only
from trtserve.releases.weight_only import LEFT_OUT, PROOFS, QUANTISED, WEIGHT_ONLY, proof, require_loader_quantises
from trtserve.runtimes.openvino_memory import is_quantised
from trtserve.specs import ConvertSpec


def _config(name: str, **spec: Any) -> dict[str, Any]:
    return checkpoint_config(FAMILIES[name][0], ConvertSpec(**spec))


def test_every_release_was_read() -> None:
    assert tuple(row.release for row in PROOFS) == RELEASES
    assert all(row.commits for row in PROOFS)
    # What stands between two releases names both.
    assert all(len(row.commits) > 1 for row in PROOFS if row.how == "between")
    assert proof("0.16.0").how == "tag"
    with pytest.raises(UsageError, match="--trtllm-version"):
        proof("0.11")


def test_a_release_whose_loader_does_not_quantise_is_sent_to_its_own_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    for algorithm in (*WEIGHT_ONLY, None, "FP8"):
        require_loader_quantises("1.2", algorithm)
    rows = tuple(
        weight_only.Proof(release=row.release, quantises=row.release != "0.12", how=row.how, commits=row.commits)
        for row in PROOFS
    )
    monkeypatch.setattr(weight_only, "PROOFS", rows)
    require_loader_quantises("0.12", "FP8")
    with pytest.raises(
        UsageError, match=r"0\.12 does not quantise float weights .* W8A16 checkpoint; 0\.13 … 1\.2 do"
    ) as caught:
        require_loader_quantises("0.12.0", "W8A16")
    assert "--converter upstream" in str(caught.value.hint)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loader_and_the_cpu_runtime_quantise_the_same_weights(name: str) -> None:
    config = _config(name, quantize="int8")
    # The loader leaves nothing out beyond its default when no module is excluded.
    assert config["quantization"]["exclude_modules"] is None
    for target in family(config["architecture"]).targets(config):
        loader = target.name.endswith(QUANTISED) and not target.name.endswith(LEFT_OUT)
        assert loader == is_quantised(target), target.name
