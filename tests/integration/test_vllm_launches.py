"""The vllm runtime in NVIDIA's images, as Slurm jobs and on Kubernetes: what the commands and files say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.docker import parse_run
from tests.doubles.mounts import check_mounts, parse_mount
from tests.doubles.slurm_options import SBATCH, SRUN, parse, script_options
from tests.support.cluster_jobs import documents, srun_lines
from tests.support.counting_vllm import gpu_repository
from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.errors import UsageError
from trtserve.nvidia.containers import image_of, vllm_image_of
from trtserve.pipeline.world_size import repository_for
from trtserve.server.launch.commands import FOLLOWER, PACKAGE_FOLDER
from trtserve.server.launch.kubernetes import KubernetesSpec
from trtserve.server.launch.kubernetes import plan_job as plan_kubernetes
from trtserve.server.launch.slurm import SlurmSpec
from trtserve.server.launch.slurm import plan_job as plan_slurm
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
    words = parse_run(list(instance.launch.command.argv[2:]))
    own = set(words.options["env"])
    assert words.image == IMAGE
    assert words.command[:2] == ["/opt/tritonserver/bin/tritonserver", f"--model-repository={repository.path}"]
    assert {f"PYTHONPATH={PACKAGE_FOLDER.parent}", "TRTSERVE_VLLM_PYTHON=/usr/bin/python3"} <= own
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in own
    assert words.options["shm-size"] == ["4g"]
    mounts = [parse_mount(each) for each in words.options["volume"]]
    check_mounts(mounts)
    assert {str(PACKAGE_FOLDER), str(repository.path)} <= {str(mount.source) for mount in mounts}
    assert all(each.endswith(":ro") for each in words.options["volume"])


def test_instances_have_gpus_and_ports_of_their_own(repository: ModelRepository, tmp_path: Path) -> None:
    spec = ServerSpec(container="26.08", instances=2, gpus=tuple(range(8)))
    instances = plan_server(repository, spec, store=Store(tmp_path)).instances
    runs = [parse_run(list(each.launch.command.argv[2:])) for each in instances]
    shown = [each for words in runs for each in words.options["env"] if each.startswith("CUDA_VISIBLE_DEVICES")]
    assert shown == ["CUDA_VISIBLE_DEVICES=0,1,2,3", "CUDA_VISIBLE_DEVICES=4,5,6,7"]
    assert len({each.address.grpc_port for each in instances}) == 2
    with pytest.raises(UsageError, match="--gpus names 4 GPUs; 2 instances of 4 ranks need 8"):
        plan_server(repository, ServerSpec(container="26.08", instances=2, gpus=(0, 1, 2, 3)), store=Store(tmp_path))


def test_another_world_size_makes_the_repository_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path))
    made = gpu_repository(tmp_path)
    spec = ServerSpec(world_size=2, container="26.08")
    changed = repository_for(made, spec, on_this_machine=False)
    assert changed.path != made.path
    content = json.loads((changed.path / "tensorrt_llm/1/config.json").read_text())
    assert content["pretrained_config"]["mapping"]["tp_size"] == 2
    assert repository_for(made, ServerSpec(world_size=1, container="26.08")).path == made.path
    on_cpu = gpu_repository(tmp_path / "other", device="cpu")
    with pytest.raises(UsageError, match="--world-size is 2; the engine of the vllm runtime starts its workers itself"):
        plan_server(on_cpu, ServerSpec(world_size=2), store=Store(tmp_path))
    with pytest.raises(UsageError, match=r"--world-size 2 needs it assembled again \(tp 2\)"):
        repository_for(made, spec, rebuild=False)
    assert run(["inspect", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM" in printed
    assert "arguments  max_model_len -1" in printed
    assert "model/model.safetensors" in printed


def test_the_executor_of_a_container_needs_no_package_that_the_image_may_lack() -> None:
    words = [sys.executable, "-c", LOADED]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=PACKAGE_FOLDER.parent)
    assert {name.split("_cython")[0] for name in done.stdout.split()} - {"trtserve"} <= ALLOWED


def test_on_several_nodes_slurm_starts_one_task_each(repository: ModelRepository, tmp_path: Path) -> None:
    spec = ServerSpec(container="26.08", host="0.0.0.0")
    job = plan_slurm(repository, spec, SlurmSpec(nodes=2), tmp_path / "job")
    batch, task = (job.files[tmp_path / "job" / name] for name in ("server.sbatch", "task.sh"))
    options = parse(script_options(batch), SBATCH, "sbatch").values
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "2")
    steps = [parse(line, SRUN, "srun").values for line in srun_lines(batch)]
    (launch,) = [line for line in steps if "mpi" in line]
    assert launch["mpi"] == "none"
    assert launch["container-image"] == "nvcr.io#nvidia/tritonserver:26.08-vllm-python-py3"
    assert str(PACKAGE_FOLDER) in launch["container-mounts"]
    assert "export TRTSERVE_VLLM_LEADER TRTSERVE_VLLM_NODES=2" in batch
    assert 'export TRTSERVE_VLLM_NODE="${SLURM_PROCID}"' in task
    leader, follower = task.split("else\n")[0], task.split("else\n")[1]
    assert "/opt/tritonserver/bin/tritonserver" in leader
    assert f"/usr/bin/python3\n        {FOLLOWER}\n        follow\n        29500" in follower
    assert "mpirun" not in batch + task
    with pytest.raises(UsageError, match="--nodes is 3; the model is shared by 4 GPUs, the same number on each"):
        plan_slurm(repository, spec, SlurmSpec(nodes=3), tmp_path / "job")


def test_pods_of_a_leader_worker_set_need_no_sshd(repository: ModelRepository, tmp_path: Path) -> None:
    spec = ServerSpec(container="registry.example/trtserve-vllm:1")
    place = tmp_path / "server.yaml"
    cluster = KubernetesSpec(claim="models", mount_path=str(repository.path.parent), nodes=2)
    several = documents(plan_kubernetes(repository, spec, cluster, place))
    scripts, group = several["ConfigMap"], several["LeaderWorkerSet"]
    leader, follower = scripts["data"]["leader.sh"], scripts["data"]["worker.sh"]
    assert 'TRTSERVE_VLLM_NODES="${LWS_GROUP_SIZE}"\nexec /opt/tritonserver/bin/tritonserver' in leader
    assert 'engine_side.py" follow 29500' in follower
    for script in (leader, follower):
        assert "ssh" not in script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    for kind in ("leaderTemplate", "workerTemplate"):
        pod = group["spec"]["leaderWorkerTemplate"][kind]["spec"]
        assert "ssh" not in str(pod)
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    one = plan_kubernetes(repository, spec, KubernetesSpec(claim="models", mount_path=cluster.mount_path), place)
    deployment = documents(one)["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_each_family_of_images_has_its_own_tags(repository: ModelRepository) -> None:
    with pytest.raises(UsageError, match=r"no container 26.08 with TensorRT-LLM: 26.07 was the last. 26.08 has vLLM 0"):
        image_of("26.08")
    with pytest.raises(UsageError, match=r"'25.12' is not a known container with vLLM; known are 26.01"):
        vllm_image_of("25.12")
    assert vllm_image_of("registry.example/own:1") == "registry.example/own:1"
    with pytest.raises(UsageError, match="--multi-model does not work with the vllm runtime"):
        plan_server(repository, ServerSpec(container="26.08", multi_model=True))
