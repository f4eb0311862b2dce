"""Parameters that mean nothing here are listed when Triton loads the model; those that cannot be done end the load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_server import serving
from trtserve.artifacts import Engine
from trtserve.repo import assemble_repository
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def repository(features_engine: Engine, features_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RepositorySpec(name="tiny", settings={"gpu_device_ids": "0,1", "cuda_graph_mode": "true"})
    return assemble_repository(
        features_engine, features_model, spec, out=tmp_path_factory.mktemp("parameters") / "repository"
    ).path


def test_what_has_no_meaning_is_listed_once(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path):
        pass
    log = (tmp_path / "triton.log").read_text()
    assert log.count("Parameters without meaning on this runtime: gpu_device_ids, cuda_graph_mode") == 1
    (listed,) = [line for line in log.splitlines() if "without meaning" in line]
    assert "executor_worker_path" not in listed


def test_what_cannot_be_done_is_a_load_error(repository: Path, tmp_path: Path) -> None:
    """As when a config.pbtxt was filled by NVIDIA's tool, which knows nothing of this runtime."""
    config = repository / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text + 'parameters { key: "sink_token_length" value { string_value: "4" } }\n')
    words = "Parameter sink_token_length is '4', which this runtime cannot carry"
    try:
        with pytest.raises(AssertionError, match=words), serving(repository, tmp_path):
            pass
    finally:
        config.write_text(text)
