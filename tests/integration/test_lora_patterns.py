"""Regular expressions of adapters, which are matched in a process of their own where they may be slow."""

from __future__ import annotations

import pytest

from trtserve.checkpoint import lora_adapter
from trtserve.checkpoint.lora_adapter import AdapterConfig
from trtserve.errors import CorruptFileError

PATHS = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 11) for name in ("q_proj", "v_proj")]


def test_expressions_match_as_in_peft() -> None:
    patterns = {r"layers\.\d\.self_attn\.q_proj": 2.0, r"(q|k)_proj": 3.0, r"^model\.layers\.0\..*": 4.0}
    config = AdapterConfig(alpha=16, alpha_pattern=patterns).with_modules(PATHS)
    assert [config.alphas[path] for path in PATHS] == [2.0, 4.0, 3.0, 16]


def test_an_expression_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_adapter, "PATTERN_SECONDS", 1)
    slow = AdapterConfig(alpha=16, alpha_pattern={"(([a-z_.]+)+)+!": 4.0})
    with pytest.raises(CorruptFileError, match=r"in alpha_pattern that takes more than 1 s for 4 modules"):
        slow.with_modules(PATHS)
    assert AdapterConfig(alpha=16, alpha_pattern={".*": 4.0}).scale("x", 2) == 2.0


@pytest.mark.parametrize("pattern", ["(", "*", "a)(?P<x", "(?R)", "a{1,99999999999}", "(" * 900])
def test_invalid_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(CorruptFileError, match="an alpha_pattern that cannot be used"):
        AdapterConfig(alpha=16, alpha_pattern={pattern: 4.0}).with_modules(PATHS)
