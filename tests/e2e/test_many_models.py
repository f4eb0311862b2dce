"""Two imports behind one encrypted port, of which only one fits the memory budget, on real servers."""

from __future__ import annotations

import json
import os
import signal
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIStatusError, DefaultHttpxClient, OpenAI

from tests.support.certificates import certificates
from tests.support.commands import trtserve
from tests.support.peft_adapters import write_adapter
from tests.support.waiting import wait_until
from trtserve.errors import LockedError, UsageError
from trtserve.host.ports import free_ports
from trtserve.server.many import plan_many
from trtserve.specs.server import ManySpec, ServerSpec

pytestmark = [pytest.mark.triton, pytest.mark.needs("anthropic")]

QUESTION = "What is machine learning?"
KEY = "a-key-for-two-models"


def answer(client: OpenAI, model: str, tokens: int = 8) -> str:
    made = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=tokens
    )
    return str(made.choices[0].message.content)


@pytest.mark.parametrize(
    ("spec", "flag"), [(ServerSpec(grpc_port=9001), "--grpc-port"), (ServerSpec(metrics_port=9001), "--metrics-port")]
)
def test_ports_that_many_models_do_not_have_are_refused(spec: ServerSpec, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} is for the server of one model"):
        plan_many({}, spec, ManySpec())


def test_two_models_in_turn(tmp_path: Path) -> None:
    home, (port,) = tmp_path / "store", free_ports("127.0.0.1", 1)
    adapter = write_adapter(tmp_path / "parrot", modules={"self_attn.q_proj": (256, 256)}, layers=4)
    lora = ("--lora-plugin", "auto", "--lora-target-modules", "attn_q", "--lora", f"parrot={adapter}")
    for name, options in (("one", lora), ("two", ()), ("broken", ())):
        trtserve("import", "demo", "--name", name, *options, home=home)
    (broken,) = (home / "repositories").glob("broken-*")
    (broken / "tensorrt_llm" / "1" / "model.py").write_text("import nothing_of_this_name\n")
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    start = (
        "start",
        "one",
        "two",
        "broken",
        "--http-port",
        str(port),
        "--idle-unload",
        "10",
        "--memory-budget",
        "0.6",
        "--no-verify",
    )
    refused = trtserve(*start[:-2], "0.1", home=home, check=False)
    assert "one needs" in refused.stderr
    own = certificates()
    encrypted = ("--tls-certificate", str(own.server), "--tls-key", str(own.server_key))
    trtserve(*start, "--api-key-file", str(key), *encrypted, "--detach", home=home)
    url = f"https://127.0.0.1:{port}"
    trust = ssl.create_default_context(cafile=certificates().root)
    http = DefaultHttpxClient(verify=trust)
    client = OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=300, max_retries=0, http_client=http)
    try:
        _use(client, url, home, trust)
    finally:
        client.close()
        stopped = trtserve("stop", "--all", home=home)
    assert sorted(stopped.stdout.split()) == ["broken", "models"]
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(home) in " ".join(each.info["cmdline"] or ())]


def _use(client: OpenAI, url: str, home: Path, trust: ssl.SSLContext) -> None:
    import anthropic

    def states() -> dict[str, str]:
        return {each.id: each.model_extra["status"]["value"] for each in client.models.list().data if each.model_extra}

    assert states() == dict.fromkeys(("one", "parrot", "two", "broken"), "unloaded")
    with pytest.raises(APIStatusError, match="API key"):
        answer(client.with_options(api_key="another-key-of-nobody"), "one")
    with pytest.raises(APIStatusError, match="The model `three` does not exist"):
        answer(client, "three")

    # First requests for both at once, a stream among them: there is room for one, and all are answered.
    with ThreadPoolExecutor(7) as pool:
        whole = [pool.submit(answer, client, name) for name in ("one", "two") * 3]
        stream = client.completions.create(model="one", prompt=QUESTION, max_tokens=200, stream=True)
        pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
        assert len({each.result() for each in whole}) == 1, "both are the same model"
    assert pieces[-1].finish_reason in ("length", "stop")
    assert sum(states()[name] == "loaded" for name in ("one", "two")) <= 1

    (adapted,) = client.completions.create(
        model="parrot", prompt=QUESTION, max_tokens=8, temperature=0, logprobs=0
    ).choices
    (plain,) = client.completions.create(model="one", prompt=QUESTION, max_tokens=8, temperature=0, logprobs=0).choices
    assert adapted.logprobs != plain.logprobs, "an adapter is asked by its name"
    assert (states()["parrot"], states()["two"]) == ("loaded", "unloaded")

    (name,) = [name for name, state in states().items() if state == "loaded" and name != "parrot"]
    http = anthropic.DefaultHttpxClient(verify=trust)
    with anthropic.Anthropic(base_url=url, api_key=KEY, timeout=300, http_client=http) as claude:
        made = claude.messages.create(model=name, max_tokens=8, messages=[{"role": "user", "content": QUESTION}])
    assert made.content[0].type == "text"
    (server,) = [each["server"] for each in _status(home) if each["server"]["name"] == name]
    os.kill(server["supervisor"], signal.SIGKILL)
    assert answer(client, name), "a model that has ended is loaded again"
    for _ in range(2):
        with pytest.raises(APIStatusError, match="the model broken could not be loaded") as error:
            answer(client, "broken")
        assert error.value.status_code == 503

    (other,) = {"one", "two"} - {name}
    asked = trtserve("query", "--model", other, "--max-tokens", "8", QUESTION, home=home)
    assert asked.stdout.strip() == answer(client, other)
    few = ("--num-requests", "4", "--output-mean", "4", "--no-calibrate", "--quiet", "--json")
    measured = trtserve("bench", "--model", other, *few, home=home)
    assert json.loads(measured.stdout)["result"]["model"] == other
    talk = trtserve("chat", other, "--max-tokens", "8", home=home, stdin=f"{QUESTION}\n/model {name}\n{QUESTION}\n")
    assert talk.stdout.splitlines() == 2 * [asked.stdout.strip()]
    described = trtserve("query", "--model", other, "--dry-run", QUESTION, home=home)
    assert f"{url.partition('//')[2].partition('/')[0]} over http" in described.stderr
    unclear = trtserve("query", QUESTION, home=home, check=False)
    assert "this server has broken, one, two" in unclear.stderr

    wait_until(lambda: set(states().values()) == {"unloaded"}, 60)
    assert {each["server"]["name"]: each["state"] for each in _status(home)} == {"models": "ready", "broken": "failed"}
    removed = trtserve("remove", "one", home=home, check=False)
    assert (removed.returncode, "working on one" in removed.stderr) == (LockedError.code, True)
    assert answer(client, "one"), "a model that is not loaded is not removed either"


def _status(home: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trtserve("status", "--json", home=home, check=False).stdout)["result"]
    return found
