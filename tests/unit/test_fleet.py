"""A fleet on paper: the simulation against a plain one, the queueing model against the simulation, what is written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import numpy.typing as npt
import pytest
import yaml

from tests.support.bench_records import answered, report_of
from tests.support.cluster_jobs import manifest_of, relocatable
from trtserve.bench.report import BenchReport
from trtserve.cli import run
from trtserve.errors import UsageError
from trtserve.pipeline.fleet import read_fleet, sizing
from trtserve.pipeline.fleet.handover import dynamo_graph, hand_over, kubernetes_objects, llm_d_values
from trtserve.pipeline.fleet.simulation import Arrivals, Incident, ReplicaSpeed, Simulated, Simulation
from trtserve.pipeline.fleet.sizing import Sized, fitted, simulate, size, waits
from trtserve.pipeline.tuning.roofline import Offered, serve
from trtserve.specs import ServerSpec

SPEED = ReplicaSpeed(step=0.02, sequence=0.001, prompt_token=0.0001, request=0.005, slots=8)
FLEET = """\
goal: ttft p99 < 1 s, itl p99 < 100 ms
gpus:
  h100: {nodes: 20, per_node: 2, price: 2.5}
  l40s: {nodes: 100, per_node: 4, price: 0.9}
shapes:
  large: {gpu: h100, gpus: 2, max_batch_size: 32, model: org/llama,
          speed: {step_ms: 20, sequence_ms: 0.5, prompt_token_ms: 0.05, request_ms: 5}}
  slow: {gpu: l40s, gpus: 1, max_batch_size: 8,
         speed: {step_ms: 200, sequence_ms: 5, prompt_token_ms: 0.5}}
traffic: {requests_per_second: 6, input_tokens: 500, output_tokens: 100, shared_prefix: 0.3, burstiness: 4}
failures: {node_hours: 200, repair_minutes: 20}
update: {hour: 1, at_once: 0.1, drain_seconds: 30}
"""


def arrivals_of(times: Sequence[float] | npt.NDArray[Any], *, prompt: float = 100.0, answer: float = 20.0) -> Arrivals:
    full = np.ones(len(times))
    return Arrivals(np.array(times, float), prompt * full, answer * full, 0 * full)


class PlainReplica:
    """A replica token by token: each step takes what its sequences and new prompts take."""

    def __init__(self, arrivals: Arrivals, firsts: dict[int, float]) -> None:
        self.arrivals, self.firsts = arrivals, firsts
        self.waiting: list[int] = []
        self.running: dict[int, float] = {}
        self.clock = 0.0

    def advance(self, until: float) -> None:
        while self.clock < until and (self.waiting or self.running):
            new = self.waiting[: SPEED.slots - len(self.running)]
            del self.waiting[: len(new)]
            self.running |= {request: self.arrivals.answers[request] for request in new}
            prompts = sum(self.arrivals.prompts[request] for request in new)
            self.clock += SPEED.step + SPEED.sequence * len(self.running) + SPEED.prompt_token * prompts
            self.firsts |= {each: self.clock - self.arrivals.times[each] + SPEED.request for each in new}
            self.running = {request: left - 1 for request, left in self.running.items() if left > 1}
        if until < math.inf:
            self.clock = max(self.clock, until)


def plain(arrivals: Arrivals, count: int) -> list[float]:
    """Return the times to the first token, shortest first."""
    firsts: dict[int, float] = {}
    replicas = [PlainReplica(arrivals, firsts) for _ in range(count)]
    for request, moment in enumerate(arrivals.times):
        for replica in replicas:
            replica.advance(moment)
        min(replicas, key=lambda each: len(each.running) + len(each.waiting)).waiting.append(request)
    for replica in replicas:
        replica.advance(math.inf)
    return sorted(firsts.values())


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_simulation_agrees_with_one_token_by_token(replicas: int) -> None:
    random = np.random.default_rng(5)
    # Bursts: quiet and busy seconds in turns.
    gaps = random.exponential(1, 600) / (replicas * np.where(np.arange(600) // 40 % 2, 8.0, 3.0))
    arrivals = arrivals_of(np.cumsum(gaps))
    exact = plain(arrivals, replicas)
    found = Simulation(replicas, SPEED).run([arrivals])
    assert (found.requests, found.completed, found.failed) == (600, 600, 0)
    for quantile in (0.5, 0.99):
        assert found.first.quantile(quantile) == pytest.approx(exact[math.ceil(quantile * 600) - 1], rel=0.15)


def test_one_request_alone() -> None:
    found = Simulation(1, SPEED).run([arrivals_of([1.0])])
    assert found.first.quantile(0.5) == pytest.approx(0.005 + 0.01 + 0.021, rel=0.02)
    assert found.gap.quantile(0.5) == pytest.approx(0.021, rel=0.02)
    assert found.seconds == pytest.approx(1 + 0.01 + 20 * 0.021)


def test_requests_wait_for_a_slot_in_order() -> None:
    speed = ReplicaSpeed(step=1.0, sequence=0.0, prompt_token=0.0, request=0.0, slots=1)
    found = Simulation(1, speed).run([arrivals_of([0.0] * 40, answer=2.0)])
    assert found.longest_queue == 39
    assert found.seconds == pytest.approx(80.0)
    assert found.first.quantile(1.0) == pytest.approx(79.0, rel=0.02)


def test_failures_cut_answers_off_and_move_those_that_wait() -> None:
    speed = ReplicaSpeed(step=1.0, sequence=0.0, prompt_token=0.0, request=0.0, slots=1)
    down, up = Incident(5.5, "down", (0,)), Incident(20.0, "up", (0,))
    found = Simulation(2, speed).run([arrivals_of([0.0, 0.0, 0.1, 0.2, 30.0], answer=4.0)], [down, up])
    assert (found.completed, found.failed) == (4, 1)
    nobody = Simulation(1, speed).run([arrivals_of([6.0], answer=4.0)], [down, up])
    assert nobody.completed == 1
    assert nobody.first.quantile(0.5) == pytest.approx(15.0, rel=0.02)


def test_an_update_drains_before_it_stops() -> None:
    speed = ReplicaSpeed(step=1.0, sequence=0.0, prompt_token=0.0, request=0.0, slots=4)
    incidents = [Incident(1.0, "drain", (0,)), Incident(9.0, "down", (0,)), Incident(12.0, "up", (0,))]
    found = Simulation(2, speed).run([arrivals_of([0.0, 0.0, 2.0, 3.0], answer=5.0)], incidents)
    assert (found.completed, found.failed) == (4, 0)


def test_shared_prefixes_are_computed_once() -> None:
    parts = arrivals_of(np.arange(200) * 1.0, prompt=1000.0)._replace(shared=np.full(200, 800.0))
    found = Simulation(1, SPEED, prefixes=1).run([parts])
    assert 0.85 * 200 * 800 < found.cached_tokens < 0.97 * 200 * 800


def test_cost_grows_with_events_and_memory_does_not() -> None:
    def day(requests: int) -> Simulated:
        return Simulation(64, SPEED).run([arrivals_of(np.arange(requests) / 100.0, answer=200.0)])

    small, large = day(2000), day(8000)
    assert (small.events, large.events) == (4000, 16000)  # steps are no events
    assert len(large.first.counts) == len(small.first.counts)


def test_the_speed_of_a_replica_follows_from_results() -> None:
    """Results of a replica with known figures at three loads."""
    reports = []
    for batch in (1, 8, 32):
        each = 0.02 + 0.0005 * batch
        first = 1000 * (0.01 + 16 * 0.0001 + each)
        records = [
            answered(number * batch + slot, intended=number * (first + 7 * 1000 * each), first=first, step=1000 * each)
            for number in range(8)
            for slot in range(batch)
        ]
        reports.append(report_of(records, spec={"concurrency": batch}))
    speed, error = fitted(reports, slots=32)
    assert speed.step == pytest.approx(0.02, rel=0.15)
    assert speed.sequence == pytest.approx(0.0005, rel=0.3)
    assert error < 0.1
    with pytest.raises(UsageError, match="two loads or more"):
        fitted(reports[:1], slots=32)


def closed_loop(speed: ReplicaSpeed, concurrency: int, prompt: int, answer: int, luck: float) -> BenchReport:
    """A result of a replica of this speed; all its times are `luck` times as long."""

    def cost(sequences: int, prompt_tokens: int, _: float) -> tuple[float, ...]:
        return (speed.step + speed.sequence * sequences + speed.prompt_token * prompt_tokens,)

    offered = Offered(input_tokens=prompt, output_tokens=answer, concurrency=concurrency, requests=64)
    run = serve(offered, cost, slots=speed.slots, step_tokens=2048, overhead=speed.request)
    records = [
        replace(
            answered(
                number,
                intended=1000 * luck * sent,
                first=1000 * luck * (first - sent),
                step=1000 * luck * (end - first) / (answer - 1),
                tokens=answer,
            ),
            input_tokens=prompt,
        )
        for number, (sent, first, end) in enumerate(run.times.tolist())
    ]
    return report_of(records, spec={"concurrency": concurrency})


@pytest.mark.parametrize(("prompt", "answer"), [(32, 32), (512, 64)])
@pytest.mark.parametrize(("sequence_ms", "prompt_token_ms"), [(0.8, 0.1), (0.1, 0.3), (3.0, 0.01)])
def test_the_fit_tells_prompts_from_sequences(
    prompt: int, answer: int, sequence_ms: float, prompt_token_ms: float
) -> None:
    """In closed loops both grow with the load. Noise of 5 % moves what the replica can do by no more than 15 %."""
    true = ReplicaSpeed(
        step=0.005, sequence=sequence_ms / 1000, prompt_token=prompt_token_ms / 1000, request=0.01, slots=8
    )

    def most(speed: ReplicaSpeed) -> float:
        """Requests per second with all slots in use."""
        return 8 / (answer * (speed.step + 8 * speed.sequence) + 8 * prompt * speed.prompt_token)

    speed, error = fitted([closed_loop(true, each, prompt, answer, 1.0) for each in (1, 2, 4, 8)], slots=8)
    for name in ("step", "sequence", "prompt_token", "request"):
        assert getattr(speed, name) == pytest.approx(getattr(true, name), rel=0.1), name
    assert error < 0.02
    noisy = [
        closed_loop(true, each, prompt, answer, luck)
        for each, luck in zip((1, 2, 4, 8), (1.05, 0.95, 1.05, 0.95), strict=True)
    ]
    speed, error = fitted(noisy, slots=8)
    assert most(speed) == pytest.approx(most(true), rel=0.15)
    assert speed.prompt_token <= 2 * true.prompt_token
    assert error < 0.15


def fleet_of(tmp_path: Path, text: str = FLEET) -> Any:
    (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
    return read_fleet(tmp_path / "fleet.yaml")


def test_the_queueing_model_brackets_the_simulation(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    (large,) = size(fleet)  # one request alone misses the goal on the slow shape
    assert large.fewest <= large.replicas
    assert large.fits
    simulated = simulate(fleet, large, hours=1)
    assert (simulated.part, simulated.minutes) == (1.0, 60.0)
    day = simulated.found
    quick, slow = large.pooled.figures, large.expected.figures
    assert 0.7 * quick["ttft_p50"] <= 1000 * (day.first.quantile(0.5) or 0) <= 1.3 * slow["ttft_p50"]
    assert 1000 * (day.first.quantile(0.99) or 0) <= fleet.limits_ms["ttft_p99"]
    assert day.completed + day.failed == day.requests


def test_a_busy_small_fleet_has_shorter_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_MOST_GROUPS", 2000)
    fleet = fleet_of(tmp_path)
    simulated = simulate(fleet, size(fleet)[0], hours=3)
    assert 1 <= simulated.minutes < 10
    assert simulated.found.requests < 6000
    assert set(simulated.found.hours) == {0, 1, 2}


def test_more_replicas_wait_less(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    speed = ReplicaSpeed(step=0.02, sequence=0.0005, prompt_token=0.00005, request=0.005, slots=32)
    figures = [waits(speed, fleet.traffic, 200.0, count, pooled=False).figures["ttft_p99"] for count in (1, 4, 8, 40)]
    assert figures == sorted(figures, reverse=True)
    assert math.isinf(figures[0])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("gpu: h100", "gpu: h200", "Did you mean|not under gpus"),
        ("ttft p99 < 1 s", "tpot p99 < 1 s", "the goal has tpot_p99"),
        ("requests_per_second: 6", "requests_per_second: 0", "traffic.requests_per_second"),
        ("per_node: 2", "per_nodes: 2", "per_node"),
        ("nodes: 20", "nodes: 0", "nodes"),
        (", burstiness: 4", ", day: [1, 2]", "day"),
        ("goal: ttft", "goal: [ttft", "not YAML"),
        ("goal: ttft", "goal: 2001-99-99 #", "not YAML"),
        ("goal: ttft", f"goal: {'9' * 5000} #", "not YAML"),
        ("goal: ttft", f"goal: {'[' * 20_000} #", "not YAML"),
        ("goal: ttft", f"#{'x' * (1 << 20)}\ngoal: ttft", "larger than 1 MiB"),
        # submit.sh names jobs after shapes.
        ("large:", '"$(touch x)":', "shapes has .*letters, digits"),
        ("large:", '"a\\nEND\\ntouch x":', "shapes has .*letters, digits"),
        ("large:", '"large\\n":', "shapes has .*letters, digits"),
        ("large:", "-large:", "begins with a letter"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fleet_of(tmp_path, FLEET.replace(before, after, 1))


SCHEMAS = json.loads((Path(__file__).parents[1] / "golden" / "handover_schemas.json").read_text(encoding="utf-8"))
_TYPES = {"object": dict, "map": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": float}


def require_schema(content: Any, kind: str, path: str = "") -> None:
    """Compare an object with the fields that its project publishes."""
    known = SCHEMAS[kind]["fields"]
    assert path in known, f"{kind} has no field {path}"
    expected, required = known[path]
    if expected in _TYPES:
        assert isinstance(content, _TYPES[expected]), f"{path} is no {expected}"
    if expected == "map" or expected == "any":
        return
    if isinstance(content, dict):
        assert not set(required) - set(content), f"{path} lacks {set(required) - set(content)}"
        for name, below in content.items():
            if path or name != "metadata":
                require_schema(below, kind, f"{path}.{name}")
    elif isinstance(content, list):
        for below in content:
            require_schema(below, kind, f"{path}[]")


LABELS = {"app.kubernetes.io/name": "trtserve", "app.kubernetes.io/instance": "llama"}
WORKER = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "server", "image": "image"}]}}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "llama"},
    "spec": {"selector": LABELS, "ports": [{"name": "grpc", "port": 8001}, {"name": "http", "port": 8000}]},
}
WORKLOADS = [
    {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "llama"},
        "spec": {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": WORKER},
    },
    {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "llama"},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {"size": 2, "leaderTemplate": WORKER, "workerTemplate": WORKER},
        },
    },
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["kind"])
def test_kubernetes_objects_fit_the_published_schemas(tmp_path: Path, workload: dict[str, Any]) -> None:
    fleet = fleet_of(tmp_path)
    (large,) = size(fleet)
    objects = {each["kind"]: each for each in kubernetes_objects(fleet, large, [workload, SERVICE])}
    whole = large.replicas + large.spare
    assert objects[workload["kind"]]["spec"]["replicas"] == whole
    assert workload["spec"]["replicas"] == 1  # what was read is not changed
    for kind in ("ScaledObject", "InferencePool", "HTTPRoute", workload["kind"]):
        if kind in SCHEMAS:
            assert objects[kind]["apiVersion"] == SCHEMAS[kind]["version"]
            require_schema(objects[kind], kind)
    assert objects["InferencePool"]["spec"]["targetPorts"] == [{"number": 8000}]
    assert objects["ScaledObject"]["spec"]["maxReplicaCount"] == whole
    with pytest.raises(AssertionError, match="has no field"):
        require_schema(
            {**objects["InferencePool"], "spec": {**objects["InferencePool"]["spec"], "pods": 3}}, "InferencePool"
        )
    with pytest.raises(AssertionError, match="lacks"):
        require_schema({**objects["ScaledObject"], "spec": {"triggers": []}}, "ScaledObject")


def handed(tmp_path: Path, **given: Any) -> list[dict[str, Any]]:
    """Return what a plan makes of a manifest that `start --kubernetes` wrote with these settings."""
    job = manifest_of(relocatable(tmp_path / "llama"), ServerSpec(name="llama"), ssh_secret="keys", **given)
    (tmp_path / "llama.yaml").write_text(job.files[job.script], encoding="utf-8")
    fleet = fleet_of(tmp_path, FLEET.replace("model: org/llama", "manifest: llama.yaml"))
    (large,) = size(fleet)
    (written,) = hand_over(fleet, large, tmp_path / "out")
    return list(yaml.safe_load_all(written.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("nodes", "kind"), [(1, "Deployment"), (2, "LeaderWorkerSet")])
def test_a_manifest_with_a_pool_keeps_its_pool_of_gateways(tmp_path: Path, nodes: int, kind: str) -> None:
    found = handed(tmp_path, nodes=nodes, gateway_image="me/trtserve", inference_pool="epp")
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)  # of two with one name, `kubectl apply` keeps the second
    objects = {each["kind"]: each for each in found}
    assert objects[kind]["spec"]["replicas"] == objects["ScaledObject"]["spec"]["maxReplicaCount"] > 1
    target = objects["ScaledObject"]["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": objects[kind]["apiVersion"], "kind": kind, "name": "llama"}
    pool, (rule,) = objects["InferencePool"], objects["HTTPRoute"]["spec"]["rules"]
    assert pool["spec"]["targetPorts"] == [{"number": 9000}]
    assert pool["spec"]["endpointPickerRef"]["name"] == "epp"
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    for each in found:
        if each["kind"] in SCHEMAS:
            require_schema(each, each["kind"])
        elif each["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(each, "1.34", strict=True)


def test_new_objects_are_in_the_namespace_of_the_manifest(tmp_path: Path) -> None:
    given = {"gateway_image": "me/trtserve", "inference_pool": "epp", "inference_gateway": "front", "namespace": "ml"}
    found = handed(tmp_path, nodes=1, **given)
    assert {each["metadata"]["namespace"] for each in found} == {"ml"}
    objects = {each["kind"]: each for each in found}
    assert len(objects) == len(found)  # the manifest's route and pool stay alone
    assert objects["HTTPRoute"]["spec"]["parentRefs"] == [{"name": "front"}]
    (trigger,) = objects["ScaledObject"]["spec"]["triggers"]
    assert 'namespace="ml"' in trigger["metadata"]["query"]
    require_schema(objects["HTTPRoute"], "HTTPRoute")


@pytest.mark.parametrize("kind", ["ScaledObject", "HorizontalPodAutoscaler"])
def test_one_object_scales_the_model(tmp_path: Path, kind: str) -> None:
    fleet = fleet_of(tmp_path)
    (large,) = size(fleet)
    # The chart names KEDA's target without its kind, which is a Deployment then.
    target = {"name": "llama"} if kind == "ScaledObject" else {"kind": "Deployment", "name": "llama"}
    chart = {"kind": kind, "metadata": {"name": "llama"}, "spec": {"scaleTargetRef": target}}
    other = {**chart, "metadata": {"name": "other"}, "spec": {"scaleTargetRef": {"name": "other"}}}
    objects = kubernetes_objects(fleet, large, [WORKLOADS[0], SERVICE, chart, other])
    scalers = [each for each in objects if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]
    assert [each["metadata"]["name"] for each in scalers] == ["other", "llama"]
    assert scalers[1]["spec"]["maxReplicaCount"] == large.replicas + large.spare


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_gateway_with_a_fixed_list_of_replicas_is_refused(tmp_path: Path, nodes: int) -> None:
    with pytest.raises(UsageError, match="a gateway in front of a fixed list of replicas") as caught:
        handed(tmp_path, nodes=nodes, gateway_image="me/trtserve", gateway_secret="clients")
    assert "--inference-pool PICKER" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_model_is_found_by_the_label_of_its_pods(tmp_path: Path, kind: str) -> None:
    fleet = fleet_of(tmp_path)
    (large,) = size(fleet)
    proxy = {**WORKLOADS[0], "metadata": {"name": "proxy"}}
    proxy["spec"] = {"template": {"metadata": {"labels": {"app.kubernetes.io/name": "trtserve-gateway"}}}}
    model = {**WORKLOADS[0], "kind": kind}
    first, second, *around = kubernetes_objects(fleet, large, [proxy, model, SERVICE])
    assert "replicas" not in first["spec"]
    assert second["spec"]["replicas"] == large.replicas + large.spare
    scaled = next(each for each in around if each["kind"] == "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": kind, "name": "llama"}


def test_values_fit_the_schema_of_llm_d(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    (large,) = size(fleet)
    values = llm_d_values(fleet.shapes["large"], large, "org/llama")
    require_schema(values, "llm-d-modelservice")
    assert values["decode"]["parallelism"]["tensor"] == 2


def dynamo_of(tmp_path: Path, gpus: int, per_node: int, **changes: str) -> tuple[Any, Sized]:
    """Return a graph for replicas of `gpus` on nodes with `per_node`."""
    fleet = fleet_of(tmp_path)
    (large,) = size(fleet)
    shape = replace(fleet.shapes["large"], gpus=gpus, **changes)
    kind = replace(fleet.gpus[shape.gpu], per_node=per_node)
    fleet = replace(fleet, shapes={"large": shape}, gpus={shape.gpu: kind})
    return dynamo_graph(fleet, large, 'org/llama "x"'), large


@pytest.mark.parametrize(("gpus", "per_node", "nodes"), [(2, 8, 1), (2, 1, 2), (12, 8, 2)])
def test_a_graph_fits_the_schema_of_dynamo(tmp_path: Path, gpus: int, per_node: int, nodes: int) -> None:
    graph, large = dynamo_of(tmp_path, gpus, per_node)
    assert graph["apiVersion"] == SCHEMAS["DynamoGraphDeployment"]["version"]
    require_schema(graph, "DynamoGraphDeployment")
    front, worker = graph["spec"]["components"]
    assert (front["type"], worker["type"], worker["replicas"]) == ("frontend", "worker", large.replicas + large.spare)
    assert worker.get("multinode") == ({"nodeCount": nodes} if nodes > 1 else None)
    (main,) = worker["podTemplate"]["spec"]["containers"]
    assert main["args"] == ["--model", 'org/llama "x"', "--tensor-parallel-size", str(gpus), "--max-num-seqs", "32"]
    assert nodes * int(main["resources"]["limits"]["nvidia.com/gpu"]) == gpus


def test_what_dynamo_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="9 GPUs on 2 nodes; Dynamo gives each node of a replica as many"):
        dynamo_of(tmp_path, 9, 8)
    for image in ("vllm-runtime", "vllm-runtime:latest", "host:5000/a-1.5.1", "host:1.5.1/runtime"):
        with pytest.raises(UsageError, match="only an image whose tag is a version"):
            dynamo_of(tmp_path, 2, 8, dynamo_image=image)
    for image in ("host:5000/runtime:1.5.1", "runtime:v1.5.1-cuda13", f"runtime:1.5.1@sha256:{'0' * 64}"):
        dynamo_of(tmp_path, 2, 8, dynamo_image=image)


def test_files_are_handed_over_whole(tmp_path: Path) -> None:
    job = tmp_path / "llama.slurm"
    job.mkdir()
    (job / "server.sbatch").touch()
    (tmp_path / "llama.yaml").write_text(yaml.safe_dump_all([WORKLOADS[0], SERVICE]), encoding="utf-8")
    fleet = fleet_of(
        tmp_path, FLEET.replace("model: org/llama", "model: org/llama, job: llama.slurm, manifest: llama.yaml")
    )
    (large,) = size(fleet)
    written = hand_over(fleet, large, tmp_path / "out")
    assert [each.name for each in written] == ["kubernetes.yaml", "submit.sh", "llm-d-values.yaml", "dynamo.yaml"]
    assert f"seq 1 {large.replicas + large.spare}" in written[1].read_text(encoding="utf-8")
    assert written[1].stat().st_mode & 0o100
    assert not list((tmp_path / "out").glob(".*"))
    with pytest.raises(UsageError, match="has no `manifest`, `job` or `model`"):
        hand_over(fleet_of(tmp_path, FLEET.replace("model: org/llama,", "")), large, tmp_path / "none")
    unlabelled = yaml.safe_dump_all([{"kind": "Deployment", "spec": None}, SERVICE])
    nameless = yaml.safe_dump_all([{"spec": {}}, WORKLOADS[0], SERVICE])
    for text in ("kind: Pod\n", unlabelled, nameless):
        (tmp_path / "llama.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=r"expected a Service and one of .* app.kubernetes.io/name: trtserve"):
            hand_over(fleet, large, tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_MOST_GROUPS", 2000)
    fleet_of(tmp_path)
    file = str(tmp_path / "fleet.yaml")
    assert run(["plan", "--fleet", file, "--hours", "1", "--write", str(tmp_path / "out"), "--json"]) == 0
    said = capsys.readouterr()
    assert "Simulating 1 hour of" in said.err
    result = json.loads(said.out)["result"]
    assert 1000 < result["simulated"]["requests"] < 3000
    assert result["written"] == [str(tmp_path / "out" / name) for name in ("llm-d-values.yaml", "dynamo.yaml")]
    assert run(["plan", "--fleet", file, "--hours", "0"]) == 0
    assert "large" in capsys.readouterr().out
    fleet_of(tmp_path, FLEET.replace("nodes: 20", "nodes: 1"))
    assert run(["plan", "--fleet", file, "--hours", "0"]) == 53
    assert "there is 1." in capsys.readouterr().err
    fleet_of(tmp_path, FLEET.replace("itl p99 < 100 ms", "itl p99 < 5 ms"))
    assert run(["plan", "--fleet", file, "--hours", "0"]) == 53
    assert "No shape meets" in capsys.readouterr().err
    speed = "speed: {step_ms: 20, sequence_ms: 0.5, prompt_token_ms: 0.05, request_ms: 5}"
    fleet_of(tmp_path, FLEET.replace(speed, "measured: [c1, c2]"))
    assert run(["plan", "--fleet", file, "--hours", "0"]) == 2
    assert re.search(r"c1 cannot be read.*next: .*bench", capsys.readouterr().err, re.DOTALL)
    assert run(["plan"]) == 2
    assert run(["plan", "demo", "--fleet", file]) == 2
    capsys.readouterr()
    assert run(["plan", "demo", "--hours", "3"]) == 2
    assert "--hours is for the plan of a fleet" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--gpu", "--gpu-memory", "--tp-size", "--max-seq-len"])
def test_options_of_a_model_are_refused_for_a_fleet(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--fleet", str(tmp_path / "fleet.yaml"), flag, "2"]) == 2
    assert f"leave {flag} out" in capsys.readouterr().err


def test_the_example_of_the_page_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "fleet.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    fleet_of(tmp_path, example)
    assert run(["plan", "--fleet", str(tmp_path / "fleet.yaml"), "--hours", "0"]) == 0
    assert "tp8" in capsys.readouterr().out
