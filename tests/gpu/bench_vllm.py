"""The vllm runtime behind a real Triton: right answers of several formats, speed against vLLM alone, dead engines.

`TRTSERVE_VLLM_PYTHON=… python -m tests.gpu.bench_vllm models|speed|faults`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.gpu.random_engines import LLAMA_8B
from tests.gpu.served_bench import measured, print_figures
from tests.support.devices import DEVICE
from tests.support.model_server import ModelServer
from tests.support.quantised_models import write_quantised_model
from tests.support.release_client import NEWEST
from tests.support.servers import running_server
from tests.support.tiny_models import write_byte_tokenizer, write_safetensors, write_tiny_model
from trtserve.artifacts import ModelRepository
from trtserve.executor.engine.limits import EngineOptions, KvCacheOptions
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.vllm.arguments import MODEL_FOLDER, engine_arguments
from trtserve.executor.vllm.installation import VARIABLE, require_installation
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.process import tree
from trtserve.server.state import Server
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

Dtype = Literal["auto", "float32", "bfloat16"]
PROMPTS = [[1, 60, 61, 62], [1, *range(100, 160)], [5, 9, 200]]
COUNT = 24
EAGER = {"enforce_eager": "true"}
_READY = 400.0


def imported(work: Path, source: str, name: str, *, dtype: Dtype = "auto", **options: Any) -> ModelRepository:
    """Return the repository of a model for the vllm runtime."""
    settings = options.pop("settings", EAGER)
    spec = resolve_import(
        source,
        name=name,
        convert=ConvertSpec(dtype=dtype, tp_size=options.pop("tp_size", 1)),
        build=BuildSpec(runtime="vllm", **{"max_seq_len": 256, "max_batch_size": 16, **options}),
        repository=RepositorySpec(settings=settings, kv_cache_free_gpu_mem_fraction=0.5),
        store=Store(work / "home"),
    )
    return import_to_repository(spec, store=Store(work / "home"))


@contextmanager
def served(work: Path, repository: ModelRepository, name: str, **options: Any) -> Iterator[Server]:
    """A ready server with its gateway; the log is printed on failure."""
    with running_server(
        repository.path, home=work / "home", name=name, gateway=True, ready_timeout=_READY, **options
    ) as server:
        yield server


def alone(repository: ModelRepository, **given: Any) -> list[dict[str, Any]]:
    """Run vLLM alone with the arguments that the executor gives it."""
    engine = repository.path / "tensorrt_llm" / "1"
    config = read_engine_config(engine)
    options = EngineOptions(kv_cache=KvCacheOptions(free_fraction=0.5))
    arguments = engine_arguments(config, options, engine / MODEL_FOLDER, adapters=0)
    python = str(require_installation().python)
    script = Path(__file__).with_name("vllm_alone.py")
    done = subprocess.run(
        [python, "-P", str(script), json.dumps({"arguments": arguments, **given})],
        stdout=subprocess.PIPE, text=True, check=True, timeout=570, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def core(server: Server, prompt: list[int], count: int = COUNT) -> list[int]:
    """Return the tokens of a greedy stream of the core model."""
    with ModelServer(server.address).stream() as stream:
        answers = stream.all("tensorrt_llm", NEWEST.core(prompt, count, streaming=True, end_id=-1))
    assert [answer["output_ids"].size for answer in answers] == [1] * count, "a response for each token"
    return [int(answer["output_ids"].item()) for answer in answers]


def http(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return the status and the JSON of an answer; 0 when nothing listens."""
    url = f"http://127.0.0.1:{server.address.http_port}{path}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
        ) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def contract(server: Server, name: str) -> str:
    """Ask all five models and the gateway, and return "all right", or what was not."""
    models = ModelServer(server.address)
    body = {"model": name, "prompt": "What is ML?", "max_tokens": 8, "temperature": 0}
    asked = {"text_input": "What is ML?", "max_tokens": 8}
    ways: list[tuple[str, dict[str, Any]]] = [
        *((f"/v2/models/{model}/generate", asked) for model in (name, "ensemble", "tensorrt_llm_bls")),
        ("/v1/completions", body),
        ("/v1/completions", {**body, "n": 2, "temperature": 0.9, "seed": 7}),
        ("/v1/completions", {**body, "logprobs": 0}),
        ("/v1/completions", {**body, "logprobs": 2}),
        ("/v1/completions", {**body, "logprobs": 2, "echo": True}),
    ]
    wrong = []
    for path, given in ways:
        status, answer = http(server, path, given)
        if status != 200:
            alive = server.instances[0].process.alive()
            wrong.append(f"{path} {given}: {status} {str(answer)[:200]}; Triton {'runs' if alive else 'has ended'}")
    status, answer = models.generate("tensorrt_llm_bls", {**asked, "beam_width": 2})
    if "beam_width is not supported by the vllm runtime" not in str(answer):
        wrong.append(f"beam_width: {answer}")
    return "; ".join(wrong) or "all right"


def models(work: Path, names: list[str], *, tp_size: int) -> None:
    """Serve each model, and compare its tokens with those of vLLM alone."""
    failed = []
    for name in names:
        folder = work / "models" / name
        dtype: Dtype = "auto"
        if name == "demo":
            source, dtype = "demo", "float32"
        elif name in ("awq", "gptq", "fp8"):
            source = str(write_quantised_model(folder, name).folder)
        else:
            source = str(write_tiny_model(folder, name, dtype="bfloat16"))
        try:
            repository = imported(work, source, name, dtype=dtype, tp_size=tp_size)
            begin = time.monotonic()
            with served(work, repository, name) as server:
                ready = time.monotonic() - begin
                found = [core(server, prompt) for prompt in PROMPTS]
                asked = contract(server, name)
            expected = [row["tokens"] for row in alone(repository, prompts=PROMPTS, count=COUNT) if "tokens" in row]
            pairs = [
                (a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
            ]
            equal = sum(a == b for a, b in pairs)
            print_figures(
                **{f"{name}": f"{equal} of {len(pairs)} tokens as vLLM alone; ready after {ready:.0f} s; {asked}"}
            )
            failed += [name] if asked != "all right" else []
        except Exception as error:  # noqa: BLE001 - the other models are looked at too
            failed.append(name)
            print_figures(**{f"{name}": f"FAILED: {type(error).__name__}: {str(error)[:300]}"})
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    sys.stdout.write(f"{len(names)} models answered as vLLM alone does\n")


def random_8b(work: Path, layers: int) -> Path:
    """Write the config of an 8 B Llama, whose weights vLLM draws itself (load_format=dummy)."""
    folder = work / "models" / "8b"
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA_8B | {"num_hidden_layers": layers, "eos_token_id": 2, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {"none": np.zeros(1, np.float32)})
    write_byte_tokenizer(folder, max_length=8192)
    return folder


def speed(work: Path, loads: list[int], *, layers: int, tp_size: int) -> None:
    """Measure the 8 B shape behind Triton, behind the gateway, and in vLLM alone."""
    repository = imported(
        work, str(random_8b(work, layers)), "random", max_seq_len=2048, max_batch_size=256, max_num_tokens=8192,
        settings={"load_format": "dummy"} | (EAGER if DEVICE == "cpu" else {}), tp_size=tp_size,
    )  # fmt: skip
    home = work / "home"
    requests = {streams: max(8, 4 * streams) for streams in loads}
    own: dict[int, float] = {}
    seconds: dict[str, float] = {}
    for _ in range(2):  # the first one compiles, for both
        for row in alone(repository, loads=[[n, requests[n]] for n in loads] if seconds else []):
            if "streams" in row:
                own[row["streams"]] = row["tokens_per_second"]
            else:
                seconds["alone"] = row["first_answer_seconds"]
    begin = time.monotonic()
    with served(work, repository, "random") as server:
        core(server, PROMPTS[0], 1)
        seconds["served"] = time.monotonic() - begin
        print_figures(**{f"first_answer_{name}_seconds": round(value, 1) for name, value in seconds.items()})
        address = server.address
        v1 = f"http://127.0.0.1:{address.http_port}/v1"
        for streams in loads:
            workers = 4 if streams >= 16 else 1
            ways = {"triton": ("--server", "random", "--model", "tensorrt_llm"), "gateway": ("--openai", v1)}
            for way, where in ways.items():
                try:
                    found = measured(where, streams, home, requests=requests[streams], workers=workers)
                except subprocess.CalledProcessError as error:
                    print_figures(**{f"{way}_{streams}": f"FAILED with code {error.returncode}"})
                    continue
                tokens = found["statistics"]["output_tokens_per_second"]
                text = f"{tokens:.0f} tokens/s, ÷ vLLM alone {tokens / own[streams]:.3f} ({own[streams]:.0f})"
                print_figures(**{f"{way}_{streams}": text})


def faults(work: Path) -> None:
    """Kill the engine of a supervised server: how long until it is not ready, and until it answers right again."""
    repository = imported(work, "demo", "fragile", dtype="float32")
    environment = {**os.environ, "TRTSERVE_HOME": str(work / "home")}

    def trtserve(*words: str) -> None:
        command = [sys.executable, "-m", "trtserve", *words]
        subprocess.run(command, check=True, timeout=_READY, env=environment, stdout=subprocess.DEVNULL)

    flags = ("--detach", "--restart", "on-failure", "--auto-ports", "--ready-timeout", "300")
    trtserve("start", "--model-repository", str(repository.path), "--name", "fragile", *flags)
    from trtserve.server.state import list_servers

    def now() -> Server:
        return next(each for each in list_servers(Store(work / "home")) if each.name == "fragile")

    try:
        server = now()
        right = core(server, PROMPTS[0])
        for victim in (b"EngineCore", b"engine_side"):
            root = server.instances[0].process
            (engine,) = [each for each in tree(root) if victim in Path(f"/proc/{each.pid}/cmdline").read_bytes()]
            begin = time.monotonic()
            os.kill(engine.pid, signal.SIGKILL)
            while http(server, "/v2/health/ready")[0] == 200:
                time.sleep(0.05)
            noticed = time.monotonic() - begin
            while http(server := now(), "/v2/health/ready")[0] != 200:
                if time.monotonic() > begin + _READY:
                    raise SystemExit(f"after {victim.decode()} was killed the server did not come back")
                time.sleep(0.2)
            assert core(server, PROMPTS[0]) == right
            text = f"not ready after {noticed:.2f} s, right again after {time.monotonic() - begin:.1f} s"
            print_figures(**{f"killed {victim.decode()}": text})
    finally:
        trtserve("stop", "fragile")
    sys.stdout.write("The engine was killed twice, and the server came back\n")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("models", "speed", "faults"))
    parser.add_argument("names", nargs="*", help="models, or streams")
    parser.add_argument("--work", type=Path, default=Path("/tmp/trtserve-vllm"))
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--tp-size", type=int, default=1)
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    assert VARIABLE in os.environ, VARIABLE
    if options.part == "models":
        names = options.names or ["demo", "llama", "awq", "gptq", "fp8", "qwen3_moe"]
        models(options.work, names, tp_size=options.tp_size)
    elif options.part == "speed":
        loads = list(map(int, options.names or (1, 64, 256)))
        speed(options.work, loads, layers=options.layers, tp_size=options.tp_size)
    else:
        faults(options.work)


if __name__ == "__main__":
    main()
