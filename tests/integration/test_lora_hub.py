"""`trtserve lora org/name`: the adapter is pulled from a hub on loopback, by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.hub import Hub, running_hub
from tests.support.peft_adapters import write_adapter
from tests.support.stages import convert_adapter
from trtserve.artifacts import Manifest
from trtserve.errors import ModelNotFoundError, UnsupportedModelError
from trtserve.pipeline.lora import WEIGHTS, plan_adapter
from trtserve.pipeline.model import download_folder
from trtserve.store import Store
from trtserve.store.hub import resolve

ID = "acme/polite"
MODULES = {"self_attn.q_proj": (16, 16)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


def test_an_adapter_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    model = hub.add(ID, write_adapter(tmp_path / "source", modules=MODULES))
    plan = plan_adapter(ID)
    assert (plan.source.name, plan.pairs, plan.reused) == ("polite", (), False)
    assert not hub.asked_for("adapter_model.safetensors")
    adapter = convert_adapter(ID)
    assert Manifest.read(adapter.path).facts["commit"] == model.commit
    local = convert_adapter(tmp_path / "source", out=tmp_path / "local")
    assert np.array_equal(np.load(adapter.path / WEIGHTS), np.load(local.path / WEIGHTS))
    assert not list((Store().root / "downloads").iterdir())
    asked = len(hub.asked_for("adapter_model.safetensors"))
    assert convert_adapter(ID).path == adapter.path
    assert len(hub.asked_for("adapter_model.safetensors")) == asked


def test_a_plan_waits_for_the_process_that_has_the_folder(hub: Hub, tmp_path: Path) -> None:
    hub.add(ID, write_adapter(tmp_path / "source", modules=MODULES))
    revision = resolve(ID, None)
    with ThreadPoolExecutor(1) as others:
        with download_folder(Store(), revision):
            planned = others.submit(plan_adapter, ID)
            with pytest.raises(TimeoutError):
                planned.result(timeout=1)
        assert planned.result(timeout=30).source.name == "polite"


def test_repositories_without_an_adapter_are_refused(hub: Hub, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "old", modules=MODULES)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    hub.add(ID, folder)
    with pytest.raises(UnsupportedModelError, match="takes PyTorch"):
        plan_adapter(ID)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="not a PEFT adapter"):
        plan_adapter(ID)
