"""The vllm runtime in NVIDIA's images, as Slurm jobs and on Kubernetes: what the commands and files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.docker import parse_run
from tests.doubles.mounts import check_mounts, parse_mount
from tests.support.counting_vllm import gpu_repository
from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.nvidia.containers import image_of, vllm_image_of
from trtserve.server.launch.commands import PACKAGE_FOLDER
from trtserve.server.plan import plan_server
from trtserve.specs import ServerSpec
from trtserve.store import Store

IMAGE = "nvcr.io/nvidia/tritonserver:26.08-vllm-python-py3"
# Packages that the executor of a container may import: vLLM needs them too.
ALLOWED = {"numpy", "msgspec", "typing_extensions", "_distutils_hack"}
LOADED = """
import importlib, sys
importlib.import_module("trtserve.executor.loaders")
importlib.import_module("trtserve.executor.api").for_release("1.2")
importlib.import_module("trtserve.executor.vllm.engine")
print(*{name.partition(".")[0] for name, module in sys.modules.items()
        if "site-packages" in str(getattr(module, "__file__", ""))})
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    return gpu_repository(tmp_path_factory.mktemp("home"), tp_size=4)


def test_a_container_has_the_package_the_repository_and_its_own_vllm(
    repository: ModelRepository, tmp_path: Path
) -> None:
    plan = plan_server(repository, ServerSpec(container="26.08", gpus=(0, 1, 2, 3)), store=Store(tmp_path))
    (instance,) = plan.instances
    run = parse_run(list(instance.launch.command.argv[2:]))
    assert run.image == IMAGE
    assert run.command[:2] == ["/opt/tritonserver/bin/tritonserver", f"--model-repository={repository.path}"]
    assert "--backend-directory=/opt/tritonserver/backends" in run.command
    assert {f"PYTHONPATH={PACKAGE_FOLDER.parent}", "TRTSERVE_VLLM_PYTHON=/usr/bin/python3"} <= set(run.options["env"])
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in run.options["env"]
    assert run.options["shm-size"] == ["4g"]
    mounts = [parse_mount(each) for each in run.options["volume"]]
    check_mounts(mounts)
    assert {str(PACKAGE_FOLDER), str(repository.path)} <= {str(mount.source) for mount in mounts}
    assert all(each.endswith(":ro") for each in run.options["volume"])


def test_the_executor_of_a_container_needs_no_package_that_the_image_may_lack() -> None:
    words = [sys.executable, "-c", LOADED]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=PACKAGE_FOLDER.parent)
    assert {name.split("_cython")[0] for name in done.stdout.split()} - {"trtserve"} <= ALLOWED


def test_each_family_of_images_has_its_own_tags(repository: ModelRepository) -> None:
    with pytest.raises(UsageError, match=r"no container 26.08 with TensorRT-LLM: 26.07 was the last. 26.08 has vLLM 0"):
        image_of("26.08")
    with pytest.raises(UsageError, match=r"'25.12' is not a known container with vLLM; known are 26.01"):
        vllm_image_of("25.12")
    assert vllm_image_of("registry.example/own:1") == "registry.example/own:1"
    with pytest.raises(UsageError, match="--multi-model does not work with the vllm runtime"):
        plan_server(repository, ServerSpec(container="26.08", multi_model=True))
