"""Setup files: what they may say, how they are refused, and that the schema says the same."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.full_disk import full_disk
from tests.support.server_records import server_record
from tests.support.setup_schema import validate_setup
from trtserve.artifacts import Engine
from trtserve.cli import run
from trtserve.errors import DiskSpaceError, LockedError, ServerRunningError, UsageError
from trtserve.files import locked, write_whole
from trtserve.host.ports import listening_socket
from trtserve.pipeline.setup_file import Setup
from trtserve.pipeline.setup_file import plan as setup_plan
from trtserve.pipeline.setup_file.plan import bring_down, bring_up, plan_setup
from trtserve.pipeline.setup_file.reading import read_setup, template
from trtserve.process import ProcessId
from trtserve.server.detach import start_arguments
from trtserve.server.state import Server, forget, start_lock, write_state
from trtserve.store import Store

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "setups").glob("*.yaml"))
MODEL = "models:\n  demo:\n    source: demo\n"


def setup_of(tmp_path: Path, text: str) -> Setup:
    file = tmp_path / "setup.yaml"
    file.write_text(text, encoding="utf-8")
    return read_setup(file)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    setup = read_setup(path)
    assert setup.models
    assert setup.servers
    validate_setup(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_template_is_valid_with_every_commented_key_but_the_draft(tmp_path: Path) -> None:
    lines = [line for line in template().splitlines() if "# draft:" not in line]
    plain = [line.replace("# ", "", 1) if line.startswith("    # ") else line for line in lines]
    text = "\n".join(line for line in plain if "auto_ports" not in line)
    setup = setup_of(tmp_path, text)
    assert (setup.models[0].convert.quantize, setup.models[0].convert.tp_size) == ("int8", 2)
    assert setup.servers[0].spec.restart == "on-failure"
    validate_setup(yaml.safe_load(text))
    benchmarks = template().partition("# benchmarks:")[2].replace("\n#", "\n")
    assert setup_of(tmp_path, f"{text[: text.index('# benchmarks')]}benchmarks:{benchmarks}").benchmarks
    assert max(map(len, template().splitlines())) < 80, "a terminal shows it without wrapped lines"


def test_values_become_specs(tmp_path: Path) -> None:
    setup = setup_of(
        tmp_path,
        MODEL
        + "    max_batch_size: 4\n    container: 25.10\n    settings: {max_queue_delay: 5}\n    streaming: false\n"
        "    lora: {poet: ./poet, named: stored}\n"
        "servers:\n  front:\n    model: demo\n    gpus: [1, 0]\n    tls_key: key.pem\n    tls_certificate: c.pem\n",
    )
    (model,), (server,) = setup.models, setup.servers
    assert (model.build.max_batch_size, model.repository.streaming, model.repository.name) == (4, False, "demo")
    assert model.convert.container == model.build.container == "25.10"  # as it is written, not the number 25.1
    assert model.repository.settings == {"max_queue_delay": "5"}
    assert model.repository.lora == {"poet": tmp_path / "poet", "named": Path("stored")}
    assert (server.name, server.spec.gpus, server.spec.tls_key) == ("front", (1, 0), tmp_path / "key.pem")


SERVED = MODEL + "servers:\n  front:\n    model: demo\n"


def test_benchmarks_have_traffic_and_limits(tmp_path: Path) -> None:
    setup = setup_of(
        tmp_path,
        SERVED + "benchmarks:\n  drawn:\n    server: front\n    traffic: prefix\n    prefix_len: 64\n    strict: true\n"
        "    slo: {ttft: 200ms}\n    limits: {ttft_p99: 2s, tokens_per_second: 50}\n"
        "  asked: {server: front, dataset: questions.json, num_requests: 5, out: results}\n",
    )
    drawn, asked = setup.benchmarks
    assert (drawn.spec.traffic, drawn.spec.prefix_len, drawn.strict) == ("prefix", 64, True)
    assert drawn.spec.slo == {"ttft": "200ms"}
    assert drawn.requirements == {"ttft_p99": 2000.0, "tokens_per_second": 50.0}
    assert (asked.spec.traffic, asked.spec.dataset) == ("dataset", tmp_path / "questions.json")
    # As `bench dataset` does: an end token ends an answer.
    assert (asked.spec.num_requests, asked.spec.ignore_eos, asked.out) == (5, False, tmp_path / "results")
    validate_setup(yaml.safe_load((tmp_path / "setup.yaml").read_text(encoding="utf-8")))


def test_draft_models_come_first(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, MODEL + "    draft: small\n  small:\n    source: gpt2\n")
    assert [model.name for model in setup.models] == ["small", "demo"]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (MODEL + "    quantise: int8\n", ":4: models.demo has no key 'quantise'.", "Did you mean quantize?"),
        (MODEL + "    max-batch-size: 4\n", ":4: models.demo has no key", "Did you mean max_batch_size?"),
        (MODEL + "    max_batch_size: 0\n", ":4: models.demo.max_batch_size is 0; it must be at least 1", None),
        (MODEL + "    max_batch_size: many\n", ":4: models.demo.max_batch_size is 'many'; expected an integer", None),
        (MODEL + "    dtype: float61\n", ":4: models.demo.dtype is 'float61'; expected one of", None),
        (MODEL + "    dtype:\n", ":4: models.demo.dtype has no value", None),
        (MODEL + "    dtype: [float16]\n", ":4: models.demo.dtype must be one word", None),
        (MODEL + "    builder_flags: --x\n", ":4: models.demo.builder_flags must be a list", None),
        (MODEL + "    source: gpt2\n", ":4: models.demo has 'source' twice", None),
        (MODEL + "    draft: dmeo\n", ":4: models.demo.draft is 'dmeo', which is no model", "Did you mean demo?"),
        (MODEL + "    draft: demo\n", ":4: models.demo drafts for itself", None),
        (MODEL + "    name: other\n", ":4: models.demo has no key 'name'", None),
        ("models:\n  demo:\n    dtype: float16\n", ":3: models.demo has no source", "demo, an alias"),
        ("models: demo\n", ":1: models must be a mapping", None),
        ("model:\n  demo: {}\n", ":1: the file has no key 'model'", "Did you mean models?"),
        ("models:\n  a b:\n    source: demo\n", ":2: 'a b' is not a valid name", "letters"),
        ("servers: {}\n", ":1: models is missing", None),
        (MODEL + "  x: [\n", ":4: not YAML", None),
        ('{"models": 1\n', ":1: not YAML", None),
        ("# nothing\n", "is empty", "trtserve init"),
        ("# nothing\n" * 110_000, "is larger than 1 MiB", None),
        ("&a [*a, *a]\n", ":1: the file must be a mapping", None),
        (f"models: {'[' * 20_000}", "nested too deeply", None),
        (MODEL + "servers:\n  a: {}\n", ":5: servers.a has no model", "demo"),
        (MODEL + "servers:\n  a: {model: dem}\n", ":5: servers.a.model is 'dem'", "Did you mean demo?"),
        (
            MODEL + "servers:\n  a: {model: demo}\n  b: {model: demo}\n",
            ":6: servers.b and servers.a both",
            "auto_ports",
        ),
        (MODEL + "benchmarks:\n  b: {}\n", ":5: benchmarks.b has no server", "Describe one under `servers:` first"),
        (SERVED + "benchmarks:\n  b: {}\n", ":8: benchmarks.b has no server", "front"),
        (SERVED + "benchmarks:\n  b: {server: frnt}\n", ":8: benchmarks.b.server is 'frnt'", "Did you mean front?"),
        (SERVED + "benchmarks:\n  b: {server: front, openai: x}\n", ":8: benchmarks.b has no key 'openai'", None),
        (SERVED + "benchmarks:\n  b: {server: front, traffic: e2e}\n", ":8: benchmarks.b.traffic is 'e2e'", None),
        (
            SERVED + "benchmarks:\n  b: {server: front, trace: x, dataset: y}\n",
            ":8: benchmarks.b has dataset and",
            None,
        ),
        (
            SERVED + "benchmarks:\n  b:\n    server: front\n    limits: {ttft_p9: 1s}\n",
            ":10: benchmarks.b.limits: ttft_p9 is not a limit",
            "ttft_p99",
        ),
        (
            SERVED + "benchmarks:\n  b:\n    server: front\n    limits: {ttft_p99: soon}\n",
            ":10: benchmarks.b.limits: ttft_p99 is 'soon'; expected a time",
            None,
        ),
        (
            SERVED + "benchmarks:\n  b:\n    server: front\n    limits: {tokens_per_second: -1}\n",
            ":10: benchmarks.b.limits: tokens_per_second is '-1'; expected a number above 0",
            None,
        ),
        (
            MODEL + "servers:\n  a: {model: demo, api_key: secret}\n",
            ":5: servers.a has no key 'api_key'",
            "api_key_file",
        ),
    ],
)
def test_mistakes_are_refused_with_their_line(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        setup_of(tmp_path, text)
    assert message in refused.value.message
    assert refused.value.message.startswith(str(tmp_path / "setup.yaml"))
    assert hint is None or hint in str(refused.value.hint)


@pytest.mark.parametrize(
    "content", [{"models": {"a": {}}}, {"models": {"a": {"source": "demo", "tp_size": 0}}}, {"x": 1}]
)
def test_schema_refuses_too(content: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate_setup(content)


def test_init_leaves_nothing_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk(room=1):
        code = run(["init", str(tmp_path / "new.yaml")])
    assert code == DiskSpaceError.code
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_next_command_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "my models.yaml"]) == 0
    assert capsys.readouterr().err == "Next: trtserve up 'my models.yaml'\n"


def test_a_file_that_cannot_be_replaced_on_a_full_disk_stays(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text("old", encoding="utf-8")
    with full_disk(room=1), pytest.raises(DiskSpaceError):
        write_whole(file, "new")
    assert (list(tmp_path.iterdir()), file.read_bytes()) == ([file], b"old")


def test_init_keeps_an_existing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert run(["init", str(file)]) == 0
    assert read_setup(file).models[0].source == "demo"
    file.write_text("kept", encoding="utf-8")
    assert run(["init", str(file)]) == 2
    assert file.read_text(encoding="utf-8") == "kept"
    assert "exists already" in capsys.readouterr().err


def test_missing_file_says_how_to_write_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", str(tmp_path / "none.yaml")]) == 2
    assert "trtserve init" in capsys.readouterr().err


def test_a_change_rebuilds_only_the_stages_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "setup.yaml"
    file.write_text(MODEL + "    runtime: openvino\n    max_batch_size: 4\n", encoding="utf-8")
    bring_up(plan_setup(read_setup(file), store=Store()))
    assert run(["diff", str(file)]) == 0
    assert capsys.readouterr().out == ""
    file.write_text(MODEL + "    runtime: openvino\n    max_batch_size: 2\n", encoding="utf-8")
    assert run(["diff", str(file), "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["result"]["models"]
    actions = {stage["stage"]: stage["action"] for stage in model["stages"]}
    assert actions == {"model": "reuse", "convert": "reuse", "build": "make", "repo": "make"}
    assert model["differences"] == ["max_batch_size: 4 → 2"]
    more = "    max_seq_len: 64\n    gather_context_logits: true\n"
    file.write_text(MODEL + "    runtime: openvino\n    max_batch_size: 4\n" + more, encoding="utf-8")
    assert run(["diff", str(file), "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["result"]["models"]
    assert sorted(model["differences"]) == ["gather_context_logits: false → true", "max_seq_len: not set → 64"]


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    file = tmp_path / "setup.yaml"
    file.write_text(
        MODEL + "    runtime: openvino\n  second:\n    source: demo\n    runtime: openvino\n", encoding="utf-8"
    )

    class Interrupting:
        """Progress that is interrupted when the second model begins."""

        def step(self, text: str) -> None:
            if text == "Model second":
                raise KeyboardInterrupt

        def warn(self, text: str) -> None: ...

        def task(self, text: str, **options: Any) -> Any:
            from trtserve.progress import SILENT

            return SILENT.task(text, **options)

    with pytest.raises(KeyboardInterrupt):
        bring_up(plan_setup(read_setup(file)), progress=Interrupting())
    first, second = plan_setup(read_setup(file)).models
    assert first.repository is not None
    assert second.repository is None
    bring_up(plan_setup(read_setup(file)))
    assert all(model.repository is not None for model in plan_setup(read_setup(file)).models)


class KilledUp:
    """What an `up` leaves behind that was killed: a supervisor that checks, records its server, and starts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.done = Store(), list[str]()
        self._ended, begun = threading.Event(), threading.Event()
        monkeypatch.setattr(setup_plan, "stop_server", self._stop)
        monkeypatch.setattr(setup_plan, "start_in_background", self._start)
        self._thread = threading.Thread(target=self._supervise, args=(begun,))
        self._thread.start()
        assert begun.wait(60)

    def _supervise(self, begun: threading.Event) -> None:
        with locked(start_lock("front", self.store), wait=False):
            begun.set()
            time.sleep(0.3)  # it looks at files and machine
            write_state(server_record("front", state="starting"), self.store)
            assert self._ended.wait(60)

    def _stop(self, name: str, **_: object) -> Server:
        server = server_record(name)
        self.done.append("stop")
        forget(server_record(name, state="starting"), self.store)
        self._ended.set()
        self._thread.join()
        return server

    def _start(self, *_: object, **__: object) -> Server:
        with locked(start_lock("front", self.store), wait=False):
            self.done.append("start")
            return server_record("front")


FRONT = MODEL + "    runtime: openvino\nservers:\n  front: {model: demo, auto_ports: true}\n"


def test_up_stops_what_a_killed_up_began_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(tmp_path, FRONT)
    killed = KilledUp(monkeypatch)
    bring_up(plan_setup(setup))
    assert killed.done == ["stop", "start"]


def test_down_stops_what_a_killed_up_began_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(tmp_path, FRONT)
    killed = KilledUp(monkeypatch)
    assert [server.name for server in bring_down(setup)] == ["front"]
    assert killed.done == ["stop"]


def test_down_removes_the_unfinished_engine_of_a_killed_up(tmp_path: Path) -> None:
    engines = Store().folder(Engine)
    left = [engines / ".demo-123.partial", engines / ".demo-123.lock"]
    left[0].mkdir(parents=True)
    left[1].touch()
    assert bring_down(setup_of(tmp_path, FRONT)) == []
    assert not [path for path in left if path.exists()]


def test_up_looks_again_when_its_start_meets_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor of a killed `up` may still be starting its interpreter when the next `up` looks."""
    starts = iter((LockedError("Another process starts it."), ServerRunningError("It runs."), server_record("front")))

    def start(*_: object, **__: object) -> Server:
        if isinstance(outcome := next(starts), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(setup_plan, "start_in_background", start)
    assert [server.name for server in bring_up(plan_setup(setup_of(tmp_path, FRONT))).servers] == ["front"]


def test_two_ups_at_once_do_not_stop_what_the_other_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done = threading.Event(), list[str]()

    def start(*_: object, **__: object) -> Server:
        write_state(server_record("front", state="starting"), Store())
        begun.set()
        time.sleep(0.3)  # its models load
        forget(server_record("front", state="starting"), Store())
        done.append("started")
        return server_record("front")

    def stop(*_: object, **__: object) -> None:
        done.append("stopped")

    monkeypatch.setattr(setup_plan, "start_in_background", start)
    monkeypatch.setattr(setup_plan, "stop_server", stop)
    plan = plan_setup(setup_of(tmp_path, FRONT))
    first = threading.Thread(target=bring_up, args=(plan,))
    first.start()
    assert begun.wait(60)
    bring_up(plan)
    first.join()
    assert done == ["started", "started"]


def test_up_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(setup_plan, "start_in_background", lambda *_, **__: server_record("front"))
    file = tmp_path / "setup.yaml"
    for ui in ("false", "true"):
        file.write_text(FRONT.replace("true}", f"true, ui: {ui}}}"), encoding="utf-8")
        assert run(["up", str(file)]) == 0
        assert ("Page: http://127.0.0.1:1/" in capsys.readouterr().err) == (ui == "true")


def test_the_plan_names_what_a_restart_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "setup.yaml"
    file.write_text(MODEL + "    runtime: openvino\n", encoding="utf-8")
    bring_up(plan_setup(read_setup(file)))
    file.write_text(file.read_text() + "servers:\n  front: {model: demo, http_port: 9000}\n", encoding="utf-8")
    write_state(server_record("front", supervisor=ProcessId.of(os.getpid())), Store())
    words = [
        "-m",
        "trtserve",
        "start",
        "demo",
        "--model-repository=/old",
        "--no-rebuild",
        "--ui",
        "--http-port",
        "18200",
    ]
    monkeypatch.setattr(setup_plan, "arguments", lambda _: [*words, "--name", "front"])
    assert run(["up", str(file), "--dry-run"]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("server front: restart"))
    assert "--ui is dropped, --http-port 18200 → 9000)" in said
    assert "--model-repository /old → " in said
    assert "--name" not in said


def test_moved_ports_and_servers_that_the_file_does_not_name_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "setup.yaml"
    file.write_text(MODEL + "    runtime: openvino\n", encoding="utf-8")
    bring_up(plan_setup(read_setup(file)))
    repository = plan_setup(read_setup(file)).models[0].repository
    assert repository is not None
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        file.write_text(file.read_text() + FRONT.partition("openvino\n")[2].replace("true", f"true, http_port: {port}"))
        assert run(["diff", str(file)]) == 0
        assert f"server front: start (http_port {port} → " in capsys.readouterr().out

        running = server_record("front", supervisor=ProcessId.of(os.getpid()))  # on ports 1, 2 and 3
        write_state(running, Store())
        write_state(server_record("old"), Store())
        spec = replace(read_setup(file).servers[0].spec, http_port=1, grpc_port=2, metrics_port=3)
        words = ["-m", "trtserve", *start_arguments(repository, spec)]
        monkeypatch.setattr(setup_plan, "arguments", lambda _: words)
        for command in (["diff", str(file)], ["up", str(file), "--dry-run"]):
            assert run(command) == 0
            said = " ".join(capsys.readouterr().err.split())
            assert f"Server front keeps its ports, as auto_ports allows: http_port {port} → 1" in said
            assert "Server old runs, and the file does not name it. To stop it: trtserve stop old" in said
        words.append("--ui")
        assert run(["diff", str(file)]) == 0
        out = capsys.readouterr().out
        assert "--ui is dropped" in out
        assert f"http_port {port} → 1" in out, "another program has the port of the file"
    assert run(["diff", str(file)]) == 0
    assert f"--http-port 1 → {port}" in capsys.readouterr().out, "it is free again"


def test_a_draft_model_is_built_first_and_served_with_its_target(tmp_path: Path) -> None:
    file = tmp_path / "setup.yaml"
    small = "  small:\n    source: demo\n    runtime: openvino\n"
    file.write_text(MODEL + "    runtime: openvino\n    max_draft_len: 3\n    draft: small\n" + small, encoding="utf-8")
    plan = plan_setup(read_setup(file))
    assert [(model.setup.name, model.waits_for_draft) for model in plan.models] == [("small", False), ("demo", True)]
    bring_up(plan)
    again = plan_setup(read_setup(file)).models
    assert [model.repository is not None for model in again] == [True, True]
    assert again[1].plan.spec.draft is not None
    assert again[1].differences == []


def test_the_record_of_an_import_is_a_setup_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "setup.yaml"
    imported = ["import", "demo", "--name", "small", "--max-batch-size", "3", "--no-streaming", "--quiet"]
    assert run([*imported, "--set", "max_queue_size=9"]) == 0
    assert run(["init", str(file), "--from", "small"]) == 0
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert content["models"]["small"] == {
        "source": "demo",
        "max_batch_size": 3,
        "streaming": False,
        "settings": {"max_queue_size": "9"},
    }
    (model,) = plan_setup(read_setup(file)).models
    assert {stage["action"] for stage in model.stages()} == {"reuse"}
    assert model.differences == []
    assert run(["init", str(tmp_path / "other.yaml"), "--from", "unknown"]) == 23
    assert "Imports: small." in capsys.readouterr().err
