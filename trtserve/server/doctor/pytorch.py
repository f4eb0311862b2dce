"""PyTorch on GPUs: whether it sees them, and whether two ranks exchange a tensor between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from trtserve.errors import counted
from trtserve.host.install_command import install_command
from trtserve.process import Command, run
from trtserve.server.doctor.findings import (
    PYTORCH,
    Finding,
    Group,
    State,
)
from trtserve.server.doctor.mpi import run_two_ranks

_TIMEOUT = 60.0
_MARK = "found "
# A process of its own: PyTorch takes seconds to load, and a broken driver may end it.
_LOOK = f"""\
import json, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    import torch
    count = torch.cuda.device_count() if torch.version.cuda else 0
    problem = ''
    try:
        for number in range(count):
            torch.ones(1, device=f'cuda:{{number}}').add_(1).item()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
nccl = '.'.join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
problem = problem or ('' if count else ' '.join(str(each.message) for each in told).strip())
print({_MARK!r} + json.dumps(dict(torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl, gpus=count,
    problem=problem)))
"""
_HELLO = f"""\
import json, torch
from trtserve.executor.torch.ranks import join
ranks = join(2, 1, 'cuda', None)
total = ranks.all_reduce(torch.full((4,), ranks.rank + 1.0, device=ranks.device))
print({_MARK!r} + json.dumps(dict(rank=ranks.rank, device=str(ranks.device), sum=float(total.sum()))), flush=True)
"""
_SUM = 4 * (1.0 + 2.0)


def check_pytorch() -> Finding:
    """Load PyTorch in another process, and calculate on every GPU that it sees."""
    if find_spec("torch") is None:
        return _finding("gpu", "PyTorch", "failed", "not installed", install_command("cuda"))
    output = run(Command(argv=(sys.executable, "-c", _LOOK)), timeout=_TIMEOUT).stdout
    (seen,) = _found(output)
    if seen["cuda"] is None:
        fix = "Install a build of PyTorch for CUDA: https://pytorch.org/get-started/locally"
        return _finding("gpu", "PyTorch", "failed", f"{seen['torch']} is built without CUDA", fix)
    what = f"{seen['torch']}, CUDA {seen['cuda']}, NCCL {seen['nccl']}"
    if not seen["gpus"] or seen["problem"]:
        reason = seen["problem"] or "the driver shows none"
        fix = "Install a driver for that CUDA, or a PyTorch for the CUDA of this driver."
        return _finding("gpu", "PyTorch", "failed", f"{what}: no usable GPU: {reason}", fix)
    return _finding("gpu", "PyTorch", "ok", f"{what}, calculates on {counted(seen['gpus'], 'GPU')}")


def check_ranks() -> Finding:
    """Start two ranks as `start` does; each takes a GPU, and NCCL adds a tensor of both."""
    if find_spec("torch") is None:
        return _finding("mpi", "NCCL", "failed", "PyTorch is not installed", install_command("cuda"))
    code, output = run_two_ranks(_HELLO, bound=False)
    ranks = {each["rank"]: each for each in _found(output) if each["sum"] == _SUM}
    if len(ranks) == 2:
        devices = " and ".join(ranks[rank]["device"] for rank in sorted(ranks))
        return _finding("mpi", "NCCL", "ok", f"two ranks added a tensor on {devices}")
    printed = [line.strip() for line in output.splitlines() if line.strip(" -*=")] or ["it printed nothing"]
    problem = "did not end in time" if code is None else f"exit code {code}"
    fix = "Start it with NCCL_DEBUG=INFO to see why: NCCL_DEBUG=INFO trtserve doctor"
    return _finding("mpi", "NCCL", "failed", f"two ranks: {problem}: {printed[-1]}", fix)


def _found(output: str) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        if _MARK in line:
            yield json.loads(line.partition(_MARK)[2])


def _finding(group: Group, name: str, state: State, evidence: str, fix: str = "") -> Finding:
    return Finding(group=group, name=name, state=state, evidence=evidence, fix=fix, needed_by=PYTORCH)
