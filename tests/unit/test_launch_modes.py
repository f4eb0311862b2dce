"""The command of every launch mode, spelled out from the description of upstream's launch script; the registries."""

from __future__ import annotations

import inspect
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest

from trtserve.cli.start import start
from trtserve.errors import MachineError, RepositoryError, UsageError
from trtserve.host.gpus import require_gpus, split_gpus
from trtserve.nvidia.releases import RELEASES
from trtserve.repository.served import CoreModel, ServedRepository, device_groups
from trtserve.server import launch
from trtserve.server.launch import cluster
from trtserve.server.launch.clusters import CLUSTERS
from trtserve.server.launch.commands import LaunchSetup
from trtserve.server.launch.modes import MODES, LaunchMode, leader, llmapi, mpi_ranks, orchestrator, slurm_task
from trtserve.server.plan import instance_addresses
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import ServerSpec
from trtserve.specs.cluster import OPTIONS, ClusterSpec
from trtserve.specs.options import options_of

DEFAULTS = Address(host="127.0.0.1", http_port=8000, grpc_port=8001, metrics_port=8002)
EXE = "/opt/tritonserver/bin/tritonserver"
PORTS = "--grpc-port=8001 --http-port=8000 --metrics-port=8002"
OWN = (
    "--grpc-infer-allocation-pool-size=0 --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1"
)
EXPLICIT = "--model-control-mode=explicit --load-model=tensorrt_llm"
MPI = "mpirun --allow-run-as-root --tag-output"
NO_POOLS = "--pinned-memory-pool-byte-size=0 --enable-peer-access=false"
FOLDER = Path(launch.__file__).parent


def setup(release: str = "1.2", **changes: object) -> LaunchSetup:
    return replace(LaunchSetup(repository=Path("/R"), address=DEFAULTS, release=release, shm_prefix="x_"), **changes)  # type: ignore[arg-type]


def backend(rank: int) -> str:
    return f"--disable-auto-complete-config --backend-config=python,shm-region-prefix-name=x_r{rank}_"


def test_leader_of_the_first_releases() -> None:
    launch = leader(setup("0.12"), 2)
    expected = (
        f"{MPI} -n 1 {EXE} --model-repository=/R {PORTS} {backend(0)} --exit-timeout-secs=3 {OWN} : "
        f"-n 1 {EXE} --model-repository=/R {EXPLICIT} {PORTS} {backend(1)} --exit-timeout-secs=3 {OWN} :"
    )
    assert shlex.join(launch.command.argv) == expected
    assert launch.command.cwd == Path("/R")
    assert launch.command.env == {}
    assert (launch.ranks, launch.mode) == (2, "leader")
    assert launch.groups[1][0] == EXE


def test_ports_are_given_twice_since_0_19() -> None:
    expected = (
        f"{MPI} -n 1 {EXE} --model-repository=/R {PORTS} {PORTS} {backend(0)} --exit-timeout-secs=3 {OWN} : "
        f"-n 1 {EXE} --model-repository=/R {PORTS} {EXPLICIT} {PORTS} {backend(1)} --exit-timeout-secs=3 {OWN} :"
    )
    assert shlex.join(leader(setup("0.19"), 2).command.argv) == expected


def test_exit_timeout_follows_the_repository_from_1_0_on() -> None:
    first = f"{EXE} --model-repository=/R --exit-timeout-secs=9 {PORTS}"
    expected = f"{MPI} -n 1 {first} {PORTS} {backend(0)} {OWN} : -n 1 {first} {EXPLICIT} {PORTS} {backend(1)} {OWN} :"
    assert shlex.join(leader(setup("1.0", exit_timeout=9), 2).command.argv) == expected


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_that_every_release_has(release: str) -> None:
    launch = leader(setup(release, core_models=("a", "b"), arguments=("--log-verbose=1",)), 4)
    assert launch.command.argv[-1] == ":"
    assert launch.command.argv.count(":") == launch.command.argv.count("-n") == 4
    assert [backend(rank).split()[-1] in group for rank, group in enumerate(launch.groups)] == [True] * 4
    for rank, group in enumerate(launch.groups):
        assert group[:2] == (EXE, "--model-repository=/R")
        assert ("--load-model=a" in group and "--load-model=b" in group) is (rank > 0)
        assert group.count("--grpc-port=8001") == (2 if RELEASES.index(release) >= RELEASES.index("0.19") else 1)
        assert group[-1] == "--log-verbose=1"


def test_one_rank_needs_mpirun_only_in_old_releases() -> None:
    old = leader(setup("0.18"), 1)
    assert shlex.join(old.command.argv).startswith(f"{MPI} -n 1 {EXE} ")
    new = leader(setup("0.19"), 1)
    assert (new.mode, new.command.argv[0], ":" in new.command.argv) == ("single", EXE, False)


def test_devices_and_oversubscription() -> None:
    launch = leader(setup(gpus=(2, 3), oversubscribe=True, mpirun="/venv/bin/mpirun"), 2)
    assert launch.command.env == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert launch.command.argv[:4] == ("/venv/bin/mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output")


def test_pool_of_the_first_gpu_belongs_to_rank_0() -> None:
    first, second = leader(setup("0.13", pool_bytes=100), 2).groups
    assert first.index("--cuda-memory-pool-byte-size=0:100") < first.index("--grpc-port=8001")
    assert not any(argument.startswith("--cuda-memory-pool") for argument in second)
    assert "--cuda-memory-pool-byte-size=0:100" not in leader(setup("0.12", pool_bytes=100), 2).groups[0]


def core(name: str, devices: str = "", ranks: str = "", **more: object) -> CoreModel:
    groups = {"gpu_device_ids": device_groups(devices), "participant_ids": device_groups(ranks)}
    made = CoreModel(name=name, backend="tensorrtllm", world_size=2, **groups)  # type: ignore[arg-type]
    return replace(made, **more)  # type: ignore[arg-type]


def two_models() -> list[CoreModel]:
    return [core("a", "0,1", "1,2"), core("b", "2,3", "3,4")]


def test_orchestrator_that_spawns() -> None:
    launch = orchestrator(setup("0.18", core_models=("a", "b")), two_models(), gpus=4)
    none = " ".join(f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(4))
    expected = (
        f"{MPI} -n 1 {EXE} --model-repository=/R {NO_POOLS} {none} {PORTS} {backend(0)} --exit-timeout-secs=3 {OWN} :"
    )
    assert shlex.join(launch.command.argv) == expected
    assert launch.command.env == {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}


def test_orchestrator_of_0_12_knows_neither_switch_nor_pools() -> None:
    launch = orchestrator(setup("0.12"), two_models(), gpus=4)
    assert launch.command.env == {"TRTLLM_ORCHESTRATOR": "1"}
    assert NO_POOLS.split(maxsplit=1)[0] not in launch.command.argv
    with pytest.raises(UsageError, match=r"0\.13"):
        orchestrator(setup("0.12"), two_models(), spawn=False)


def test_orchestrator_whose_workers_run_before() -> None:
    launch = orchestrator(setup(core_models=("a", "b")), two_models(), spawn=False, gpus=4)
    assert launch.ranks == 5
    assert launch.command.env["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "0"
    assert "--load-model=b" in launch.groups[4]
    assert "--pinned-memory-pool-byte-size=0" not in launch.groups[0]


def test_instances_of_a_group_have_devices_each() -> None:
    models = [core("a", "0,1;2,3", "1,2;3,4", instances=2)]
    assert orchestrator(setup(), models, gpus=4).ranks == 1
    assert orchestrator(setup(), models, spawn=False, gpus=4).ranks == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_device_ids": "1,2"}, "GPU 1 is claimed by both a and b"),
        ({"gpu_device_ids": "2,2"}, "GPU 2 is twice in gpu_device_ids of b"),
        ({"gpu_device_ids": "3,4"}, r"b wants GPU 4; this machine has 4, numbered 0 … 3"),
        ({"gpu_device_ids": ""}, "The model b has no gpu_device_ids"),
        ({"gpu_device_ids": "2"}, r"1 number in a group; its engine has 2 ranks"),
        ({"gpu_device_ids": "2;3"}, r"2 groups; its instance_group has 1 instance"),
        ({"gpu_device_ids": "2,3;4,5", "instances": 2, "backend": "python"}, "several groups"),
        ({"participant_ids": "2,3"}, r"must be the ranks 1 … 4, each once; .*: 2, 4"),
        ({"participant_ids": "0,3"}, "rank 0, which is the orchestrator"),
        ({"participant_ids": ""}, r"0 groups; its instance_group has 1 instance"),
        ({"backend": "python"}, "cannot find workers that were started before"),
    ],
)
def test_collisions_of_devices_and_ranks(changes: dict[str, object], words: str) -> None:
    groups = {
        key: device_groups(value) if isinstance(value, str) and key.endswith("_ids") else value
        for key, value in changes.items()
    }
    first, second = two_models()
    models = [first, replace(second, **groups)]  # type: ignore[arg-type]
    with pytest.raises(RepositoryError, match=words):
        orchestrator(setup(), models, spawn=False, gpus=4)


def test_one_model_may_see_all_devices() -> None:
    assert orchestrator(setup(), [core("a")], gpus=2).ranks == 1


def test_llmapi() -> None:
    first = f"{EXE} --model-repository=/R --exit-timeout-secs=3 {PORTS}"
    expected = (
        f"{MPI} -n 1 trtllm-llmapi-launch {first} {PORTS} {backend(0)} {OWN} : "
        f"-n 1 trtllm-llmapi-launch {first} {EXPLICIT} {PORTS} {backend(1)} {OWN} :"
    )
    assert shlex.join(llmapi(setup("1.1"), 2).command.argv) == expected
    for alone in (llmapi(setup("1.1"), 1), llmapi(setup("0.21"), 2)):
        assert (alone.command.argv[0], alone.ranks, alone.mode) == (EXE, 1, "llmapi")


def test_several_llms_start_workers_of_their_own() -> None:
    def ranks(*models: CoreModel) -> int:
        return mpi_ranks(
            ServedRepository(models=("tiny",), model="tiny", backends=frozenset(), streaming=True, core_models=models)
        )

    assert ranks(core("a")) == 2
    assert ranks(core("a"), core("b")) == ranks(core("a", instances=2)) == 1


def test_llmapi_on_several_nodes() -> None:
    """Every task of srun has the command of rank 0; on other ranks the launcher ignores it."""
    assert shlex.join(slurm_task(setup("1.2"))).startswith(f"trtllm-llmapi-launch {EXE} --model-repository=/R ")


def test_ports_of_instances_do_not_meet() -> None:
    found = [list(address.ports.values()) for address in instance_addresses(DEFAULTS, 3)]
    assert found == [[8000, 8001, 8002], [8003, 8004, 8005], [8006, 8007, 8008]]
    apart = Address(host="127.0.0.1", http_port=8000, grpc_port=9000, metrics_port=8002)
    found = [list(address.ports.values()) for address in instance_addresses(apart, 3, lambda port: port == 9001)]
    assert found == [[8000, 9000, 8002], [8001, 9002, 8003], [8004, 9003, 8005]]
    with pytest.raises(UsageError, match="No port is left above 65535"):
        instance_addresses(replace(DEFAULTS, metrics_port=65535), 2)


def test_gpus_of_instances() -> None:
    assert split_gpus((), instances=1, ranks=2) == [()]
    assert split_gpus((), instances=2, ranks=2) == [(0, 1), (2, 3)]
    assert split_gpus((4, 5, 1, 0), instances=2, ranks=2) == [(4, 5), (1, 0)]
    with pytest.raises(UsageError, match=r"names 3 GPUs; 2 instances of 2 rank"):
        split_gpus((0, 1, 2), instances=2, ranks=2)


@pytest.mark.parametrize(("text", "words"), [("0,x", "expected an integer"), ("", "expected"), ("1,1", "twice")])
def test_gpus_are_different_numbers(text: str, words: str) -> None:
    gpus = options_of(ServerSpec)["gpus"]
    with pytest.raises(UsageError, match=words):
        ServerSpec(gpus=gpus.value_of([text]))
    assert ServerSpec(gpus=gpus.value_of(["1, 0"])).gpus == (1, 0)


def test_ranks_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    require_gpus(2, 2, (0, 1))
    with pytest.raises(MachineError, match="nvidia-smi finds none"):
        require_gpus(1, 0)
    with pytest.raises(MachineError, match=r"4 ranks need a GPU each; this machine has 2"):
        require_gpus(4, 2)
    with pytest.raises(MachineError, match="names GPU 2"):
        require_gpus(2, 2, (1, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES=5 shows 1"):
        require_gpus(2, 1)


def test_every_mode_is_registered() -> None:
    assert [type(mode) for mode in MODES.values()] == LaunchMode.__subclasses__()


def test_every_cluster_has_a_module_options_a_flag_and_a_parameter_of_start() -> None:
    planning = {path.stem for path in FOLDER.glob("*.py") if "\ndef plan_job(" in path.read_text(encoding="utf-8")}
    flags = {field.name for field in fields(ClusterSpec) if field.default is False}
    parameters = inspect.signature(start).parameters
    assert set(CLUSTERS) == planning == set(OPTIONS) == flags
    assert [name for name in parameters if name in OPTIONS] == list(OPTIONS)
    promised = [name for name in vars(cluster.Cluster) if not name.startswith("_")]
    assert all(hasattr(module, name) for module in CLUSTERS.values() for name in promised)
