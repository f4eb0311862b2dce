"""How the models load their tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_modules import load


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_tokenizer = load(monkeypatch, "preprocessing", "hf_tokenizer")
    with pytest.raises(FileNotFoundError, match=r"tokenizer_dir is .*nowhere, which is no folder"):
        hf_tokenizer.load_tokenizer(tmp_path / "nowhere")
