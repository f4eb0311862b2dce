"""How requests end: with one data response and an empty final one, by a stop, or because the client has gone."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import RunningGateway, running_gateway
from tests.support.model_server import ModelServer, Tensors, flags, integers
from tests.support.release_client import NEWEST, long_integers
from tests.support.servers import running_server
from tests.support.text_requests import ENDLESS, is_idle
from tests.support.waiting import wait_until
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.server.state import log_file
from trtserve.server.triton.tritonserver import kv_blocks
from trtserve.store import Store

pytestmark = pytest.mark.triton

PROMPT = [1, 30, 31]
DIRECT = ("tensorrt_llm", "tensorrt_llm_bls", "tiny")


def asked(model: str, count: int, *, streaming: bool, **given: Any) -> Tensors:
    """A request to any of the models."""
    if model == "tensorrt_llm":
        return NEWEST.core(PROMPT, count, streaming=streaming, **given)
    return NEWEST.text("Ending", count, streaming=streaming, **given)


def responses(server: ModelServer, model: str, tensors: Tensors, request_id: str = "") -> list[tuple[bool, bool]]:
    """(has data, is final) of each response."""
    found: list[tuple[bool, bool]] = []
    with server.stream() as stream:
        stream.send(model, tensors, request_id)
        while not found or not found[-1][1]:
            outputs, final, answered = stream.next()
            assert answered == request_id
            found.append((bool(outputs), final))
    return found


@pytest.mark.parametrize("model", DIRECT)
def test_one_data_response_and_an_empty_final_one(features: ModelServer, model: str) -> None:
    tensors = asked(model, 5, streaming=False)
    assert responses(features, model, tensors, "an id") == [(True, False), (False, True)]


def test_the_ensemble_answers_once(features: ModelServer) -> None:
    """Triton joins the last two responses when the core model ends before the text is ready."""
    found = responses(features, "ensemble", asked("ensemble", 5, streaming=False), "an id")
    assert found in ([(True, True)], [(True, False), (False, True)])


@pytest.mark.parametrize("model", DIRECT)
def test_a_stream_ends_with_an_empty_response(features: ModelServer, model: str) -> None:
    found = responses(features, model, asked(model, 5, streaming=True))
    assert found[-1] == (False, True)
    assert found[:-1] == [(True, False)] * (len(found) - 1)
    # What waits for the BLS model comes to it together.
    assert len(found) > (4 if model == "tensorrt_llm" else 1)


def test_every_row_answers_once(features: ModelServer) -> None:
    tensors = NEWEST.text(["a", "bb", "ccc"], 3)
    for model in ("ensemble", "tiny"):
        assert sum(data for data, _ in responses(features, model, tensors)) == 3


def endless(model: str, **given: Any) -> Tensors:
    return {**asked(model, ENDLESS, streaming=True, **given), "end_id": integers(-1)}


@contextmanager
def ended_before(tokens: int, server: ModelServer) -> Iterator[None]:
    """Check that the engine becomes idle after the block, with fewer tokens than requested, or none."""
    wait_until(lambda: is_idle(server))
    before = server.metric("nv_llm_output_token_len_sum")
    requests = server.metric("nv_llm_output_token_len_count")
    yield
    wait_until(lambda: server.metric("nv_llm_output_token_len_count") > requests)
    wait_until(lambda: is_idle(server))
    assert server.metric("nv_llm_output_token_len_sum") - before < tokens


KINDS: dict[str, Tensors] = {
    "plain": {},
    "beams": {"beam_width": integers(3)},
    "several sequences": {"num_return_sequences": integers(3), "seed": long_integers(1)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tiny"])
def test_a_stop_ends_what_is_under_way(features: ModelServer, model: str, kind: str) -> None:
    tensors = {**endless(model), **KINDS[kind]}
    with features.stream() as stream, features.stream() as stopper:
        stream.send(model, tensors, "under way")
        assert not stream.next()[1]
        assert stopper.all("tensorrt_llm", NEWEST.stop(), "under way") == []
        answers = 0
        while not stream.next()[1]:
            answers += 1
    assert answers < ENDLESS * (3 if kind == "several sequences" else 1)
    wait_until(lambda: is_idle(features))


def test_a_stop_reaches_every_request_of_its_id(features: ModelServer) -> None:
    tensors = {**endless("tensorrt_llm"), "num_return_sequences": integers(4), "seed": long_integers(1)}
    ended = ended_before(2 * 4 * ENDLESS, features)
    with features.stream() as first, features.stream() as second, features.stream() as stopper, ended:
        for stream in (first, second):
            stream.send("tensorrt_llm", tensors, "twice")
            assert not stream.next()[1]
        assert stopper.all("tensorrt_llm", NEWEST.stop(), "twice") == []
        for stream in (first, second):
            while not stream.next()[1]:
                pass


def test_a_stopped_request_says_so(features: ModelServer) -> None:
    with features.stream() as stream, features.stream() as stopper:
        # One sequence alone may be at its end before the stop comes through on a busy machine.
        tensors = {**endless("tensorrt_llm"), "num_return_sequences": integers(8), "seed": long_integers(1)}
        stream.send("tensorrt_llm", {**tensors, "return_finish_reason": flags(True)}, "told")
        assert not stream.next()[1]
        stopper.all("tensorrt_llm", NEWEST.stop(), "told")
        reasons: list[Any] = []
        final = False
        while not final:
            outputs, final, _ = stream.next()
            reasons += outputs["finish_reason"].reshape(-1).tolist() if "finish_reason" in outputs else []
    assert reasons == [b"cancelled"] * 8


def test_a_stop_of_nothing_is_answered(features: ModelServer) -> None:
    assert responses(features, "tensorrt_llm", NEWEST.stop(), "nobody has this id") == [(False, True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["tensorrt_llm", "tiny"])
def test_a_disconnected_client_frees_its_blocks(features: ModelServer, model: str, kind: str) -> None:
    with ended_before(ENDLESS * (1 if kind == "plain" else 3), features), features.stream() as stream:
        stream.send(model, {**endless(model), **KINDS[kind]})
        assert not stream.next()[1]


def makes_no_step(server: ModelServer) -> bool:
    """Return whether the engine makes no step for a while; its counters are published ten times per second."""
    before = server.metric("nv_trt_llm_general_metrics", "iteration_counter")
    time.sleep(0.5)
    return server.metric("nv_trt_llm_general_metrics", "iteration_counter") == before


def test_nothing_is_computed_after_the_end(features: ModelServer) -> None:
    """Once a stopped request has had its final response, the engine makes no step for it."""
    with features.stream() as stream, features.stream() as stopper:
        stream.send("tensorrt_llm", endless("tensorrt_llm"), "at once")
        assert not stream.next()[1]
        stopper.all("tensorrt_llm", NEWEST.stop(), "at once")
        while not stream.next()[1]:
            pass
    wait_until(lambda: is_idle(features))
    wait_until(lambda: makes_no_step(features), 5)  # the request itself would run for ten seconds


@pytest.mark.parametrize("model", DIRECT)
def test_an_http_client_that_leaves_ends_its_request(features: ModelServer, model: str) -> None:
    body: dict[str, Any] = {"text_input": "Ending", "max_tokens": ENDLESS, "stream": True}
    if model == "tensorrt_llm":
        body = {"input_ids": PROMPT, "input_lengths": 3, "request_output_len": ENDLESS, "streaming": True}
    body |= {"end_id": -1, "num_return_sequences": 8}
    with ended_before(8 * ENDLESS, features), closing(features.connection(30)) as connection:
        connection.request("POST", f"/v2/models/{model}/generate_stream", body=json.dumps(body | {"seed": 1}))
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        answer.close()


@contextmanager
def run_to_its_end(tokens: int, server: ModelServer) -> Iterator[None]:
    """Check that the request of the block generates all of its tokens although no client waits for them."""
    before = server.metric("nv_llm_output_token_len_sum")
    requests = server.metric("nv_llm_output_token_len_count")
    yield
    wait_until(lambda: server.metric("nv_llm_output_token_len_count") > requests)
    assert server.metric("nv_llm_output_token_len_sum") - before == tokens


def test_an_http_client_that_leaves_the_ensemble_is_not_noticed(features: ModelServer) -> None:
    """Triton looks at the connection of a directly called decoupled model only: the request runs to its end."""
    body = {"text_input": "Ending", "max_tokens": 300, "stream": True, "end_id": -1}
    with run_to_its_end(300, features), closing(features.connection(30)) as connection:
        connection.request("POST", "/v2/models/ensemble/generate_stream", body=json.dumps(body))
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        answer.close()


def test_a_cancelled_call_of_the_ensemble_is_not_noticed(features: ModelServer) -> None:
    """Triton does not pass the cancellation on to the models of an ensemble."""
    with run_to_its_end(300, features), features.stream() as stream:
        stream.send("ensemble", {**asked("ensemble", 300, streaming=True), "end_id": integers(-1)})
        assert not stream.next()[1]


@pytest.mark.parametrize("model", ["tensorrt_llm", "tiny"])
def test_query_stops_by_cancelling_its_call(features: ModelServer, features_root: Path, model: str) -> None:
    address, repository = features.address, features_root / "repository"
    endpoint = Endpoint(http_port=address.http_port, grpc_port=address.grpc_port, model="tiny", repository=repository)
    options = {"max_tokens": ENDLESS, "end_id": -1, "num_return_sequences": 8, "seed": 1}
    # Time for the request to reach the engine: one that is cancelled before is not counted.
    stop: dict[str, Any] = {"stop_after_ms": 500, "stop_via_cancel": True, "protocol": "grpc"}
    spec = QuerySpec(prompts=("Ending",), model=model, stream=True, options=options, **stop)
    with ended_before(8 * ENDLESS, features):
        assert generate(spec, endpoint).stopped


def test_many_short_requests(features: ModelServer) -> None:
    """Cancellation is checked while requests end; Triton 2.51 dies when the check meets a finished request."""
    models = ("ensemble", *DIRECT[1:])

    def ask(number: int) -> int:
        return features.generate(models[number % 3], {"text_input": f"{number}", "max_tokens": 1 + number % 5})[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(400))) == {200}


def test_triton_keeps_no_ensemble_whose_client_has_left(
    features: ModelServer, features_root: Path, tmp_path: Path
) -> None:
    """If the gateway closed its connection, Triton 2.51 would keep the request, and wait for it in vain at its end."""
    with running_server(
        features_root / "repository", home=tmp_path, name="left", gateway=True, gracefully=True
    ) as server:

        def leave(number: int) -> None:
            verb = ("generate", "generate_stream")[number % 2]
            body = {"text_input": f"{number}", "max_tokens": ENDLESS, "end_id": -1, "stream": verb != "generate"}
            address = server.address
            with closing(http.client.HTTPConnection(address.host, address.http_port, timeout=30)) as connection:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", f"/v2/models/ensemble/{verb}", json.dumps(body), headers)
                time.sleep(number % 20 / 50)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(leave, range(30)))
        wait_until(lambda: kv_blocks(server.address)["used"] == 0)
        time.sleep(1.0)  # the gateway reads the last answers to their ends; on a busy machine while Triton ends
    log = log_file("left", Store(tmp_path)).read_text(encoding="utf-8", errors="replace")
    assert "Waiting for in-flight requests to complete." in log
    in_flight = re.findall(r"Found (\d+) model versions that have in-flight inferences", log)
    assert in_flight[-1] == "0"


@pytest.fixture(scope="module")
def gateway(features: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder, port = tmp_path_factory.mktemp("gateway"), features.address.http_port
    with running_gateway(folder, port, model="tiny", core_models=("tensorrt_llm",)) as gateway:
        yield gateway


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", ["ensemble", "tiny"])
def test_a_client_of_the_gateway_that_leaves_ends_its_request(
    features: ModelServer, gateway: RunningGateway, model: str, verb: str
) -> None:
    """Triton itself would let the ensemble run to its end."""
    body = {"text_input": "Ending", "max_tokens": ENDLESS, "end_id": -1, "stream": verb == "generate_stream"}
    # Eight sequences: on a busy machine the gateway comes to run more rarely than the engine.
    with ended_before(8 * ENDLESS, features), gateway.connected() as connection:
        text = json.dumps({**body, "num_return_sequences": 8})
        connection.request("POST", f"/v2/models/{model}/{verb}", text, {"Content-Type": "application/json"})
        wait_until(lambda: not is_idle(features))
