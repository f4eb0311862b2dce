"""The ranks of one engine: how their processes meet, and how they exchange tensors and messages.

Every rank is one process, started by mpirun or srun. MPI tells each its number and carries the address of rank 0; then
it is ended, since an MPI program must end together on all ranks. Tensors go through torch.distributed (NCCL between
GPUs, gloo between CPUs), and rank 0's messages through sockets, on which a waiting rank uses no CPU time.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trtserve.executor.torch.rank_group import RankGroup

if TYPE_CHECKING:
    from trtserve.executor.torch.operations import Device
    from trtserve.executor.torch.sum_kernels import GpuSums


logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class AwaitedTensor:
    """A tensor on its way from another rank; on GPUs the current stream at its making waits for it, no other."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, group: Any
    ) -> None:
        self._tensor = torch.empty(shape, dtype=dtype, device=device)
        self._work = dist.irecv(self._tensor, source, group=group)
        self._host, self._arrived = self._tensor, None
        if device.type == "cuda":
            self._work.wait()
            self._host = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._host.copy_(self._tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
            self._work = None

    def on_device(self) -> Tensor:
        """Return the tensor; on GPUs the current stream waits for it, and not the host."""
        if self._arrived is None:
            return self.on_host()
        stream = torch.cuda.current_stream()
        stream.wait_event(self._arrived)
        self._tensor.record_stream(stream)
        return self._tensor

    def on_host(self) -> Tensor:
        """Return the tensor in memory of the host as soon as it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        elif self._work is not None:
            self._work.wait()
            self._work = None
        return self._host


class Ranks(RankGroup):
    """All ranks of an engine, as seen by one of them. `hosts` are those of all ranks."""

    def __init__(
        self,
        rank: int,
        tp_size: int,
        stages: int,
        device: torch.device,
        connections: Sequence[Connection],
        hosts: Sequence[str],
    ) -> None:
        super().__init__(tp_size, rank % tp_size, stages, rank // tp_size)
        self.rank, self.size = rank, tp_size * stages
        self.device = device
        # On rank 0 those to all others, elsewhere the one to rank 0.
        self._connections = connections
        # Every rank has to take part in making each group.
        groups = [dist.new_group([*range(first, first + tp_size)]) for first in range(0, self.size, tp_size)]
        self._tp = groups[self.stage]
        # Each direction between stages has a group, and so a communicator, of its own: neither waits for the other.
        self._forward, self._back = (dist.new_group() if stages > 1 else None for _ in range(2))
        self._stream = torch.cuda.Stream(device) if stages > 1 and device.type == "cuda" else None
        self._sent = deque[tuple[Any, Tensor]]()
        self._sums: GpuSums | None = None
        first = self.stage * tp_size
        if tp_size > 1 and device.type == "cuda" and len(set(hosts[first : first + tp_size])) == 1:
            self._sums = gpu_sums(self._tp, device)

    def all_reduce(self, part: Tensor) -> Tensor:
        if self._sums is not None and self._sums.fit(part):
            return self._sums(part)
        if self.tp_size > 1:
            dist.all_reduce(part, group=self._tp)
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        if self.tp_size == 1:
            return part
        rows, columns = part.shape
        gathered = part.new_empty(self.tp_size * rows, columns)
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=self._tp)
        return gathered.view(self.tp_size, rows, columns).transpose(0, 1).reshape(rows, self.tp_size * columns)

    def send(self, hidden: Tensor) -> None:
        self._post(hidden, self.rank + self.tp_size, self._forward)

    def receive(self, hidden: Tensor) -> Tensor:
        dist.recv(hidden, self.rank - self.tp_size, group=self._forward)
        return hidden

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a tensor to the same tensor-parallel rank of the first stage."""
        self._post(tensor, self.tp_rank, self._back)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> AwaitedTensor:
        """Receive, on the first stage, what the last one sends there."""
        if self._stream is None:
            return AwaitedTensor(shape, dtype, self.device, self.size - self.tp_size + self.tp_rank, self._back)
        with torch.cuda.stream(self._stream):
            return AwaitedTensor(shape, dtype, self.device, self.size - self.tp_size + self.tp_rank, self._back)

    def _post(self, tensor: Tensor, target: int, group: Any) -> None:
        """Send without waiting: the receiver may be waiting for this rank elsewhere."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, target, group=group), tensor))
        # What was sent two steps ago has arrived, or will without this rank.
        if len(self._sent) > 4 * self.stages:
            self._sent.popleft()[0].wait()

    def smallest(self, value: int) -> int:
        lowest = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return int(lowest)

    def tell(self, message: bytes) -> None:
        """Send a message from rank 0 to all others."""
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            raise RuntimeError("another rank of this model has ended") from error

    def hear(self) -> bytes | None:
        """Return the next message of rank 0, or None when rank 0 has ended."""
        (leader,) = self._connections
        try:
            return leader.recv_bytes()
        except (EOFError, OSError):
            return None


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """What rank 0 tells the others through MPI."""

    host: str
    store_port: int
    message_port: int
    key: bytes


def join(tp_size: int, stages: int, device: Device, gpus: Sequence[int] | None) -> Ranks:
    """Return the ranks of this launch as soon as all of them are there.

    A rank takes the GPU with its number in `gpus`, or without them the one with its number among the ranks of its host.
    Raises RuntimeError when there are not tp_size × stages processes, or when this rank has no GPU.
    """
    # Else a rank that is killed meanwhile leaves a file in /dev/shm; this folder goes with mpirun.
    if folder := os.environ.get("OMPI_FILE_LOCATION"):
        os.environ.setdefault("OMPI_MCA_btl_sm_backing_directory", folder)
    from mpi4py import MPI

    world, wanted = MPI.COMM_WORLD, tp_size * stages
    rank, size = world.Get_rank(), world.Get_size()
    if size != wanted:
        raise RuntimeError(
            f"the engine has {wanted} ranks, but MPI started {size}; start it with `trtserve start`, or give mpirun or "
            f"srun {wanted} processes"
        )
    logger.info("Rank %d of %d waits for the others", rank, size)
    own_cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
    cores: list[tuple[str, list[int]]] = world.allgather(own_cores)
    hosts = [host for host, _ in cores]
    place = _device(device, gpus, rank=rank, local_rank=hosts[:rank].count(hosts[rank]))
    listener = store = None
    if rank == 0:
        host = _address(hosts)
        key = secrets.token_bytes(32)
        listener = Listener((host, 0), backlog=size, authkey=key)
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        meeting = _Meeting(host=host, store_port=store.port, message_port=listener.address[1], key=key)
        world.bcast(meeting)
    else:
        meeting = world.bcast(None)
    MPI.Finalize()

    if listener is None:
        connection = Client((meeting.host, meeting.message_port), authkey=meeting.key)
        connection.send(rank)
        connections = [connection]
        store = dist.TCPStore(meeting.host, meeting.store_port, size)
    else:
        accepted = [listener.accept() for _ in range(size - 1)]
        listener.close()
        connections = [connection for _, connection in sorted((each.recv(), each) for each in accepted)]
    for each in connections:
        _send_at_once(each)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif "OMP_NUM_THREADS" not in os.environ:  # more threads than cores wait for each other after every operation
        torch.set_num_threads(max(1, torch.get_num_threads() // cores.count(own_cores)))
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        device_id=place if place.type == "cuda" else None,
    )
    where, threads = hosts[rank], torch.get_num_threads()
    logger.info("Rank %d of %d has joined the others on %s, device %s, %d threads", rank, size, where, place, threads)
    return Ranks(rank, tp_size, stages, place, connections, hosts)


def _send_at_once(connection: Connection) -> None:
    """Let TCP send each message at once: else it holds one back until the last is acknowledged, for up to 40 ms."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)


def _device(device: Device, gpus: Sequence[int] | None, *, rank: int, local_rank: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    number = gpus[rank % len(gpus)] if gpus else local_rank
    if number >= torch.cuda.device_count():
        raise RuntimeError(
            f"rank {rank} needs GPU {number}; this process sees {torch.cuda.device_count()}, numbered from 0"
        )
    return torch.device("cuda", number)


def _address(hosts: Sequence[str]) -> str:
    """Return the address of this host, the first one, at which the others reach it."""
    other = next((host for host in hosts if host != hosts[0]), None)
    if other is None:
        return _LOOPBACK
    # Connecting a datagram socket sends nothing: it chooses the interface towards the other host.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((other, 9))
        return str(towards.getsockname()[0])


def gpu_sums(group: Any, device: torch.device) -> GpuSums | None:
    """Return the sums of a group of GPUs of one host, or None when a rank cannot take part."""
    from trtserve.executor.torch.sum_kernels import GpuSums

    found = None
    try:
        found = GpuSums.of_group(group, device)
    except RuntimeError as error:
        logger.info("NCCL sums all tensors, because the GPUs cannot write to each other's memory: %s", error)
    everywhere = torch.tensor(int(found is not None), device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    return found if int(everywhere) else None
