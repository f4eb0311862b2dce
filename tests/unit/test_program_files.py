"""Files that the models of a repository read, by themselves: sizes, kinds and contents that no repository has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import python_backend
from tests.support.python_backend import Tensor
from tests.support.tiny_models import write_byte_tokenizer
from trtserve.programs.bls.inputs import engine_length
from trtserve.programs.core.settings import runs_on_gpu
from trtserve.programs.postprocessing.model import TritonPythonModel
from trtserve.programs.shared.files import MOST_TABLE, read_json, read_object
from trtserve.programs.shared.lora_names import LoraNames
from trtserve.programs.shared.parameters import ModelParameters, check_classes
from trtserve.programs.shared.tokenizer import configured_end_ids

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "adapters": ("lora.json", lambda folder: LoraNames(folder, "lora.json")),
    "classes": (
        "parameter_classes.json",
        lambda folder: check_classes(ModelParameters({}, folder, print), folder, print),
    ),
    "ends": ("generation_config.json", configured_end_ids),
    "engine": ("config.json", runs_on_gpu),
}


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_TABLE + 1)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("kind", [large, pipe, device, deep])
@pytest.mark.parametrize(("name", "reader"), READERS.values(), ids=READERS)
def test_a_hostile_file_is_refused(
    name: str, reader: Callable[[Path], object], kind: Callable[[Path], None], tmp_path: Path
) -> None:
    kind(tmp_path / name)
    with pytest.raises(ValueError, match=r"more than 16 MiB|not a regular file|nested too deeply"):
        reader(tmp_path)


def test_the_length_of_a_hostile_engine_is_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "tensorrt_llm" / "1"
    folder.mkdir(parents=True)
    pipe(folder / "config.json")
    assert engine_length(tmp_path, "tensorrt_llm") is None


def test_files_that_are_right(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1]}')
    assert read_json(path) == read_object(path) == {"a": [1]}
    assert read_object(tmp_path / "absent") == {}
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"a\.json holds no JSON object"):
        read_object(path)


class Asked:
    """A request to `postprocessing`."""

    def __init__(self, tokens: list[int], length: int, rows: int = 1) -> None:
        arrays: dict[str, Any] = {
            "TOKENS_BATCH": np.array([[tokens]], dtype=np.int32).repeat(rows, axis=1),
            "SEQUENCE_LENGTH": np.full((1, rows), length, dtype=np.int32),
        }
        self._tensors = [Tensor(name, array) for name, array in arrays.items()]

    def inputs(self) -> list[Tensor]:
        return self._tensors


@pytest.fixture
def model(tmp_path: Path) -> TritonPythonModel:
    write_byte_tokenizer(tmp_path)
    made = TritonPythonModel()
    config = f'{{"parameters": {{"tokenizer_dir": {{"string_value": "{tmp_path}"}}}}, "output": []}}'
    made.initialize({"model_config": config, "model_repository": str(tmp_path / "r"), "model_version": "1"})
    return made


def test_more_tokens_than_one_request_may_hold_are_refused_by_their_shape(model: TritonPythonModel) -> None:
    many = 2**20 + 1
    padded, long, negative, wide = model.execute(
        [Asked([75] * many, 2), Asked([75] * many, many), Asked([75] * 2 * many, -1), Asked([75], 0, rows=many)]
    )
    assert not padded.has_error()
    for answer, shape in ((long, [1, 1, many]), (negative, [1, 1, 2 * many]), (wide, [1, many, 1])):
        expected = f"TOKENS_BATCH has shape {shape}; at most 1048576 rows and tokens are decoded in a request."
        assert expected in answer.error().message()


def test_tokens_that_no_tokenizer_decodes_are_the_requests_fault(model: TritonPythonModel) -> None:
    right, wrong = model.execute([Asked([75, 108], 2), Asked([-5, 7], 2)])
    assert not right.has_error()
    assert wrong.error().code() == python_backend.TritonError.INVALID_ARG
    assert "The tokenizer cannot decode these tokens" in wrong.error().message()
