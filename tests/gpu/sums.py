"""Check and measure sums over two GPUs against NCCL's: `python -m tests.gpu.sums`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from tests.gpu.served_bench import print_figures
from trtserve.executor.torch.ranks import gpu_sums
from trtserve.host.ports import free_ports

ROWS = (1, 8, 32, 64, 128, 256, 512)
COLUMNS = 4096


def main() -> None:
    """Run both ranks."""
    (port,) = free_ports("127.0.0.1", 1)
    multiprocessing.spawn(_rank, (port,), nprocs=2)
    sys.stdout.write("sums equal NCCL's in float32, each rounded once\n")


def _rank(rank: int, port: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    sums = gpu_sums(dist.group.WORLD, device)
    assert sums is not None, "the GPUs cannot write to each other's memory"
    own, shared = torch.Generator(device).manual_seed(rank), torch.Generator().manual_seed(0)

    def expected(x: Tensor) -> Tensor:
        total = x.float()
        dist.all_reduce(total)
        return total.to(x.dtype)

    def draw(*shape: int) -> Tensor:
        zeros = torch.rand(shape, device=device, generator=own) < 0.1
        return torch.randn(shape, device=device, generator=own).where(~zeros, -0.0)  # its bits mean "nothing there"

    for _ in range(300):
        rows, kind, width = (int(torch.randint(size, (1,), generator=shared)) for size in (512, 3, 4))
        x = draw(rows + 1, (8, 1000, COLUMNS, COLUMNS)[width]).to((torch.bfloat16, torch.float16, torch.float32)[kind])
        if sums.fit(x):
            assert torch.equal(sums(x), expected(x))
    # Graphs with an odd number of sums leave the halves of the places in any order.
    graphs = []
    for rows, count in ((1, 3), (64, 5), (7, 1), (256, 2)):
        x, graph = draw(rows, COLUMNS).bfloat16(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [sums(x * factor) for factor in range(1, count + 1)]
        graphs.append((graph, x, found))
    for _ in range(300):
        graph, x, found = graphs[int(torch.randint(len(graphs), (1,), generator=shared))]
        x.copy_(draw(*x.shape))
        graph.replay()
        assert all(torch.equal(each, expected(x * factor)) for factor, each in enumerate(found, 1))
    for rows in ROWS:
        x = torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=device)
        times = [_microseconds(each, x) for each in (dist.all_reduce, sums)]
        if rank == 0:
            print_figures(**{f"{rows} rows of {COLUMNS:,}: µs by NCCL and by this kernel": times})
    dist.destroy_process_group()


def _microseconds(function: Callable[[Tensor], object], x: Tensor, *, count: int = 64, repeats: int = 30) -> float:
    """Return the time of one call in a graph of `count`."""
    graph = torch.cuda.CUDAGraph()
    function(x)
    with torch.cuda.graph(graph):
        for _ in range(count):
            function(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return round(milliseconds * 1000 / repeats / count, 2)


if __name__ == "__main__":
    main()
