"""Metrics of a real server, and `trtserve metrics`."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from tritonclient.utils import InferenceServerException

from tests.support.model_server import ModelServer
from tests.support.openai_endpoint import openai_endpoint
from tests.support.release_client import NEWEST
from tests.support.text_requests import ENDLESS, MAX_SEQ_LEN
from tests.support.waiting import wait_until
from trtserve.cli import run
from trtserve.client.metrics import GENERAL, KV_BLOCKS, LENGTHS, REQUESTS, TOKENS, CoreMetrics, parse
from trtserve.server.status import Reading, read_metrics, remote_source

pytestmark = pytest.mark.triton

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = (MONITORING / "dashboard.json").read_text(encoding="utf-8")
ALERTS = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
PROMPT = [1, 40, 41, 42, 43]
DRAFTS = "nv_trtserve_draft_tokens_total"
INFLIGHT = "nv_trt_llm_inflight_batcher_metrics"
PROMPTS, ANSWERS = LENGTHS
BUCKETS = ("le 10", "le 50", "le 100", "le 500", "le 1000", "le +Inf")


def read(server: ModelServer) -> Reading:
    return read_metrics(remote_source(server.address.host, server.address.metrics_port))


def core(server: ModelServer) -> CoreMetrics:
    (found,) = read(server).core
    return found


def once(server: ModelServer, wanted: Callable[[CoreMetrics], bool]) -> CoreMetrics:
    """The first reading that is as `wanted`; the core model brings its metrics up to date every 100 ms."""
    deadline = time.monotonic() + 60
    while not wanted(found := core(server)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def idle(server: ModelServer) -> CoreMetrics:
    """Wait until no request is active and the counts of earlier tests have arrived; return that reading."""
    deadline, last = time.monotonic() + 60, core(server)
    while True:
        time.sleep(0.25)
        found = core(server)
        if found.value(REQUESTS, "active") == 0 and found.families == last.families:
            return found
        assert time.monotonic() < deadline, found
        last = found


def number(found: CoreMetrics, family: str, kind: str) -> float:
    value = found.value(family, kind)
    assert value is not None
    return value


def test_families_and_labels_of_the_newest_release(features: ModelServer) -> None:
    found = idle(features)
    assert {name: set(values) for name, values in found.families.items()} == {
        REQUESTS: {"active", "max", "scheduled", "context", "waiting"},
        "nv_trt_llm_runtime_memory_metrics": {"cpu", "gpu", "pinned"},
        KV_BLOCKS: {"max", "free", "used", "tokens_per", "reused", "fraction"},
        INFLIGHT: {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
        GENERAL: {"timestamp", "iteration_counter"},
        TOKENS: {"prompt", "generated"},
        DRAFTS: {"drafted", "accepted"},
        PROMPTS: {"count", "sum", *BUCKETS},
        ANSWERS: {"count", "sum", *BUCKETS},
    }
    assert found.value(REQUESTS, "max") == 8
    assert number(found, GENERAL, "timestamp") == pytest.approx(time.time(), abs=3600)
    assert number(found, KV_BLOCKS, "max") == number(found, KV_BLOCKS, "free") + number(found, KV_BLOCKS, "used")


def test_tokens_are_counted_exactly(features: ModelServer) -> None:
    before = idle(features)
    with features.stream() as stream:
        stream.all("tensorrt_llm", NEWEST.core(PROMPT, 12, streaming=True))
        stream.all("tensorrt_llm", NEWEST.core(PROMPT, 7))
    expected = number(before, TOKENS, "generated") + 19
    after = once(features, lambda found: found.value(TOKENS, "generated") == expected)
    assert number(after, TOKENS, "prompt") == number(before, TOKENS, "prompt") + 2 * len(PROMPT)
    done = idle(features)
    assert number(done, GENERAL, "iteration_counter") >= number(before, GENERAL, "iteration_counter") + 19


def test_times_of_streams_are_in_buckets(features: ModelServer) -> None:
    """As a histogram of Prometheus has them, though Triton knows them as counters."""

    def samples() -> dict[tuple[str, str], float]:
        return {
            (each.name.removeprefix("nv_trtserve_"), each.labels.get("le", "")): each.value
            for each in parse(read(features).text)
            if each.name.startswith("nv_trtserve_") and "_seconds_" in each.name
        }

    idle(features)  # times of earlier tests have arrived
    before = samples()
    with features.stream() as stream:
        stream.all("tensorrt_llm", NEWEST.core(PROMPT, 12, streaming=True, end_id=-1))
        stream.all("tensorrt_llm", NEWEST.core(PROMPT, 7))  # has no first token of its own
    inter, queue = ("inter_token_seconds_count", ""), ("queue_seconds_count", "")  # the second request adds to one only
    wait_until(lambda: samples()[inter] == before[inter] + 11 and samples()[queue] == before[queue] + 2)
    after = samples()
    grown = {key: after[key] - before[key] for key in after}
    assert grown["inter_token_seconds_bucket", "+Inf"] == 11
    assert grown["first_token_seconds_count", ""] == grown["first_token_seconds_bucket", "+Inf"] == 1
    assert 0 < grown["inter_token_seconds_sum", ""] < 10
    assert grown["queue_seconds_count", ""] == grown["queue_seconds_bucket", "+Inf"] == 2
    buckets = [value for (name, _), value in grown.items() if name == "inter_token_seconds_bucket"]
    assert len(buckets) == 15
    assert max(buckets) == 11


def test_draft_tokens_are_counted(features: ModelServer) -> None:
    before = idle(features)
    draft = {"draft_input_ids": np.array([[5, 6, 7]], dtype=np.int32)}
    with features.stream() as stream:
        stream.all("tensorrt_llm", {**NEWEST.core(PROMPT, 4), **draft})
    expected = number(before, DRAFTS, "drafted") + 3
    after = once(features, lambda found: found.value(DRAFTS, "drafted") == expected)
    assert 0 <= number(after, DRAFTS, "accepted") - number(before, DRAFTS, "accepted") <= 3


def test_lengths_of_ended_requests_fall_into_the_buckets_of_the_backend(features: ModelServer) -> None:
    before = idle(features)
    lengths = {7: 4, 60: 12, 5: 140}  # prompt → answer
    with features.stream() as stream:
        for prompt, answer in lengths.items():
            stream.all("tensorrt_llm", NEWEST.core([1, *range(40, 39 + prompt)], answer))
    expected = number(before, ANSWERS, "count") + 3
    after = once(features, lambda found: found.value(ANSWERS, "count") == expected)

    def grown(family: str) -> list[float]:
        return [number(after, family, kind) - number(before, family, kind) for kind in ("sum", *BUCKETS)]

    assert grown(PROMPTS) == [72, 2, 2, 3, 3, 3, 3]
    assert grown(ANSWERS) == [156, 1, 2, 2, 3, 3, 3]
    labels = {
        sample.labels.get("response_metric_type") for sample in parse(read(features).text) if "_len" in sample.name
    }
    assert labels == {"total_input_tokens", "total_output_tokens"}


def test_gauges_are_live_and_return_to_rest(features: ModelServer) -> None:
    rest = idle(features)
    with features.stream() as stream, features.stream() as stopper:
        for identifier in ("first", "second"):
            stream.send("tensorrt_llm", NEWEST.core(PROMPT, ENDLESS, streaming=True, end_id=-1), identifier)
        busy = once(features, lambda found: found.value(INFLIGHT, "generation_requests") == 2)
        for identifier in ("first", "second"):
            stopper.all("tensorrt_llm", NEWEST.stop(), identifier)
        open_requests = 2
        while open_requests:
            open_requests -= stream.next()[1]
    assert busy.value(REQUESTS, "active") == 2
    assert number(busy, KV_BLOCKS, "used") > number(rest, KV_BLOCKS, "used")
    assert number(busy, KV_BLOCKS, "fraction") == number(busy, KV_BLOCKS, "used") / number(busy, KV_BLOCKS, "max")
    done = idle(features)
    assert number(done, KV_BLOCKS, "used") == number(rest, KV_BLOCKS, "used")


def test_the_prompt_of_a_refused_request_does_not_count(features: ModelServer) -> None:
    before = number(idle(features), TOKENS, "prompt")
    with features.stream() as stream, pytest.raises(InferenceServerException):
        stream.all("tensorrt_llm", NEWEST.core([5] * MAX_SEQ_LEN, 3, streaming=True))
    with features.stream() as stream:
        stream.all("tensorrt_llm", NEWEST.core(PROMPT, 3, streaming=True))
    once(features, lambda found: found.value(TOKENS, "prompt") == before + len(PROMPT))


def test_requests_of_triton_are_counted_for_each_model(features: ModelServer) -> None:
    def counted() -> dict[str, float]:
        return {each.model: each.values["request_success"] for each in read(features).models}

    before = counted()
    with features.stream() as stream:
        stream.all("ensemble", NEWEST.text("Metrics", 3))
    wanted = {"ensemble", "preprocessing", "postprocessing", "tensorrt_llm"}
    wait_until(lambda: wanted <= {model for model, count in counted().items() if count > before[model]})


def test_the_command_on_a_real_page(features: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{features.address.host}:{features.address.metrics_port}"
    assert run(["metrics", "--url", url]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {cells[1] for cells in lines if cells[0] == "tensorrt_llm"} > {REQUESTS, KV_BLOCKS, TOKENS}
    idle(features)
    assert run(["metrics", "--url", url, "--watch", "--count", "2", "--interval", "0.2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    first, second = captured.out.splitlines()
    assert first.endswith("- tokens/s\t- prompt tokens/s\t- iterations/s")
    assert second.endswith("0.0 tokens/s\t0.0 prompt tokens/s\t0.0 iterations/s")


def test_times_of_generate_stream_are_on_the_page_of_the_gateway(features: ModelServer, features_root: Path) -> None:
    with openai_endpoint(features, repository=features_root / "repository") as url:
        base = url.removesuffix("/v1")

        def ask(path: str, body: object = None) -> str:
            content = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{base}{path}", content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        asked = {"text_input": "Hi", "max_tokens": 6, "stream": True, "bad_words": "", "stop_words": "", "end_id": -1}
        pieces = len(re.findall("^data:", ask("/v2/models/tensorrt_llm_bls/generate_stream", asked), re.MULTILINE))
        ask("/v2/models/tensorrt_llm_bls/generate", {**asked, "stream": False})
        page = ask("/metrics").splitlines()
    assert pieces >= 2  # parts of characters wait
    labels = 'adapter="",model_name="tensorrt_llm_bls"'
    assert f"trtserve_generate_time_to_first_token_seconds_count{{{labels}}} 1.0" in page
    assert f"trtserve_generate_inter_token_seconds_count{{{labels}}} {pieces - 1}.0" in page


def test_dashboard_and_alerts_ask_for_metrics_that_exist(features: ModelServer, features_root: Path) -> None:
    with openai_endpoint(features, repository=features_root / "repository") as url:
        asked = {"model": "tiny", "prompt": "Hi", "max_tokens": 6, "stream": True}
        headers = {"Content-Type": "application/json"}
        stream = urllib.request.Request(f"{url}/completions", json.dumps(asked).encode(), headers)
        urllib.request.urlopen(stream, timeout=60).read()
        page = urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60).read().decode()
    samples = parse(page, ("nv_", "trtserve_"))
    labelled = {(sample.name, *pair) for sample in samples for pair in sample.labels.items()}
    names = {sample.name for sample in samples} | {"up"}  # Prometheus' own
    queries = [
        *(target["expr"] for panel in json.loads(DASHBOARD)["panels"] for target in panel["targets"]),
        *(rule["expr"] for rule in yaml.safe_load(ALERTS)["groups"][0]["rules"]),
    ]
    for query in queries:
        found = re.findall(r"\b((?:nv|trtserve)_\w+|up)\b(?:\{([^}]*)\})?", query)
        assert found, query
        for name, matchers in found:
            if name.startswith("nv_gpu_"):
                continue  # exists on machines with GPUs
            assert name in names, query
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                for value in values.split("|") if label not in ("instance", "job") else ():
                    assert (name, label, value) in labelled, query
