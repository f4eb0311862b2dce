"""How the models load their tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.programs.shared.tokenizer import load_tokenizer


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer_dir is .*nowhere, which is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
