"""Files of strangers with generated lies in them: every command ends with a result or with an error of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.bench_records import answered, report_of
from tests.support.lies import lie, lie_in_text
from tests.support.peft_adapters import write_adapter
from tests.support.repositories_to_check import RepositoryFactory, bases
from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.__main__ import prepare_streams
from trtserve.artifacts import Model
from trtserve.bench.exports import write_result
from trtserve.cli import run
from trtserve.specs import ConvertSpec

# `make fuzz` asks for more.
TRIALS = int(os.environ.get("TRTSERVE_FILE_LIES", "25"))
FIRST = int(os.environ.get("TRTSERVE_FILE_LIES_FROM", "0"))
SECONDS = 30  # of one command; all of them need less than one


@contextmanager
def limited(what: str) -> Iterator[None]:
    def late(_number: int, _frame: object) -> None:
        raise AssertionError(f"{what} takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def model(folder: Path) -> Path:
    path = write_tiny_model(folder / "model", shards=2)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.5}')
    (path / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "</s>", "lstrip": false}, "bos_token": "<s>"}'
    )
    return path


def adapter(folder: Path) -> Path:
    return write_adapter(
        folder / "adapter",
        modules={"self_attn.q_proj": (64, 64)},
        alpha_pattern={"q_proj": 3, r"layers\.1\..*": 4},
        rank_pattern={"q_proj": 4},
        target_modules=["q_proj"],
        bias="none",
        use_rslora=False,
    )


def result(folder: Path) -> Path:
    (folder / "result").mkdir()
    write_result(report_of([answered(number, intended=number / 10) for number in range(8)]), folder / "result")
    return folder / "result"


def checkpoint(folder: Path) -> Path:
    return convert_model(Model(path=model(folder)), ConvertSpec(), out=folder / "checkpoint").path


def setup_file(folder: Path) -> Path:
    (folder / "setup").mkdir()
    benchmarks = {"demo": {"server": "demo", "concurrency": 4, "num_requests": 5, "limits": {"ttft_p99": "500ms"}}}
    content = {
        "models": {"demo": {"source": str(model(folder)), "max_batch_size": 8, "quantize": "int8"}},
        "servers": {"demo": {"model": "demo", "auto_ports": True, "restart": "on-failure", "http_port": 18000}},
        "benchmarks": benchmarks,
        "tune": {"demo": {"server": "demo", "goal": "ttft p99 < 500 ms", "ranges": {"max_batch_size": [4, 8]}}},
    }
    (folder / "setup" / "setup.json").write_text(json.dumps(content))  # which is YAML, too
    return folder / "setup"


def embedded(folder: Path) -> Path:
    factory = RepositoryFactory(folder)
    return factory.own("embedded", factory.embedded())


FAULTS = ("bug in trtserve", "Traceback", "a" * 4000)
REPOSITORY = (
    *("manifest.json", "tensorrt_llm/1/config.json", "*/config.pbtxt", "*/1/parameter_classes.json"),
    *("preprocessing/1/tokenizer/*.json", "lora*.json", "*/1/model.yaml", "*/1/*.xml"),
)
# What is damaged, in which of its files, and the commands that read it; {} is its folder.
SERVED = ("check {}", "start --dry-run --model-repository {}", "inspect {}")
SUBJECTS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], tuple[str, ...]]] = {
    "model": (
        model,
        ("*.json",),
        (
            "import --dry-run {}",
            "import --dry-run --tp-size 2 --quantize int8 {}",
            "import --dry-run --runtime llmapi {}",
            "plan {}",
            "inspect {}",
        ),
    ),
    "checkpoint": (checkpoint, ("*.json",), ("build --dry-run {}", "inspect {}")),
    "adapter": (adapter, ("*.json",), ("lora --dry-run {}", "lora --out OUT/adapter {}")),
    "result": (
        result,
        ("*.json", "*.jsonl"),
        ("bench report {}", "bench report --html OUT/report.html {}", "bench compare {} {}"),
    ),
    "setup": (
        setup_file,
        ("*.json",),
        ("diff {}/setup.json", "up --dry-run {}/setup.json", "tune --dry-run {}/setup.json"),
    ),
    "embedded": (embedded, REPOSITORY, SERVED),
    "gpus": (lambda folder: bases(RepositoryFactory(folder))["lora"], REPOSITORY, SERVED),
    "llmapi": (lambda folder: RepositoryFactory(folder).llmapi("llmapi"), REPOSITORY, SERVED),
    "upstream": (lambda folder: RepositoryFactory(folder).upstream("upstream", "0.18.2"), REPOSITORY, SERVED),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(subject: str) -> Path:
        if subject not in made:
            made[subject] = SUBJECTS[subject][0](tmp_path_factory.mktemp(subject))
        return made[subject]

    return find


@pytest.mark.parametrize("subject", SUBJECTS)
def test_lies_in_files_end_with_a_result_or_an_error(
    subject: str, good: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, patterns, commands = SUBJECTS[subject]
    original = good(subject)
    folder = tmp_path / "folder"
    found = []
    for seed in range(FIRST, FIRST + TRIALS):
        chance = random.Random(f"{subject} {seed}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder, symlinks=True)
        files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        file = chance.choice(files)
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            changed = lie(text, chance)
        elif file.suffix == ".jsonl":
            lines = text.splitlines()
            number = chance.randrange(len(lines)) if lines else 0
            lines[number : number + 1] = [lie(lines[number] if lines else "{}", chance)]
            changed = "\n".join(lines)
        else:
            changed = lie_in_text(text, chance)
        file.unlink()
        file.write_bytes(changed.encode("utf-8", "surrogatepass"))
        (tmp_path / "out").mkdir(exist_ok=True)
        command = chance.choice(commands)
        words = [word.replace("OUT", str(tmp_path / "out")).replace("{}", str(folder)) for word in command.split()]
        prepare_streams()
        with limited(f"{command}, seed {seed}"):
            run(words)
        page = tmp_path / "out" / "report.html"
        if page.exists():
            assert "<script>alert" not in page.read_text(encoding="utf-8"), f"{command}, seed {seed}"
        shutil.rmtree(tmp_path / "out")
        written = capsys.readouterr()
        if fault := next((fault for fault in FAULTS if fault in written.out + written.err), None):
            place = (written.out + written.err).find(fault)
            said = (written.out + written.err)[max(0, place - 400) : place + 400]
            found.append(f"{command}, {file.relative_to(folder)}, seed {seed}, {fault!r}: {said}")
    assert not found, "\n\n".join(found)
