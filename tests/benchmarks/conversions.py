"""Programs that `bench_convert` and `kills` run: the random model, `trtserve convert`, `cp`, and the usual conversion.

The usual way is what converters do that are not streamed: transformers loads the model, torch cuts it, and
safetensors.torch.save_file writes the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.engines import SIZES
from tests.benchmarks.frame import environment
from tests.benchmarks.memory import anonymous_bytes

if TYPE_CHECKING:
    import torch

SAMPLE_SECONDS = 0.004
TIMEOUT = 600.0
_TOUCHED = 4 << 30
_TOUCH = f"import mmap; m = mmap.mmap(-1, {_TOUCHED}); [m.__setitem__(i, 1) for i in range(0, {_TOUCHED}, 4096)]"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A conversion of the model of type `source` to `dtype`; `target` is the wanted speed relative to cp."""

    source: str = "float16"
    dtype: str = "float16"
    tp_size: int = 1
    pp_size: int = 1
    target: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: seconds from start to end, of them those of writing, and peaks in bytes.

    `sampled` is RssAnon + RssShmem of all its processes as read every 4 ms, 0 when it was not: that takes its share of
    the cores. `maxrss` is ru_maxrss, which includes pages of files, of the largest process.
    """

    seconds: float
    writing: float
    sampled: int
    maxrss: int


def model_folder(work: Path, dtype: str) -> Path:
    """The random Llama of 1.1 B parameters in a type, made when it is not there yet."""
    folder = work / ("llama-1.1b" if dtype == "float16" else f"llama-1.1b-{dtype}")
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        # In its own process: memory of this one would count in the peaks of its children.
        subprocess.run([*_CALL, "generate", str(folder), dtype], check=True, timeout=TIMEOUT)
    return folder


def convert_command(model: Path, out: Path, case: Case) -> list[str]:
    """The conversion as a user types it."""
    sizes = ["--tp-size", str(case.tp_size), "--pp-size", str(case.pp_size), "--dtype", case.dtype]
    return [sys.executable, "-m", "trtserve", "convert", str(model), "--out", str(out), *sizes, "--quiet"]


def converted(model: Path, out: Path, case: Case, home: Path, *, sample: bool) -> Run:
    """Convert in a fresh process; the seconds of writing are in the rates that it leaves in `home`."""
    run = watched(convert_command(model, out, case), environment(TRTSERVE_HOME=str(home)), sample=sample)
    rates = json.loads((home / "rates.json").read_text(encoding="utf-8"))
    return Run(seconds=run.seconds, writing=rates["convert"][-1]["seconds"], sampled=run.sampled, maxrss=run.maxrss)


def converted_as_usual(model: Path, out: Path, case: Case, *, sample: bool) -> Run:
    """Convert the usual way in a fresh process."""
    sizes = [str(case.tp_size), str(case.pp_size)]
    return watched([*_CALL, "usual", str(model), str(out), *sizes, case.dtype], environment(), sample=sample)


def watched(
    command: Sequence[str],
    variables: dict[str, str],
    *,
    sample: bool,
    before: Callable[[], None] | None = None,
) -> Run:
    """Run a command to its end, and `sample` its memory; SystemExit when it fails.

    `before` runs in its process first.
    """
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        env=variables,
        preexec_fn=before,  # noqa: PLW1509 - a benchmark has one thread
    )
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - start
        if pid:
            break
        if sample:
            peak = max(peak, anonymous_bytes(process.pid))
        if seconds > TIMEOUT:
            process.kill()
        time.sleep(SAMPLE_SECONDS)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return Run(seconds=seconds, writing=seconds, sampled=peak, maxrss=usage.ru_maxrss * 1024)


def copied(model: Path, out: Path) -> float:
    """Seconds that `cp` needs for the weights."""
    out.mkdir()
    start = time.perf_counter()
    subprocess.run(["cp", str(model / "model.safetensors"), str(out)], check=True, timeout=TIMEOUT)
    return time.perf_counter() - start


def clean(*folders: Path) -> None:
    """Remove the output of a run and wait for disk and memory to settle before the next one.

    A virtual machine hands free memory back to its host after seconds; who touches it next waits for the host to bring
    it again, several times as long as a copy takes. So more than a run needs is touched, and free again when it begins.
    """
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    subprocess.run([sys.executable, "-c", _TOUCH], check=True, timeout=TIMEOUT)


def require_same(ours: Path, theirs: Path) -> None:
    """SystemExit when two checkpoints do not hold the same tensors, number for number."""
    names = sorted(path.name for path in ours.glob("rank*.safetensors"))
    if names != sorted(path.name for path in theirs.glob("rank*.safetensors")):
        raise SystemExit(f"{ours} and {theirs} have different ranks")
    subprocess.run([*_CALL, "same", str(ours), str(theirs)], check=True, timeout=TIMEOUT)


def _same(ours: Path, theirs: Path) -> None:
    from trtserve.checkpoint.tensor_files import TensorFile

    for path in sorted(ours.glob("rank*.safetensors")):
        first, second = TensorFile(path), TensorFile(theirs / path.name)
        if first.entries.keys() != second.entries.keys():
            raise SystemExit(f"{path.name}: {sorted(first.entries.keys() ^ second.entries.keys())}")
        for name in first.entries:
            one, other = first.tensor(name), second.tensor(name)
            if one.shape != other.shape or one.tobytes() != other.tobytes():
                raise SystemExit(f"{path.name}: {name} differs")


def _generate(folder: Path, dtype: str) -> None:
    """Write the model, tensor by tensor, with the format's header in front."""
    import numpy as np

    from tests.support.families import FAMILIES
    from trtserve.checkpoint.tensor_files import CODES, layout, numpy_dtype

    llama = FAMILIES["llama"]
    config = llama.config | SIZES["llama-1b"] | {"dtype": dtype, "torch_dtype": dtype}
    listed = dict(llama.tensors(config))
    header, _ = layout(listed, dtype)
    folder.mkdir(parents=True)
    generator, kind = np.random.default_rng(0), numpy_dtype(CODES[dtype])
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(header)
        for shape in listed.values():
            handle.write((0.02 * generator.standard_normal(shape, dtype=np.float32)).astype(kind).tobytes())
    (folder / "config.json").write_text(json.dumps(config))


def _usual(model: Path, out: Path, tp_size: int, pp_size: int, dtype: str) -> None:
    """Load with transformers, split with torch, save with safetensors; names and splits are TensorRT-LLM's."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    state, layers = loaded.state_dict(), loaded.config.num_hidden_layers
    out.mkdir()
    for rank in range(tp_size * pp_size):
        stage, tp_rank = divmod(rank, tp_size)
        each = layers // pp_size
        tensors: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(range(stage * each, (stage + 1) * each)):
            tensors |= _usual_layer(state, f"model.layers.{layer}.", f"transformer.layers.{number}.", tp_size, tp_rank)
        if stage == 0:
            tensors["transformer.vocab_embedding.weight"] = state["model.embed_tokens.weight"].clone()
        if stage == pp_size - 1:
            tensors["transformer.ln_f.weight"] = state["model.norm.weight"].clone()
            tensors["lm_head.weight"] = state["lm_head.weight"].chunk(tp_size)[tp_rank].clone()
        save_file(tensors, out / f"rank{rank}.safetensors", metadata={"format": "pt"})


def _usual_layer(
    state: dict[str, torch.Tensor], theirs: str, ours: str, tp_size: int, tp_rank: int
) -> dict[str, torch.Tensor]:
    import torch

    def cut(name: str, dimension: int) -> torch.Tensor:
        return state[f"{theirs}{name}.weight"].chunk(tp_size, dimension)[tp_rank]

    return {
        f"{ours}input_layernorm.weight": state[f"{theirs}input_layernorm.weight"].clone(),
        f"{ours}post_layernorm.weight": state[f"{theirs}post_attention_layernorm.weight"].clone(),
        f"{ours}attention.qkv.weight": torch.cat([cut(f"self_attn.{part}_proj", 0) for part in "qkv"]),
        f"{ours}attention.dense.weight": cut("self_attn.o_proj", 1).contiguous().clone(),
        f"{ours}mlp.fc.weight": cut("mlp.gate_proj", 0).clone(),
        f"{ours}mlp.gate.weight": cut("mlp.up_proj", 0).clone(),
        f"{ours}mlp.proj.weight": cut("mlp.down_proj", 1).contiguous().clone(),
    }


_CALL = [sys.executable, "-m", "tests.benchmarks.conversions"]


def main() -> None:
    """Run the parts that need their own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("generate", "usual", "same"))
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    first, second, *rest = options.arguments
    if options.part == "generate":
        _generate(Path(first), second)
    elif options.part == "same":
        _same(Path(first), Path(second))
    else:
        tp_size, pp_size, dtype = rest
        _usual(Path(first), Path(second), int(tp_size), int(pp_size), dtype)


if __name__ == "__main__":
    main()
