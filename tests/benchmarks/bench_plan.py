"""Memory and disk as `trtserve plan` estimates them, compared with the measured use of each stage.

Every case converts, builds and serves a random model with the real commands; memory is RssAnon + RssShmem of their
processes, sampled. Memory is taken when it is first used: the server is asked with prompts of several lengths, one of
which fills a step.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from tests.benchmarks.memory import anonymous_bytes

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama-30m": ("llama", {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 1024}),
    "llama-130m": ("llama", {
        "hidden_size": 640, "num_hidden_layers": 20, "num_attention_heads": 10, "num_key_value_heads": 5,
        "intermediate_size": 1728}),
    "llama-290m": ("llama", {
        "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 2816}),
    "llama-1.1b": ("llama", {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632}),
    # q, k and v are one matrix, the output head is the embedding.
    "gpt2-120m": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 2048}),
    "mixtral-220m": ("mixtral", {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 1792, "num_local_experts": 8, "num_experts_per_tok": 2}),
}  # fmt: skip
CASES = (
    ("llama-30m", "float32", "none"),
    ("llama-30m", "float16", "int4"),
    ("llama-130m", "bfloat16", "none"),
    ("llama-290m", "float16", "none"),
    ("llama-290m", "bfloat16", "int8"),
    ("llama-290m", "bfloat16", "int4"),
    ("gpt2-120m", "float16", "none"),
    ("mixtral-220m", "bfloat16", "none"),
    ("mixtral-220m", "float16", "int8"),
    ("mixtral-220m", "float16", "int4"),
    ("llama-1.1b", "float16", "none"),
    ("llama-1.1b", "bfloat16", "int8"),
)
VOCABULARY = 32000
TOKENS = 1024
LENGTHS = (16, 64, 256)
BOUND = 10.0
"""Largest error in per cent."""
TIMEOUT = 900.0
SAMPLE_SECONDS = 0.004
SAMPLER_PRIORITY = -10


def generate(folder: Path, model: str) -> None:
    """Write a random float16 model."""
    from tests.support.tiny_models import write_tiny_model

    family, sizes = MODELS[model]
    positions = {} if "n_positions" in sizes else {"max_position_embeddings": 2048}
    write_tiny_model(folder, family, dtype="float16", gain=0.05, **sizes, **positions, vocab_size=VOCABULARY)


class Watched:
    """A command and its children while they run; `peak` is the largest sum of their RssAnon + RssShmem."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self._began = time.monotonic()
        self.peak = 0
        _run_at(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trtserve", *arguments],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        _run_at(SAMPLER_PRIORITY)

    def sample(self) -> None:
        """Read the memory of all processes once."""
        self.peak = max(self.peak, anonymous_bytes(self._process.pid))
        if time.monotonic() - self._began > TIMEOUT:
            self._process.kill()
            raise SystemExit("a stage did not come to its end")
        time.sleep(SAMPLE_SECONDS)

    def line(self) -> str:
        """The first line of its output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def wait(self) -> int:
        """The peak, when the command has ended well."""
        while self._process.poll() is None:
            self.sample()
        if self._process.returncode:
            raise SystemExit(f"{self._process.args!r} ended with code {self._process.returncode}")
        return self.peak

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and its children; background jobs of a shell ignore SIGINT."""
        self._process.terminate()
        self._process.communicate(timeout=60)


def _run_at(priority: int) -> None:
    """A peak lasts a moment: on a busy machine a sampler that has to wait for its turn does not see it."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, priority)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_case(work: Path, model: str, dtype: str, quantize: str) -> list[Row]:
    """Plan, then convert, build and serve, and compare."""
    source, home = work / f"plan-{model}", work / "plan-home"
    if not (source / "config.json").exists():
        generate(source, model)
    shutil.rmtree(home, ignore_errors=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRTSERVE_")} | {"TRTSERVE_HOME": str(home)}
    case = f"{model} {dtype}" + (f" {quantize}" if quantize != "none" else "")
    convert, build = ("--dtype", dtype, "--quantize", quantize), ("--max-seq-len", "2048", "--max-num-tokens", "1024")
    cache = ("--max-tokens-in-paged-kv-cache", str(2 * TOKENS))
    planned = _planned(environment, str(source), *convert, *build, *cache)

    def row(stage: str, what: str, measured: int) -> Row:
        foreseen = planned[stage][f"{what}_bytes"]
        error = 100 * abs(foreseen / measured - 1)
        sides = {"measured": foreseen / 1e6, "base": measured / 1e6}
        return Row(case=f"{case}, {stage}, {what}", value=error, target=BOUND, at_most=True, **sides)

    def made(stage: str, *arguments: str) -> tuple[Path, list[Row]]:
        watched = Watched(environment, *arguments, "--quiet")
        peak = watched.wait()
        folder = Path(watched.line().strip())
        return folder, [row(stage, "memory", peak), row(stage, "disk", _size(folder))]

    checkpoint, rows = made("convert", "convert", str(source), *convert, "--name", "bench")
    engine, more = made("build", "build", str(checkpoint), *build, "--name", "bench")
    repository = Watched(environment, "repo", str(engine), "--tokenizer", str(source), *cache, "--quiet")
    repository.wait()
    folder = repository.line().strip()
    peak = serve(environment, folder, vocab=VOCABULARY)
    shutil.rmtree(home)
    return [*rows, *more, row("start", "memory", peak)]


def _planned(environment: dict[str, str], *arguments: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "trtserve", "plan", *arguments, "--json", "--quiet"]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=TIMEOUT).stdout
    return {stage["stage"]: stage for stage in json.loads(output)["result"]["stages"]}


def serve(environment: dict[str, str], repository: str, *, vocab: int) -> int:
    """Return the peak of a server with requests of all lengths, since kernels pack weights by step size."""
    server = Watched(environment, "start", "--model-repository", repository, "--auto-ports", "--quiet")
    if not server.line().strip():
        raise SystemExit("the server did not start")
    try:
        _ask(server, environment, ["Hello"])
        for number, length in enumerate((*LENGTHS, TOKENS - 8, TOKENS - 8)):
            tokens = [3 + (number + position) % (vocab - 3) for position in range(length)]
            file = Path(environment["TRTSERVE_HOME"]) / "tokens.csv"
            file.write_text(",".join(map(str, tokens)) + "\n")
            _ask(server, environment, ["--model", "tensorrt_llm", "--input-tokens-csv", str(file)])
    finally:
        server.stop()
    return server.peak


def _ask(server: Watched, environment: dict[str, str], arguments: list[str]) -> None:
    command = [sys.executable, "-m", "trtserve", "query", "--max-tokens", "8", *arguments]
    _run_at(0)
    question = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _run_at(SAMPLER_PRIORITY)
    while question.poll() is None:
        server.sample()
    if question.returncode:
        raise SystemExit("a question was not answered")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--case", type=int, action="append", choices=range(len(CASES)), help="only these cases")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for number in arguments.case or range(len(CASES)):
        rows += run_case(arguments.work, *CASES[number])
        print(table(rows, measured="Planned, MB", base="Measured, MB", value="Error, %"), flush=True)
    finish(arguments, "plan", rows)


if __name__ == "__main__":
    main()
