"""Manifests for Kubernetes: core objects by schemas of several versions, LeaderWorkerSet by its documented fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.cluster_jobs import documents, manifest_of, relocatable
from tests.support.double_engines import core_config, write_core_model, write_engine_folder
from tests.support.recorded_progress import Lines
from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.errors import ArtifactError, RepositoryError, UsageError
from trtserve.server.launch.cluster import ClusterJob, write_job
from trtserve.server.launch.kubernetes import KubernetesSpec, object_name, plan_job
from trtserve.specs import ServerSpec

# The oldest and the newest that the validator and today's clusters share, and one between.
VERSIONS = ("1.27", "1.31", "1.34")

# Fields of leaderworkerset.x-k8s.io/v1 (api/leaderworkerset/v1 of kubernetes-sigs/lws): name → type or nested fields.
LEADER = "leaderworkerset.sigs.k8s.io/worker-index"
LEADER_WORKER_SET: dict[str, Any] = {
    "replicas": int,
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    "rolloutStrategy": {
        "type": {"RollingUpdate"},
        "rollingUpdateConfiguration": {"partition": int, "maxUnavailable": (int, str), "maxSurge": (int, str)},
    },
    "networkConfig": {"subdomainPolicy": {"Shared", "UniquePerReplica"}},
    "leaderWorkerTemplate": {
        "size": int,
        "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
        "leaderTemplate": "pod",
        "workerTemplate": "pod",
        "subGroupPolicy": {"subGroupPolicyType": {"LeaderWorker", "LeaderExcluded"}, "subGroupSize": int},
    },
}


def repository_of(tmp_path: Path, tp: int = 4) -> ModelRepository:
    return relocatable(tmp_path / "My_Model", tp)


def require_core(document: Mapping[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(dict(document), version, strict=True)


def require_fields(content: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Every key is a documented one, with a value of its type; pod templates are those of the core API."""
    assert not content.keys() - fields.keys()
    for key, value in content.items():
        allowed = fields[key]
        if allowed == "pod":
            require_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": value["spec"]})
        elif isinstance(allowed, dict):
            require_fields(value, allowed)
        elif isinstance(allowed, set):
            assert value in allowed
        else:
            assert isinstance(value, allowed)


def test_one_node_is_a_deployment_and_a_service(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    job = manifest_of(repository, hf_secret="hub", pull_secret="registry", namespace="serving", replicas=2)
    found = documents(job)
    assert list(found) == job.record["objects"] == ["Deployment", "Service", "NetworkPolicy"]
    for document in found.values():
        require_core(document)
        assert document["metadata"]["namespace"] == "serving"
    deployment = found["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["replicas"] == 2
    assert deployment["template"]["metadata"]["labels"] == deployment["selector"]["matchLabels"]
    assert (
        container["image"] == "nvcr.io/nvidia/tritonserver:25.04-trtllm-python-py3"
    )  # the newest of the engine's release
    assert container["command"][:2] == ["mpirun", "--allow-run-as-root"]
    assert container["command"].count("--model-repository=/models/My_Model") == 4
    assert "--http-address=0.0.0.0" in container["command"]  # probes come from outside of the pod
    assert container["workingDir"] == "/models/My_Model"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    home, token = container["env"]
    assert home == {"name": "HOME", "value": "/tmp"}
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    service = found["Service"]["spec"]
    assert service["selector"].items() <= deployment["template"]["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports


def test_probes_ask_tritons_health_pages_and_look_for_dead_stubs(tmp_path: Path) -> None:
    spec = ServerSpec(http_port=9000, grpc_port=9001, metrics_port=9002)
    found = documents(manifest_of(repository_of(tmp_path, 1), spec, ready_timeout=905))
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    for kind, page in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        bash, flag, script = container[kind]["exec"]["command"]
        assert (bash, flag) == ("bash", "-c")
        assert "/dev/tcp/localhost/9000" in script
        assert f"GET /v2/health/{page} HTTP/1.0" in script
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 905
    assert container["ports"][0] == {"name": "http", "containerPort": 9000}


def require_few_rights(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }


def test_pods_have_few_rights_and_no_neighbours_from_elsewhere(tmp_path: Path) -> None:
    found = documents(manifest_of(repository_of(tmp_path, 1)))
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    require_few_rights(pod["spec"], container)
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {}}]
    assert {port["port"] for port in rule["ports"]} == {port["name"] for port in container["ports"]}


def test_several_nodes_are_a_leader_worker_set(tmp_path: Path) -> None:
    job = manifest_of(repository_of(tmp_path), nodes=2, ssh_secret="keys", replicas=3)
    found = documents(job)
    assert list(found) == job.record["objects"] == ["ConfigMap", "LeaderWorkerSet", "Service", "NetworkPolicy"]
    require_core(found["ConfigMap"])
    require_core(found["Service"])
    workers = found["LeaderWorkerSet"]
    assert workers.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert workers["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    require_fields(workers["spec"], LEADER_WORKER_SET)
    template = workers["spec"]["leaderWorkerTemplate"]
    assert (workers["spec"]["replicas"], template["size"]) == (3, 2)
    assert found["Service"]["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": "my-model",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    # The set's own service, for the names of its pods, has the set's name.
    assert found["Service"]["metadata"]["name"] != workers["metadata"]["name"]
    for name in ("leaderTemplate", "workerTemplate"):
        (container,) = template[name]["spec"]["containers"]
        require_few_rights(template[name]["spec"], container)
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template[name]["spec"]["volumes"]}
    assert "startupProbe" in template["leaderTemplate"]["spec"]["containers"][0]


def orchestrated(tmp_path: Path, devices: str = "0,1") -> ModelRepository:
    nodes = {} if devices.count(",") == 3 else {"num_nodes": "2"}
    given: dict[str, Any] = {"gpu_device_ids": devices, "participant_ids": "1,2,3,4", **nodes}
    return relocatable(tmp_path / "repository", container="25.05", **given)


def test_an_orchestrator_is_one_rank_more_on_the_first_node(tmp_path: Path) -> None:
    spec = ServerSpec(multi_model=True, spawn_processes=False)
    found = documents(manifest_of(orchestrated(tmp_path), spec, nodes=2, ssh_secret="keys"))
    script = found["ConfigMap"]["data"]["leader.sh"]
    hosts = [line.split('"')[1] for line in script.splitlines() if "--host" in line]
    assert hosts == ["${hosts[0]}:3"] * 3 + ["${hosts[1]}:3"] * 2
    leader = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": 2}


def test_gpus_of_a_pod_count_from_0_in_each_pod(tmp_path: Path) -> None:
    spec = ServerSpec(multi_model=True, spawn_processes=False)
    with pytest.raises(RepositoryError, match="wants GPU 2; each node has 2, numbered 0 … 1"):
        manifest_of(orchestrated(tmp_path / "two", "0,1,2,3"), spec, nodes=2, ssh_secret="keys")
    with pytest.raises(RepositoryError, match="wants GPU 4; the job has 4"):
        manifest_of(orchestrated(tmp_path / "one", "2,3,4,5"), spec)


def test_the_engine_is_told_how_many_gpus_a_pod_has(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    config = repository.path / "tensorrt_llm" / "1" / "config.json"
    manifest = manifest_of(repository, nodes=2, ssh_secret="keys")
    assert json.loads(config.read_text())["pretrained_config"]["mapping"]["gpus_per_node"] == 8
    write_job(manifest)
    assert json.loads(config.read_text())["pretrained_config"]["mapping"]["gpus_per_node"] == 2
    assert any("to the volume again" in note for note in manifest.notes)
    assert not any("again" in note for note in manifest_of(repository, nodes=2, ssh_secret="keys").notes)


def test_files_that_only_the_volume_has_are_not_checked(tmp_path: Path) -> None:
    repository, told = repository_of(tmp_path), Lines()
    config = repository.path / "tensorrt_llm" / "config.pbtxt"
    config.write_text(core_config("tensorrt_llm", "tensorrt_llm/1", lora_prefetch_dir="/models/loras"))
    cluster, file = KubernetesSpec(claim="models"), tmp_path / "server.yaml"
    manifest = plan_job(repository, ServerSpec(), cluster, file, progress=told)
    assert manifest.files
    assert any("names /models/loras, which is not on this machine" in text for text in told.warnings)


def test_an_image_of_nvidia_has_no_sshd_for_several_pods(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    for container, warned in ((None, True), ("mine/with-sshd:1", False)):
        told = Lines()
        spec = ServerSpec(container=container, trtllm_version="0.18.2" if container else None)
        cluster = KubernetesSpec(claim="models", nodes=2, ssh_secret="keys")
        plan_job(repository, spec, cluster, tmp_path / "server.yaml", progress=told)
        assert any("has no sshd" in text for text in told.warnings) == warned


def test_the_leaders_probe_waits_as_long_as_its_script_and_its_models(tmp_path: Path) -> None:
    given: dict[str, Any] = {"nodes": 2, "ssh_secret": "keys", "ready_timeout": 300.0, "worker_timeout": 900.0}
    found = documents(manifest_of(repository_of(tmp_path), **given))
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    probe = template["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1200
    assert "SECONDS > 900" in found["ConfigMap"]["data"]["leader.sh"]


def test_hosts_keep_their_whole_names(tmp_path: Path) -> None:
    script = documents(manifest_of(repository_of(tmp_path), nodes=2, ssh_secret="keys"))["ConfigMap"]["data"][
        "leader.sh"
    ]
    exports = next(line for line in script.splitlines() if line.startswith("export OMPI_"))
    assert exports.split()[1:] == ["OMPI_MCA_orte_keep_fqdn_hostnames=1", "PRTE_MCA_prte_keep_fqdn_hostnames=1"]
    assert script.index(exports) < script.index("exec ")


def test_an_orchestrator_that_spawns_is_on_one_node(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this server is one process") as caught:
        manifest_of(orchestrated(tmp_path), ServerSpec(multi_model=True), nodes=2, ssh_secret="keys")
    assert "--disable-spawn-processes" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nodes": 2}, "--ssh-secret"),
        ({"nodes": 3, "ssh_secret": "keys"}, "are 3 ranks; the server has 4"),
        ({"nodes": 2, "ssh_secret": "keys", "gpus_per_node": 8}, "are 16 ranks"),
        ({"hf_secret": "Hub Token"}, "--hf-secret"),
        ({"mount_path": "models"}, "absolute path"),
        ({"nodes": 0}, "at least 1"),
        ({"worker_timeout": 0}, "--worker-timeout"),
        ({"gpus_per_node": 8}, "are 8 ranks; the server has 4"),
        ({"gateway_image": "me/trtserve"}, "--gateway-secret NAME"),
        ({"gateway_secret": "clients"}, "--gateway-image IMAGE"),
        ({"inference_pool": "llama-epp"}, "--gateway-image IMAGE"),
        ({"inference_pool": "Epp:x", "gateway_image": "me/trtserve"}, "NAME:PORT"),
        ({"inference_pool": "epp:65536", "gateway_image": "me/trtserve"}, "a port of 1 to 65535"),
        ({"inference_pool": "epp", "gateway_image": "me/trtserve", "gateway_secret": "clients"}, "pickers send no key"),
        ({"inference_gateway": "front"}, "--inference-pool NAME"),
        (
            {"inference_gateway": "Front", "inference_pool": "epp", "gateway_image": "me/trtserve"},
            "--inference-gateway is 'Front'; expected a name",
        ),
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        manifest_of(repository_of(tmp_path), **wrong)


def test_paths_outside_of_the_volume_are_refused(tmp_path: Path) -> None:
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(write_engine_folder(tmp_path / "engine")))
    repository = ModelRepository(path=tmp_path / "repository")
    with pytest.raises(UsageError, match="not below /models"):
        manifest_of(repository)
    container = documents(manifest_of(repository, mount_path=str(tmp_path)))["Deployment"]["spec"]["template"]["spec"]
    assert container["containers"][0]["workingDir"] == str(repository.path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama-2-7b", "llama-2-7b"), ("My_Model.v1", "my-model-v1"), ("7b", "s-7b"), ("a" * 90, "a" * 50)],
)
def test_names_that_kubernetes_takes(name: str, expected: str) -> None:
    assert object_name(name) == expected


def test_a_name_without_letters() -> None:
    with pytest.raises(UsageError, match="no letter"):
        object_name("___")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["start", "--model-repository", str(repository_of(tmp_path).path), "--kubernetes"]
    assert run(line) == 2
    assert "--claim NAME" in capsys.readouterr().err
    file = tmp_path / "server.yaml"
    assert run([*line, "--claim", "models", "--out", str(file), "--container", "25.03", "--instances", "2"]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert "tritonserver:25.03-trtllm" in file.read_text()
    assert "replicas: 2" in file.read_text()
    assert run([*line, "--claim", "models", "--out", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["objects"] == ["Deployment", "Service", "NetworkPolicy"]
    file.write_text("kind: Pod\n")
    with pytest.raises(ArtifactError, match="not written by trtserve"):
        write_job(ClusterJob(files={file: ""}))


def test_a_manifest_is_not_written_over_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a folder"):
        write_job(ClusterJob(files={tmp_path: ""}))


# Fields of inference.networking.k8s.io/v1 (api/v1/inferencepool_types.go of gateway-api-inference-extension).
INFERENCE_POOL: dict[str, Any] = {
    "selector": {"matchLabels": {"app.kubernetes.io/name": str, "app.kubernetes.io/instance": str, LEADER: str}},
    "targetPorts": list,
    "appProtocol": {"http", "kubernetes.io/h2c"},
    "endpointPickerRef": {
        "group": str,
        "kind": str,
        "name": str,
        "port": {"number": int},
        "failureMode": {"FailOpen", "FailClose"},
    },
}


GATEWAY: dict[str, Any] = {"gateway_image": "me/trtserve", "gateway_secret": "clients"}


def objects_of(job: ClusterJob) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(job.files[job.script]) if each is not None]


def gateway_settings(container: Mapping[str, Any]) -> list[str]:
    """Return the words of the gateway's command, which `trtserve gateway` itself has read."""
    bash, flag, script, command, *words = container["command"]
    assert (bash, flag, command) == ("bash", "-c", "gateway")
    assert script.rstrip().endswith('exec trtserve "$0" "$@"')
    return list(words)


def test_a_gateway_in_front_of_all_copies_knows_each_by_its_name(tmp_path: Path) -> None:
    spec = ServerSpec(name="llama", instances=3)
    job = manifest_of(repository_of(tmp_path), spec, replicas=3, **GATEWAY)
    found = objects_of(job)
    assert [each["kind"] for each in found] == job.record["objects"]
    for each in found:
        require_core(each)
    servers, _, pods, gateway, front, _ = found
    assert servers["spec"]["serviceName"] == pods["metadata"]["name"] == "llama-pods"
    assert pods["spec"]["clusterIP"] == "None"
    template = gateway["spec"]["template"]
    assert front["spec"]["selector"] == gateway["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert not front["spec"]["selector"].items() <= servers["spec"]["template"]["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    words = gateway_settings(container)
    assert words[words.index("--url") + 1] == "llama-0.llama-pods:8001"
    assert words[-2:] == [f"--replica=llama-{number}.llama-pods:8001:8000" for number in (1, 2)]
    assert words[words.index("--repository") + 1] == "/models/My_Model"
    assert "--api-key-file" in words
    assert container["env"][1]["valueFrom"] == {"secretKeyRef": {"name": "clients", "key": "key"}}
    assert front["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"]
    # It says so, because `kubectl apply` leaves a Deployment of the same name.
    assert any("kubectl delete deployment llama" in note for note in job.notes)
    assert not any("kubectl delete" in note for note in manifest_of(repository_of(tmp_path / "alone")).notes)


def test_a_gateway_finds_the_leaders_of_several_nodes(tmp_path: Path) -> None:
    spec = ServerSpec(name="llama")
    job = manifest_of(repository_of(tmp_path), spec, nodes=2, ssh_secret="k", replicas=2, **GATEWAY)
    gateway = next(each for each in objects_of(job) if each["kind"] == "Deployment")
    words = gateway_settings(gateway["spec"]["template"]["spec"]["containers"][0])
    assert words[words.index("--url") + 1] == "llama-0.llama:8001"
    assert words[-1] == "--replica=llama-1.llama:8001:8000"


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_gateway_apis_picker_gets_a_pool_of_gateways(tmp_path: Path, nodes: int) -> None:
    given = {"nodes": nodes, "ssh_secret": "k", "gateway_image": "me/trtserve", "inference_pool": "llama-epp:9003"}
    job = manifest_of(repository_of(tmp_path), ServerSpec(name="llama"), **given)
    found = documents(job)
    assert sorted(found) == sorted(job.record["objects"])
    pool = found["InferencePool"]
    assert (pool["apiVersion"], pool["metadata"]["name"]) == ("inference.networking.k8s.io/v1", "llama")
    require_fields(pool["spec"], INFERENCE_POOL)
    assert pool["spec"]["endpointPickerRef"] == {"name": "llama-epp", "port": {"number": 9003}}
    if nodes == 1:
        template = found["Deployment"]["spec"]["template"]
        labels = template["metadata"]["labels"]
        require_core(found["Deployment"])
    else:
        template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = template["metadata"]["labels"] | {LEADER: "0"}  # the extension writes it
        require_fields(found["LeaderWorkerSet"]["spec"], LEADER_WORKER_SET)
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    _, gateway = template["spec"]["containers"]
    assert pool["spec"]["targetPorts"] == [{"number": gateway["ports"][0]["containerPort"]}]
    # A container without limits could take the memory of its neighbour, Triton.
    assert gateway["resources"] == {"requests": {"memory": "512Mi"}, "limits": {"memory": "4Gi"}}
    # /health is that of the servers: a probe of it would restart a gateway whose Triton loads.
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/", "port": "openai"}
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"
    words = gateway_settings(gateway)
    assert words[words.index("--url") + 1] == "localhost:8001"
    assert "--no-auth" in words  # the picker has no key; who may ask is the Gateway's business
    require_core(found["NetworkPolicy"])
    assert {"from": [{"namespaceSelector": {}}], "ports": [{"port": "openai"}]} in found["NetworkPolicy"]["spec"][
        "ingress"
    ]


def test_a_gateway_of_the_cluster_leads_to_the_pool(tmp_path: Path) -> None:
    given = {"gateway_image": "me/trtserve", "inference_pool": "epp", "inference_gateway": "front", "namespace": "ml"}
    job = manifest_of(repository_of(tmp_path), ServerSpec(name="llama"), **given)
    found = documents(job)
    assert sorted(found) == sorted(job.record["objects"])
    assert {each["metadata"]["namespace"] for each in found.values()} == {"ml"}
    route, pool = found["HTTPRoute"]["spec"], found["InferencePool"]["metadata"]["name"]
    assert route["parentRefs"] == [{"name": "front"}]
    target = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
    assert route["rules"] == [{"backendRefs": [target]}]


@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_get_no_variables_of_services(tmp_path: Path, nodes: int) -> None:
    """Those of one called `trtserve` would be options of the gateway."""
    job = manifest_of(repository_of(tmp_path), ServerSpec(name="llama"), nodes=nodes, ssh_secret="k", **GATEWAY)
    workloads = [
        each["spec"] for each in objects_of(job) if each["kind"] in ("StatefulSet", "LeaderWorkerSet", "Deployment")
    ]
    parts = [each.get("leaderWorkerTemplate", each) for each in workloads]
    pods = [part[key]["spec"] for part in parts for key in part if "emplate" in key]
    assert len(pods) == 1 + nodes
    assert {pod["enableServiceLinks"] for pod in pods} == {False}


@pytest.mark.parametrize("port", ["http", "grpc", "metrics"])
def test_triton_and_the_gateway_of_a_pod_have_different_ports(tmp_path: Path, port: str) -> None:
    ports: dict[str, Any] = {f"{port}_port": 9000}
    spec = ServerSpec(**ports)
    repository, pool = repository_of(tmp_path), {"gateway_image": "me/trtserve", "inference_pool": "llama-epp"}
    with pytest.raises(UsageError, match=f"--{port}-port is 9000, where the gateway"):
        manifest_of(repository, spec, **pool)
    assert manifest_of(repository, spec, **GATEWAY).files  # a gateway of its own pod does not meet Triton


@pytest.mark.parametrize("pool", [True, False])
def test_a_pool_that_everyone_reaches_is_warned_of(tmp_path: Path, pool: bool) -> None:
    told, cluster = Lines(), KubernetesSpec(claim="models", **GATEWAY)
    if pool:
        cluster = replace(cluster, gateway_secret=None, inference_pool="epp")
    plan_job(repository_of(tmp_path), ServerSpec(), cluster, tmp_path / "server.yaml", progress=told)
    assert any("pods of all namespaces reach them" in text for text in told.warnings) == pool


def test_a_gateways_words_are_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest_of(repository_of(tmp_path), ServerSpec(name="llama"), **GATEWAY, replicas=2)
    gateway = next(each for each in objects_of(job) if each["kind"] == "Deployment")
    words = gateway_settings(gateway["spec"]["template"]["spec"]["containers"][0])
    words[words.index("--repository") + 1] = str(tmp_path / "missing")
    assert run(["gateway", *words]) == 2
    assert "missing, which is not a folder" in capsys.readouterr().err  # nothing else was wrong
