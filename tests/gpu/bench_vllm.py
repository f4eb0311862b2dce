"""The vllm runtime behind a real Triton: right answers of several formats, speed against vLLM alone, dead engines.

`TRTSERVE_VLLM_PYTHON=… python -m tests.gpu.bench_vllm models|speed|faults|nvidia [--tp-size 2]`
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

import trtserve
from tests.gpu.random_engines import LLAMA_8B
from tests.gpu.served_bench import measured, print_figures
from tests.support.devices import DEVICE
from tests.support.model_server import ModelServer
from tests.support.quantised_models import write_quantised_model
from tests.support.release_client import NEWEST
from tests.support.servers import running_server
from tests.support.tiny_models import write_byte_tokenizer, write_safetensors, write_tiny_model
from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.executor.engine.limits import EngineOptions, KvCacheOptions
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.vllm.arguments import MODEL_FOLDER, engine_arguments
from trtserve.executor.vllm.installation import VARIABLE, require_installation
from trtserve.host.gpus import gpus_now
from trtserve.host.ports import free_ports
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
ON_CPU = EAGER | {"kv_cache_memory_bytes": "500000000"}
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


def given_arguments(repository: ModelRepository) -> dict[str, Any]:
    """Return the arguments that the executor gives vLLM."""
    engine = repository.path / "tensorrt_llm" / "1"
    options = EngineOptions(kv_cache=KvCacheOptions(free_fraction=0.5))
    return engine_arguments(read_engine_config(engine), options, engine / MODEL_FOLDER, adapters=0)


def alone(arguments: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    """Run vLLM alone."""
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


def fetched(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return the status and the JSON of an answer; 0 when nothing listens."""
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


def http(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return what `fetched` returns of a path of the gateway."""
    return fetched(f"http://127.0.0.1:{server.address.http_port}{path}", body)


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
    """Serve each model, and compare its tokens with those of vLLM alone on one GPU."""
    failed = []
    for name in names:
        folder = work / "models" / name
        dtype: Dtype = "auto"
        if name == "demo":
            source, dtype = "demo", "float32"
        elif name == "8b":
            source, dtype = str(written_8b(work)), "float32"
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
            one = given_arguments(repository) | {"tensor_parallel_size": 1}
            expected = [row["tokens"] for row in alone(one, prompts=PROMPTS, count=COUNT) if "tokens" in row]
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
    """Write the config of an 8 B Llama, whose weights vLLM draws itself (load_format=dummy); a CPU gets a small one."""
    folder = work / "models" / "8b"
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA_8B | {"num_hidden_layers": layers, "eos_token_id": 2, "bos_token_id": 1}
    if DEVICE == "cpu":
        demo = json.loads(Path(trtserve.__file__).with_name("demo").joinpath("config.json").read_text())
        config |= {name: demo[name] for name in config.keys() & demo.keys()}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {"none": np.zeros(1, np.float32)})
    write_byte_tokenizer(folder, max_length=8192)
    return folder


def written_8b(work: Path) -> Path:
    """Write an 8 B Llama with random weights: those that vLLM draws itself depend on the number of GPUs."""
    import torch
    from safetensors.torch import save_file

    folder = random_8b(work, LLAMA_8B["num_hidden_layers"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    hidden, inner, vocabulary = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    values = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    sizes = {
        **{
            f"self_attn.{name}_proj": (rows, hidden)
            for name, rows in zip("qkvo", (hidden, values, values, hidden), strict=True)
        },
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = range(config["num_hidden_layers"])
    files = [
        {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), "lm_head": (vocabulary, hidden)},
        *({f"model.layers.{layer}.{name}": size for name, size in sizes.items()} for layer in layers),
    ]
    where: dict[str, str] = {}
    draw = torch.Generator(DEVICE).manual_seed(1)
    for number, tensors in enumerate(files):
        made = {}
        for name, size in tensors.items():
            plain = torch.ones(size, dtype=torch.bfloat16)
            drawn = plain if len(size) == 1 else torch.randn(size, device=DEVICE, generator=draw).mul(size[-1] ** -0.5)
            made[f"{name}.weight"] = drawn.to("cpu", torch.bfloat16)
            where[f"{name}.weight"] = f"model-{number:05}.safetensors"
        save_file(made, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@contextmanager
def vllm_serve(arguments: dict[str, Any], name: str) -> Iterator[tuple[str, float]]:
    """Run vLLM's own server; yields the address of its API, and the seconds until its first answer."""
    (port,) = free_ports("127.0.0.1", 1)
    words = ["--model", arguments["model"], "--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        elif key != "model":
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    python = str(require_installation().python)
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", *words, "--disable-uvicorn-access-log"]
    begin = time.monotonic()
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""}, start_new_session=True) as server:
        try:
            address = f"http://127.0.0.1:{port}/v1"
            asked = {"model": name, "prompt": PROMPTS[0], "max_tokens": 1}
            while fetched(f"{address}/completions", asked)[0] != 200:
                if server.poll() is not None or time.monotonic() > begin + _READY:
                    raise SystemExit("vllm serve does not start")
                time.sleep(0.2)
            yield address, time.monotonic() - begin
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def speed(work: Path, loads: list[int], *, layers: int, tp_size: int) -> None:
    """Measure the 8 B shape behind Triton, behind the gateway, and in vLLM alone."""
    repository = imported(
        work, str(random_8b(work, layers)), "random", max_seq_len=2048, max_batch_size=256, max_num_tokens=8192,
        settings={"load_format": "dummy"} | (ON_CPU if DEVICE == "cpu" else {}), tp_size=tp_size,
    )  # fmt: skip
    home, arguments = work / "home", given_arguments(repository)
    requests = {streams: max(8, 4 * streams) for streams in loads}
    found: dict[str, dict[int, float]] = {}
    seconds: dict[str, float] = {}
    for _ in range(2):  # the first one compiles, for both
        for row in alone(arguments, loads=[[n, requests[n]] for n in loads] if seconds else []):
            if "streams" in row:
                found.setdefault("alone", {})[row["streams"]] = row["tokens_per_second"]
                print_figures(**{f"alone_{row['streams']}": f"{row['tokens_per_second']:.0f} tokens/s"})
            else:
                seconds["alone"] = row["first_answer_seconds"]

    def measure(way: str, *where: str) -> None:
        for streams in loads:
            workers = 4 if streams >= 16 else 1
            try:
                report = measured(where, streams, home, requests=requests[streams], workers=workers)
            except subprocess.CalledProcessError as error:
                print_figures(**{f"{way}_{streams}": f"FAILED with code {error.returncode}"})
                continue
            found.setdefault(way, {})[streams] = report["statistics"]["output_tokens_per_second"]
            print_figures(**{f"{way}_{streams}": f"{found[way][streams]:.0f} tokens/s"})

    begin = time.monotonic()
    with served(work, repository, "random") as server:
        core(server, PROMPTS[0], 1)
        seconds["served"] = time.monotonic() - begin
        measure("triton", "--server", "random", "--model", "tensorrt_llm")
        measure("gateway", "--openai", f"http://127.0.0.1:{server.address.http_port}/v1")
    with vllm_serve({**arguments, "skip_tokenizer_init": False}, "random") as (address, seconds["vllm_serve"]):
        measure("vllm_serve", "--openai", address, "--tokenizer", arguments["model"])
    print_figures(first_answer_seconds={name: round(value, 1) for name, value in seconds.items()})
    for way, other in (("triton", "alone"), ("gateway", "alone"), ("gateway", "vllm_serve")):
        both = found.get(way, {}).keys() & found.get(other, {}).keys()
        ratios = {f"{streams}": round(found[way][streams] / found[other][streams], 3) for streams in sorted(both)}
        print_figures(**{f"{way} ÷ {other}": ratios})


def nvidia(work: Path) -> None:
    """Serve a repository of NVIDIA's backend `vllm`: the demo model's texts as vLLM alone makes them."""
    from tokenizers import Tokenizer

    model = imported(work, "demo", "demo", dtype="float32").path / "tensorrt_llm" / "1" / MODEL_FOLDER
    arguments: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
    }  # fmt: skip
    version = work / "nvidia" / "vllm_model" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ kind: KIND_MODEL }]\n')
    (version / "model.json").write_text(json.dumps(arguments))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = ["What is ML?", "What is AI?", "Hello"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    rows = [row["tokens"] for row in alone(arguments, prompts=prompts, count=COUNT) if "tokens" in row]
    expected = [tokenizer.decode(row) for row in rows]
    artifact = load_artifact(ModelRepository, version.parents[1])
    repository = ModelRepository(path=artifact.path, manifest=artifact.manifest)
    with served(work, repository, "nvidia") as server:
        asked = json.dumps({"max_tokens": COUNT, "temperature": 0, "ignore_eos": True})
        bodies = [{"text_input": text, "sampling_parameters": asked, "exclude_input_in_output": True} for text in texts]
        found = [http(server, "/v2/models/vllm_model/generate", body)[1] for body in bodies]
        right = sum(str(dict(answer).get("text_output")) == text for answer, text in zip(found, expected, strict=True))
        body = {"model": "vllm_model", "prompt": texts[0], "max_tokens": 8, "temperature": 0}
        status = http(server, "/v1/completions", body)[0]
        report = measured(("--server", "nvidia", "--model", "vllm_model"), 8, work / "home", requests=32, answer=64)
        tokens = report["statistics"]["output_tokens_per_second"]
    print_figures(nvidia=f"{right} of {len(texts)} texts as vLLM alone; /v1 {status}; 8 streams {tokens:.0f} tokens/s")
    if right < len(texts) or status != 200:
        raise SystemExit(f"expected {expected}, found {found}")


def faults(work: Path, *, tp_size: int) -> None:
    """Kill the engine of a supervised server: how long until it is not ready, and until it answers right again."""
    repository = imported(work, "demo", "fragile", dtype="float32", tp_size=tp_size)
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
        for victim in (*((b"Worker_TP1",) if tp_size > 1 else ()), b"EngineCore", b"engine_side"):
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
        last = [now().supervisor, *tree(now().instances[0].process)]
        trtserve("stop", "fragile")
    left = [each.pid for each in last if each is not None and each.alive()]
    print_figures(left_after_stop=left, memory_in_use=[gpu.memory - gpu.free >> 20 for gpu in gpus_now()])
    if left:
        raise SystemExit(f"after the stop {left} still run")
    sys.stdout.write("The engine was killed, and the server came back\n")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("models", "speed", "faults", "nvidia"))
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
    elif options.part == "nvidia":
        nvidia(options.work)
    else:
        faults(options.work, tp_size=options.tp_size)


if __name__ == "__main__":
    main()
